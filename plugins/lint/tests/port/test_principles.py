"""What a port must never do: choose a device on import, call `to` of what has none, open a branch that was closed."""

import sys
import types
from unittest import mock

import pytest
import torch
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.port_command import port
from accelcore_lint.port.project import Known, read_project
from click.testing import CliRunner


def imported(source, name="module", **modules):
    """The module that a source defines, where a choice of a device is an error, as when others import it."""
    accelcore = types.ModuleType("accelcore")
    accelcore.select = mock.Mock(side_effect=AssertionError("a device was chosen on import"))
    module = types.ModuleType(name)
    with mock.patch.dict(sys.modules, {"accelcore": accelcore, **modules}):
        exec(compile(source, name, "exec"), module.__dict__)
    return module


BODIES = [
    "return x.cuda()",
    "device = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')\n    return x.to(device)",
    "return torch.utils.data.DataLoader(x, pin_memory=True)",
    "return torch.optim.SGD([x.cuda()], 0.1)",
    "with torch.cuda.amp.autocast():\n        torch.cuda.amp.GradScaler().scale(x).backward()",
    "torch.cuda.manual_seed(0)\n    torch.cuda.synchronize()",
    "args = argparse.ArgumentParser().parse_args()\n    return x.cuda()",
]
FORMS = {
    "function": "def {name}(x):\n    {body}\n",
    "default": "def {name}(x, device=torch.device('cuda'), kind='cuda' if torch.cuda.is_available() else 'cpu'):\n"
    "    {body}\n",
    "method": "def {name}(x):\n    {body}\n\n\nclass {name}_module(torch.nn.Module):\n    def forward(self, x):\n"
    "        return {name}(x.cuda())\n",
    "documented": '"""Says "it".\n\nSee work(x) (2019), "[1]".\n"""\nimport torch\n\n\ndef {name}(x):\n    {body}\n',
}
TAILS = {
    "nothing": "",
    "registers": "KINDS = {}\nKINDS.update(work=work)\nfor name in ('a', 'b'):\n    KINDS[name] = name\n",
    "options at the top": "parser = argparse.ArgumentParser()\nparser.add_argument('--n', default=1)\n"
    "args = parser.parse_args([])\n",
    "guard": "if __name__ == '__main__':\n    print(work(torch.ones(2)))\n",
    "training guard": "if __name__ == '__main__':\n    for x in torch.utils.data.DataLoader([1.0]):\n"
    "        work(x).backward()\n",
}


@pytest.mark.parametrize(
    ("form", "tail"),
    [
        pytest.param(form, tail, marks=[] if (row + column) % len(FORMS) == 0 else pytest.mark.full)
        for row, form in enumerate(FORMS)
        for column, tail in enumerate(TAILS)
    ],
)
def test_a_module_that_others_import_chooses_no_device_on_import(form, tail):
    names = ["work", *(f"work_{number}" for number in range(1, len(BODIES)))]
    functions = [FORMS[form].format(name=name, body=body) for name, body in zip(names, BODIES, strict=True)]
    source = "\n\n".join(["import argparse\nimport torch\n", *functions, TAILS[tail]])
    known = Known(imported="guard" in tail)
    ported = port_source(source, Level.ROLES, known).source
    assert ported != source
    imported(ported)
    assert port_source(ported, Level.ROLES, known).source == ported


@pytest.mark.parametrize(
    "lines",
    [
        "@torch.cuda.amp.custom_fwd\ndef forward(ctx, x):\n    return x\n",
        "class F:\n    device = torch.device('cuda')\n",
        "DEVICE = torch.device('cuda')\n\n\ndef f():\n    return DEVICE\n",
        "def f(device='cuda', other=torch.device('cuda')):\n    return device\n",
    ],
)
@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_module_asks_no_question_on_import_that_it_did_not_ask(lines, level):
    ported = port_source(f"import torch\n\n\n{lines}", level).source
    with mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("cuda")) as asked:
        imported(ported)
    assert all(not call.args and not call.kwargs for call in asked.call_args_list)


