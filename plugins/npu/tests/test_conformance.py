"""The conformance suite on the emulated NPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import forks
import pytest

from accelcore.testing import *  # noqa: F403

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # torch_npu's deepcopy
    pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format:UserWarning"),  # conv1d's backward
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning:UserWarning"),  # npugraph_ex
]


class TestOperators(TestOperators):  # noqa: F405
    """In `full`: the emulator's self-test compares the same samples on the emulated NPU in each run."""

    pytestmark = pytest.mark.full


@pytest.fixture(scope="module", autouse=True)
def _forked_job(fork: Callable[..., Any]) -> Iterator[None]:
    """The suite's ranks are forks; those of the CPU's suite, in tests/, are processes, as users get."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("accelcore.util.child_process.subprocess", forks.in_place_of_subprocess(fork))
        yield


@pytest.mark.full  # test_ranks.py and test_scaler.py train on such parts
def test_a_part_that_clamps_overflow_and_raises_a_flag_conforms(run):
    done = run(
        "-m", "accelcore", "run", "--emulate", "npu", "-m", "accelcore", "verify", "backend", "npu",
        "--only", "scaler", "--json", ACCEL_EMULATED_SOC="Ascend910A",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    card = json.loads(done.stdout)
    assert card["backend"]["capabilities"]["overflow_flag"] is True
    assert card["conforms"]
