"""Conformance of the compiler role: a compiled module computes the same, and a failed compilation runs eagerly."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from accelcore import AccelError, Backend, ConfigurationError, LossScale
from accelcore.precision.policy import PrecisionWord
from accelcore.testing.support.declared import declared
from accelcore.testing.support.oracles import ExactHead, batches, eps, error, network
from accelcore.testing.support.usable import DeviceTests

_AUTOCAST = (("bf16", "bfloat16"), ("fp16", "float16"), ("O1", "float16"))  # presets, and the dtypes they compute in


def _failing(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("a compiler that cannot compile this")


class _Shifted(torch.nn.Module):
    """Parameters, buffers and inputs that a forward pass changes, a mode, attributes, and an argument with a name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)
        self.norm.bias.requires_grad_(False)  # a compiler may take it for a constant
        self.factor, self.share, self.signs, self.way = 1, 1.0, [1.0], "up"

    def forward(
        self,
        rows: torch.Tensor,
        scale: torch.Tensor | None = None,
        *,
        shift: int = 0,
        plus: torch.Tensor | None = None,
    ) -> torch.Tensor:
        normed: torch.Tensor = self.norm(rows.to(self.norm.weight.dtype, copy=True))
        if scale is not None:
            normed = normed * scale
        if plus is not None:
            normed = normed + plus
        rows += 1
        shifted = self.factor * self.share * self.signs[0] * normed
        return (shifted if self.way == "up" else -shifted).to(rows.dtype) + shift


class _Branching(torch.nn.Module):
    """A result whose way depends on values, which a compiler may take for constants."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2 if rows.sum() > 0 else rows - 1


class _TwoMasks(torch.nn.Module):
    """Two layers that draw as many random numbers in one graph, and a sum of many numbers at two places."""

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows under two masks, and the sums of the even and of the odd places."""
        places = torch.arange(len(rows), device=rows.device) % 2
        masked = torch.stack([torch.nn.functional.dropout(rows, 0.5) for _ in range(2)])
        return masked, torch.zeros_like(rows[:2]).index_add(0, places, rows)


