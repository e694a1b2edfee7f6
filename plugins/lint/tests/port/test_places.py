"""Which backend a ported line uses: one that the script selects already, or a process selects, or none."""

import pytest
from accelcore_lint.port import Level, port_source

STARTED = """import torch
import torch.multiprocessing as mp


def work(gpu):
    net = torch.nn.Linear(2, 2).cuda()
    return net(torch.ones(2).cuda(gpu))


mp.spawn(work, nprocs=2) if many else work({})
"""


@pytest.mark.parametrize(
    ("given", "rank"), [("0", "gpu"), ("args.gpu", "gpu"), ("-1", "max(gpu, 0)"), ("args.train_gpus", None)]
)
def test_a_process_whose_function_is_also_called_with_no_rank_selects_by_none(given, rank):
    outcome = port_source(STARTED.format(given), Level.ROLES)
    assert ("accelcore.select" in outcome.source) is (rank is not None)
    assert rank is None or f"    accel = accelcore.select(local_rank={rank})\n" in outcome.source
    assert len(outcome.left) == (rank is None)


def test_a_rank_that_is_compared_with_0_may_be_minus_one():
    source = STARTED.format("args.gpu").replace("    net =", "    assert gpu >= 0\n    net =")
    assert "accelcore.select(local_rank=max(gpu, 0))" in port_source(source, Level.ROLES).source


@pytest.mark.parametrize("head", ["accel = ", "if __name__ == '__main__':\n    accel = "])
def test_a_backend_that_the_script_selects_is_used(head):
    indent = "    " if head.startswith("if") else ""
    source = f"import accelcore\nimport torch\n{head}accelcore.select('cpu')\n{indent}x = torch.ones(2).cuda()\n"
    outcome = port_source(source, Level.ROLES).source
    assert outcome == source.replace(".cuda()", ".to(accel.device)")


def test_a_backend_that_is_selected_in_another_function_is_not_selected_twice():
    source = (
        "import accelcore\nimport torch\n\n\ndef main():\n    accel = accelcore.select('cpu')\n"
        "    step(torch.ones(2, device=accel.device))\n\n\ndef step(x):\n    return x.cuda()\n\n\nmain()\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert outcome.source.count("select(") == 1
    assert [note.line for note in outcome.left] == [11]
