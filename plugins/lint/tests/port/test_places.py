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


FORKED = """import torch
from multiprocessing import Process

{first}

def work(gpu):
    torch.cuda.set_device(gpu)
    return torch.ones(2).cuda()


Process(target=work, args=(0,)).start()
"""


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_no_device_is_asked_for_before_processes_are_forked(level):
    source = port_source(FORKED.format(first=""), level).source
    head, _, body = source.partition("def work")
    assert "cuda()" not in body
    assert "current_accelerator" in body
    assert "accelerator" not in head
    assert "select" not in source


def test_a_device_of_the_module_stays_if_processes_are_forked():
    outcome = port_source(FORKED.format(first="PAD = torch.ones(2).cuda()\n"), Level.ROLES)
    assert "PAD = torch.ones(2).cuda()" in outcome.source
    assert "forked" in outcome.left[0].text


def test_a_device_without_number_is_the_one_that_a_context_makes_current():
    source = "import torch\ndevice = torch.device('cuda')\nwith torch.cuda.device({}):\n    train(device)\n"
    assert "accelcore" not in port_source(source.format("args.gpu"), Level.ROLES).source.replace("TODO(accelcore)", "")
    assert "device = accel.device" in port_source(source.format("0"), Level.ROLES).source
