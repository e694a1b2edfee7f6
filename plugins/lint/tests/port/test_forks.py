"""Processes that are forked: their parent must not ask for a device before, as CUDA then fails in them."""

from argparse import Namespace
from unittest import mock

import pytest
import torch
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import Known, read_project
from port_sources import imported, written

FORKS = """import multiprocessing as mp
import torch


class Runner:
    def start(self, x):
        backend = {choice}
        worker = mp.Process(target=run, args=(backend,))
        worker.start()
        return x.cuda()
"""


def test_devices_are_not_asked_for_before_a_process_is_forked():
    choice = '"gloo" if x is None else "nccl"'
    for known in (Known(imported=True), Known()):
        ported = port_source(FORKS.format(choice=choice), Level.ROLES, known).source
        before = ported.partition("mp.Process(")[0]
        assert "accelerator.current_accelerator()" in before
        assert "check_available" not in before
    asks = FORKS.format(choice="torch.cuda.is_available()")
    assert "check_available=True" in port_source(asks, Level.ROLES, Known(imported=True)).source


@pytest.mark.parametrize(
    "start",
    [
        "mp.Process(target=work, args=(n,)).start()",
        "mp.start_processes(work, args=(n,), start_method='fork')",
        "os.fork()",
        "run(work, n)",
    ],
)
def test_the_number_of_devices_and_the_backend_are_asked_without_a_check_that_a_fork_forbids(start, tmp_path):
    source = (
        "import argparse\nimport os\nimport torch\nimport torch.multiprocessing as mp\nfrom nets import run\n\n\n"
        "def work(rank, n):\n    torch.cuda.set_device(rank)\n    torch.ones(1).cuda()\n\n\n"
        "def options():\n    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('--backend', default='nccl')\n    return parser.parse_args()\n\n\n"
        f"def main():\n    n = torch.cuda.device_count()\n    args = options()\n    {start}\n\n\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    other = 'start_method = "fork"' if "run" in start else 'Settings(start_method="fork")'
    path, _ = written(tmp_path, {"main.py": source, "nets.py": f"def run(work, n):\n    {other}\n"})
    ported = port_source(source, Level.ROLES, read_project([path]).known(path)).source
    parent = ported.partition("def options")[2]
    words = ("nccl", "cuda", "is_available", "check_available", "accel.")
    assert [word for word in words if word in parent] == []


def test_a_rank_that_joins_a_job_asks_which_devices_are_there():
    source = FORKS.format(choice="None") + "\n\ndef train():\n    torch.distributed.init_process_group('nccl')\n"
    ported = port_source(source, Level.ROLES, Known(imported=True)).source
    assert "check_available=True" in ported.partition("def train")[2]


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_function_that_returns_a_device_asks_without_a_check_where_processes_are_forked(level):
    source = (
        "import torch\nimport torch.multiprocessing as mp\n\nmove = lambda x, gpu: x.cuda(gpu)\n\n\n"
        "def of(gpu):\n    return torch.device('cpu') if gpu < 0 else torch.device('cuda:' + str(gpu))\n\n\n"
        "def first(args):\n    return torch.device('cuda:' + str(args.gpus[0]))\n\n\n"
        "def work(x):\n    print(x.cuda())\n\n\n"
        "def start(x):\n    mp.Process(target=work, args=(x,)).start()\n"
    )
    ported = port_source(source, level, Known(imported=True)).source
    with mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("meta")) as asked:
        module = imported(ported)
        assert not asked.called
        assert module.of(0) == torch.device("meta", 0)
        assert module.first(Namespace(gpus=[1])) == torch.device("meta", 1)
    assert [call.args or call.kwargs for call in asked.mock_calls] == [{}, {}]
    assert "check_available" in ported.partition("def work")[2]


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    "start", ["mp.Process(target=decode, args=(rank, x)).start()", "Process(None, decode, args=(rank, x)).start()"]
)
def test_a_process_that_runs_a_function_of_its_starter_asks_for_a_device_itself(level, start):
    source = (
        "import torch\nimport torch.multiprocessing as mp\nfrom multiprocessing import Process\n\n\ndef main(x):\n"
        "    def decode(rank, x):\n        torch.cuda.set_device(rank)\n        return x.cuda()\n\n"
        f"    for rank in range(2):\n        {start}\n\n\nif __name__ == '__main__':\n    main(torch.ones(2))\n"
    )
    parent, _, child = port_source(source, level).source.partition("def decode")
    assert "accelerator" not in parent
    assert ".current_accelerator(check_available=True)" in child
    assert "x.cuda()" not in child


