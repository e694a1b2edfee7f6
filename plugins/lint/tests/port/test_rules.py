"""Each rule's examples, which are also the documentation's, and what single rules leave as it is."""

import pytest
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.rules import RULES

ADDED = {
    Level.TORCH: 'device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")\n',
    Level.ROLES: "accel = accelcore.select()\n",
}
HEAD = "# A file is looked at if it has a vendor's word, such as cuda.\n"
EXAMPLES = [
    pytest.param(example, id=f"{rule.name}-{number}") for rule in RULES for number, example in enumerate(rule.examples)
]


def bare(source, example):
    """The source without what every rewritten file gets: imports, and the line that chooses the device."""
    value = ADDED[example.level].partition(" = ")[2]
    lines = source.splitlines(keepends=True)
    if value.strip() not in example.after:
        lines = [line for line in lines if not line.endswith(value)]
    lines = [line for line in lines if line not in (HEAD, "import torch\n", "import accelcore\n")]
    return "".join(lines).strip("\n")


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example):
    outcome = port_source(f"{HEAD}import torch\n{example.before}\n", example.level)
    after = [line for line in example.after.split("\n") if line != "import torch"]
    assert bare(outcome.source, example).split("\n") == after


def test_every_rule_is_named_once_and_has_a_title():
    names = [rule.name for rule in RULES]
    assert len(set(names)) == len(names)
    assert all(rule.title for rule in RULES)


@pytest.mark.parametrize("quote", ["'", '"', "'''", '"""'])
@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES], ids=lambda level: level.value)
def test_strings_in_an_f_string_have_other_quotes(quote, level):
    source = f"import torch\nx = f{quote}{{1 if torch.cuda.is_available() else 0:.3g}}G{quote}\n"
    outcome = port_source(source, level)
    compile(outcome.source, "ported", "exec")
    assert outcome.after == 0


@pytest.mark.parametrize("name", ["str(self.device)", "device.type", "args.device"])
def test_a_word_in_the_name_of_a_device(name):
    source = f"import torch\nif 'cuda' in {name}:\n    torch.cuda.empty_cache()\n"
    outcome = port_source(source, Level.ROLES)
    assert outcome.after == 0
    assert f'if "cpu" not in {name}:' in outcome.source


@pytest.mark.parametrize(
    ("made", "other", "kept"),
    [
        ("sparse=True", "", 1),
        ("sparse=args.sparse", "", 1),
        ("sparse=False", "", 0),
        ("", "torch.optim.SparseAdam", 1),
        ("", "FullyShardedDataParallel(net)", 1),
        ("", "averaged = list(net.state_dict().values())", 1),
        ("", "averaged = [p.data for p in net.parameters()]", 1),
        ("", "averaged = [q.dtype for q in net.parameters()]", 0),
    ],
)
def test_an_optimizer_of_gradients_that_may_be_sparse_or_of_tensors_that_are_held_stays(made, other, kept):
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
        ("net.share_memory()", 1),  # other processes read its parameters where they are
    ],
)
def test_an_optimizer_that_is_saved_or_copied_itself_stays(line, kept):
    source = (
        "import copy\nimport torch\nnet = torch.nn.Linear(5, 2).cuda()\n"
        f"optimizer = torch.optim.SGD(net.parameters(), 0.1)\n{line}\n"
    )
    assert port_source(source, Level.ROLES).source.count("torch.optim.SGD(") == kept


REPLICA = """import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Net(torch.nn.Module):
    def forward(self, x):
        y = torch.cuda.FloatTensor(2)
        return x.cuda() + torch.ones(2, device="cuda") + torch.zeros(2).to(device)


Net()
"""


@pytest.mark.parametrize("method", ["forward", "grid"])
def test_a_module_of_which_there_may_be_replicas_takes_the_current_device(method):
    outcome = port_source(REPLICA.replace("forward", method), Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    assert "device = torch.device(accel.device.type)\n" in outcome.source
    assert "torch.empty(2, device=accel.device.type)" in outcome.source
    assert "x.to(accel.device.type) + torch.ones(2, device=accel.device.type) + " in outcome.source


def test_a_module_level_device_that_no_module_uses_is_the_backends():
    source = port_source(REPLICA.replace(".to(device)", ""), Level.ROLES).source
    assert "device = accel.device\n" in source


CUDNN = """import torch
from torch.backends import cudnn

cudnn.deterministic = True
cudnn.benchmark = args.benchmark
x = torch.ones(2).cuda()
"""


@pytest.mark.parametrize("line", ["", "print(cudnn.version())\n"])
def test_settings_of_cudnn_keep_their_meaning_and_their_import_goes_with_its_last_other_use(line):
    ported = port_source(CUDNN + line, Level.ROLES)
    name = "cudnn" if line else "torch.backends.cudnn"
    assert f"\n{name}.deterministic = True\n{name}.benchmark = args.benchmark\n" in ported.source
    assert ("import cudnn" in ported.source) is bool(line)
    assert [note.line for note in ported.harmless] == ([4, 5, 7] if line else [])
    assert port_source(ported.source, Level.ROLES).source == ported.source


def test_a_setting_of_cudnn_is_harmless_whatever_name_the_file_gives_torch():
    outcome = port_source("import torch as th\nfrom torch.backends import cudnn\ncudnn.benchmark = True\n", Level.ROLES)
    assert outcome.source == "import torch as th\nth.backends.cudnn.benchmark = True\n"
    assert (outcome.left, outcome.ignored) == ([], 1)


@pytest.mark.parametrize("line", ["import torch.backends.cudnn as cudnn", "from torch.backends import cudnn"])
def test_an_import_of_cudnn_that_nothing_uses_goes(line):
    assert "cudnn" not in port_source(f"{line}\nimport torch\nx = torch.ones(2).cuda()\n", Level.TORCH).source


def test_the_number_of_the_current_device_is_0_where_there_is_none():
    source = (
        "import torch\nprint(torch.cuda.current_device())\n"
        "if torch.cuda.is_available():\n    torch.zeros(torch.cuda.current_device())\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert "print(torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0)" in ported
    assert "torch.zeros(torch.accelerator.current_device_index())" in ported


@pytest.mark.parametrize(
    ("owner", "before", "is_rewritten", "reasons"),
    [
        ("x", "", True, 0),
        ("self.weight", "", True, 0),
        ("args", "args.is_cuda = True", False, 0),
        ("self.args", "", False, 0),
        ("opt", "", False, 0),
        ("self", "", False, 0),
        ("run", "run.is_cuda = torch.cuda.is_available()", False, 0),
        ("run", "class Run:\n    is_cuda = True", False, 1),
        ("run", "parser.add_argument('--is-cuda')", False, 1),
    ],
)
def test_is_cuda_of_options_and_of_the_files_own_classes_is_no_tensors(owner, before, is_rewritten, reasons):
    source = f"import torch\n{before}\nif {owner}.is_cuda:\n    y = y.cuda()\n"
    outcome = port_source(source, Level.ROLES)
    assert (f'if {owner}.device.type != "cpu":' in outcome.source) is is_rewritten
    assert (f"if {owner}.is_cuda:" in outcome.source) is not is_rewritten
    assert len(outcome.left) == reasons
