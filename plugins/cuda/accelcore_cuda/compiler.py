"""Compilation on CUDA: torch.compile, if the requirements of inductor are installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from accelcore.errors import logger
from accelcore.roles.compiler import Compiled, TorchCompiler
from accelcore_cuda.known_faults import MIX_ORDER_REDUCTION


class CudaCompiler(TorchCompiler):
    """Compiler that checks the requirements of inductor. Other backends of torch.compile run without checks."""

    def __init__(self, compute: tuple[int, int], *, rocm: bool) -> None:
        super().__init__(avoids=(MIX_ORDER_REDUCTION,))
        self._compute, self._rocm = compute, rocm

    def compile(self, module: nn.Module, options: Mapping[str, Any] = MappingProxyType({})) -> Compiled:
        own = _without_mix_order_reduction(options) if MIX_ORDER_REDUCTION.applies else options
        compiled = super().compile(module, own)  # refuses unknown options; compiles at the first call
        compiled.overwrites = replays_graphs(options)
        if options.get("backend", "inductor") != "inductor":
            return compiled
        reason = missing_for_inductor(self._compute, rocm=self._rocm)
        if reason is None:
            return compiled
        logger.warning("the model runs eagerly, not compiled: %s", reason)
        return Compiled(module, compiled=False, reason=reason)


def _without_mix_order_reduction(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options with the optimization that computes wrong gradients turned off, unless they set it."""
    import torch._inductor  # only for those who compile: it takes a while

    mode, own = options.get("mode"), options.get("options")
    if options.get("backend", "inductor") != "inductor" or (mode and own):  # torch.compile refuses both
        return options
    of_mode = torch._inductor.list_mode_options(mode or "default")  # torch takes a mode or options
    return {**options, "mode": None, "options": {"triton.mix_order_reduction": False, **of_mode, **(own or {})}}


def replays_graphs(options: Mapping[str, Any]) -> bool:
    """Return whether torch.compile with these options runs the model as CUDA graphs."""
    import torch._inductor.config  # only for those who compile: it takes a while

    backend = options.get("backend", "inductor")
    if backend != "inductor":
        return bool(backend == "cudagraphs")
    mode = torch._inductor.list_mode_options(options.get("mode") or "default")
    named = {name.replace("-", "_"): value for name, value in (options.get("options") or {}).items()}
    return bool({**mode, **named}.get("triton.cudagraphs", torch._inductor.config.triton.cudagraphs))


def missing_for_inductor(compute: tuple[int, int], *, rocm: bool) -> str | None:
    """Return why inductor cannot compile for this GPU, or None. It needs Triton, a C compiler and Python's headers."""
    if not rocm and compute < (7, 0):
        return (
            f"Triton, which inductor compiles with, needs sm_70 or newer, and this GPU is sm_{compute[0]}{compute[1]}"
        )
    if importlib.util.find_spec("triton") is None:
        return "Triton, which inductor compiles with, is not installed (pip install triton)"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler (install gcc, or name a compiler in CC)"
    header = _python_header()
    if not header.exists():
        return f"Triton needs Python's headers, and there is no {header} (install python3-dev)"
    return None


def _python_header() -> Path:
    """Return where Triton looks for Python.h: Debian uses another scheme for headers than for packages."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"], "Python.h")
