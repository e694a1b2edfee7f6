"""Ranks that a script starts: which of them select a backend by their number, and which keep what a caller chose."""

import pytest
from accelcore_lint.port import Level, port_source


@pytest.mark.parametrize(
    ("more", "selects"),
    [
        ("", False),
        ("    x = x.to(device)\n", False),
        ("    print(torch.cuda.device_count())\n    x = x.cuda()\n", True),
        ("    x = x.to(rank)\n", True),
        ("    x = torch.ones(2, device=rank)\n", True),
        ("    if device_type == 'cuda':\n        x = x.cuda(rank)\n", False),
    ],
)
@pytest.mark.parametrize("given", ["device_type", "other"])
def test_a_rank_whose_caller_may_have_chosen_the_cpu_selects_no_device(more, selects, given):
    source = (
        "import torch\nimport torch.distributed as dist\nimport torch.multiprocessing as mp\n\nother = 'cuda'\n\n\n"
        "def work(rank, device_type):\n    x = torch.ones(3, device=f'{device_type}:{rank}')\n    dist.all_reduce(x)\n"
        f"    if {given} == 'cuda':\n        torch.cuda.synchronize()\n{more}\n\n"
        "if __name__ == '__main__':\n    mp.spawn(work, args=('cpu',), nprocs=4)\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert ("accelcore.select(local_rank=rank)" in ported) is (selects or given == "other")
    assert "cuda.synchronize" not in ported


@pytest.mark.parametrize("line", ["x = torch.ones(2).to(rank)", "x = torch.ones(2, device=rank)"])
def test_a_rank_whose_number_is_the_only_word_for_its_device_selects_it(line):
    source = (
        f"import torch\nimport torch.multiprocessing as mp\n\n\ndef work(rank):\n    {line}\n\n\n"
        "if __name__ == '__main__':\n    torch.cuda.empty_cache()\n    mp.spawn(work, nprocs=4)\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert "    accel = accelcore.select(local_rank=rank)\n" in ported


@pytest.mark.parametrize(
    "line",
    [
        "device = f'cuda:{rank}' if device == 'cuda' else 'cpu'",
        "device = torch.device(f'cuda:{rank}' if args.use_cuda else 'cpu')",
        "device = torch.device('cuda', rank) if args.gpu and args.fast else torch.device('cpu')",
        "if args.device == 'cuda':\n        device = torch.device('cuda', rank)",
    ],
)
def test_a_rank_keeps_its_number_below_a_condition_of_its_caller(line):
    source = (
        f"import torch\nimport torch.multiprocessing as mp\n\n\ndef work(rank, device, args):\n    {line}\n"
        "    torch.ones(2).to(device)\n\n\nif __name__ == '__main__':\n    mp.spawn(work, args=('cpu', 0))\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert "select(" not in ported
    assert "current_device.type}:{rank}" in ported or "torch.device(current_device.type, rank)" in ported
