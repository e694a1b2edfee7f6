"""Conformance of transfers and memory: what a tensor keeps on its way, and figures that reading does not change."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from io import BytesIO
from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelcore import Backend
from accelcore.testing.support.declared import refused
from accelcore.testing.support.found import Found, is_refusal, known_faults
from accelcore.testing.support.kinds import bits, same_bits, same_numbers
from accelcore.util.text import first_line

MEBIBYTE = 2**20


def kept_memory(accel: Backend) -> list[Tensor]:
    """Return tensors that fill what the process has kept of freed memory: 64 MiB that follow are new memory."""
    found, used = list[Tensor](), accel.runtime.memory().used
    for _ in range(16):  # a figure that does not follow at all is for the test to report
        found.append(torch.ones(64 * MEBIBYTE // 4, device=accel.device))
        accel.runtime.synchronize()
        before, used = used, accel.runtime.memory().used
        if used - before > 48 * MEBIBYTE:
            break
    return found


def _range(*shape: int) -> Tensor:
    return torch.arange(float(math.prod(shape))).reshape(shape)


_IMAGES, _VOLUMES = torch.channels_last, torch.channels_last_3d
_Layout = tuple[Callable[[Tensor], Tensor], tuple[int, ...], tuple[int, ...]]
_LAYOUTS: dict[str, _Layout] = {  # a view or copy of a contiguous tensor, of few elements and of many
    "contiguous": (lambda base: base, (2, 3, 2, 2), (16, 24, 15, 13)),
    "channels last": (lambda base: base.contiguous(memory_format=_IMAGES), (2, 3, 2, 2), (16, 24, 15, 13)),
    "channels last in 3-D": (lambda base: base.contiguous(memory_format=_VOLUMES), (2, 3, 2, 2, 2), (4, 24, 15, 13, 4)),
    "transposed": (Tensor.t, (2, 3), (257, 293)),
    "permuted": (lambda base: base.permute(2, 0, 1), (2, 3, 4), (43, 41, 43)),
}
_OF_OTHER_MEMORY: dict[str, _Layout] = {  # whose strides are not kept
    "with gaps": (lambda base: base[:, 1::2], (3, 6), (257, 586)),
    "expanded": (lambda base: base[:, :1].expand(-1, 293), (3, 2), (257, 2)),
    "behind others": (lambda base: base[1:].t(), (4, 3), (258, 293)),
}


def _laid_out(layout: str, *, many: bool = False, fill: Callable[..., Tensor] = _range) -> Tensor:
    view, *shapes = {**_LAYOUTS, **_OF_OTHER_MEMORY}[layout]
    return view(fill(*shapes[many]))


_WHOLE = ("bool", "uint8", "int32", "int64")
_DTYPES = (
    *(*_WHOLE, "int8", "int16", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
)
_WAYS = ("to_device", "prefetch", "to", "non_blocking", "copy_")
_of_ways = pytest.mark.parametrize("way", _WAYS)


def _moved(accel: Backend, tensor: Tensor, way: str) -> Tensor:
    if way == "to_device":
        return accel.runtime.to_device(tensor)
    if way == "prefetch":
        return accel.runtime.prefetch(tensor)()
    if way == "copy_":
        return torch.empty_like(tensor, device=accel.device).copy_(tensor)
    return tensor.to(accel.device, non_blocking=way == "non_blocking")


def _converted(accel: Backend, host: Tensor, target: torch.dtype) -> dict[str, Tensor]:
    """Return a tensor of the host in another dtype, by each way to convert it."""
    there, shape = host.to(accel.device), host.shape
    images = {4: _IMAGES, 5: _VOLUMES}.get(len(shape), torch.contiguous_format)
    columns = torch.empty(shape[::-1], dtype=target, device=accel.device).permute(*reversed(range(len(shape))))
    found = {
        "copy_": torch.empty(shape, dtype=target, device=accel.device).copy_(there),
        "copy_ to columns": columns.copy_(there),
        "to": there.to(target),
        "copy_ from the host": torch.empty(shape, dtype=target, device=accel.device).copy_(host),
        "copy_ to the host": torch.empty(shape, dtype=target).copy_(there),
        "to from the host": host.to(accel.device, target),
        "to on the host": there.to("cpu", target),
    }
    for form in (torch.contiguous_format, images):
        try:
            found[f"to({form})"] = there.to(target, memory_format=form)
        except (NotImplementedError, RuntimeError) as error:  # a device may have no such format
            if not is_refusal(error):
                raise
    return found


class TransferTests:
    """Tensors between host and device, and figures of memory."""

    @pytest.mark.parametrize("layout", _LAYOUTS)
    def test_copies_into_other_strides(self, accel: Backend, layout: str) -> None:
        """`copy_` to, from and on the device puts each element in its place if the strides differ, also unawaited."""
        tensor = _laid_out(layout)
        for awaited in (True, False):
            sent, other = tensor.to(accel.device), {"non_blocking": not awaited}
            dense = torch.full(tensor.shape, 77.0)
            found = {
                "to the device": dense.to(accel.device).copy_(tensor, **other),
                "on the device": dense.to(accel.device).copy_(sent, **other),
                "to the host": dense.clone().copy_(sent, **other),
                "back into its own strides": torch.empty_like(tensor).copy_(
                    dense.to(accel.device).copy_(sent), **other
                ),
            }
            accel.runtime.synchronize()
            for what, arrived in found.items():
                assert torch.equal(arrived.cpu(), tensor), f"{what} with {other} the values are others"

    @pytest.mark.parametrize("layout", _LAYOUTS)
    def test_conversions_in_other_strides(self, accel: Backend, layout: str) -> None:
        """A conversion rounds to the nearest number in any strides, also if it changes them, or moves the tensor."""
        names = (*accel.capabilities.model_dtypes, *_WHOLE, "int8", "int16")
        known = [getattr(torch, name) for name in names]
        certain = [getattr(torch, name) for name in (*accel.capabilities.model_dtypes, *_WHOLE)]
        saturates = accel.capabilities.overflow_flag  # or it may
        turn = list(_LAYOUTS).index(layout)
        pairs = [(False, *pair) for pair in permutations(known, 2)]
        pairs += [(True, *pair) for pair in list(permutations(known, 2))[turn % 3 :: 3]]
        for many, source, target in pairs:
            shape = _laid_out(layout, many=many).shape
            numbers = (20 * torch.randn(shape, generator=torch.Generator().manual_seed(6))).clamp(-120, 120)
            if source.is_floating_point and (target.is_floating_point or target == torch.bool) and not saturates:
                special = torch.tensor([65_519.0, -65_520.0, math.inf, math.nan, -0.0])  # the second is beyond fp16
                numbers.view(-1)[:5] = special
            elif source.itemsize > 1 and (target.itemsize > 1 or target == torch.bool):
                numbers.view(-1)[:2] = torch.tensor([256.0, 30_000.0])  # without a bit among the lowest, or many
            numbers = numbers.abs() if torch.uint8 in (source, target) else numbers
            exact = numbers.to(source).double()  # contiguous, as all that leads to the right numbers
            whole = not (target.is_floating_point or target == torch.bool)
            right = (exact.trunc() if whole else exact).to(target)
            host = torch.empty_like(_laid_out(layout, many=many), dtype=source).copy_(numbers.to(source))
            try:
                found = _converted(accel, host, target)
            except (NotImplementedError, RuntimeError):
                if source in certain and target in certain:
                    raise
                continue
            for way, converted in found.items():
                assert same_numbers(converted.cpu(), right), f"{source} that is {layout} by {way} is wrong in {target}"

    @_of_ways
    def test_large_tensors_travel(self, accel: Backend, way: str) -> None:
        """A tensor of some MiB arrives whole, to its last element, and so does one after it."""
        for tensor in (_range(3 * MEBIBYTE // 4 + 1), _range(1023, 771).t(), _range(5)):
            there = _moved(accel, tensor, way)
            accel.runtime.synchronize()
            for back in (there.cpu(), accel.runtime.fetch(there)()):
                assert torch.equal(back, tensor), f"of {tensor.numel()} numbers some arrived as others"

    @pytest.mark.parametrize("way", ["to_device", "prefetch", "to", "non_blocking"])
    def test_graph_travels(self, accel: Backend, way: str) -> None:
        """A transfer is part of the graph: `requires_grad` arrives, gradients come back to the tensor on the host."""
        leaf = torch.ones(3, requires_grad=True)
        there = _moved(accel, leaf * 2, way)
        assert there.requires_grad, "requires_grad was lost"
        seen: list[Tensor] = []
        leaf.register_hook(seen.append)
        torch.autograd.backward(there, torch.arange(3.0, device=accel.device))
        assert leaf.grad is not None, "no gradient came back"
        assert leaf.grad.tolist() == [0.0, 2.0, 4.0], "a wrong gradient came back"
        assert len(seen) == 1, "a hook was not called once"
        assert not _moved(accel, torch.ones(3), way).requires_grad, "requires_grad was invented"
        assert _moved(accel, torch.ones(3, requires_grad=True), way).requires_grad, "a leaf lost its requires_grad"

    @pytest.mark.parametrize("way", ["to_device", "prefetch"])
    def test_batches_of_many_kinds(self, accel: Backend, way: str) -> None:
        """Numbers that are not finite, no elements, no dimensions and complex numbers arrive as they are."""
        inf, nan = float("inf"), float("nan")
        batch = {
            "special": torch.tensor([inf, -inf, nan, -0.0, 1e-40, torch.finfo(torch.float32).max]),
            "empty": torch.ones(0, 3),
            "scalar": torch.tensor(2**53 + 1),
            "complex": torch.tensor([1 + 2j]),
            "conjugate": torch.tensor([1 + 2j]).conj(),
            "bytes": torch.arange(256, dtype=torch.uint8),
        }
        moved = accel.runtime.to_device(batch) if way == "to_device" else accel.runtime.prefetch(batch)()
        for name, tensor in batch.items():
            found, arrived = moved[name], moved[name].cpu()
            assert (found.shape, found.dtype, found.device) == (tensor.shape, tensor.dtype, accel.device), name
            assert (
                torch.equal(arrived.nan_to_num(7), tensor.nan_to_num(7))
                if name == "special"
                else torch.equal(arrived.resolve_conj(), tensor.resolve_conj())
            ), f"{name} arrived as {arrived.tolist()}"
            if name == "special":
                assert arrived.signbit().tolist()[3], "the sign of 0 was lost"

    @_of_ways
    def test_conjugates_and_negatives_travel(self, accel: Backend, way: str, record_property: Any) -> None:
        """A view that is conjugate or negative by a mark arrives with its values, and so does one that comes back."""
        numbers = torch.tensor([[1 + 2j, 3 - 4j], [0 - 1j, 5 + 6j]])
        views: dict[str, Callable[[Tensor], Tensor]] = {
            "conjugate": torch.conj,
            "negative": lambda tensor: tensor.conj().imag,
            "adjoint": torch.adjoint,
        }
        found = Found(known_faults(accel))
        for name, view in views.items():
            given, there = view(numbers), view(numbers.to(accel.device))
            moved = {
                "arrives": _moved(accel, given, way).cpu(),
                "comes back": there.cpu(),
                "fetched": accel.runtime.fetch(there)(),
                "copied to the host": torch.empty_like(given).copy_(there),
                "copied on the device": torch.empty_like(there).copy_(there).cpu(),
            }
            for what, tensor in moved.items():
                if tensor.tolist() != given.tolist():
                    found.note(f"what is {name} {what} by {way} with the values {tensor.tolist()}")
        assert not found.wrong, "\n".join(found.wrong)
        if found.seen:
            record_property("known_bug", f"views by {way}: {'; '.join(found.seen)}")

    def test_later_changes_stay_apart(self, accel: Backend) -> None:
        """A tensor that came back to the host, or went to the device, does not follow later changes or transfers."""
        there = torch.ones(1000, device=accel.device)
        back = there.to("cpu", copy=True)
        there.mul_(2)
        assert back.tolist() == [1.0] * 1000, "what is on the host changed with the device"
        host = torch.ones(1000)
        sent = host.to(accel.device, copy=True)
        accel.runtime.synchronize()
        host.zero_()
        assert sent.cpu().tolist() == [1.0] * 1000, "what is on the device changed with the host"
        for way in _WAYS:
            moved, _ = (_moved(accel, torch.full((1000,), value), way) for value in (1.0, 2.0))
            assert moved.cpu().tolist() == [1.0] * 1000, f"the next transfer by {way} takes its memory"
            for value in (3.0, 4.0):
                host.fill_(value)
                again = _moved(accel, host, way)
                accel.runtime.synchronize()
                assert again.cpu().tolist() == [value] * 1000, (
                    f"by {way} a buffer that was filled again arrives as it was"
                )

    def test_fetch_is_a_copy(self, accel: Backend) -> None:
        """`fetch` returns the values that the tensor had then, on the host and without its graph."""
        leaf = torch.arange(4.0, device=accel.device).requires_grad_()
        value = leaf * 2
        held = [value, value.sum()]
        fetched = [accel.runtime.fetch(each) for each in (*held, value.expand(2, 4))]
        with torch.no_grad():
            torch._foreach_zero_(held)
        row, total, expanded, later = (ready() for ready in (*fetched, accel.runtime.fetch(value)))
        assert later.tolist() == [0.0] * 4, f"a later copy has the values {later.tolist()}"
        assert row.tolist() == [0.0, 2.0, 4.0, 6.0], f"the copy followed a later change: {row.tolist()}"
        assert total.item() == 12.0, f"a scalar was fetched as {total.item()}"
        assert expanded.tolist() == 2 * [row.tolist()], f"two rows in one memory were fetched as {expanded.tolist()}"
        assert (row.device.type, row.requires_grad) == ("cpu", False), "the copy is not a plain tensor on the host"

    @_of_ways
    @pytest.mark.parametrize("name", _DTYPES)
    def test_every_dtype_travels(self, accel: Backend, name: str, way: str) -> None:
        """Numbers of each dtype of torch keep every bit to the device and back, few and many; some may be refused.

        Strides and memory format arrive and come back, too, if there are no gaps.
        """
        dtype = getattr(torch, name)
        for layout, many in product((*_LAYOUTS, *_OF_OTHER_MEMORY), (False, True)):
            given = _laid_out(layout, many=many, fill=partial(bits, dtype))
            dense = torch.zeros(given.shape, dtype=dtype)
            try:
                there = _moved(accel, given, way)
                back = {"cpu": there.cpu(), "fetch": accel.runtime.fetch(there)(), "copy_": dense.copy_(there)}
            except (NotImplementedError, RuntimeError, TypeError) as error:
                if name in (*_WHOLE, *accel.capabilities.model_dtypes):
                    raise
                refused(f"{name}: {first_line(error)}")
            accel.runtime.synchronize()
            assert (there.dtype, there.device) == (dtype, accel.device), f"it arrived as {there.dtype}"
            for place, arrived in (("device", there), ("host", back["cpu"])) if layout in _LAYOUTS else ():
                assert arrived.stride() == given.stride(), (
                    f"what is {layout} has the strides {arrived.stride()} on the {place} instead of {given.stride()}"
                )
            for how, arrived in back.items():
                assert arrived.dtype == dtype, f"it came back as {arrived.dtype}"
                assert same_bits(arrived, given), f"what is {layout} came back by {how} as other numbers"

    def test_models_travel(self, accel: Backend) -> None:
        """A model on the device keeps parameters, ties, buffers, hooks, `requires_grad` and memory format."""
        model: Any = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3))
        model[2].weight = model[0].weight
        model[0].bias.requires_grad_(False)
        model.to(memory_format=torch.channels_last)
        calls: list[int] = []
        model[0].register_forward_hook(lambda *_: calls.append(1))
        strides = model[0].weight.stride()
        model.to(accel.device)
        assert model[2].weight is model[0].weight, "two layers no longer share their weight"
        assert [parameter.requires_grad for parameter in model.parameters()] == [True, False, True, True, True]
        assert model[0].weight.stride() == strides, "the memory format was lost"
        assert all(tensor.device == accel.device for tensor in model.state_dict().values()), "something stayed behind"
        model(torch.ones(1, 2, 8, 8, device=accel.device)).sum().backward()
        assert len(calls) == 1, "a hook was lost"
        assert model[0].bias.grad is None, "a frozen parameter has a gradient"

    @pytest.mark.parametrize("way", ["loaded to the device", "loaded to the host", "loaded", "copied"])
    def test_tensors_are_saved(self, accel: Backend, way: str) -> None:
        """What torch saves and loads, or copies, keeps values and `requires_grad`; a file also strides and views."""
        memory = torch.arange(24.0, device=accel.device).reshape(2, 3, 4)
        images = memory.cpu()[..., None].contiguous(memory_format=torch.channels_last).to(accel.device)
        kinds = [getattr(torch, name) for name in accel.capabilities.model_dtypes]
        saved = {
            "whole": memory, "column": memory[1, :, 2], "turned": memory.permute(2, 0, 1), "images": images,
            "parameter": nn.Parameter(memory[0].clone()), "frozen": nn.Parameter(memory[0].clone(), False),
            "nothing": memory[:0], "number": memory[0, 0, 1], "long": (memory + 2**24).long() * 2**31 + 1,
            **{str(kind): (memory / 3).to(kind) for kind in (*kinds, torch.bool, torch.complex64)},
        }  # fmt: skip
        places = {"loaded to the device": accel.device, "loaded to the host": torch.device("cpu")}
        file, place = BytesIO(), places.get(way)
        torch.save(saved, file)
        file.seek(0)
        found = copy.deepcopy({**saved}) if way == "copied" else torch.load(file, map_location=place)
        for name, right in saved.items():
            one = found[name]
            assert one.device == (place or accel.device), f"{name} is on {one.device}"
            strides = way != "copied"  # torch copies tensors of some devices by `clone`, which may change them
            forms = [(each.dtype, strides and each.stride(), each.requires_grad, type(each)) for each in (one, right)]
            assert forms[0] == forms[1], f"{name} is {forms[0]} instead of {forms[1]}"
            assert torch.equal(one.cpu(), right.cpu()), f"{name} has other values"
        with torch.no_grad():
            found["whole"].fill_(7)
        assert found["column"].tolist() == [7.0] * 3 or way == "copied", "a view that shared memory is a copy"
        assert memory.cpu().equal(torch.arange(24.0).reshape(2, 3, 4)), "what was saved changed with its copy"

    def test_pinned_memory_keeps_layout(self, accel: Backend) -> None:
        """Pinning keeps strides and values, and a copy that does not block gives them after `synchronize`."""
        if not accel.capabilities.pinned_memory:
            pytest.skip("not declared: pinned memory; another test sees that a loader does not pin")
        for layout in _LAYOUTS:
            tensor = _laid_out(layout)
            pinned: Tensor = tensor.pin_memory()
            assert pinned.is_pinned(), "it is not pinned"
            for there in (accel.runtime.to_device(pinned), pinned.to(accel.device, non_blocking=True)):
                accel.runtime.synchronize()
                assert torch.equal(there.cpu(), tensor)
            host = (tensor + 1).pin_memory()
            assert torch.equal(pinned, tensor), "the next tensor that is pinned takes its memory"
            host.copy_(there, non_blocking=True)
            accel.runtime.synchronize()
            assert torch.equal(host, tensor), "synchronize returned before a copy to the host was done"

    def test_reading_keeps_the_peak(self, accel: Backend) -> None:
        """Memory that was freed counts in the peak, however often the figures are read, or if they were not read."""
        kept = kept_memory(accel)
        before = accel.runtime.memory().used
        unseen = torch.ones(160 * MEBIBYTE // 4, device=accel.device)
        accel.runtime.synchronize()
        del unseen
        least = before + 144 * MEBIBYTE
        assert accel.runtime.memory().peak >= least, "memory that was freed before a reading is not in the peak"
        held = torch.ones(96 * MEBIBYTE // 4, device=accel.device)
        accel.runtime.synchronize()
        peak = accel.runtime.memory().peak - 16 * MEBIBYTE  # up to what the host's own bookkeeping lags behind
        del held
        freed = [accel.runtime.memory() for _ in range(3)]
        assert all(memory.peak >= peak for memory in freed), "reading reset the peak"
        assert all(memory.total == freed[0].total for memory in freed), "the total changes"
        assert freed[-1].used < peak - 48 * MEBIBYTE, "memory that was freed counts as used"
        again = torch.ones(16 * MEBIBYTE // 4, device=accel.device)
        accel.runtime.synchronize()
        assert accel.runtime.memory().peak >= peak, "a smaller tensor lowered the peak"
        del again, kept

    def test_synchronize_orders_results(self, accel: Backend) -> None:
        """Work that was queued is done, in order, when `synchronize` returns; it changes no tensor."""
        total = torch.zeros(256, 256, device=accel.device)
        host = torch.empty(256, 256)
        for number in range(64):
            total.add_(number)
        host.copy_(total, non_blocking=True)
        accel.runtime.synchronize()
        accel.runtime.synchronize()
        assert float(host[0, 0]) == sum(range(64)), "a copy to the host was not done"
        assert float(total[-1, -1]) == sum(range(64))
