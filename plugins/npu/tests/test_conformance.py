"""The conformance suite on the emulated NPU."""

from __future__ import annotations

import json

import pytest

from accelcore.testing import *  # noqa: F403

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # torch_npu's deepcopy
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning:UserWarning"),  # npugraph_ex
]


def test_a_part_that_clamps_overflow_and_raises_a_flag_conforms(run):
    done = run(
        "-m", "accelcore", "run", "--emulate", "npu", "-m", "accelcore", "verify", "backend", "npu",
        "--only", "scaler", "--json", ACCEL_EMULATED_SOC="Ascend910A", timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    card = json.loads(done.stdout)
    assert card["backend"]["capabilities"]["overflow_flag"] is True
    assert card["conforms"]
