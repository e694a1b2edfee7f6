"""A device of torch outside of torch: `import testchip` builds it, once a version of torch, and registers it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import types
from pathlib import Path

import torch
from platformdirs import user_cache_path
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
        pass

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


torch.ops.load_library(build())
torch.utils.rename_privateuse1_backend("testchip")
torch._register_device_module("testchip", Module("torch.testchip"))
torch.utils.generate_methods_for_privateuse1_backend()
