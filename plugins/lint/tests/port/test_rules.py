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


def test_the_scripts_own_option_is_no_vendor_line():
    source = (
        "import argparse\nimport torch\nparser = argparse.ArgumentParser()\n"
        'parser.add_argument("--cuda", action="store_true")\nargs = parser.parse_args()\n'
        "model = torch.nn.Linear(2, 2)\nif args.cuda:\n    model.cuda()\n"
        'device = torch.device("cuda" if args.cuda else "cpu")\nmove = model.cuda\n'
    )
    outcome = port_source(source, Level.ROLES)
    assert (outcome.before, outcome.after) == (3, 1)
    assert [note.line for note in outcome.left] == [10]
    assert "if args.cuda:\n    model.to(accel.device)\n" in outcome.source
    assert 'torch.device(accel.device.type if args.cuda else "cpu")' in outcome.source
    flag = source.replace("args = parser.parse_args()", "args = make()")
    assert port_source(flag, Level.ROLES).after == 1  # `if args.cuda` asks for a truth
    flag = "import torch\nargs = make()\nmove = args.cuda\n"
    assert port_source(flag, Level.ROLES).after == 1


@pytest.mark.parametrize("other", ["", "setup(3)\n", "start = setup\n"])
def test_a_parameter_is_a_local_rank_if_every_call_passes_one(other):
    source = (
        "import torch\nimport torch.multiprocessing as mp\n\n\n"
        "def setup(gpu):\n    return torch.zeros(1).cuda(gpu)\n\n\n"
        f"def work(rank):\n    setup(rank)\n\n\n{other}mp.spawn(work, nprocs=2)\n"
    )
    assert port_source(source, Level.ROLES).after == (1 if other else 0)


@pytest.mark.parametrize(("imports", "after"), [("", 0), ("from torch import cuda\n", 4)])
def test_a_flag_of_the_script_is_no_vendor_line(imports, after):
    source = f"import torch\n{imports}cuda = torch.cuda.is_available()\nif cuda:\n    print(1)\nprint(cuda)\n"
    assert port_source(source, Level.TORCH).after == after


@pytest.mark.parametrize("quote", ["'", '"', "'''", '"""'])
@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES], ids=lambda level: level.value)
def test_strings_in_an_f_string_have_other_quotes(quote, level):
    source = f"import torch\nx = f{quote}{{1 if torch.cuda.is_available() else 0:.3g}}G{quote}\n"
    outcome = port_source(source, level)
    compile(outcome.source, "ported", "exec")
    assert outcome.after == 0


SPAWNED = """import os
import torch
import torch.multiprocessing as mp


def main():
    os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"
    mp.spawn(work, nprocs=2)


def work(gpu):
    model = torch.nn.Linear(2, 2).cuda()
    step(model)


def step(model):
    return model(torch.ones(1, 2).cuda())


main()
"""


def test_a_process_that_is_started_has_the_variables_of_its_parent():
    outcome = port_source(SPAWNED, Level.ROLES)
    assert not outcome.left
    assert "def work(gpu):\n    accel = accelcore.select(local_rank=gpu)\n" in outcome.source
    assert "def step(model):\n    current_device = torch.accelerator" in outcome.source


@pytest.mark.parametrize(
    ("before", "after", "made"),
    [
        ("", "work(0)", "accel = accelcore.select()"),
        ("work(0)", "", None),
        ("", "work(0)\nwork(1)", "current_device = torch.accelerator.current_accelerator("),
        ("", "work(0)\nprint(work)", None),
    ],
)
def test_a_function_that_is_called_after_devices_are_hidden_chooses_the_device(before, after, made):
    source = (
        "import os\nimport torch\n\n\ndef work(n):\n    return torch.ones(n).cuda()\n\n\n"
        f'{before}\nos.environ["CUDA_VISIBLE_DEVICES"] = "1"\n{after}\n'
    )
    outcome = port_source(source, Level.ROLES)
    assert len(outcome.left) == (made is None)
    assert made is None or f"def work(n):\n    {made}" in outcome.source