def test_a_script_leaves_defaults_that_are_set_when_others_import_it():
    source = (
        "import argparse\nimport torch\n\n\ndef predict(x, device=torch.device('cuda')):\n    return x.to(device)\n\n\n"
        "def main():\n    args = argparse.ArgumentParser().parse_args()\n    predict(torch.ones(2)).cuda()\n\n\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert "device=torch.device('cuda')" in outcome.source
    assert len(outcome.left) == 1
    imported(outcome.source)


def written(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "setup.py").touch()
    return [folder / name for name in files]


@pytest.mark.parametrize(
    "line",
    ["from train import work", "import train", "from .train import (\n    other,\n    work,\n)", "from . import train"],
)
def test_a_script_that_another_file_imports_is_known(tmp_path, line):
    paths = written(
        tmp_path / "project", {"train.py": "work = 1\n", "tune.py": line + "\n", "test_it.py": "import tune\n"}
    )
    project = read_project(paths)
    assert [project.known(path).imported for path in paths] == [True, False, False]
    assert read_project(paths[:1]).known(paths[0]).imported


OWN = """class Sampler:
    def cuda(self):
        self.where = "its own"


class Bigger(Sampler):
    pass


def make():
    return Bigger()
"""


@pytest.mark.parametrize("made", ["Sampler()", "Bigger()", "make()", "loss.Sampler()"])
@pytest.mark.parametrize("named", ["sampler", "self.sampler"])
def test_an_own_method_of_the_project_is_still_the_one_that_is_called(tmp_path, made, named):
    user = (
        "import torch\nimport loss\nfrom loss import Bigger, Sampler, make\n\n\ndef run(self):\n"
        f"    {named} = {made}\n    {named}.cuda()\n    return {named}.where\n\n\ndef move(x):\n    return x.cuda()\n"
    )
    paths = written(tmp_path / "project", {"loss.py": OWN, "user.py": user})
    project = read_project(paths)
    outcome = port_source(user, Level.ROLES, project.known(paths[1]))
    assert outcome.after == 1
    assert "return x.to(current_device)" in outcome.source
    loss = imported(OWN, "loss")
    assert imported(outcome.source, loss=loss).run(types.SimpleNamespace()) == "its own"
    assert read_project(paths[1:]).known(paths[1]) == project.known(paths[1])


@pytest.mark.parametrize(
    ("head", "before"),
    [
        ("device=None", ""),
        ("*, device=None", ""),
        ("given=None", "    device = given\n"),
        ("given=None", "    device = given if given else None\n"),
        ("options=types.SimpleNamespace(device=None)", "    device = options.__dict__.get('device')\n"),
    ],
)
def test_a_move_to_none_goes_to_the_current_device(head, before):
    source = f"import types\nimport torch\n\n\ndef moved(x, {head}):\n{before}    return x.cuda(device)\n"
    ported = port_source(source, Level.ROLES).source
    module = imported(ported)
    assert "cuda" not in ported

    class Tensor:
        def to(self, device):
            return device

    assert module.moved(Tensor()) == torch.device("cpu")


CONDITIONS = [
    "device == torch.device('cuda')",
    "torch.device('cuda') == torch.device(device)",
    "torch.device(device) == torch.device('cuda')",
    "torch.device(device).type == 'cuda'",
    "str(device) == 'cuda'",
    "'cuda' in str(device)",
    "torch.device(device) == torch.device('cuda') and torch.cuda.is_available()",
    "not torch.device(device) != torch.device('cuda')",
    "device != torch.device('cpu') and torch.cuda.is_available()",
    "torch.cuda.is_available()",
    "torch.cuda.is_available() and device",
    "not not torch.cuda.is_available()",
    "torch.cuda.device_count() > 0",
    "torch.ones(1).is_cuda",
    "device == 'cuda'",
    "not device == 'cuda'",
    "'cuda' == device or device == 'cuda'",
    "device != 'cpu' and device == 'cuda'",
]


class Moved:
    """A tensor that says how it was moved."""

    is_cuda = True
    device = torch.device("cuda")
    moved = False

    def cuda(self, device=None):
        self.moved = True
        return self

    to = cuda


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_condition_is_true_on_the_same_devices_as_before(condition):
    source = f"import torch\n\n\ndef taken(device, x):\n    if {condition}:\n        x.cuda()\n    return x.moved\n"
    was, now = imported(source), imported(port_source(source, Level.ROLES).source)
    for accelerator, names in ((None, ["cpu"]), (torch.device("cuda"), ["cpu", "cuda", "cuda:1"])):
        count = 2 * (len(names) > 1)
        with (
            mock.patch.object(torch.accelerator, "current_accelerator", return_value=accelerator),
            mock.patch.object(torch.accelerator, "device_count", return_value=count),
            mock.patch.object(torch.accelerator, "is_available", return_value=count > 0),
            mock.patch.object(torch.cuda, "device_count", return_value=count),
            mock.patch.object(torch.cuda, "is_available", return_value=count > 0),
        ):
            for device in [*names, *map(torch.device, names)]:
                assert now.taken(device, Moved()) is was.taken(device, Moved()), device


@pytest.mark.parametrize(
    "condition", ["{}", "x and {}", "x or {}", "not {} and 0", "torch.cuda.is_available() and {}", "{} is True"]
)
def test_what_a_script_asks_of_bfloat16_is_still_about_accelerators(condition):
    source = f"import torch\nx = 0\nfound = {condition.format('torch.cuda.is_bf16_supported()')}\n"
    accelcore = types.ModuleType("accelcore")
    capabilities = types.SimpleNamespace(autocast_dtypes={"bfloat16"})
    accelcore.select = lambda: types.SimpleNamespace(device=torch.device("cpu"), capabilities=capabilities)
    ported = port_source(source, Level.ROLES).source
    assert "cuda" not in ported
    found = types.ModuleType("script")
    with mock.patch.dict(sys.modules, {"accelcore": accelcore}):
        exec(ported, found.__dict__)
    with mock.patch.object(torch.cuda, "is_bf16_supported", return_value=False):
        assert found.found == imported(source).found


LEFT = [
    "torch.cuda.get_device_capability()",
    "where = torch.device('cuda:%s' % number)",
    "where = torch.device('cuda:' + number)",
    "state = torch.load(path)",
]


@pytest.mark.parametrize("line", LEFT)
def test_a_question_stays_if_nothing_it_guards_is_rewritten(line):
    head, other = "import torch\n\n\ndef f(number):\n", "torch.load(path, map_location='cpu')"
    branches = f"{head}    if torch.cuda.is_available():\n        {line}\n    else:\n        {other}\n"
    assert "if torch.cuda.is_available():" in port_source(branches, Level.ROLES).source
    turned = f"{head}    if not torch.cuda.is_available():\n        {other}\n    else:\n        {line}\n"
    assert "if not torch.cuda.is_available():" in port_source(turned, Level.ROLES).source


@pytest.mark.parametrize(
    "body",
    ["extension = CUDAExtension\n    x = x.cuda()", "import pynvml", "engine = tensorrt.Runtime()\n    x = x.cuda()"],
)
def test_a_question_about_a_vendors_other_tools_stays(body):
    outcome = port_source(f"import torch\nif torch.cuda.is_available():\n    {body}\n", Level.ROLES)
    assert "if torch.cuda.is_available():" in outcome.source
    assert outcome.left


@pytest.mark.parametrize("line", LEFT[:3])
def test_a_question_stays_if_it_returns_before_something_that_is_left(line):
    source = (
        "import torch\n\n\ndef f(x):\n    if not torch.cuda.is_available():\n        return x\n"
        f"    {line}\n    return x.cuda()\n"
    )
    assert "if not torch.cuda.is_available():" in port_source(source, Level.ROLES).source
    done = source.replace(f"    {line}\n", "")
    assert 'if current_device.type == "cpu":' in port_source(done, Level.ROLES).source


@pytest.mark.parametrize("line", LEFT[:3])
@pytest.mark.parametrize("name", ["cuda", "self.has_gpu"])
def test_a_question_with_a_name_stays_if_nothing_that_it_guards_is_rewritten(line, name):
    source = (
        f"import torch\n\n\ndef f(self, x):\n    {name} = x and torch.cuda.is_available()\n"
        f"    if {name}:\n        {line}\n"
    )
    assert f"{name} = x and torch.cuda.is_available()" in port_source(source, Level.ROLES).source
    assert "cuda.is_available()" not in port_source(source + "        x.cuda()\n", Level.ROLES).source
    assert "cuda.is_available()" not in port_source(source.replace(line, "x = 1"), Level.ROLES).source


def test_a_state_is_loaded_to_the_device_where_another_branch_loads_it_to_the_cpu():
    source = (
        "import torch\n\n\ndef load(net, path):\n    if torch.cuda.is_available():\n"
        "        net.load_state_dict(torch.load(path))\n        net.cuda()\n    else:\n"
        "        net.load_state_dict(torch.load(path, map_location='cpu'))\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    assert "net.load_state_dict(torch.load(path, map_location=current_device))" in outcome.source


def test_a_load_beside_one_to_another_accelerator_is_nobodys_business():
    source = (
        "import torch\nif args.gpu is None:\n    state = torch.load(path)\nelse:\n"
        "    state = torch.load(path, map_location=location)\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert (outcome.source, outcome.left) == (source, [])


DEFAULTS = [
    "parser.add_argument('--device', default='cuda:3')",
    "device = os.environ.get('DEVICE', 'cuda:3')",
    "device = os.getenv('DEVICE', default='cuda:3')",
    "device = args.device or 'cuda:3'",
    "device = 'cuda:3' if args.second else 'cpu'",
    "if args.second:\n    device = 'cuda:3'",
    "def place(x, device='cuda:3'):\n    return x.to(device)",
]


@pytest.mark.parametrize("line", DEFAULTS)
def test_an_index_that_is_only_a_default_chooses_no_device(line):
    source = (
        "import os\nimport argparse\nimport torch\n\nparser = argparse.ArgumentParser()\n"
        f"{line}\nargs = parser.parse_args()\nx = torch.ones(2)\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert "local_rank" not in outcome.source
    assert outcome.left
    certain = source.replace(line, "device = torch.device('cuda:3' if torch.cuda.is_available() else 'cpu')")
    assert "accelcore.select(local_rank=3)" in port_source(certain, Level.ROLES).source


def test_a_setting_is_kept_that_takes_back_what_another_file_sets(tmp_path):
    seeds = "import torch\n\n\ndef fixed():\n    torch.backends.cudnn.benchmark = False\n    torch.manual_seed(0)\n"
    main = "import torch.backends.cudnn as cudnn\ncudnn.benchmark = {}\n"
    paths = written(tmp_path / "project", {"seeds.py": seeds, "main.py": main.format("args.fast")})
    outcome = port_source(seeds, Level.ROLES, read_project(paths).known(paths[0]))
    assert (outcome.source, outcome.left) == (seeds, [])
    paths[1].write_text(main.format("False"))
    assert "benchmark" not in port_source(seeds, Level.ROLES, read_project(paths).known(paths[0])).source


@pytest.mark.parametrize(
    "helper", ["from timm.utils import (\n    ApexScaler,\n)", "from mmcv.runner import build_optimizer"]
)
def test_apex_stays_beside_what_another_package_drives_it_by(helper):
    source = (
        "from apex import amp\nfrom apex.parallel import DistributedDataParallel as DDP\n{}\n"
        "model, optimizer = amp.initialize(model, optimizer)\nmodel = DDP(model)\n"
    )
    outcome = port_source("import torch\n" + source.format(helper), Level.ROLES)
    assert "\nfrom apex import amp\n" in outcome.source
    assert "accelcore.apex import" not in outcome.source
    assert "\nfrom apex.parallel import DistributedDataParallel as DDP\n" in outcome.source
    assert outcome.left
    assert (
        "from accelcore.apex import amp"
        in port_source("import torch\n" + source.format("import x"), Level.ROLES).source
    )


def test_another_packages_functions_for_one_vendor_are_reported():
    source = "import torch\nfrom numba import cuda\n\n\n@cuda.jit\ndef kernel(x):\n    pass\n"
    outcome = port_source(source, Level.ROLES)
    assert [note.line for note in outcome.left] == [5]


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("'cuda:' + str(k)", 1),
        ("name = 'cuda:%s'", 1),
        ("gpu = args.cuda", 0),
        ("gpu = self.opt.cuda", 0),
        ("x = self.cuda", 1),
        ("x = 'cuda: it is fast'", 0),
    ],
)
def test_strings_that_begin_a_devices_name_count_and_options_do_not(line, count):
    assert port_source(f"import torch\nprint({line!r}, {line.split(' = ')[-1]})\n", Level.ROLES).before == count


def test_a_device_that_nothing_uses_any_more_is_not_asked_for():
    source = (
        "import torch\n\n\ndef seed(n):\n    torch.manual_seed(n)\n    if torch.cuda.is_available():\n"
        "        torch.cuda.manual_seed_all(n)\n    return n\n"
    )
    assert (
        port_source(source, Level.ROLES).source
        == "import torch\n\n\ndef seed(n):\n    torch.manual_seed(n)\n    return n\n"
    )


@pytest.mark.parametrize(
    ("between", "count"),
    [
        ("", 1),
        ("random.seed(3)\nif args.cuda:\n    torch.backends.cudnn.deterministic = True\n", 1),
        ("x = torch.randn(3, device='cuda')\n", 2),
        ("net = build(args)\n", 2),
        ("if build(args):\n    pass\n", 2),
    ],
)
def test_a_seed_is_removed_if_nothing_can_have_drawn_before_it(between, count):
    source = f"import torch\ntorch.manual_seed(3)\n{between}torch.cuda.manual_seed_all(3)\n"
    assert port_source(source, Level.ROLES).source.count("manual_seed(3)") == count


def test_seeds_that_are_given_twice_are_given_once():
    source = "import torch\ntorch.cuda.manual_seed(3)\ntorch.cuda.manual_seed_all(3)\nx = 1\n"
    assert port_source(source, Level.ROLES).source.count("manual_seed(3)") == 1


@pytest.mark.parametrize(
    ("made", "ported"),
    [
        ("FloatTensor(n, 1).normal_()", "torch.empty(n, 1, device=accel.device).normal_()"),
        ("LongTensor(x.size(0))", "torch.empty(x.size(0), dtype=torch.int64, device=accel.device)"),
        ("FloatTensor([1.0])", "torch.FloatTensor([1.0]).to(accel.device)"),
        ("FloatTensor(data)", "torch.FloatTensor(data).to(accel.device)"),
        ("FloatTensor(self.data)", "torch.FloatTensor(self.data).to(accel.device)"),
        ("FloatTensor(numpy.ones(2))", "torch.FloatTensor(numpy.ones(2)).to(accel.device)"),
        ("FloatTensor((2, 3))", "torch.FloatTensor((2, 3)).to(accel.device)"),
    ],
)
def test_a_tensor_of_a_size_is_made_on_the_device(made, ported):
    head = "import numpy\nimport torch\ndata = self.data = numpy.ones(3)\n"
    assert f"y = {ported}\n" in port_source(f"{head}y = torch.cuda.{made}\n", Level.ROLES).source


def test_tabs_and_spaces_that_python_reads_are_an_error_that_says_what_to_do(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import torch\ndef f(x):\n    with x:\n\t    y = x.cuda()\n\t    z = 1\n    return x\n")
    result = CliRunner().invoke(port, [str(script)], standalone_mode=False)
    assert result.return_value == 2
    assert "tabs and spaces" in result.output


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_module_that_has_only_a_part_of_torch_imports_torch(level):
    source = (
        "from torch.utils.data import DataLoader\n\n\ndef make(data):\n    return DataLoader(data, pin_memory=True)\n"
    )
    loader = imported(port_source(source, level=level).source).make([torch.ones(2)])
    assert loader.pin_memory == torch.accelerator.is_available()
