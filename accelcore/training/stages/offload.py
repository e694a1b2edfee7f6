"""Offloading: saved tensors of some modules wait for backward in pinned host memory; copies run beside other work.

torch's `save_on_cpu` copies each tensor while the host and the device wait.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from accelcore.errors import TrainingError


class Offload:
    """Copies saved tensors to the host on a stream of its own, and back before backward needs them.

    When backward reaches a module, its tensors and those of the module that ran before it are on their way back. The
    device then holds the tensors of two modules.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = torch.get_device_module(device)
        self._stream: Any = self._streams.Stream(device)
        self._latest: weakref.ref[_Call] | None = None

    def of(self, module: nn.Module) -> saved_tensors_hooks:
        """Return a context for a module's forward pass. Its parameters stay: they take no additional memory."""
        held = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        call = _Call(self._latest)
        self._latest = weakref.ref(call)

        def pack(tensor: Tensor) -> Any:
            stays = tensor.device != self._device or tensor.untyped_storage().data_ptr() in held
            return tensor if stays else self._send(tensor, call)

        def unpack(packed: Any) -> Tensor:
            return self._receive(packed) if isinstance(packed, _Offloaded) else packed

        return saved_tensors_hooks(pack, unpack)

    def _send(self, tensor: Tensor, call: _Call) -> _Offloaded:
        self._stream.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._stream):
            copy = tensor.detach().to("cpu", non_blocking=True, copy=True)
        tensor.record_stream(self._stream)
        return _Offloaded(tensor, copy, call)

    def _receive(self, offloaded: _Offloaded) -> Tensor:
        if offloaded.changed:
            raise TrainingError(
                f"a tensor of shape {tuple(offloaded.copy.shape)} was changed in place after it was saved for backward",
                why="offload= copies it while other work runs, so that the copy may have the old or the new value",
                remedy="replace the in-place operation, or leave this part of the model out of offload=",
            )
        if not offloaded.call.returns:
            self._return_all(offloaded.call)
        earlier = None if offloaded.call.earlier is None else offloaded.call.earlier()
        user = self._streams.current_stream(self._device)
        tensor, arrived = offloaded.take() or self._return(offloaded)
        user.wait_event(arrived)
        tensor.record_stream(user)
        if earlier is not None and not earlier.returns:
            self._return_all(earlier)
        return tensor

    def _return_all(self, call: _Call) -> None:
        call.returns = True
        for reference in reversed(call.offloaded):  # backward needs the last one first
            if (offloaded := reference()) is not None:
                offloaded.back = self._return(offloaded)

    def _return(self, offloaded: _Offloaded) -> tuple[Tensor, Any]:
        """Begin the copy to the device. It follows the copy to the host, on the same stream."""
        with self._streams.stream(self._stream):
            tensor = offloaded.copy.to(self._device, non_blocking=True)
            return tensor, self._stream.record_event()


class _Call:
    """One forward pass of a module. It holds no tensors: autograd does, until it frees the graph."""

    def __init__(self, earlier: weakref.ref[_Call] | None) -> None:
        self.earlier = earlier
        self.offloaded: list[weakref.ref[_Offloaded]] = []
        self.returns = False


class _Offloaded:
    """A saved tensor on the host, and on the device again as soon as its copy back begins."""

    def __init__(self, tensor: Tensor, copy: Tensor, call: _Call) -> None:
        self.copy, self.call = copy, call
        self.back: tuple[Tensor, Any] | None = None
        # It shares the count of changes in place with the saved tensor, and has no memory.
        self._twin = tensor.detach()
        self._twin.data = tensor.new_empty(0)
        self._version = self._twin._version
        call.offloaded.append(weakref.ref(self))

    @property
    def changed(self) -> bool:
        return self._twin._version != self._version

    def take(self) -> tuple[Tensor, Any] | None:
        """Return the copy on the device and drop it, so that its memory is free after its use."""
        back, self.back = self.back, None
        return back