HIDDEN = """import os
import torch


def hot(y):
    return torch.eye(2).cuda()


def test(loader):
    return [hot(x) for x in loader]


def main(args):
    if args.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu
        print(torch.cuda.is_available())
    model = torch.nn.Linear(2, 2).cuda()
    hot(model)
    test([1])


main(parse())
"""


@pytest.mark.parametrize("name", ["str(self.device)", "device.type", "args.device"])
def test_a_word_in_the_name_of_a_device(name):
    source = f"import torch\nif 'cuda' in {name}:\n    torch.cuda.empty_cache()\n"
    outcome = port_source(source, Level.ROLES)
    assert outcome.after == 0
    assert f'if "cpu" not in {name}:' in outcome.source


def test_a_device_is_chosen_after_devices_are_hidden_also_under_a_condition():
    source = port_source(HIDDEN, Level.ROLES).source
    assert "print(torch.accelerator.is_available())\n    accel = accelcore.select()\n" in source
    assert source.count("current_device = ") == 1
    assert "torch.eye(2).to(current_device)" in source


def test_a_name_that_only_an_import_of_all_names_can_bring():
    source = "from model import *\nnet = Net().cuda()\nx = torch.ones(2).cuda()\ntorch.cuda.synchronize()\n"
    assert (port_source(source, Level.ROLES).before, port_source(source, Level.ROLES).after) == (3, 0)
    assert port_source("from model import *\nnet = Net().cuda()\n", Level.ROLES).before == 0


@pytest.mark.parametrize(
    ("made", "other", "kept"),
    [("sparse=True", "", 1), ("sparse=args.sparse", "", 1), ("sparse=False", "", 0), ("", "torch.optim.SparseAdam", 1)],
)
def test_an_optimizer_of_gradients_that_may_be_sparse_stays(made, other, kept):
    source = (
        f"import torch\nnet = torch.nn.Embedding(5, 2, {made}).cuda()\n{other}\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
    )
    assert port_source(source, Level.ROLES).source.count("torch.optim.SGD(") == kept


def test_a_storage_keeps_its_own_move():
    source = "import torch\nmemory = torch.Storage(8).cuda()\nx = torch.ones(2).cuda()\n"
    assert "torch.Storage(8).cuda()" in port_source(source, Level.ROLES).source


def test_an_empty_else_goes():
    source = (
        "import torch\ntorch.manual_seed(1)\nif torch.cuda.is_available():\n    if not args.cuda:\n"
        "        print(1)\n    else:\n        torch.cuda.manual_seed(1)\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert outcome.after == 0
    assert "else" not in outcome.source


def test_seeds_of_the_host_stay_as_they_are():
    source = "import torch\ntorch.manual_seed(1)\ntorch.cuda.manual_seed_all(1)\nx = torch.ones(2).cuda()\n"
    assert "torch.manual_seed(1)\n" in port_source(source, Level.ROLES).source
    assert "seed_all" not in port_source(source, Level.ROLES).source


BY_OPTION = """import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--gpu", type=int, default=None)


def train(x):
    return x.cuda(args.gpu, non_blocking=True)


def main():
    global args
    found = torch.cuda.is_available()
    args = parser.parse_args()
    print(found)
    model = torch.nn.Linear(2, 2).cuda(args.gpu)
    device = torch.device("cuda:{}".format(args.gpu) if found else "cpu")
    return train(model(torch.ones(2).to(device)))


main()
"""


def test_an_option_that_chooses_the_only_device_chooses_the_backend():
    outcome = port_source(BY_OPTION, Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    assert "parse_args()\n    accel = accelcore.select(local_rank=args.gpu)\n    print(found)\n" in outcome.source
    assert "found = torch.accelerator.is_available()" in outcome.source
    assert "return x.to(current_device, non_blocking=True)" in outcome.source
    assert "Linear(2, 2).to(accel.device)" in outcome.source


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("default=None", "default=-1"),
        ("print(found)", "print(found if args.gpu >= 0 else None)"),
        ("print(found)", "args.gpu = 3"),
        ("print(found)", "torch.ones(2).cuda(args.other)"),
        ("print(found)", 'torch.ones(2).to("cuda:1")'),
        ("type=int, ", ""),
        ("    args = parser.parse_args()\n", "    if not found:\n        args = parser.parse_args()\n"),
    ],
)
def test_an_option_that_may_choose_no_device_or_several_chooses_no_backend(old, new):
    assert old in BY_OPTION
    outcome = port_source(BY_OPTION.replace(old, new), Level.ROLES)
    assert "local_rank" not in outcome.source
    assert outcome.left


