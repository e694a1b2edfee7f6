"""A machine of files: what the probe looks at, under a folder of its own."""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from accelcore_cuda import amd, builds, detection, nvidia

from accelcore.devices.plugins import Declared

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "LD_LIBRARY_PATH",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
)


class Machine:
    """One on which CUDA would work, with two GPUs; tests take things away from it, or add to it."""

    def __init__(self, root: Path) -> None:
        self.root, self.modprobe = root, root / "nvidia-modprobe"
        self.dev, self.proc, self.sys, self.lib, self.wsl, self.nodes = (
            root / name for name in ("dev", "proc", "sys", "lib", "wsl", "nodes")
        )
        for folder in (self.dev, self.proc, self.sys, self.lib, self.wsl, self.nodes):
            folder.mkdir()
        for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia12"):
            (self.dev / name).touch()
        self.torch: str | None = "2.13.0+cu130"
        self.requires: list[str] = []
        self.autoloaded: list[str] = []
        self.links = False
        self.driver("580.65.06")
        self.uuids("GPU-8f2b11aa-1", "GPU-8f2c22bb-2")

    def driver(self, version: str) -> None:
        """Install the user's and the kernel's part of a driver."""
        self.library(version)
        self.kernel(
            f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\nGCC version:\n"
        )

    def library(self, version: str) -> None:
        for path in self.lib.iterdir():
            path.unlink()
        (self.lib / f"libcuda.so.{version}").touch()
        (self.lib / "libcuda.so.1").symlink_to(f"libcuda.so.{version}")

    def kernel(self, text: str) -> None:
        (self.proc / "version").write_text(text)

    def uuids(self, *uuids: str) -> None:
        for number, uuid in enumerate(uuids):
            folder = self.proc / "gpus" / f"0000:{number}a:00.0"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "information").write_text(
                f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nDevice Minor: \t {number}\n"
            )

    def no_nvidia(self) -> None:
        self.no_device_files()
        (self.proc / "version").unlink()

    def no_device_files(self) -> None:
        for path in self.dev.glob("nvidia*"):
            path.unlink()

    def amd(self, *simd_counts: int) -> None:
        """Add AMD's driver; a node without SIMD units is a processor."""
        (self.dev / "kfd").touch()
        for number, count in enumerate(simd_counts):
            (self.nodes / str(number)).mkdir()
            text = f"cpu_cores_count 0\nsimd_count {count}\nunique_id {1000 + number}\n"
            (self.nodes / str(number) / "properties").write_text(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)

    def version(package: str) -> str:
        assert package == "torch"
        if made.torch is None:
            raise PackageNotFoundError(package)
        return made.torch

    def autoloads() -> list[Declared]:
        return [Declared(name, f"{name}:_autoload", name.replace("_", "-"), "1.0") for name in made.autoloaded]

    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(nvidia, "_DEV", made.dev)
    monkeypatch.setattr(nvidia, "_PROC", made.proc)
    monkeypatch.setattr(nvidia, "_SYS", made.sys)
    monkeypatch.setattr(nvidia, "_WSL", made.wsl)
    monkeypatch.setattr(nvidia, "_MODPROBE", made.modprobe)
    monkeypatch.setattr(nvidia, "_LINKER_CACHE", tmp_path / "ld.so.cache")
    monkeypatch.setattr(nvidia, "_FOLDERS", ())
    monkeypatch.setattr(nvidia, "_links", lambda: made.links)
    monkeypatch.setattr(amd, "_DEVICE", made.dev / "kfd")
    monkeypatch.setattr(amd, "_NODES", made.nodes)
    monkeypatch.setattr(builds, "version", version)
    monkeypatch.setattr(builds, "requires", lambda package: made.requires)
    monkeypatch.setattr(detection, "autoloads", autoloads)
    (tmp_path / "ld.so.cache").write_bytes(f"glibc\0libcuda.so.1\0{os.fspath(made.lib)}/libcuda.so.1\0".encode())
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    for module in ("torch_npu", "torch_npu.contrib.transfer_to_npu"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return made
