"""The NPU as a device: its queue, its random numbers, its memory, and the process it belongs to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Literal, TypeVar

import torch
import torch_npu
from torch import Tensor

from accelcore.errors import BackendUnavailableError
from accelcore.roles.accelerator import AcceleratorRuntime
from accelcore.roles.runtime import Memory

__all__ = ["NpuRuntime", "refuse_fork"]

T = TypeVar("T")


class NpuRuntime(AcceleratorRuntime):
    """One NPU of this process.

    Creating it makes the device current and sets two switches of the whole process, which torch_npu would otherwise
    take from the environment or from the kind of part: operators come compiled, not compiled at run time for each new
    shape; and tensors keep torch's own memory format.

    Attributes:
        settings: those switches, as set.
    """

    settings: Mapping[str, bool]

    def __init__(self, device: torch.device) -> None:
        refuse_fork()
        super().__init__(device)
        self._process = os.getpid()
        torch_npu.npu.set_device(device)
        # Autograd asks every device that was ever current for its stream, and torch_npu aborts where there is none yet.
        torch_npu.npu.current_stream(device)
        self.settings = {"jit_compile": False, "allow_internal_format": False}
        torch_npu.npu.set_compile_mode(jit_compile=self.settings["jit_compile"])
        torch_npu.npu.config.allow_internal_format = self.settings["allow_internal_format"]

    def synchronize(self) -> None:
        self._check_process()
        torch_npu.npu.synchronize(self.device)

    def seed(self, n: int, *, deterministic: bool = False, same: Literal["everywhere"] | None = None) -> None:
        self._check_process()
        if deterministic:
            os.environ["HCCL_DETERMINISTIC"] = "true"  # hccl reads it when a group is formed
        super().seed(n, deterministic=deterministic, same=same)

    def rng_state(self) -> dict[str, Tensor]:
        self._check_process()
        return super().rng_state()

    def set_rng_state(self, state: Mapping[str, Tensor]) -> list[str]:
        self._check_process()
        return super().set_rng_state(state)

    def memory(self) -> Memory:
        self._check_process()
        return super().memory()

    def to_device(self, batch: T) -> T:
        self._check_process()
        return super().to_device(batch)

    def side_stream(self) -> AbstractContextManager[object]:
        self._check_process()
        return super().side_stream()

    def pin(self, tensor: Tensor) -> Tensor:
        self._check_process()
        return super().pin(tensor)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise _forked()


def refuse_fork() -> None:
    """Raise BackendUnavailableError in a process that was forked from one which already used the NPU."""
    if torch_npu.npu._is_in_bad_fork():
        raise _forked()


def _forked() -> BackendUnavailableError:
    return BackendUnavailableError(
        "the npu cannot be used in this process",
        why="it was forked from one that already used the npu, and CANN does not survive a fork",
        remedy="start processes with multiprocessing's 'spawn' method, and leave the npu out of what loader workers do",
    )
