from __future__ import annotations

import pytest
from accelcore_cuda.builds import MINIMUM_DRIVERS, Build, installed_build, minimum_driver, numbers

# As in the metadata of the wheels on PyPI.
TORCH_2_11 = [
    "filelock",
    'cuda-toolkit[cublas,cudart,nvrtc]==13.0.2; platform_system == "Linux"',
    'nvidia-cudnn-cu13==9.19.0.56; platform_system == "Linux"',
    'triton==3.6.0; platform_system == "Linux"',
]
TORCH_2_6 = ['nvidia-cuda-runtime-cu12==12.4.127; platform_system == "Linux" and platform_machine != "nothing"']


@pytest.mark.parametrize(
    ("version", "requires", "runtime", "release"),
    [
        ("2.13.0+cu130", [], "cuda", (13, 0)),
        ("2.13.0+cu126", [], "cuda", (12, 6)),
        ("2.7.1+cu118", TORCH_2_11, "cuda", (11, 8)),
        ("2.13.0+rocm7.1", [], "rocm", (7, 1)),
        ("2.13.0+rocm6.3.4", [], "rocm", (6, 3)),
        ("2.13.0+cpu", TORCH_2_11, "cpu", ()),
        ("2.13.0+cpu.cxx11.abi", [], "cpu", ()),
        ("2.13.0+xpu", [], "xpu", ()),
        ("2.11.0", TORCH_2_11, "cuda", (13, 0)),
        ("2.6.0", TORCH_2_6, "cuda", (12, 4)),
        ("2.13.0", ["nvidia-cuda-runtime==13.*"], "cuda", (13,)),
        ("2.13.0", ["nvidia_cuda_runtime>=12.8,<13"], "cuda", (12, 8)),
        ("2.13.0", ["nvidia-cuda-runtime"], "cuda", ()),
        ("2.13.0", ["pytorch-triton-rocm==3.2"], "rocm", ()),
        ("2.13.0", ["cuda-toolkit==13.0.2; platform_system == 'Windows'", "filelock"], "", ()),
        ("2.13.0", ["cuda-toolkit==13.0.2; extra == 'cuda'"], "", ()),
        ("2.13.0", ["this cannot be read ==", *TORCH_2_11], "cuda", (13, 0)),
        ("2.13.0a0+git1234567", [], "", ()),
        ("2.8.0a0+34c6371d24.nv25.08", [], "", ()),
        ("2.13.0", None, "", ()),
    ],
)
def test_a_build_is_known_by_its_label_or_its_requirements(machine, version, requires, runtime, release):
    machine.torch, machine.requires = version, requires
    assert installed_build() == Build(version, runtime, release)


def test_no_torch_is_no_build(machine):
    machine.torch = None
    assert installed_build() is None


def test_a_build_says_what_it_is_for():
    assert str(Build("2.11.0", "cuda", (13, 0))) == "torch 2.11.0 for CUDA 13.0"
    assert str(Build("2.11.0", "rocm")) == "torch 2.11.0 for ROCm"
    assert str(Build("2.11.0", "")) == "torch 2.11.0"


def test_the_table_knows_what_torch_was_released_with():
    assert minimum_driver(Build("", "cuda", (13, 2))) == "580"
    assert minimum_driver(Build("", "cuda", (12, 9))) == "525.60.13"
    for unknown in (Build("", "cuda"), Build("", "cuda", (14, 0)), Build("", "rocm", (12, 0)), Build("", "cpu")):
        assert minimum_driver(unknown) is None
    assert [numbers(driver) for driver in MINIMUM_DRIVERS.values()] == sorted(map(numbers, MINIMUM_DRIVERS.values()))


def test_versions_are_compared_as_numbers():
    assert numbers("525.60.13") < numbers("525.105.17") < numbers("580") < numbers("580.65.06")