def test_an_option_that_is_read_in_another_place_than_used_chooses_the_backend():
    source = (
        "import argparse\nimport torch\n\n\ndef main(args):\n    return torch.ones(2).cuda(args.gpu)\n\n\n"
        'if __name__ == "__main__":\n    parser = argparse.ArgumentParser()\n'
        '    parser.add_argument("--gpu", type=int)\n    args = parser.parse_args()\n    main(args)\n'
    )
    once = port_source(source, Level.ROLES).source
    assert "    accel = accelcore.select(local_rank=args.gpu)\n    main(args)\n" in once
    assert "import accelcore\n" in once
    assert port_source(once, Level.ROLES).source == once


def test_a_move_inside_of_a_context_of_one_device_is_left():
    source = (
        "import torch\nfor i in range(torch.cuda.device_count()):\n"
        "    with torch.cuda.device(i):\n        x = torch.ones(2).cuda()\n"
    )
    assert "torch.ones(2).cuda()" in port_source(source, Level.ROLES).source


def test_a_rank_of_minus_one_is_a_single_process():
    source = (
        "import torch\nimport torch.multiprocessing as mp\n\n\n"
        "def work(gpu):\n    x = torch.ones(2)\n    if gpu != -1:\n        x = x.cuda(gpu)\n\n\n"
        "mp.spawn(work, nprocs=2) if mp.active_children() else work(-1)\n"
    )
    assert "accelcore.select(local_rank=max(gpu, 0))" in port_source(source, Level.ROLES).source


@pytest.mark.parametrize(("head", "count"), [("cuda, n=f(1)", 1), ("cudas, n=cuda", 2)])
def test_a_parameter_called_as_a_device_is_no_vendor_line(head, count):
    source = f"import torch\n\n\ndef fit(\n    model, {head}\n):\n    if cuda:\n        model.cuda()\n"
    assert port_source(source, Level.TORCH).before == count + (count == 2)


def test_devices_that_the_script_chooses_elsewhere_stay_where_there_is_an_accelerator():
    source = (
        "import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nfrom tools import device_of\n"
        "model = DDP(net.to(device_of()), device_ids=[device_of()])\n"
    )
    assert (
        "device_ids=[device_of()] if torch.accelerator.is_available() else None"
        in port_source(source, Level.ROLES).source
    )


BY_HAND = """import argparse
import torch


def setup(rank):
    torch.cuda.set_device(rank % torch.cuda.device_count())


def train(args):
    setup(args.rank)
    with torch.cuda.amp.autocast():
        return torch.ones(2).cuda()


parser = argparse.ArgumentParser()
parser.add_argument("--rank", type=int)
train(parser.parse_args())
"""


