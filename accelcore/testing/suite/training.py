"""Conformance end to end: training on this backend is training by hand in plain torch on the CPU."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from accelcore import Backend, ConfigurationError, Policy
from accelcore.precision.policy import PrecisionWord
from accelcore.testing.suite.levels import LevelTests
from accelcore.testing.support.declared import STRATEGIES, declared
from accelcore.testing.support.job import two_ranks
from accelcore.testing.support.options import EVERY, oracle
from accelcore.testing.support.oracles import Stateful, batches, buffers, eps, error, evaluated, network, weights
from accelcore.testing.support.ranks import share
from accelcore.testing.support.usable import DeviceTests

LR = 0.1


def loss_of(model: Any, batch: Any) -> Tensor:
    """The loss of every training here."""
    return cross_entropy(model(batch[0]), batch[1])


def by_hand(data: list[tuple[Tensor, Tensor]], *, accumulate: int = 1, clip: float | None = None) -> Any:
    """The losses, and the model, of plain torch on the CPU in float64."""
    model = network().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for number, (rows, classes) in enumerate(data, 1):
        loss = cross_entropy(model(rows.double()), classes)
        (loss / accumulate).backward()
        losses.append(loss.item())
        if number % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


def accuracy(model: nn.Module, device: torch.device) -> float:
    """Share of right answers on data that was not trained on."""
    model.eval()
    dtype = next(model.parameters()).dtype
    with torch.no_grad():
        right = [
            (model(rows.to(device, dtype)).argmax(1).cpu() == classes).float().mean()
            for rows, classes in batches(8, 32, seed=99)
        ]
    model.train()
    return float(torch.stack(right).mean())


def make(accel: Backend, model: nn.Module, optimizer: str = "adamw", **options: Any) -> Any:
    """A trainer of the kind that the tests compare."""
    return accel.trainer(
        model, accel.optimizers.create(optimizer, model.parameters(), lr=LR), loss=loss_of, **options
    )  # fmt: skip


class TestTraining(LevelTests, DeviceTests):
    """The trainer on this backend, against plain torch."""

    @pytest.mark.parametrize(
        "options", [{}, {"accumulate": 2}, {"clip_norm": 0.05}], ids=["plain", "accumulate", "clip"]
    )
    def test_fp32(self, accel: Backend, options: dict[str, Any]) -> None:
        """Losses, weights and evaluation equal a loop by hand, also with accumulation and clipping."""
        data = batches(40)
        expected, reference = by_hand(data, accumulate=options.get("accumulate", 1), clip=options.get("clip_norm"))
        trainer = make(accel, network(), **options)
        found = [trainer(accel.runtime.to_device(batch)) for batch in data]
        assert all(loss.device == accel.device for loss in found), "a loss was computed elsewhere"
        assert error(torch.stack(found), torch.tensor(expected)) < 1e-3
        for parameter in trainer.model.parameters():
            assert parameter.device == accel.device, "a parameter was trained elsewhere"
        assert abs(accuracy(trainer.model, accel.device) - accuracy(reference, torch.device("cpu"))) < 0.02
        assert trainer.steps == len(data) // options.get("accumulate", 1)

    @pytest.mark.parametrize(
        "options", [{}, {"accumulate": 3, "clip_norm": 0.05}], ids=["plain", "accumulate and clip"]
    )
    @pytest.mark.parametrize("flat", [False, True], ids=["by tensor", "flat"])
    def test_every_kind_of_state(self, accel: Backend, flat: bool, options: dict[str, Any]) -> None:
        """Weights, all buffers and the logits in evaluation equal a loop by hand, also in flat memory."""
        data, accumulate = batches(12), options.get("accumulate", 1)
        model, reference = Stateful(), Stateful().double()
        optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.01, eps=1e-3)
        trainer = accel.trainer(model, optimizer, loss=loss_of, flat=flat, **options)
        plain = torch.optim.AdamW(reference.parameters(), lr=0.01, eps=1e-3)
        for number, (rows, classes) in enumerate(data, 1):
            trainer(accel.runtime.to_device((rows, classes)))
            (cross_entropy(reference(rows.double()), classes) / accumulate).backward()
            if number % accumulate == 0:
                if "clip_norm" in options:
                    nn.utils.clip_grad_norm_(reference.parameters(), options["clip_norm"])
                plain.step()
                plain.zero_grad()
        assert all(error(*pair) < 1e-3 for pair in zip(weights(model), weights(reference), strict=True)), "weights"
        found, expected = buffers(model), buffers(reference)
        assert found.keys() == expected.keys(), "buffers came or went"
        for name, value in expected.items():
            assert error(found[name], value) < 1e-3, f"the buffer {name} is another one than by hand"
        logits = evaluated(model, accel.device)
        assert error(logits, evaluated(reference, torch.device("cpu"))) < 1e-3, "the model evaluates otherwise"

    @pytest.mark.parametrize("name", EVERY)
    def test_every_optimizer_flat(self, accel: Backend, name: str) -> None:
        """In flat memory an optimizer computes what it does for each tensor, where parameters go unused, too."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            found = []
            for flat in (False, True):
                model = network()
                optimizer = accel.optimizers.create(name, model.parameters(), lr=0.01)
                trainer = accel.trainer(model, optimizer, flat=flat)
                for number, (rows, classes) in enumerate(batches(5)):
                    rows, classes = accel.runtime.to_device((rows, classes))
                    hidden = model[:3](rows) if number in (0, 2) else None  # the last layer goes unused
                    logits = trainer.forward(rows) if hidden is None else hidden[:, :4]
                    trainer.backward(cross_entropy(logits, classes))
                    trainer.update()
                found.append(weights(model))
            assert all(error(*pair) < 1e-3 for pair in zip(*found, strict=True)), (
                f"{name} is another one in flat memory"
            )

    @pytest.mark.parametrize("flat", [False, True], ids=["by tensor", "flat"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_masters(self, accel: Backend, dtype: str, flat: bool) -> None:
        """A model held in low precision adds up updates that are too small for it, in fp32 masters."""
        with declared(dtype in accel.capabilities.model_dtypes, f"models in {dtype}"):
            low, updates = getattr(torch, dtype), 50
            model = nn.Linear(4, 1, bias=False)
            nn.init.ones_(model.weight)
            optimizer = accel.optimizers.create("sgd", model.parameters(), lr=eps(low) / 8)
            policy = Policy(model_dtype=dtype, loss_scale="dynamic" if dtype == "float16" else None)
            trainer = accel.trainer(model, optimizer, loss=lambda m, rows: m(rows).sum(), precision=policy, flat=flat)
            for _ in range(updates):
                trainer(torch.ones(1, 4, device=accel.device, dtype=low))
            assert model.weight.dtype == low
            lost = float(model.weight.detach().float().max()) - (1 - updates * eps(low) / 8)
            assert abs(lost) <= eps(low), f"updates are lost: the weights are off by {lost:.1e}"

    @pytest.mark.parametrize("name", EVERY)
    def test_every_optimizer(self, accel: Backend, name: str) -> None:
        """An optimizer made before its model was moved to the device trains as the oracle does."""
        with declared(name in accel.optimizers.names(), f"the optimizer {name}"):
            model, reference, data = network(), network().double(), batches(4)
            plain = oracle(name, reference.parameters(), lr=LR)
            trainer = accel.trainer(
                model, accel.optimizers.create(name, model.parameters(), lr=LR), loss=loss_of
            )  # fmt: skip
            for rows, classes in data:
                found = trainer(accel.runtime.to_device((rows, classes)))
                expected = cross_entropy(reference(rows.double()), classes)
                plain.zero_grad()
                expected.backward()
                plain.step()
                assert error(found, expected) < 1e-3

    @pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
    def test_low_precision(self, accel: Backend, precision: PrecisionWord, dtype: str) -> None:
        """Mixed precision learns what fp32 learns, to within its rounding."""
        with declared(dtype in accel.capabilities.autocast_dtypes, f"training in {precision}"):
            data = batches(60)
            expected, reference = by_hand(data)
            trainer = make(accel, network(), precision=precision)
            found = [float(trainer(accel.runtime.to_device(batch))) for batch in data]
            assert sum(found[-10:]) < 0.7 * sum(found[:10]), "it does not learn"
            assert abs(sum(found[-10:]) - sum(expected[-10:])) < 0.25 * sum(expected[:10])
            assert abs(accuracy(trainer.model, accel.device) - accuracy(reference, torch.device("cpu"))) < 0.1
            assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())

    def test_overflow_is_skipped(self, accel: Backend) -> None:
        """A batch whose gradients overflow in fp16 changes no weight, halves the scale, and training goes on."""
        with declared("float16" in accel.capabilities.autocast_dtypes, "training in fp16"):
            model = network()
            optimizer = accel.optimizers.create("adamw", model.parameters(), lr=LR)
            trainer = accel.trainer(model, optimizer, loss=lambda m, b: loss_of(m, b[:2]) * b[2], precision="fp16")
            rows, classes = accel.runtime.to_device(batches(1)[0])
            good, largest = (rows, classes, 1.0), torch.finfo(torch.float32).max
            trainer(good)
            before, scale = weights(trainer.model), trainer.scaler.state_dict()["scale"]
            skipped = trainer.skipped
            trainer((rows, classes, largest))  # times the scale it is beyond fp32, on a part that clamps, too
            assert all(torch.equal(a, b) for a, b in zip(weights(trainer.model), before, strict=True))
            assert trainer.skipped == skipped + 1
            assert trainer.scaler.state_dict()["scale"] == scale / 2
            trainer(good)
            assert all(bool(weight.isfinite().all()) for weight in weights(trainer.model))

    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    def test_resume_goes_on_alike(self, accel: Backend, precision: PrecisionWord, tmp_path: Path) -> None:
        """A run that is saved within a window and resumed equals the uninterrupted one, also with dropout."""
        with declared(
            precision == "fp32" or "float16" in accel.capabilities.autocast_dtypes, f"training in {precision}"
        ):
            data = [accel.runtime.to_device(batch) for batch in batches(12)]
            options: dict[str, Any] = {"precision": precision, "accumulate": 2}
            accel.runtime.seed(11)
            trainer = make(accel, network(dropout=0.3), **options)
            for batch in data[:5]:
                trainer(batch)
            saved = trainer.save(tmp_path)
            expected = [trainer(batch).item() for batch in data[5:]]
            accel.runtime.seed(12)
            twin = make(accel, network(dropout=0.3, seed=1), **options)
            assert twin.resume(tmp_path) == saved
            found = [twin(batch).item() for batch in data[5:]]
            assert found == expected
            pairs = zip(weights(twin.model), weights(trainer.model), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
            assert (twin.steps, twin.skipped) == (trainer.steps, trainer.skipped)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
    def test_model_dtypes(self, accel: Backend, dtype: str) -> None:
        """A model in a declared dtype trains in it; another dtype is refused when the trainer is made."""
        with declared(dtype in accel.capabilities.model_dtypes, f"models in {dtype}"):
            model = network().to(getattr(torch, dtype))
            trainer = make(accel, model, "sgd")
            losses = []
            for rows, classes in batches(40):
                losses.append(float(trainer(accel.runtime.to_device((rows.to(getattr(torch, dtype)), classes)))))
            assert sum(losses[-10:]) < sum(losses[:10])
            assert all(parameter.dtype == getattr(torch, dtype) for parameter in model.parameters())

    def test_compile(self, accel: Backend, caplog: pytest.LogCaptureFixture) -> None:
        """Compiled training gives the losses of eager training, or reports once why it is not compiled."""
        with declared(bool(accel.capabilities.compilers), "a compiler"):
            data = batches(8)
            expected, _ = by_hand(data, accumulate=2)
            with caplog.at_level(logging.WARNING, logger="accelcore"):
                trainer = make(accel, network(), compile=True, accumulate=2)
                found = [trainer(accel.runtime.to_device(batch)) for batch in data]
            # Read at the end: a compiler may use the memory of an output again.
            assert error(torch.stack(found), torch.tensor(expected)) < 1e-3
            assert trainer.compiled.compiled or trainer.compiled.reason

    @pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.05)])
    def test_graph(self, accel: Backend, precision: PrecisionWord, tolerance: float) -> None:
        """Captured steps give the losses of eager ones, with clipping, a schedule, short batches and open windows."""
        known = accel.capabilities
        with declared(known.graphs and (precision == "fp32" or "bfloat16" in known.autocast_dtypes), "captured steps"):
            data = [*batches(12), *batches(4, 8), *batches(7)]
            found = []
            for graph in (False, True):
                model = network()
                optimizer = accel.optimizers.create("adamw", model.parameters(), lr=LR, route="foreach")
                scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
                trainer = accel.trainer(
                    model, optimizer, loss=loss_of, scheduler=scheduler, precision=precision, accumulate=2,
                    clip_norm=0.5, graph=graph,
                )  # fmt: skip
                losses = [float(trainer(accel.runtime.to_device(batch))) for batch in data]
                trainer.flush()
                found.append((losses, [weight.tolist() for weight in weights(model)], trainer.steps))
            (eager, eager_weights, steps), (graphed, graphed_weights, graphed_steps) = found
            assert error(torch.tensor(graphed), torch.tensor(eager)) < tolerance
            for one, other in zip(graphed_weights, eager_weights, strict=True):
                assert error(torch.tensor(one), torch.tensor(other)) < 10 * tolerance
            assert graphed_steps == steps == 12

    def test_statistics_over_ranks(self, accel: Backend) -> None:
        """torch's SyncBatchNorm has the means of unequal batches, or is refused if it is not declared."""
        able = accel.capabilities
        if not able.process_groups or set(able.parallel) <= {"none"}:
            pytest.skip("not declared: a strategy for several ranks")
        found: list[Any] = list(two_ranks(accel, "statistics"))
        if not able.sync_batchnorm:
            assert found == [None, None], "unexpected success: sync_batchnorm is not declared, and is not refused"
            return
        expected = torch.cat([share(rank)[0][0][rank:] for rank in range(2)]).mean(0)
        for means in found:
            assert means is not None, "sync_batchnorm is declared, and refused"
            torch.testing.assert_close(torch.tensor(means), expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("parallel", [*STRATEGIES[1:], "no such strategy"])
    def test_parallel(self, accel: Backend, parallel: str) -> None:
        """In one process every strategy has no effect, declared or not; an unknown one is refused."""
        with declared(parallel in STRATEGIES, f"parallel={parallel!r}"):
            trainer = make(accel, network(), parallel=parallel)
            assert math.isfinite(trainer(accel.runtime.to_device(batches(1)[0])).item())

    def test_fast_fp32(self, accel: Backend) -> None:
        """`fp32="fast"` trains if the format is declared; otherwise it is refused when the trainer is made."""
        with declared(accel.capabilities.fast_fp32 is not None, 'fp32="fast"'):
            trainer = make(accel, network(), fp32="fast")
            assert math.isfinite(trainer(accel.runtime.to_device(batches(1)[0])).item())
        with pytest.raises(ConfigurationError):
            make(accel, network(), fp32="no such mode")
