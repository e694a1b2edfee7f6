"""Questions for a vendor's process group: they choose the one in use, and a report keeps its own."""

import pytest
from accelcore_lint.port import Level, port_source

LEVELS = pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
QUESTION = "dist.is_nccl_available()"


@LEVELS
@pytest.mark.parametrize(
    ("line", "marked"),
    [
        ('print(f"NCCL available: {dist.is_nccl_available() if dist.is_available() else False}")', 0),
        ('print("yes" if dist.is_nccl_available() else "no")', 0),
        ('log.info("%s", dist.is_nccl_available())', 0),
        ('report = {"has": dist.is_nccl_available()}', 1),
        ("found = dist.is_nccl_available()", 1),
        ("assert dist.is_nccl_available()", 1),
        ("if dist.is_nccl_available():\n    print(dist.is_initialized())", 1),
        ('if dist.is_nccl_available():\n    names.append("nccl")', 2),
    ],
)
def test_a_report_of_what_torch_was_built_with_keeps_its_question(level, line, marked):
    outcome = port_source(f"import torch\nimport torch.distributed as dist\n{line}\n", level)
    assert QUESTION in outcome.source
    assert "is_backend_available" not in outcome.source.replace("ask torch.distributed.is_backend_available", "")
    assert len(outcome.left) == marked


@LEVELS
@pytest.mark.parametrize(
    "line",
    [
        'backend = "nccl" if dist.is_nccl_available() else "gloo"',
        'if dist.is_nccl_available():\n    dist.init_process_group("nccl", rank=0, world_size=1)',
        'if not dist.is_nccl_available():\n    backend = "gloo"',
        'if dist.is_nccl_available():\n    backend = "nccl"\nelse:\n    backend = "gloo"',
    ],
)
def test_a_choice_of_the_process_group_asks_for_the_one_in_use(level, line):
    outcome = port_source(f"import torch\nimport torch.distributed as dist\n{line}\n", level)
    assert QUESTION not in outcome.source
    assert "torch.distributed.is_backend_available(torch.distributed.get_default_backend_for_device(" in outcome.source
    assert not outcome.left
