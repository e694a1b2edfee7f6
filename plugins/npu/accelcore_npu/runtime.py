"""Runtime of one NPU: queue, random numbers, memory, and checks for forked processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

import torch
import torch_npu

from accelcore.errors import BackendUnavailableError
from accelcore.roles.runtime import AcceleratorRuntime


class NpuRuntime(AcceleratorRuntime):
    """One NPU of this process.

    The constructor makes the device current and sets two switches for the whole process. `jit_compile` is off:
    operators come compiled instead of being compiled for each new shape. `allow_internal_format` is off: tensors keep
    torch's memory format. By default, torch_npu takes both from the environment or the chip. `settings` has the two.
    """

    settings: Mapping[str, bool]

    def __init__(self, device: torch.device) -> None:
        refuse_fork()
        self._process = os.getpid()
        super().__init__(device)
        torch_npu.npu.set_device(device)
        # Autograd asks every device that was ever current for its stream. torch_npu aborts if it does not exist yet.
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
    """Raise BackendUnavailableError if this process was forked from one that used the NPU."""
    if torch_npu.npu._is_in_bad_fork():
        raise _forked()


def _forked() -> BackendUnavailableError:
    return BackendUnavailableError(
        "the NPU cannot be used in this process",
        why="it was forked from a process that used the NPU, and CANN does not survive a fork",
        remedy="start processes with multiprocessing's 'spawn' method, and do not use the NPU in loader workers",
    )
