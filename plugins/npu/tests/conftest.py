"""The NPU of these tests is the emulated one: the real torch_npu over an emulated CANN.

Tests that need torch_npu are collected where it is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from accelcore import Backend

sys.path.insert(0, str(Path(__file__).parents[2] / "npu_emulator" / "tests"))
from emulated_session import (  # noqa: F401  # pytest finds them here
    INSTALLED,
    clean_environment,
    forks,
    pytest_configure,
    pytest_report_header,
)

fork, fork_ranks = forks.fork, forks.fork_ranks

_SUBJECTS = Path(__file__).parent / "subjects"
_WITHOUT_TORCH_NPU = {
    "test_compatibility.py",
    "test_install.py",
    "test_libraries.py",
    "test_msprobe.py",
    "test_probe.py",
}

# Of the suite, with `full`: all optimizers but some of each kind (adamw and sgd, which torch_npu and torch fuse, and
# lamb, whose formula runs on flat memory), though the numbers of each with a kernel for the NPU are compared in every
# run; most pairs of an optimizer and the position of an overflow; and what a compiled model follows, which the CPU's
# suite tries: test_compiler.py and `test_compiled_is_the_same` compile on the NPU.
_OTHERS = ("adadelta", "adam", "adamp", "bertadam", "rmsprop", "rmsproptf")
_OF_TORCH = ("adagrad", "adamax", "asgd", "nadam", "radam", "rprop")
_OF_OTHERS = tuple(f"[{name}]" for name in (*_OTHERS, *_OF_TORCH))
_OF_EACH = ("test_numerics[", "test_native[", "test_every_optimizer[")
_NUMBERS_OF_TORCH = {f"test_numerics[{name}]" for name in _OF_TORCH}
_IN_FULL = {
    *(f"test_overflow_in_any_tensor[{position}-plain]" for position in (31, 255)),
    *(f"test_overflow_in_any_tensor[{position}-sgd]" for position in (0, 64, 255)),
    *(f"test_overflow_in_any_tensor[{position}-adamw]" for position in (31, 64, 255, 299)),
    "test_compiled_follows_its_module",
}

collect_ignore = ["subjects"]
sys.path.insert(0, str(Path(__file__).parent))  # where tests find what they share

if not INSTALLED:
    collect_ignore += [path.name for path in Path(__file__).parent.glob("test_*.py")
                       if path.name not in _WITHOUT_TORCH_NPU]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is long and proves nearly nothing that others do not."""
    for item in items:
        of_others = item.name.endswith(_OF_OTHERS) and not item.name.startswith(_OF_EACH)
        of_others |= item.name in _NUMBERS_OF_TORCH
        if (of_others or item.name in _IN_FULL) and item.path.name == "test_conformance.py":
            item.add_marker("full")


@pytest.fixture
def accel() -> Iterator[Backend]:
    """The first emulated NPU, as `select("npu:0")` makes it; to find it takes longer than most tests."""
    from accelcore_npu.backend import create

    backend = create(0)
    assert backend.emulated
    yield backend
    backend.runtime.synchronize()


@pytest.fixture(scope="session")
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with arguments in a process of its own; keywords are added to its environment, None removes."""

    def start(*arguments: str, timeout: float = 240, **environment: str | None) -> subprocess.CompletedProcess[str]:
        variables = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
        return subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, timeout=timeout, env=variables
        )

    return start


@pytest.fixture(scope="session")
def job(
    fork_ranks: Callable[..., list[forks.Fork]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[dict[str, Any]]]:
    """Run a script of `subjects/` as two ranks of one job, as a launcher would; what each of them found."""

    def start(subject: str, **environment: str) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("job")
        ended = [rank.finish() for rank in fork_ranks(_SUBJECTS / subject, folder, **environment)]
        assert [rank.returncode for rank in ended] == [0, 0], "\n".join(rank.stderr for rank in ended)
        return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]

    return start
