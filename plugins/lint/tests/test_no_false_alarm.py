"""Scripts that look wrong and are not: windows that they make whole themselves, and optimizers for one step."""

import pytest
from accelcore_lint.lint import check

SOURCE = """
import torch
from samplers import Whole
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler


def load(data, args):
    {line}


def train(model, optimizer, loader, args):
    for i, batch in enumerate(loader):
        (model(batch) / args.accumulate).backward()
        if (i + 1) % args.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("return DataLoader(data)", True),
        ("return DataLoader(data, sampler=RandomSampler(data), batch_sampler=None)", True),
        ("sampler = DistributedSampler(data) if args.ranks else None; return DataLoader(data, sampler=sampler)", True),
        ("args.steps = len(data) // args.accumulate; return DataLoader(data)", True),
        ("return DataLoader(data, batch_sampler=Whole(data, args.accumulate))", False),
        ("return DataLoader(data, sampler=Whole(data) if args.whole else None)", False),
        ("size = len(data) // args.accumulate * args.accumulate; return DataLoader(data[:size])", False),
        ("return DataLoader(data[: len(data) - len(data) % args.accumulate])", False),
    ],
)
def test_a_window_is_short_unless_the_script_may_give_whole_ones(line, found):
    codes = [finding.code for finding in check(SOURCE.format(line=line))]
    assert ("ACC306" in codes) is found


@pytest.mark.parametrize(("indent", "found"), [("", True), ("    ", False)])
def test_gradients_of_an_optimizer_for_one_step_need_not_be_cleared(indent, found):
    made = "    model = build()\n    optimizer = torch.optim.SGD(model.parameters(), lr=1)\n".replace(
        "    ", f"    {indent}"
    )
    begin, loop = ("", made) if indent else (made, "")
    source = (
        f"import torch\n\n\ndef check(build, cases):\n{begin}    for case in cases:\n{loop}"
        "        model(case).mean().backward()\n        optimizer.step()\n"
    )
    assert ("ACC304" in [finding.code for finding in check(source)]) is found