def test_a_process_whose_device_the_script_chooses_takes_the_current_device():
    outcome = port_source(BY_HAND, Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    assert "accelcore" not in outcome.source
    assert "torch.accelerator.set_device_index(rank % torch.accelerator.device_count())" in outcome.source
    assert "torch.autocast(current_device.type, dtype=torch.float16)" in outcome.source
    assert "torch.ones(2).to(current_device)" in outcome.source


def test_a_rank_of_the_launcher_chooses_no_device_by_hand():
    source = BY_HAND.replace("args.rank)", "torch.distributed.get_rank())").replace('"--rank"', '"--seed"')
    outcome = port_source(source, Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    assert "set_device" not in outcome.source
    assert "torch.ones(2).to(accel.device)" in outcome.source


def test_a_device_that_is_chosen_below_a_line_is_not_used_in_it():
    source = (
        "import os\nimport torch\nprint(torch.cuda.is_available())\n"
        'os.environ["CUDA_VISIBLE_DEVICES"] = "1"\nx = torch.ones(2).cuda()\n'
    )
    once = port_source(source, Level.ROLES).source
    assert port_source(once, Level.ROLES).source == once
    assert (
        once.index("torch.accelerator.is_available")
        < once.index("accel = accelcore.select()")
        < once.index(".to(accel.device)")
    )


@pytest.mark.parametrize(("value", "after"), [("0", 0), ("1", 2)])
def test_a_name_of_the_first_device_is_the_only_one(value, after):
    source = f"import torch\ngpu = {value}\nx = torch.ones(2).cuda(gpu)\ny = x.cuda(gpu)\n"
    assert port_source(source, Level.ROLES).after == after


def test_an_attribute_that_the_script_sets_is_no_vendor_line():
    source = (
        "import torch\n\n\nclass A:\n    def __init__(self, use):\n        self.cuda = use\n        print(self.cuda)\n"
    )
    assert (port_source(source, Level.ROLES).before, port_source(source, Level.ROLES).left) == (0, [])


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("torch.save([net, optimizer], path)", 1),
        ("torch.save([net.state_dict(), optimizer.state_dict()], path)", 0),
        ('torch.save({"optimizer": optimizer.state_dict()}, "optimizer.pt")', 0),
        ('state = {"net": net, "optimizer": optimizer}', 1),
        ("before = copy.deepcopy(optimizer)", 1),
        ("before = copy.deepcopy(optimizer.state_dict())", 0),
        ("torch.save(dict(schedule=scheduler), path)", 1),
        ("print(optimizer)", 0),
    ],
)
def test_an_optimizer_that_is_saved_or_copied_itself_stays(line, kept):
    source = (
        "import copy\nimport torch\nnet = torch.nn.Linear(5, 2).cuda()\n"
        f"optimizer = torch.optim.SGD(net.parameters(), 0.1)\n{line}\n"
    )
    assert port_source(source, Level.ROLES).source.count("torch.optim.SGD(") == kept


def test_the_number_of_a_rank_is_a_device_also_as_a_keyword():
    source = (
        "import torch\nimport torch.distributed as dist\n\n\ndef main():\n    rank = dist.get_rank()\n"
        "    device = rank % torch.cuda.device_count()\n    net = torch.nn.Linear(2, 2).to(device)\n"
        "    return net(torch.ones(2, device=device)), torch.ones(2).to(device=device)\n\n\nmain()\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert ported.count("accel.device)") == 3
    assert "device=device" not in ported


@pytest.mark.parametrize(("index", "left"), [("1", 2), ("i", 2), ("0", 0)])
def test_the_first_device_of_several_is_left(index, left):
    source = (
        "import torch\nnets = []\nfor i in range(2):\n"
        f"    nets.append(torch.nn.Linear(2, 2).cuda({index}))\nx = torch.ones(2).cuda(0)\n"
    )
    assert len(port_source(source, Level.ROLES).left) == left


REPLICA = """import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Net(torch.nn.Module):
    def forward(self, x):
        y = torch.cuda.FloatTensor(2)
        return x.cuda() + torch.ones(2, device="cuda") + torch.zeros(2).to(device)
"""


@pytest.mark.parametrize("method", ["forward", "grid"])
def test_a_module_of_which_there_may_be_replicas_takes_the_current_device(method):
    outcome = port_source(REPLICA.replace("forward", method), Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    assert "device = torch.device(accel.device.type)\n" in outcome.source
    assert "torch.FloatTensor(2).to(accel.device.type)" in outcome.source
    assert "x.to(accel.device.type) + torch.ones(2, device=accel.device.type) + " in outcome.source


def test_a_module_level_device_that_no_module_uses_is_the_backends():
    source = port_source(REPLICA.replace(".to(device)", ""), Level.ROLES).source
    assert "device = accel.device\n" in source


def test_horovod_chooses_the_device_and_wraps_the_optimizer():
    source = (
        "import horovod.torch as hvd\nimport torch\nhvd.init()\ntorch.cuda.set_device(hvd.local_rank())\n"
        "net = torch.nn.Linear(2, 2).cuda()\n"
        "optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1))\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    assert "torch.accelerator.set_device_index(hvd.local_rank())" in outcome.source
    assert "torch.optim.SGD(" in outcome.source
    assert "accelcore" not in outcome.source
