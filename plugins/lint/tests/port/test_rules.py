"""Each rule's examples, which are also the documentation's."""

import pytest
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.rules import RULES

ADDED = {
    Level.TORCH: 'device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")\n',
    Level.ROLES: "accel = accelcore.select()\n",
}
EXAMPLES = [
    pytest.param(example, id=f"{rule.name}-{number}") for rule in RULES for number, example in enumerate(rule.examples)
]


def bare(source, example):
    """The source without what every rewritten file gets: imports, and the line that chooses the device."""
    value = ADDED[example.level].partition(" = ")[2]
    lines = source.splitlines(keepends=True)
    if value.strip() not in example.after:
        lines = [line for line in lines if not line.endswith(value)]
    lines = [line for line in lines if line not in ("import torch\n", "import accelcore\n")]
    return "".join(lines).strip("\n")


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example):
    outcome = port_source(f"import torch\n{example.before}\n", example.level)
    after = [line for line in example.after.split("\n") if line != "import torch"]
    assert bare(outcome.source, example).split("\n") == after


def test_every_rule_is_named_once_and_has_a_title():
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert all(rule.title for rule in RULES)
