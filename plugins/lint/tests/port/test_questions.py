"""Questions about devices, defaults and seeds: a closed branch stays closed, and nothing is taken for certain."""

import sys
import types
from unittest import mock

import pytest
import torch
from accelcore_lint.port import Level, port_source
from port_sources import imported

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
    "where = torch.cuda.default_stream(number)",
    "where = torch.device('cuda:' + number[0])",
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
    [
        "extension = CUDAExtension\n    x = x.cuda()",
        "import pynvml",
        "x = torch.cuda",
        "engine = tensorrt.Runtime()\n    x = x.cuda()",
    ],
)
def test_a_question_about_a_vendors_other_tools_stays(body):
    outcome = port_source(f"import torch\nif torch.cuda.is_available():\n    {body}\n", Level.ROLES)
    assert "if torch.cuda.is_available():" in outcome.source
    assert outcome.left


@pytest.mark.parametrize("end", ["\n        return x", " return x"])
@pytest.mark.parametrize("line", LEFT[:3])
def test_a_question_stays_if_it_returns_before_something_that_is_left(line, end):
    source = (
        f"import torch\n\n\ndef f(x):\n    if not torch.cuda.is_available():{end}\n    {line}\n    return x.cuda()\n"
    )
    assert "if not torch.cuda.is_available():" in port_source(source, Level.ROLES).source
    done = source.replace(f"    {line}\n", "")
    assert 'if current_device.type == "cpu":' in port_source(done, Level.ROLES).source


def test_a_question_stays_if_a_context_that_only_one_vendor_has_follows():
    source = (
        "import torch\nif args.gpu >= 0 and torch.cuda.is_available():\n    net.cuda()\nelse:\n    args.gpu = -1\n"
        "with torch.cuda.device(args.gpu):\n    run()\n"
    )
    assert "torch.cuda.is_available()" in port_source(source, Level.ROLES).source
    guarded = source.replace("with", "if torch.cuda.is_available():\n  with")
    assert "if args.gpu >= 0 and torch.cuda" not in port_source(guarded, Level.ROLES).source


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
    assert outcome.left or "accelcore" not in outcome.source


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("'cuda:' + str(k)", 1),
        ("name = 'cuda:%s'", 1),
        ("gpu = args.cuda", 0),
        ("gpu = self.opt.cuda", 0),
        ("x = net.cuda", 1),
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
        ("torch.cuda.set_device(args.gpu)\n", 1),
        ("if args.cuda: random.seed(3)\nif torch.cuda.device_count() > 1: print(3)\n", 1),
        ("if args.fast: x = torch.randn(3, device='cuda')\n", 2),
        ("random.seed(3); x = torch.randn(3, device='cuda')\n", 2),
        ("x = torch.randn(3, device='cuda')\n", 2),
        ("net = build(args)\n", 2),
        ("if build(args):\n    pass\n", 2),
    ],
)
def test_a_seed_is_removed_if_nothing_can_have_drawn_before_it(between, count):
    source = f"import torch\ntorch.manual_seed(3)\n{between}torch.cuda.manual_seed_all(3)\n"
    assert port_source(source, Level.ROLES).source.count("manual_seed") == count


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


@pytest.mark.parametrize(
    "use", ["device = torch.device('cuda:' + number[0] if cuda else 'cpu')", "run(torch.cuda.Event, cuda)"]
)
@pytest.mark.parametrize("value", ["torch.cuda.is_available()", "False if number < 0 else torch.cuda.is_available()"])
@pytest.mark.parametrize("name", ["cuda", "self.has_gpu"])
def test_a_question_with_a_name_stays_if_a_line_with_the_name_is_left(use, value, name):
    use = use.replace("cuda)", f"{name})").replace("if cuda", f"if {name}")
    method = f"    def run(self, number, x):\n        {use}\n"
    source = (
        f"import torch\n\n\nclass A:\n    def __init__(self, number):\n        {name} = {value}\n"
        f"{'        ' + use + chr(10) if name == 'cuda' else method}"
    )
    assert f"{name} = {value}" in port_source(source, Level.ROLES).source
    assert "cuda.is_available()" not in port_source(source.replace(use, "x.cuda()"), Level.ROLES).source


MPS = "'mps' if torch.backends.mps.is_available() else 'cpu'"
CHAINS = [
    f"device = 'cuda' if torch.cuda.is_available() else {MPS}",
    f"device = torch.device('cuda' if torch.cuda.is_available() else ({MPS}))",
    f"if torch.cuda.is_available():\n    device = 'cuda'\nelse:\n    device = {MPS}",
]


@pytest.mark.parametrize("chain", CHAINS)
def test_another_accelerator_that_a_script_knows_is_still_chosen(chain):
    source = f"import torch\n{chain}\nx = torch.ones(1).to(device)\nx.sum().backward()\n"
    ported = port_source(source, Level.ROLES).source
    assert "cuda" not in ported
    accelcore = types.ModuleType("accelcore")
    for device, has_mps, expected in (("cpu", True, "mps"), ("cpu", False, "cpu"), ("npu", False, "npu")):
        accelcore.select = lambda device=device: types.SimpleNamespace(device=types.SimpleNamespace(type=device))
        found = {}
        with (
            mock.patch.dict(sys.modules, {"accelcore": accelcore}),
            mock.patch.object(torch.backends.mps, "is_available", return_value=has_mps),
            mock.patch.object(torch, "device", side_effect=lambda kind: kind),
            mock.patch.object(torch, "ones"),
        ):
            exec(ported, found)
        assert found["device"] == expected


