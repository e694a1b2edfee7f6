"""Host views: device memory is memory of this process, so CPU tensors can share its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")

# One storage spans the whole address space of a process. A view is then a single `as_strided`, a third of the time
# that a storage for each tensor takes. It starts past 0, because torch takes a null pointer for unallocated memory.
_START = 64
_END = 1 << 47
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions


class _Spans(dict[torch.dtype, Tensor]):
    def __missing__(self, dtype: torch.dtype) -> Tensor:
        storage = torch._C._construct_storage_from_data_pointer(_START, CPU, _END - _START)
        with torch.inference_mode(False):  # whose tensors nobody could write to outside of it
            self[dtype] = span = torch.empty(0, dtype=dtype, device=CPU).set_(storage, 0, (0,), (1,))
        return span


_spans = _Spans()


def view(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over the bytes of `tensor`; a CPU tensor is its own view."""
    if tensor.is_cpu:
        return tensor
    address = tensor.data_ptr()
    if address == 0:  # empty tensors have no memory
        if tensor.numel():
            raise RuntimeError(
                f"EMULATED: a tensor of shape {tuple(tensor.shape)} has no memory: its storage was resized to 0 bytes"
            )
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
    itemsize, present = tensor.element_size(), tensor.untyped_storage().nbytes()
    if (tensor.storage_offset() + tensor.numel()) * itemsize > present:  # if only because it is expanded
        _check_extent(tensor, present // itemsize)
    offset = (address - _START) // itemsize
    host = _spans[tensor.dtype].as_strided(tensor.shape, tensor.stride(), offset)
    # Conjugate and negative tensors are lazy: the bytes are those of the tensor before.
    if tensor.is_conj():
        host = host.conj()
    if tensor.is_neg():
        host = host._neg_view()
    return host


def _check_extent(tensor: Tensor, present: int) -> None:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and tensor.storage_offset() + last >= present:
        raise RuntimeError(
            f"EMULATED: a tensor of shape {tuple(tensor.shape)} reaches past its memory: its storage was resized to "
            f"{present} elements"
        )


def place(host: Tensor, device: torch.device) -> Tensor:
    """Return a new tensor on `device` with the values of `host`; return a tensor on any device as it is."""
    if not host.is_cpu:
        return host
    if host.is_quantized:
        raise NotImplementedError("EMULATED: quantized tensors are not emulated")
    if host.layout != torch.strided:
        return host.to(device)
    wide = _CHANNELS_LAST.get(host.dim())
    if wide is not None and not host.is_contiguous() and host.is_contiguous(memory_format=wide):
        host = host.contiguous()  # no operator of torch_npu gives a result that is channels_last
    placed = torch.empty_like(host, device=device)
    if host.numel():
        view(placed).copy_(host)
    return placed


def current_device() -> torch.device:
    """Return the current NPU of this thread."""
    import torch_npu

    return torch.device("npu", torch_npu.npu.current_device())


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in an argument or result, also in its lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
