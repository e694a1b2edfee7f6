"""Conformance of the runtime role: the device's random numbers, memory and transfers."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from accelcore import Backend
from accelcore.testing.suite.drawn import DrawnTests
from accelcore.testing.suite.dropped import DroppedTests
from accelcore.testing.suite.transfers import MEBIBYTE, TransferTests, kept_memory
from accelcore.testing.support.declared import declared, refused
from accelcore.testing.support.kinds import CONTAINERS, VIEWS, described, tensors_in
from accelcore.testing.support.usable import DeviceTests
from accelcore.torch_features import GET_KERNEL
from accelcore.util.text import first_line


def draw(accel: Backend) -> list[Any]:
    """Draw numbers from every generator that a training script uses."""
    ones = torch.ones(64, device=accel.device)
    return [
        torch.randn(8, device=accel.device).cpu().tolist(),
        torch.nn.functional.dropout(ones, 0.5).cpu().tolist(),
        torch.randn(4).tolist(),
        random.random(),  # noqa: S311  # what is tested
        random.gauss(0, 1),  # of every second call Python keeps a number for the next
        *_numpy(),
    ]


def _numpy() -> list[float]:
    """Draw a number from NumPy's generator, if NumPy is installed."""
    if find_spec("numpy") is None:
        return []
    import numpy

    return [float(numpy.random.random()), float(numpy.random.standard_normal())]


def _busy(accel: Backend) -> Any:
    """Return an event after enough queued work that the device is behind its host, if that is possible."""
    module = torch.get_device_module(accel.device)
    matrix = torch.ones(1024, 1024, device=accel.device) / 1024
    event = module.Event()
    for count in (16, 128, 1024):
        for _ in range(count):
            matrix = matrix @ matrix
        event.record(module.current_stream(accel.device))
        if not event.query() or accel.emulated:
            break
    return event


# With seed 7, torch's generator of the host, a Mersenne Twister, first gives 8 numbers below a half or not; then these.
_BELOW_HALF = [True, True, False, False, False, False, True, False]
_BEHIND = [0.763043, 0.759357, 0.063021, 0.057556]


def _of_embedding(places: Tensor, values: Tensor) -> Tensor:
    weight = torch.zeros(4, 1, device=values.device, requires_grad=True)
    (found,) = torch.autograd.grad(torch.nn.functional.embedding(places, weight), weight, values[:, None])
    return found


_SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add": lambda places, values: values.new_zeros(4).index_add(0, places, values),
    "scatter_add": lambda places, values: values.new_zeros(4).scatter_add(0, places, values),
    "index_put": lambda places, values: values.new_zeros(4).index_put((places,), values, accumulate=True),
    "the gradient of embedding": _of_embedding,
}
"""Sums of many values into few places."""


