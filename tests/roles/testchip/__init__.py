"""A device of torch outside of torch: `import testchip` builds it, once a version of torch, and registers it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path
from torch.utils._pytree import tree_map_only
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).with_name("device.cpp")
FLAGS = ("-std=c++20", "-O0", "-fPIC", "-shared", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")


def build() -> Path:
    """Return the library, compiled unless the cache has it."""
    text = f"{torch.__version__} {FLAGS} {SOURCE.read_text()}"
    library = user_cache_path("accelcore") / "testchip" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        draft = library.with_suffix(f".{os.getpid()}")
        folders = [f"-I{path}" for path in include_paths()], [f"-L{path}" for path in library_paths()]
        libraries = ("-ltorch", "-ltorch_cpu", "-lc10")
        command = [os.environ.get("CXX", "g++"), *FLAGS, *folders[0], SOURCE, "-o", draft, *folders[1], *libraries]
        subprocess.run(command, check=True)
        draft.rename(library)
    return library


class Module(types.ModuleType):
    """What `torch.testchip` is."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: object) -> None:
        pass

    @staticmethod
    def synchronize(device: object = None) -> None:
        pass

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        torch.ops.testchip.seed(seed)

    @staticmethod
    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.ops.testchip.rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: object = None) -> None:
        torch.ops.testchip.set_rng_state(state)

    @staticmethod
    def memory_allocated(device: object = None) -> int:
        return torch.ops.testchip.memory()[0]

    @staticmethod
    def max_memory_allocated(device: object = None) -> int:
        return torch.ops.testchip.memory()[1]

    @staticmethod
    def get_device_properties(device: object = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def on_host(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Run a kernel on copies in the host's memory, and return copies of its results on the device."""

    def run(*arguments: Any) -> Any:
        found = kernel(*tree_map_only(torch.Tensor, torch.Tensor.cpu, arguments))
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to("testchip"), found)

    return run


def convolution_backward(gradient: torch.Tensor, *others: Any) -> Any:
    return torch.ops.aten.convolution_backward(gradient, *others[:2], [others[1].shape[0]], *others[2:])


def lstm_cell(inputs: torch.Tensor, hidden: torch.Tensor, c: torch.Tensor, *biases: torch.Tensor | None) -> Any:
    gates = sum((bias for bias in biases if bias is not None), inputs + hidden)
    i, f, g, o = gates.chunk(4, 1)
    after = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * after.tanh(), after, gates


def lstm_cell_backward(
    by_h: Any, by_c: Any, c: torch.Tensor, after: torch.Tensor, gates: torch.Tensor, bias: bool
) -> Any:
    nothing = torch.zeros_like(gates)
    found = torch.ops.aten._thnn_differentiable_lstm_cell_backward(by_h, by_c, gates, nothing, None, None, c, after)
    return found[0], found[2], found[0].sum(0) if bias else torch.empty(0)


def gru_cell(inputs: torch.Tensor, hidden: torch.Tensor, h: torch.Tensor, *biases: torch.Tensor | None) -> Any:
    gates = [part if bias is None else part + bias for part, bias in zip((inputs, hidden), biases, strict=True)]
    (r, z, n), (hr, hz, hn) = (part.chunk(3, 1) for part in gates)
    new = (n + (r + hr).sigmoid() * hn).tanh()
    return new + (z + hz).sigmoid() * (h - new), torch.cat([*gates, h], 1)


def gru_cell_backward(by_h: torch.Tensor, saved: torch.Tensor, bias: bool) -> Any:
    width = by_h.shape[1]
    inputs, hidden, h = saved.split([3 * width, 3 * width, width], 1)
    found = torch.ops.aten._thnn_differentiable_gru_cell_backward(by_h, inputs, hidden, h, None, None)[:3]
    return *found, *(part.sum(0) if bias else torch.empty(0) for part in found[:2])


def batch_norm(*arguments: Any) -> Any:
    """The statistics that it writes are not marked in the operator's schema, so torch's fallback would lose them."""
    copies = tree_map_only(torch.Tensor, torch.Tensor.cpu, arguments)
    found = torch.ops.aten.native_batch_norm(*copies)
    for own, new in zip(arguments[3:5], copies[3:5], strict=True):
        if own is not None:
            own.copy_(new)
    return tuple(tensor.to("testchip") for tensor in found)


KERNELS = {
    "convolution_overrideable": torch.ops.aten.convolution.default,
    "convolution_backward_overrideable": convolution_backward,
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": lstm_cell_backward,
    "_thnn_fused_gru_cell": gru_cell,
    "_thnn_fused_gru_cell_backward": gru_cell_backward,
}
"""Those that torch asks such a device for, because the CPU's have other names."""

torch.ops.load_library(build())
torch.utils.rename_privateuse1_backend("testchip")
torch._register_device_module("testchip", Module("torch.testchip"))
torch.utils.generate_methods_for_privateuse1_backend()
LIBRARY = torch.library.Library("aten", "IMPL")
for name, kernel in KERNELS.items():
    LIBRARY.impl(name, on_host(kernel), "PrivateUse1")
LIBRARY.impl("native_batch_norm", batch_norm, "PrivateUse1")
# So that `module.to` changes parameters in place, as on devices that torch knows, and layers share what they shared.
LIBRARY.impl("_has_compatible_shallow_copy_type", lambda one, other: True, "PrivateUse1")
