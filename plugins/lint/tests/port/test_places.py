"""Which backend a ported line uses: one that the script selects already, or a process selects, or none."""

from unittest import mock

import pytest
import torch
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import Known
from port_sources import imported

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
    assert ("torch.ones(2).to(gpu if gpu is not None else current_device)" in outcome.source) is (rank is None)


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


@pytest.mark.parametrize("function", ["", "def f(x):\n    return x.cuda()\n\n\n"])
@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_device_is_asked_for_below_the_import_of_torch_also_in_the_guard(level, function):
    source = (
        f"{function}if __name__ == '__main__':\n    import torch\n    from argparse import ArgumentParser\n\n"
        "    args = ArgumentParser().parse_args()\n    torch.cuda.set_device(args.gpu)\n"
        "    print(torch.ones(2).cuda())\n"
    )
    ported = port_source(source, level).source
    assert ".cuda()" not in ported
    assert ported.index("import torch\n") < ported.index("torch.accelerator.current_accelerator")
    assert ported.count("import torch\n") == (2 if function else 1)


GUARDED = """import torch


def train(x{default}):
    return x.cuda()


def test(x):
    return train(x.cuda())


if __name__ == "__main__":
    torch.optim.SGD([test(torch.ones(2))], 0.1).step()
"""


@pytest.mark.parametrize(
    ("default", "above", "is_skipped"),
    [
        ("", "", True),
        ("", "pad = torch.ones(2).cuda()\n", False),
        ("", "torch.multiprocessing.set_start_method('spawn')\n", True),
        (", pad=torch.ones(2).cuda()", "", True),
    ],
)
def test_a_spawned_worker_that_imports_the_script_selects_only_if_that_needs_a_device(default, above, is_skipped):
    source = GUARDED.format(default=default).replace("def train", f"{above}def train")
    ported = port_source(source, Level.ROLES).source
    assert ('if __name__ != "__mp_main__":\n    accel = accelcore.select()\n' in ported) is is_skipped
    assert "accelcore.select()" in ported
    assert port_source(ported, Level.ROLES).source == ported


ELSEWHERE = """import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from tools import init_distributed_mode as init, wrap


def main(args):
    {first}(args)
    model = DDP(Net().cuda(), device_ids=[{index}])
    optimizer = torch.optim.AdamW(model.parameters())
    print(torch.cuda.max_memory_allocated())
"""


