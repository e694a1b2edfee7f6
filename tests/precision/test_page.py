"""docs/precision.md shows the table there is, and the lists of the torch that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import accelcore.precision
from accelcore.precision import O1, Treatment

PAGE = (Path(__file__).parents[2] / "docs" / "precision.md").read_text(encoding="utf-8")


def listed(key):
    operators = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {operator.split("::")[1].split(".")[0] for operator in operators}


@pytest.mark.parametrize("treatment", list(Treatment), ids=str)
def test_the_page_has_o1(treatment):
    (row,) = re.findall(rf"^\| {treatment.value} \| (.*) \|$", PAGE, re.M)
    assert re.findall(r"`(\w+)`", row) == sorted(name for name in O1 if O1[name] is treatment)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the page is about torch 2.13")
def test_the_page_has_what_torchs_own_tables_list_differently():
    accelcore.precision.reset()  # O1's kernels, which other tests leave in the dispatcher, are not torch's own
    cpu, cuda = listed("AutocastCPU"), listed("AutocastCUDA")
    for sentence, operators in (
        ("Operators that torch's autocast lists on the CPU and not on CUDA:", cpu - cuda),
        ("Operators that it lists on CUDA and not on the CPU:", cuda - cpu),
    ):
        _, _, rest = PAGE.partition(sentence)
        assert re.findall(r"`(\w+)`", rest.strip().partition("\n\n")[0]) == sorted(operators), sentence


def test_what_the_page_says_of_torchs_own_on_the_cpu():
    x = torch.linspace(0.1, 0.9, 16).view(1, 4, 4).bfloat16()
    functional = torch.nn.functional
    with torch.autocast("cpu", torch.bfloat16):
        low = (functional.softmax(x, 1), functional.layer_norm(x, (4,)), functional.group_norm(x, 2), x.exp(), x.log())
        low += (x.pow(2), x.sum(), x.cumsum(0), torch.norm(x))
        loss = functional.binary_cross_entropy(x, x)
    assert {result.dtype for result in low} == {torch.bfloat16}
    assert loss.dtype is torch.float32