def test_a_rank_that_a_fork_counts_keeps_its_number():
    source = (
        "import os\nimport torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\n\n"
        "def start(model, gpus):\n    rank = 0\n    for _ in range(gpus - 1):\n        if os.fork() == 0:\n"
        "            rank += 1\n            model.to(rank)\n            model.device = f'cuda:{rank}'\n"
        "            model.cuda(rank)\n            return DDP(model, device_ids=[rank])\n"
    )
    ported = port_source(source, Level.ROLES, Known(imported=True)).source
    assert ":{rank}" in ported
    assert "cuda" not in ported
    assert "device_ids=[rank] if" in ported
    assert "model.to(torch.device(current_device.type, rank))" in ported


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ("self.devices = [torch.device(f'cuda:{i}') for i in range(n)]", False),
        ("device = torch.device('cuda')", False),
        ("device = torch.device('cuda')\n        self.net.to(device)", True),
        ("self.start('cuda')\n        self.x = torch.ones(n).cuda()", True),
    ],
)
def test_a_method_that_only_names_devices_may_run_before_a_fork(line, asks):
    source = (
        "import torch\nimport torch.multiprocessing as mp\n\n\n"
        f"class Tester:\n    def choose(self, n):\n        {line}\n\n"
        "    def test(self):\n        for device in self.devices:\n"
        "            mp.Process(target=self.work, args=(device,)).start()\n\n"
        "    def work(self, device):\n        return torch.ones(1).cuda()\n"
    )
    chosen, _, rest = port_source(source, Level.ROLES).source.partition("def test(")
    assert ("check_available=True" in chosen, "check_available=True" in rest) == (asks, True)


@pytest.mark.parametrize(
    ("line", "is_rank"),
    [
        ("print('rank', {})", False),
        ("torch.manual_seed({})", False),
        ("if {} == 0:\n        print('first')", False),
        ("torch.cuda.set_device({})", True),
        ("model = model.cuda({})", True),
        ("setup({}, 2)", True),
        ("gpu = {}", True),
    ],
)
@pytest.mark.parametrize("name", ["rank", "_"])
def test_processes_share_a_device_unless_their_function_may_choose_it_by_their_number(line, is_rank, name):
    source = (
        "import torch\nimport torch.multiprocessing as mp\nfrom jobs import setup\n\n\n"
        f"def work({name}, model):\n    {line.format(name)}\n    return model.cuda()\n\n\n"
        "if __name__ == '__main__':\n    mp.spawn(work, args=(torch.nn.Linear(2, 2),), nprocs=2)\n"
    )
    chosen = f"accelcore.select(local_rank={name})" if is_rank else "accelcore.select()"
    assert chosen in port_source(source, Level.ROLES).source


@pytest.mark.parametrize(
    ("lines", "start", "chosen"),
    [
        ("from tensorfn import distributed as dist\nimport torch.distributed as dist", "dist.launch(main, 2)", False),
        ("from tools.ranks import run_distributed", "run_distributed(main, 2)", False),
        ("from fairseq import distributed_utils", "distributed_utils.call_main(config, main)", False),
        ("import fire", "fire.Fire(main)", True),
        ("import fire", "main(2)", True),
    ],
)
def test_a_function_that_a_launcher_runs_takes_the_current_device(lines, start, chosen):
    body = "    net = torch.nn.Linear(2, 2).cuda()\n    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
    source = f'import torch\n{lines}\n\n\ndef main(n):\n{body}\n\nif __name__ == "__main__":\n    {start}\n'
    assert ("accelcore.select()" in port_source(source, Level.ROLES).source) is chosen