class TestRuntime(DrawnTests, DroppedTests, TransferTests, DeviceTests):
    """Seeds, random states, memory, transfers."""

    def test_seed(self, accel: Backend) -> None:
        """The same seed gives the same numbers on the device and the host; another seed gives others."""
        accel.runtime.seed(1)
        first = draw(accel)
        assert draw(accel) != first
        draw(accel)  # an odd number of times: a generator that makes normal numbers in pairs has kept one
        for device in {"cpu": torch.device("cpu"), accel.device.type: accel.device}.values():
            torch.randn(3, device=device)
        accel.runtime.seed(1)
        assert draw(accel) == first, "the same seed gives other numbers"
        accel.runtime.seed(2)
        assert draw(accel) != first, "another seed gives the same numbers"

    def test_every_seed_is_another(self, accel: Backend) -> None:
        """Seeds that differ in their sign or in any bit give other numbers. torch's CPU generator reads 32 bits."""
        drawn = {}
        for seed in (7, -7, *(7 + 2**bit for bit in range(3, 64))):
            accel.runtime.seed(seed)
            drawn[seed] = torch.randn(8, device=accel.device).cpu().tolist(), random.random()  # noqa: S311
        short = [seed for seed in drawn if seed < 2**32 and seed != 7 and drawn[seed][0] == drawn[7][0]]
        alike = short + [seed for seed in drawn if seed > 2**32 and drawn[seed][1] == drawn[7][1]]
        assert not alike, f"the seeds {alike} give the numbers of seed 7"

    def test_seed_deterministic(self, accel: Backend) -> None:
        """`deterministic=True` makes torch refuse operators that are not deterministic; a seed alone does not."""
        before = torch.are_deterministic_algorithms_enabled()
        try:
            torch.use_deterministic_algorithms(False)
            accel.runtime.seed(1)
            assert not torch.are_deterministic_algorithms_enabled(), "a seed alone made torch deterministic"
            accel.runtime.seed(1, deterministic=True)
            assert torch.are_deterministic_algorithms_enabled(), "deterministic=True was ignored"
            accel.runtime.seed(2)
            assert torch.are_deterministic_algorithms_enabled(), "a later seed ends deterministic=True"
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        finally:
            torch.use_deterministic_algorithms(before)

    @pytest.mark.parametrize("name", _SUMS)
    def test_deterministic_sums(self, accel: Backend, name: str) -> None:
        """After `deterministic=True` sums into one place have the same bits each time, or raise an error."""
        before = torch.are_deterministic_algorithms_enabled()
        try:
            accel.runtime.seed(1, deterministic=True)
            values = torch.randn(2**15, device=accel.device)
            places = torch.arange(2**15, device=accel.device) % 3
            first, second = (_SUMS[name](places, values).cpu() for _ in range(2))
        except (NotImplementedError, RuntimeError) as error:
            refused(f"{name}: {first_line(error)}")
        finally:
            torch.use_deterministic_algorithms(before)
        assert torch.equal(first, second), f"{name} adds in another order each time, despite deterministic=True"

    def test_same_seed_everywhere(self, accel: Backend) -> None:
        """`same="everywhere"` gives the same numbers as on all devices, in any dtype."""

        def drawn() -> list[Any]:
            return [torch.rand(8, device=accel.device).cpu().tolist(), *draw(accel)]

        accel.runtime.seed(7)
        own = drawn()
        with declared(GET_KERNEL.present, 'same="everywhere"'):
            accel.runtime.seed(7, same="everywhere")
        try:
            accel.runtime.seed(7, same="everywhere")
            kept = torch.nn.functional.dropout(torch.ones(8, device=accel.device), 0.5) != 0
            uniform = torch.rand(4, device=accel.device)
            assert kept.tolist() == _BELOW_HALF, "dropout has another mask than everywhere"
            assert uniform.cpu().sub(torch.tensor(_BEHIND)).abs().max() < 1e-6, (
                "rand gives other numbers than everywhere"
            )
            for dtype in (getattr(torch, name) for name in accel.capabilities.model_dtypes):
                host, device = torch.empty(4, 6, dtype=dtype), torch.empty(6, 4, dtype=dtype, device=accel.device).T
                for tensor in (host, device):
                    accel.runtime.seed(7, same="everywhere")
                    torch.nn.init.normal_(tensor)
                assert torch.equal(device.cpu(), host), f"normal_ in {dtype} gives other numbers than on the host"
            state = accel.runtime.rng_state()
            expected = drawn()
            assert accel.runtime.set_rng_state(state) == []
            assert drawn() == expected, "a state that was put back does not repeat the numbers drawn since"
        finally:
            accel.runtime.seed(7)
        assert drawn() == own, "a seed without it does not give the device's own numbers"

    def test_random_state_replays(self, accel: Backend) -> None:
        """Restoring a random state repeats the numbers drawn since, on the device and the host."""
        accel.runtime.seed(3)
        draw(accel)
        state = accel.runtime.rng_state()
        expected = draw(accel)
        for _ in range(2):  # a state can be used again
            draw(accel)
            assert accel.runtime.set_rng_state(state) == []
            assert draw(accel) == expected, "a state that was put back does not repeat the numbers drawn since"

    def test_random_state_can_be_saved(self, accel: Backend) -> None:
        """A random state is CPU tensors by name. Drawing numbers does not change it, and reading it draws none."""
        state = accel.runtime.rng_state()
        assert state
        assert all(isinstance(name, str) for name in state)
        assert all(value.device.type == "cpu" for value in state.values())
        before = {name: value.clone() for name, value in state.items()}
        draw(accel)
        accel.runtime.rng_state()
        assert all(torch.equal(value, before[name]) for name, value in state.items())
        found = []
        for reads in (0, 1):
            accel.runtime.seed(9)
            for _ in range(reads):
                accel.runtime.rng_state()
            found.append(draw(accel))
        assert found[0] == found[1], "to read the state changes the numbers that are drawn next"

    def test_random_state_of_another_device(self, accel: Backend) -> None:
        """A state of another kind of device is reported by name, and the rest is restored, also without NumPy's."""
        state = accel.runtime.rng_state()
        expected = draw(accel)
        unknown = accel.runtime.set_rng_state({**state, "a generator of another device": torch.zeros(8)})
        assert unknown == ["a generator of another device"], "what could not be restored is not reported"
        assert draw(accel) == expected
        of_torch = {name: value for name, value in state.items() if "numpy" not in name}
        assert accel.runtime.set_rng_state(of_torch) == []
        assert torch.randn(8, device=accel.device).cpu().tolist() == expected[0], "a state without NumPy's was ignored"

    @pytest.mark.parametrize("kind", CONTAINERS)
    @pytest.mark.parametrize("way", ["to_device", "prefetch"])
    def test_batches_move_whole(self, accel: Backend, kind: str, way: str) -> None:
        """Every tensor of a batch arrives on the device; containers and other values do not change."""
        batch = CONTAINERS[kind](torch.arange(6.0).reshape(2, 3).t())
        before = described(batch)
        moved = accel.runtime.to_device(batch) if way == "to_device" else accel.runtime.prefetch(batch)()
        assert type(moved) is type(batch), f"a {type(batch).__name__} arrived as a {type(moved).__name__}"
        arrived = tensors_in(moved)
        assert len(arrived) == len(tensors_in(batch))
        for tensor in arrived:
            assert tensor.device == accel.device, f"a tensor of the batch stayed on {tensor.device}"
        strides = [tensor.stride() for tensor in tensors_in(batch)]
        assert [tensor.stride() for tensor in arrived] == strides, "a tensor of the batch has other strides"
        assert described(moved) == before, "something arrived as something else"
        assert described(batch) == before, "the batch itself was changed"

    @pytest.mark.parametrize("kind", VIEWS)
    def test_views_keep_values(self, accel: Backend, kind: str) -> None:
        """A view arrives with its own elements, in their order; a view on the device comes back with its own."""
        base = torch.arange(24.0).reshape(4, 6)
        view = VIEWS[kind](base)
        assert torch.equal(accel.runtime.to_device(view).cpu(), view)
        there = VIEWS[kind](base.to(accel.device))
        ready = accel.runtime.fetch(there)
        for way, back in (("cpu", there.cpu()), ("copy_", torch.empty_like(view).copy_(there)), ("fetch", ready())):
            assert torch.equal(back, view), f"by {way} a view on the device comes back as other elements of its memory"

    def test_no_needless_copy(self, accel: Backend) -> None:
        """A tensor that is already on the device is not copied."""
        there = torch.ones(3, device=accel.device)
        assert accel.runtime.to_device([there])[0].data_ptr() == there.data_ptr(), "it was copied"

    def test_synchronize(self, accel: Backend) -> None:
        """synchronize returns when the queued work is done."""
        accel.runtime.synchronize()
        if not accel.capabilities.streams:
            pytest.skip("it declares no streams, and nothing else shows whether synchronize waited")
        done = _busy(accel)
        if done.query():
            pytest.skip("this device was never seen to be behind its host, so nothing shows whether synchronize waited")
        accel.runtime.synchronize()
        assert done.query(), "synchronize returned before the work was done"

    def test_memory(self, accel: Backend) -> None:
        """Memory figures are bytes, in order, and grow by what is allocated."""
        kept = kept_memory(accel)
        before = accel.runtime.memory()
        held = torch.ones(64 * MEBIBYTE // 4, device=accel.device)
        accel.runtime.synchronize()
        after = accel.runtime.memory()
        for memory in (before, after):
            assert 0 <= memory.used <= memory.peak <= memory.total, f"the figures contradict each other: {memory}"
        assert after.total == before.total
        assert after.peak >= before.peak
        assert after.used - before.used > 48 * MEBIBYTE, "64 MiB were allocated, and the figure did not follow"
        del held
        # Up to what the host's own bookkeeping lags behind.
        assert accel.runtime.memory().peak > after.used - 16 * MEBIBYTE, "the peak fell when memory was freed"
        del kept

    def test_prefetch(self, accel: Backend) -> None:
        """A prefetched batch arrives whole, whatever is queued and freed in between."""
        waiting = [accel.runtime.prefetch({"rows": torch.full((4096,), float(n)), "n": n}) for n in range(4)]
        for n, ready in enumerate(waiting):
            batch: Any = ready()
            assert batch["rows"].device == accel.device
            doubled = batch["rows"] * 2
            assert (batch["n"], doubled.sum().item()) == (n, 8192.0 * n), "it is not the batch that was prefetched"

    def test_side_stream(self, accel: Backend) -> None:
        """Results of a side stream can be used after it, in order."""
        with declared(accel.capabilities.streams, "side streams"):
            with accel.runtime.side_stream():
                pass
            module = torch.get_device_module(accel.device)
            outer = module.current_stream(accel.device)
            with accel.runtime.side_stream():
                assert module.current_stream(accel.device) != outer, "its work is queued on the stream outside it"
            assert module.current_stream(accel.device) == outer, "later work is queued on the side stream, too"
            with pytest.raises(ZeroDivisionError), accel.runtime.side_stream():
                raise ZeroDivisionError
            assert module.current_stream(accel.device) == outer, "after an error, later work is queued on it, too"
            total = torch.zeros(1024, device=accel.device)
            for _ in range(8):
                with accel.runtime.side_stream():
                    total = total + 1
                total = total * 1
            assert total.sum().item() == 8 * 1024

    def test_capture(self, accel: Backend) -> None:
        """Captured work runs at each launch on the current values of its inputs, and not while it is recorded."""
        with declared(accel.capabilities.graphs, "graphs"):
            inputs, total = (torch.zeros(4, device=accel.device) for _ in range(2))
            returned, launch = accel.runtime.capture(lambda: total.add_(inputs) * 2)
            for number, expected in ((1.0, 1.0), (2.0, 3.0), (3.0, 6.0)):
                inputs.fill_(number)
                launch()
                assert total.tolist() == [expected] * 4, "a launch did something else than the work, or not once"
                assert returned.tolist() == [2 * expected] * 4, "what the work returned does not follow a launch"
            second, launch_second = accel.runtime.capture(lambda: (inputs * 3).exp().log() + total, beside=launch)
            for number, expected in ((1.0, 7.0), (2.0, 9.0)):
                inputs.fill_(number)
                launch()
                launch_second()
                torch.testing.assert_close(second.cpu(), torch.full((4,), expected + 3 * number))

    def test_captured_draws(self, accel: Backend) -> None:
        """Each launch of captured work draws other numbers, by the seed and by a state that is put back."""
        with declared(accel.capabilities.graphs, "graphs"):
            ones = torch.ones(512, device=accel.device)
            (kept, drawn), launch = accel.runtime.capture(
                lambda: (torch.nn.functional.dropout(ones, 0.5), torch.rand_like(ones))
            )

            def launched() -> list[float]:
                launch()
                return [*kept.tolist(), *drawn.tolist()]

            accel.runtime.seed(31)
            first, state = launched(), accel.runtime.rng_state()
            second = launched()
            assert not {*first[512:]} & {*second[512:]}, "a launch draws the numbers of the one before"
            assert first[:512] != second[:512], "a launch drops what the one before did"
            assert accel.runtime.set_rng_state(state) == []
            assert launched() == second, "a state that was put back does not repeat a launch"
            accel.runtime.seed(31)
            assert launched() == first, "the same seed gives a launch other numbers"

    def test_capture_after_an_error(self, accel: Backend) -> None:
        """An error that ends a capture leaves the stream as it was: work is run, and the next capture is right."""
        with declared(accel.capabilities.graphs, "graphs"):
            inputs, total = (torch.zeros(4, device=accel.device) for _ in range(2))

            def broken() -> None:
                total.add_(inputs)
                raise ZeroDivisionError

            stream = torch.get_device_module(accel.device).current_stream
            outer = stream(accel.device)
            with pytest.raises(ZeroDivisionError):
                accel.runtime.capture(broken)
            assert stream(accel.device) == outer, "after an error, later work is queued on the stream of the capture"
            inputs.fill_(2.0)
            assert (inputs + torch.ones_like(inputs)).tolist() == [3.0] * 4, "after an error, work is not run"
            assert torch.rand(4, device=accel.device).std().item() > 0, "after an error, random numbers are the same"
            returned, launch = accel.runtime.capture(lambda: total.add_(inputs) * 2)
            total.zero_()
            launch()
            assert (total + returned).tolist() == [6.0] * 4, (
                "a launch does not do the work that was captured after an error"
            )
