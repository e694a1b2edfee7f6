"""The device that is measured: its clock, its memory, what it is."""

from __future__ import annotations

import gc
import platform
import subprocess
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from time import perf_counter
from typing import Any

import torch
import torch._inductor

import accelcore
from benchmarks.machine import describe_machine, describe_versions

__all__ = ["Deadline", "Device"]

_DISTRIBUTIONS = ("accelerate", "lightning-fabric", "pytorch-lightning", "lightning", "triton")
_SMI = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu")


class Deadline:
    """When a stage has to be done."""

    def __init__(self, seconds: float) -> None:
        self._end = perf_counter() + seconds

    @property
    def left(self) -> float:
        """Seconds until then; negative afterwards."""
        return self._end - perf_counter()


class Device:
    """One device, as accelcore selects it and as torch names it.

    Args:
        name: "cuda" or "cpu".
        toy: whether sizes are tiny, and numbers mean nothing.
    """

    def __init__(self, name: str, *, toy: bool) -> None:
        self.accel = accelcore.select(name)
        self.torch = self.accel.device
        self.type, self.toy = self.torch.type, toy
        self.cuda = self.type == "cuda"
        self.rehearsal = toy or not self.cuda or self.accel.emulated

    def compile_options(self, mode: str | None = None) -> dict[str, Any]:
        """Return the options for torch.compile that every loop gets.

        accelcore turns off an optimization that may compute wrong gradients. Loops by hand then turn it off, too:
        otherwise two different programs would be compared. A rehearsal on the CPU leaves out inductor, which is slow
        there.
        """
        if self.toy and not self.cuda:
            return {"backend": "eager"}
        if not self.cuda:
            return {} if mode is None else {"mode": mode}

        from accelcore_cuda.known_faults import MIX_ORDER_REDUCTION  # the plugin may be missing where there is no GPU

        if not MIX_ORDER_REDUCTION.applies:
            return {} if mode is None else {"mode": mode}
        of_mode = {} if mode is None else torch._inductor.list_mode_options(mode)  # torch takes a mode or options
        return {"options": {**of_mode, "triton.mix_order_reduction": False}}

    def clock(self) -> float:
        """The time, once all that was asked of the device is done."""
        self.accel.runtime.synchronize()
        return perf_counter()

    def forget(self) -> None:
        """Give back the memory of what is no longer referenced, and measure the peak anew."""
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        self.measure_peak()

    def measure_peak(self) -> None:
        """Measure the peak of memory anew."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.torch)

    def peak(self) -> int | None:
        """The most bytes that tensors have held since `measure_peak`; None where that is not known."""
        return torch.cuda.max_memory_allocated(self.torch) if self.cuda else None

    def held(self) -> int | None:
        """The bytes that tensors hold now; None where that is not known."""
        return torch.cuda.memory_allocated(self.torch) if self.cuda else None

    def memory(self) -> int | None:
        """All of the device's memory in bytes; None where it has none of its own."""
        return torch.cuda.get_device_properties(self.torch).total_memory if self.cuda else None

    def chip(self) -> str:
        return torch.cuda.get_device_name(self.torch) if self.cuda else str(describe_machine()["cpu"])

    def describe(self) -> dict[str, Any]:
        """The chip, its driver, the machine around it, and the versions of what runs."""
        nccl = torch.cuda.nccl.version() if self.cuda and torch.distributed.is_nccl_available() else None
        cudnn = torch.backends.cudnn.version() if self.cuda else None
        found = {"chip": self.chip(), **describe_machine()}
        if self.cuda:
            found["compute_capability"] = ".".join(map(str, torch.cuda.get_device_capability(self.torch)))
            found["memory_bytes"] = self.memory()
            found["driver"] = _driver()
        versions = {
            **describe_versions(_DISTRIBUTIONS),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda or "none",
            "cudnn": str(cudnn or "none"),
            "nccl": ".".join(map(str, nccl)) if nccl else "none",
            "accelcore": accelcore.__version__,
        }
        if versions["triton"] == "not installed" and find_spec("triton") is not None:
            versions["triton"] = "there, of unknown version"
        return {**found, "versions": versions}

    def clocks(self) -> dict[str, str]:
        """What nvidia-smi says of clocks (MHz), power (W) and temperature (°C) now; nothing where it is not there."""
        if not self.cuda:
            return {}
        uuid = str(torch.cuda.get_device_properties(self.torch).uuid)
        uuid = f"GPU-{uuid.removeprefix('GPU-')}"
        return dict(zip(_SMI, _ask_smi(*_SMI, uuid=uuid), strict=False))


def _driver() -> str:
    answer = _ask_smi("driver_version")
    if answer:
        return answer[0]
    with suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    return "unknown"


def _ask_smi(*queries: str, uuid: str = "") -> list[str]:
    program = which("nvidia-smi")
    if program is None:
        return []
    asked = [
        program,
        f"--query-gpu={','.join(queries)}",
        "--format=csv,noheader,nounits",
        *(["-i", uuid] if uuid else []),
    ]
    with suppress(OSError, subprocess.SubprocessError):
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
        return [value.strip() for value in answer.splitlines()[0].split(",")]
    return []