BESIDE = [
    "if device.type == 'cuda':\n        x.cuda()\n    elif device.type == 'mps':\n        x.moved = 'mps'",
    "if 'cuda' in str(device):\n        x.cuda()\n    elif 'mps' in str(device):\n        x.moved = 'mps'",
]


@pytest.mark.parametrize("chain", BESIDE)
def test_a_condition_is_false_on_another_accelerator_that_the_file_knows(chain):
    source = f"import torch\n\n\ndef taken(device, x):\n    {chain}\n    return x.moved\n"
    was, now = imported(source), imported(port_source(source, Level.ROLES).source)
    assert "'cuda'" not in port_source(source, Level.ROLES).source
    for name in ("cuda", "mps", "cpu"):
        with (
            mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("cuda")),
        ):
            assert now.taken(torch.device(name), Moved()) == was.taken(torch.device(name), Moved()), name


def test_a_method_is_cuda_is_called_as_before():
    source = "import torch\n\n\ndef f(graph):\n    if graph.is_cuda():\n        graph.cuda()\n"
    assert "if graph.is_cuda():" in port_source(source, Level.ROLES).source


def test_a_line_of_several_statements_that_stays_is_not_touched():
    source = "import torch\nx = 1; y = torch.cuda.CUDAGraph()\n"
    assert source.splitlines()[1] in port_source(source, Level.ROLES).source


@pytest.mark.parametrize(
    ("index", "device"),
    [
        ("y.device", "y.device"),
        ("self.boxes.device", "self.boxes.device"),
    ],
)
def test_a_move_to_the_device_of_another_tensor(index, device):
    source = f"import torch\n\n\ndef f(self, x, y):\n    return x.cuda({index})\n"
    assert f"return x.to({device})\n" in port_source(source, Level.ROLES).source


def test_a_function_that_torch_compiles_asks_for_no_device():
    source = "import torch\n\n\n@torch.jit.script\ndef f(x):\n    return x.cuda()\n"
    outcome = port_source(source, Level.ROLES)
    assert "return x.cuda()" in outcome.source
    assert len(outcome.left) == 1


FALLBACKS = {
    "def main(device):\n    {}\n    return device\n": True,
    "def main(args):\n    {}\n    return args.device\n": True,
    "def main(args):\n    {}\n        pin_memory = False\n    return args.device\n": True,
    "def main():\n    device = 'cuda'\n    {}\n    return device\n": False,
}


@pytest.mark.parametrize(("form", "stays"), FALLBACKS.items())
def test_a_fallback_to_the_cpu_stays_if_the_device_may_be_another_files(form, stays):
    name = "args.device" if "args" in form else "device"
    line = f"if not torch.cuda.is_available():\n        {name} = 'cpu'"
    ported = port_source(f"import torch\n\n\n{form.format(line)}", Level.ROLES).source
    assert ("if not torch.cuda.is_available():" in ported) is stays


def test_a_question_stays_if_a_line_below_it_fails_on_other_devices():
    line = "torch.set_default_tensor_type('torch.cuda.HalfTensor')"
    source = f"import torch\n\n\ndef f(x):\n    if torch.cuda.is_available():\n        {line}\n        x.cuda()\n"
    assert "if torch.cuda.is_available():" in port_source(source, Level.ROLES).source
    assert "cuda" not in port_source(source.replace(f"        {line}\n", ""), Level.ROLES).source


def test_a_question_about_providers_of_another_library_stays():
    source = "import torch\nproviders = ['CUDAExecutionProvider'] if torch.cuda.is_available() else []\n"
    assert "if torch.cuda.is_available()" in port_source(source, Level.ROLES).source


@pytest.mark.parametrize(
    ("use", "has_index"), [("run[str(device)]", False), ("f'run-{device}'", False), ("print(f'on {device}')", True)]
)
def test_a_device_whose_name_is_used_has_no_index_as_before(use, has_index):
    source = (
        f"import torch\ndevice = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\nx = {use}\nx.cuda()\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert ("device = accel.device\n" in ported) is has_index
    assert ("device = torch.device(accel.device.type)\n" in ported) is not has_index


@pytest.mark.parametrize(
    ("test", "below", "other", "kept"),
    [
        ("isinstance(x, torch.cuda.FloatTensor)", "y = y.cuda()", "", False),
        ("not isinstance(x, torch.cuda.FloatTensor)", "y = y.cuda()", "", False),
        ("isinstance(x, torch.cuda.FloatTensor)", "torch.cuda.nvtx.mark('x')", "", True),
        ("isinstance(x, torch.cuda.FloatTensor)", "y = y.cuda()", "MPS = 'mps'\n", True),
    ],
)
def test_a_question_for_a_type_of_one_device_is_also_about_what_is_no_tensor(test, below, other, kept):
    source = (
        f"import torch\n{other}\n\ndef step(x, y):\n    if {test}:\n        {below}\n        y = None\n    return y\n"
    )
    ported = port_source(source, Level.TORCH).source
    assert ("torch.cuda.FloatTensor" in ported) is kept
    assert kept or (imported(ported).step(2, torch.ones(1)) is None) is ("not" in test)