@pytest.mark.parametrize(
    ("first", "index", "is_own"),
    [("wrap", "args.local_rank", True), ("wrap", "args.gpu", False), ("init", "args.local_rank", False)],
)
def test_a_device_that_another_file_may_choose_stays_the_current_one(first, index, is_own):
    source = ELSEWHERE.format(first=first, index=index) + "\n\nif __name__ == '__main__':\n    main(parse())\n"
    outcome = port_source(source, Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    assert ("accelcore.select" in outcome.source) is is_own
    kept = f"device_ids=[{index}] if torch.accelerator.is_available() else None"
    assert (kept in outcome.source) is not is_own
    assert port_source(outcome.source, Level.ROLES).source == outcome.source


TRIED_OUT = """import torch


class Net(torch.nn.Module):
    def forward(self, x):
        return x + torch.ones(2).cuda()


def noise(n):
    return torch.randn(n).cuda()


if __name__ == "__main__":
    net = Net().cuda()
    {line}
"""


@pytest.mark.parametrize(
    ("line", "is_script"),
    [
        ("net(noise(2))", False),
        ("net(noise(2)).backward()", False),
        ("torch.optim.SGD(net.parameters(), 0.1).step()", True),
    ],
)
def test_a_module_that_only_tries_itself_out_as_a_script_selects_nothing(line, is_script):
    outcome = port_source(TRIED_OUT.format(line=line), Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    assert ("accelcore" in outcome.source) is is_script
    head, _, tried = outcome.source.partition("if __name__ == ")
    assert ("\n    current_device = " in tried) is not is_script
    assert "\ncurrent_device = " not in head
    assert port_source(outcome.source, Level.ROLES).source == outcome.source


def test_a_module_whose_guard_runs_nothing_of_what_trains_is_no_script():
    source = (
        "import torch\nfrom torch import optim\n\n\nclass Meta:\n    def __init__(self, net):\n"
        "        self.optimizer = optim.Adam(net.cuda().parameters())\n\n\ndef main():\n    {}\n\n\n"
        'if __name__ == "__main__":\n    main()\n'
    )
    assert "accelcore" not in port_source(source.format("pass"), Level.ROLES).source
    assert "accelcore.select()" in port_source(source.format("Meta(torch.nn.Linear(2, 2))"), Level.ROLES).source


@pytest.mark.parametrize(
    ("made", "reader"),
    [
        ("Config()", "self.config.parse_args()"),
        ("argparse.ArgumentParser()", "self.config.parse_args()"),
        ("Config()", "config.parse_args()"),
    ],
)
def test_a_class_that_reads_options_makes_no_script_of_its_module(made, reader):
    source = (
        "import argparse\nimport torch\n\n\nclass Trainer:\n    def __init__(self):\n"
        f"        self.config = {made}\n        self.options = {reader}\n\n"
        "    def step(self, x):\n        return x.cuda()\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    assert "accelcore" not in outcome.source


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_decorator_asks_for_the_device_when_the_function_runs(level):
    source = (
        "import torch\n\n\ndef moved(scale):\n    def decorate(forward):\n        def wrapper(x):\n"
        "            return forward(x.cuda() * scale)\n\n        return wrapper\n\n    return decorate\n\n\n"
        "@moved(2)\ndef run(x):\n    return x\n"
    )
    outcome = port_source(source, level)
    assert (outcome.after, outcome.left) == (0, [])
    before, _, body = outcome.source.partition("        def wrapper(x):\n")
    assert "current_accelerator" not in before
    assert body.lstrip().split(" = ")[1].startswith("torch.accelerator.current_accelerator(")
    assert port_source(outcome.source, level).source == outcome.source


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    ("default", "is_left"),
    [
        ('device="cuda"', False),
        ('device="cuda:1"', True),
        ('backend="nccl"', False),
        ('place=torch.device("cuda")', False),
        ('device=torch.device("cuda" if torch.cuda.is_available() else "cpu")', False),
        ("count=torch.cuda.device_count()", False),
    ],
)
def test_a_default_asks_for_a_device_at_import_only_if_it_did(default, is_left, level):
    outcome = port_source(f"import torch\n\n\ndef step(x, {default}):\n    return x.cuda()\n", level)
    assert (default in outcome.source) is is_left
    assert [note.line for note in outcome.left] == [4] * is_left
    assert port_source(outcome.source, level).source == outcome.source


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(("kind", "backend"), [("cuda", "nccl"), ("xpu", "xccl"), (None, "gloo")])
def test_the_default_of_a_backend_is_that_of_the_accelerator(kind, backend, level):
    source = "import torch\n\n\ndef join(rank, backend='nccl'):\n    return backend\n"
    device = torch.device(kind) if kind else None
    ported = port_source(source, level).source
    with mock.patch.object(torch.accelerator, "current_accelerator", side_effect=lambda: device):
        assert imported(ported).join(0) == backend


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize("body", ["assert backend in ('nccl', 'gloo')", "return 1 if backend == 'nccl' else 0"])
def test_the_default_of_a_backend_stays_if_its_function_knows_some_backends_only(body, level):
    source = f"import torch\n\n\ndef join(rank, backend='nccl'):\n    {body}\n"
    assert "def join(rank, backend='nccl')" in port_source(source, level).source


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    ("first", "last", "is_left"),
    [
        ("import torch", "", False),
        ("import torch as th", "", False),
        ("from torch import nn", "", False),
        ("import torch.nn as nn", "", False),
        ("import os", "import torch", True),
        ("import os", "if __name__ == '__main__':\n    import torch\n    print(torch.ones(2).cuda())", True),
        ("class Made:\n    import torch", "import torch.nn", True),
    ],
)
def test_a_default_needs_torch_above_it(first, last, is_left, level):
    source = f"{first}\n\n\ndef kind(device='cuda'):\n    return device\n\n\n{last}\n"
    outcome = port_source(source, level)
    assert bool(outcome.left) is is_left
    namespace = {"__name__": "module"}
    exec(outcome.source, namespace)
    assert namespace["kind"]() == ("cuda" if is_left else "cpu")
    assert port_source(outcome.source, level).source == outcome.source


def test_a_class_that_needs_the_current_device_and_a_backend_has_both():
    source = (
        "import torch\n\n\nclass Meter:\n    def __init__(self, gpu=torch.cuda.is_available()):\n"
        "        self.x = torch.ones(2).cuda() if gpu else None\n\n\ndef run(data):\n"
        "    optimizer = torch.optim.SGD(Meter().x, lr=0.1)\n\n\nif __name__ == '__main__':\n    run(1)\n"
    )
    head = port_source(source, Level.ROLES).source.partition("class Meter")[0]
    assert head.count("accel = accelcore.select()") == head.count("current_device = torch.accelerator.") == 1


MOVED = ['torch.ones(2).to("cuda")', "torch.ones(2).type(torch.cuda.LongTensor)", "torch.cuda.FloatTensor([1.0])"]


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize("known", [Known(imported=True), Known(steered=True)])
@pytest.mark.parametrize("made", MOVED)
def test_a_line_that_moves_as_it_is_imported_goes_to_the_cpu_where_the_accelerator_is_missing(made, known, level):
    ported = port_source(f"import torch\n\nx = {made}\n", level, known).source
    assert "check_available=True" in ported
    assert "current_accelerator()" not in ported


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize("move", ['to("cuda")', "type(torch.cuda.LongTensor)", "cuda()"])
def test_a_lambda_of_a_module_asks_for_the_device_when_it_is_called(move, level):
    ported = port_source(f"import torch\n\nmove = lambda x: x.{move}\n", level, Known(imported=True)).source
    assert ported.startswith("import torch\n\nmove = lambda x: x.to(")
    assert "check_available=True" in ported


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    ("clock", "line", "moves"),
    [
        ("    # Begin.\n    start = time.time()  # s\n", "", True),
        ("    start = time.perf_counter()\n", "    x = x + 1\n", True),
        ("    start = time.time()\n", "    import os\n", False),
        ("    start = time.time()\n", "    os.environ['MODE'] = '1'\n", False),
    ],
)
def test_the_device_is_chosen_above_a_clock_whose_time_would_hold_the_choice(level, clock, line, moves):
    source = (
        "import os\nimport time\nimport torch\n\n\ndef main(x):\n    print(x)\n"
        f"{clock}{line}    y = x.cuda() @ x.cuda()\n    print(time.time() - start)\n    return y\n\n\n"
        "if __name__ == '__main__':\n    main(torch.ones(3))\n"
    )
    body = port_source(source, level).source.partition("def main(x):\n")[2]
    choice = body.index("torch.accelerator") if level is Level.TORCH else body.find("accelcore.select()")
    if level is Level.ROLES and choice < 0:
        choice = body.index("current_accelerator")
    assert (choice < body.index("start =")) is moves
    assert body.index("print(x)") < choice < body.index("x.to(")


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_function_that_a_worker_runs_asks_for_a_device_only_where_the_original_does(level):
    source = (
        "import torch\n\n\ndef scaled(x, mean, std):\n    if x.is_cuda:\n        mean = mean.cuda()\n"
        "        std = std.cuda()\n    return (x - mean) / std\n\n\ndef moved(x, y, use):\n    if use:\n"
        "        x = x.cuda()\n    else:\n        y = y.cuda()\n    return x, y\n"
    )
    ported, scope = port_source(source, level).source, {"__name__": "transforms"}
    one = torch.ones(2)
    with mock.patch("torch.accelerator.current_accelerator", side_effect=AssertionError("a worker asks")):
        exec(ported, scope)
        assert scope["scaled"](one, one, one).tolist() == [0, 0]
    assert ported.count("current_accelerator(") == 2  # one for each function
    assert port_source(ported, level).source == ported
