"""A sample of the planted faults; `python -m tests.faults.parity_faults` plants as many as it is told."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
parity_faults = importlib.import_module("parity_faults")
PAIRS = ("cpu fp32", "cpu bf16")


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.full) for first in (10, 20))])
def test_planted_faults_are_named_and_clean_pairs_agree(first, tmp_path):
    cases = [parity_faults.case(number, 0, PAIRS, tmp_path) for number in range(first, first + 10)]
    assert not [each for each in cases if "alarm" in each]
    assert not [each for each in cases if each["verdict"] != "named"]


@pytest.mark.full
@pytest.mark.parametrize("pair", ["cpu", "compiled", "1to2", "2to2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_many_planted_faults_are_named(pair, dtype):
    found = parity_faults.counts(parity_faults.cases(range(100), 1, (f"{pair} {dtype}",)))
    assert found["alarms"] == 0
    assert found["named"] >= 99


def test_the_committed_table_was_counted_by_this_program():
    table = json.loads((HERE / "parity_faults.json").read_text())
    assert table["planted"] == sum(sum(found.values()) - found["alarms"] for found in table["by fault"].values())
    assert table["named"] == sum(found.get("named", 0) for found in table["by fault"].values())
    assert set(table["by fault"]) <= set(parity_faults.FAULTS)