class TestCompiler(DeviceTests):
    """Compiled modules against eager ones."""

    def test_compiled_is_the_same(self, accel: Backend) -> None:
        """A compiled module gives the outputs and gradients of the eager one, in the very same parameters.

        Its outputs keep their values in later calls, unless it declares that it overwrites them.
        """
        with declared(bool(accel.capabilities.compilers), "a compiler"):
            module, reference = network().to(accel.device), network()
            compiled = accel.compiler.compile(module, {})
            (inputs, _), (more, _) = *batches(1), *batches(1, 24, seed=2)
            kept: list[tuple[torch.Tensor, torch.Tensor]] = []
            for number, rows in enumerate((inputs, more, -inputs)):
                for each in (module, reference):
                    next(each.parameters()).requires_grad_(number > 0)  # it is frozen at first
                output = compiled.module(rows.to(accel.device))
                assert output.device == accel.device
                kept.append((output.detach(), reference(rows).detach()))
                assert error(*kept[-1]) < 1e-4, "a compiled module computes something else"
                output.square().mean().backward()
                reference(rows).square().mean().backward()
            gradients = [(parameter.grad, other.grad) for parameter, other in _pairs(module, reference)]
            for found, expected in gradients:
                assert found is not None, "a parameter has no gradient: something else than its module was compiled"
                assert expected is not None
                assert error(found, expected) < 1e-3, "a compiled module has other gradients"
            if not compiled.overwrites:
                assert all(error(*pair) < 1e-4 for pair in kept), "a later call overwrites an output, undeclared"
            assert compiled.compiled or compiled.reason, "it runs eagerly, and does not say why"

    def test_compiled_follows_its_module(self, accel: Backend) -> None:
        """A compiled module follows changes of mode, weights, attributes, and its inputs' shapes, strides and dtypes.

        Arguments may be there later, by name in any order, or by place.
        It has gradients where they are enabled, calls its hooks and those of its parts, and changes buffers and inputs.
        It changes an earlier output only if it declares that.
        """
        with declared(bool(accel.capabilities.compilers), "a compiler"):
            module, reference = _Shifted().to(accel.device), _Shifted()
            calls: list[str] = []
            for part in (module, module.norm):
                part.register_forward_pre_hook(lambda *_: calls.append("before"))
                part.register_forward_hook(lambda *_: calls.append("after"))
            compiled = accel.compiler.compile(module, {})
            other = next((name for name in accel.capabilities.model_dtypes if name != "float32"), "float32")
            calls_of = [
                *((16, True, "float32", False, 0), (16, True, "float32", True, 1), (5, True, "float32", True, 1)),
                *((5, False, other, False, 2), (5, True, "float32", True, 1)),
                (5, False, other, False, 2),  # as before, with other weights
            ]
            for number, (size, training, name, graph, way) in enumerate(calls_of):
                ((rows, _),) = batches(1, size)
                rows = rows.to(getattr(torch, name))
                rows = rows.t().contiguous().t() if graph else rows
                for each in (module.train(training), reference.train(training)):
                    torch.nn.init.constant_(each.norm.weight, size + number)
                    torch.nn.init.constant_(each.norm.bias, number)
                    torch.nn.init.constant_(each.norm.get_buffer("running_mean"), number)
                    each.factor, each.norm.eps, each.norm.momentum = 1 + number, 0.1 + way, 0.1 + way / 4
                    if not accel.emulated:  # torch makes inputs on the host of them, which no emulated graph takes
                        each.share, each.signs = 1 - way / 8, [1.0 + way]
                    each.way = ("up", "down", "up")[way]
                was_compiled = compiled.compiled
                calls.clear()
                with torch.set_grad_enabled(graph):
                    found = _called(compiled.module, given := rows.to(accel.device, copy=True), number, graph=graph)
                expected = _called(reference, rows, number, graph=graph)
                assert found.dtype == rows.dtype, f"of {rows.dtype} a compiled module makes {found.dtype}"
                limit = max(1e-4, 4 * eps(rows.dtype))
                assert error(found, expected) < limit, "what became of the module or its inputs later does not count"
                assert found.requires_grad == graph, "whether gradients are enabled does not count later"
                assert torch.equal(given.cpu(), rows), "what the module writes to an input is lost"
                if compiled.compiled == was_compiled:  # else the compiler failed, after a part had run perhaps
                    called = ["before", "before", "after", "after"]
                    assert calls == called, "a hook of the module, or of its part, was not called once"
            with torch.no_grad():
                compiled.module(-rows.to(accel.device))
            if not compiled.overwrites:
                assert error(found, expected) < limit, "without gradients a later call overwrites an output, undeclared"
            for buffer, expected in zip(module.buffers(), reference.buffers(), strict=True):
                assert error(buffer, expected) < 1e-4, "a buffer of the module did not follow"

    def test_compiled_branches(self, accel: Backend) -> None:
        """A compiled module takes the branch that the values of each call ask for."""
        if accel.emulated:
            pytest.skip("torch would compile an emulation's kernels, too, where they run between two graphs")
        with declared(bool(accel.capabilities.compilers), "a compiler"):
            compiled = accel.compiler.compile(_Branching().to(accel.device), {})
            for number, expected in ((1.0, 2.0), (-3.0, -4.0), (3.0, 6.0)):
                found = compiled.module(torch.full((4,), number, device=accel.device))
                assert found.tolist() == [expected] * 4, f"of {number} it makes {found.tolist()}: it kept a branch"

    def test_compiled_draws_anew(self, accel: Backend) -> None:
        """Each call of a compiled module draws other random numbers, and after the same seed the same ones.

        So does each of its layers. Beside them, numbers are added up at repeated indices.
        """
        with declared(bool(accel.capabilities.compilers), "a compiler"):
            compiled = accel.compiler.compile(_TwoMasks(), {})
            rows, masks = torch.ones(64, device=accel.device), []
            for number in range(4):
                if number % 2 == 0:
                    accel.runtime.seed(27)
                masked, sums = compiled.module(rows)
                masks.append((masked != 0).tolist())
                assert sums.tolist() == [32.0, 32.0], f"a compiled module adds 32 ones at an index to {sums.tolist()}"
            assert masks[0][0] != masks[0][1], "two layers of a compiled module draw the same numbers"
            assert masks[0] != masks[1], "a compiled module draws the same numbers in each call"
            assert masks[:2] == masks[2:], "a compiled module does not draw by the seed"

    def test_backward_is_outside_autocast(self, accel: Backend) -> None:
        """A compiled backward computes in the dtypes of the eager one, also if forward ran under autocast."""
        known = accel.capabilities
        with declared(bool(known.compilers) and bool(known.autocast_dtypes), "a compiler under autocast"):
            module, reference = (ExactHead(accel.device.type).to(accel.device) for _ in range(2))
            compiled, ((rows, _),) = accel.compiler.compile(module, {}), batches(1)
            for call in (compiled.module, reference):
                with accel.autocast():
                    output = call(rows.to(accel.device))
                output.square().mean().backward()
            found, expected = module.head.weight.grad, reference.head.weight.grad
            assert found is not None
            assert expected is not None
            assert error(found, expected) < 1e-4, "backward was compiled as if it ran under autocast"
            compiled = accel.compiler.compile(torch.nn.Linear(rows.shape[1], 2).to(accel.device), {})
            for name in known.autocast_dtypes:
                with accel.autocast(name), torch.no_grad():
                    kind = compiled.module(rows.to(accel.device)).dtype
                assert str(kind) == f"torch.{name}", f"under autocast to {name} a compiled module computes in {kind}"

    @pytest.mark.parametrize(("precision", "dtype"), _AUTOCAST)
    def test_training_is_eager(self, accel: Backend, precision: PrecisionWord, dtype: str) -> None:
        """A head that disables autocast, because its gradients overflow fp16, does not overflow when compiled."""
        known = accel.capabilities
        low = dtype in known.autocast_dtypes and (precision != "O1" or "O1" in known.autocast_tables)
        with declared(bool(known.compilers) and low, f"a compiler under precision={precision!r}"):
            data, found = batches(6), []
            for compile_ in (False, True):
                model = ExactHead(accel.device.type)
                optimizer = accel.optimizers.create("sgd", model.parameters(), lr=1e-3)
                trainer = accel.trainer(
                    model, optimizer, loss=lambda m, b: cross_entropy(m(b[0]), b[1]), precision=precision,
                    loss_scale=LossScale(init=2.0**22), compile=compile_,
                )  # fmt: skip
                losses = [float(trainer(accel.runtime.to_device(batch))) for batch in data]
                found.append((losses, trainer.skipped))
            (eager, eager_skipped), (compiled, skipped) = found
            assert not eager_skipped, "an eager window was skipped: autocast(enabled=False) does not hold in backward"
            assert not skipped, f"compiled, {skipped} of {len(data)} windows are skipped, and none where it is eager"
            assert error(torch.tensor(compiled), torch.tensor(eager)) < 8 * eps(getattr(torch, dtype))

    def test_every_compiler_is_there(self, accel: Backend) -> None:
        """Each declared compiler can be chosen by `{"backend": name}`, and computes what the module does."""
        for name in accel.capabilities.compilers:
            module, reference, ((rows, _),) = network().to(accel.device), network(), batches(1)
            try:
                compiled = accel.compiler.compile(module, {"backend": name})
            except AccelError as refusal:
                raise AssertionError(f"compilers declares {name}, which is refused") from refusal
            assert error(compiled.module(rows.to(accel.device)), reference(rows)) < 1e-4, name
            assert compiled.compiled or compiled.reason, f"{name} runs eagerly, and does not say why"

    def test_failure_falls_back_once(self, accel: Backend, caplog: pytest.LogCaptureFixture) -> None:
        """If compilation fails, the module runs eagerly, with the right result, one report and the reason."""
        with declared(bool(accel.capabilities.compilers), "a compiler"):
            module, reference = network().to(accel.device), network()
            with caplog.at_level(logging.WARNING, logger="accelcore"):
                try:
                    compiled = accel.compiler.compile(module, {"backend": _failing})
                except ConfigurationError:
                    pytest.skip("this compiler takes no backend that could be made to fail")
                for rows, _ in batches(3):
                    assert error(compiled.module(rows.to(accel.device)), reference(rows)) < 1e-4
            assert not compiled.compiled, "it says that it runs compiled, with a compiler that failed"
            assert compiled.reason, "it does not say why it runs eagerly"
            said = [record for record in caplog.records if "eager" in record.getMessage()]
            assert len(said) == 1, f"the log says it {len(said)} times"

    def test_unknown_option(self, accel: Backend) -> None:
        """An option that the compiler does not know is refused when it is given."""
        with declared(bool(accel.capabilities.compilers), "a compiler"):
            compiled = accel.compiler.compile(network().to(accel.device), {})
            if not compiled.compiled:
                pytest.skip(f"nothing here checks the options: {compiled.reason}")
            with pytest.raises(ConfigurationError):
                accel.compiler.compile(network().to(accel.device), {"no_such_option": True})

    def test_errors_of_the_model_pass(self, accel: Backend) -> None:
        """An error of the model itself reaches the user, instead of a fallback."""

        class Wrong(torch.nn.Module):
            def forward(self, rows: torch.Tensor) -> torch.Tensor:
                return rows.reshape(len(rows) + 5)  # torch itself refuses it, in its own words

        with declared(bool(accel.capabilities.compilers), "a compiler"):
            compiled = accel.compiler.compile(Wrong().to(accel.device), {})
            with pytest.raises(Exception, match=r"shape|size"):
                compiled.module(torch.ones(2, 3, device=accel.device))


def _called(module: Any, rows: torch.Tensor, number: int, *, graph: bool) -> Any:
    """Call a `_Shifted` with the arguments of one of several calls, which has all of them or the first alone."""
    if not graph:
        return module(rows)
    scale, plus = (torch.linspace(1, factor, rows.shape[1]).to(rows) for factor in (2 + number, 3 + number))
    named = {"shift": 2, "plus": plus, "scale": scale}
    if number == 1:
        return module(rows, **named)
    if number == 2:
        return module(rows, **dict(reversed(named.items())))
    return module(rows, named.pop("scale"), **named)


def _pairs(module: torch.nn.Module, other: torch.nn.Module) -> Any:
    return zip(module.parameters(), other.parameters(), strict=True)
