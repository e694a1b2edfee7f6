"""The NPU as a device: its queue, its random numbers, its memory, and the process it belongs to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

import torch
import torch_npu

from accelcore.errors import BackendUnavailableError
from accelcore.roles.runtime import AcceleratorRuntime

__all__ = ["NpuRuntime", "refuse_fork"]


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
        self._process = os.getpid()
        super().__init__(device)
        torch_npu.npu.set_device(device)
        # Autograd asks every device that was ever current for its stream, and torch_npu aborts where there is none yet.
        torch_npu.npu.current_stream(device)
        self.settings = {"jit_compile": False, "allow_internal_format": False}
        torch_npu.npu.set_compile_mode(jit_compile=self.settings["jit_compile"])
        torch_npu.npu.config.allow_internal_format = self.settings["allow_internal_format"]

    @property
    def device(self) -> torch.device:
        if os.getpid() != self._process:
            raise _forked()
        return super().device

    def seed(self, n: int, *, deterministic: bool = False, same: Literal["everywhere"] | None = None) -> None:
        super().seed(n, deterministic=deterministic, same=same)
        if deterministic:
            os.environ["HCCL_DETERMINISTIC"] = "true"  # hccl reads it when a group is formed


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
