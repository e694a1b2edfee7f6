"""Questions for a vendor's process group: they choose the one in use, and a report keeps its own."""

import subprocess
import sys

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


@LEVELS
@pytest.mark.parametrize("backend", ["cuda:nccl,cpu:gloo", "cpu:gloo,cuda:nccl", "npu:hccl"])
def test_a_group_of_several_devices_with_one_vendors_is_left(level, backend):
    outcome = port_source(f'import torch.distributed as dist\ndist.init_process_group("{backend}")\n', level)
    assert (outcome.before, outcome.after) == (1, 1)
    (note,) = outcome.left
    assert "process group" in note.text


def test_a_long_block_for_another_accelerator_takes_no_long_time():
    branch = "".join(f"            call_{number}(device=device)\n" for number in range(60))
    source = f"import torch\nif device == 'cuda':\n    x = x.cuda()\nelif device == 'mps':\n{branch}"
    program = f"from accelcore_lint.port.uses import kept_questions\nassert kept_questions({source!r}) == ''"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
