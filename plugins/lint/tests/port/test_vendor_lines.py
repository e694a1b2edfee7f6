"""Which lines count as one vendor's, and which names are the script's own."""

import pytest
from accelcore_lint.port import Level, port_source


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
    flag = "import torch\nargs = make()\nmove = {}.cuda\n"
    assert port_source(flag.format("args"), Level.ROLES).after == 0
    assert port_source(flag.format("made"), Level.ROLES).after == 1


@pytest.mark.parametrize(("imports", "after"), [("", 0), ("from torch import cuda\n", 4)])
def test_a_flag_of_the_script_is_no_vendor_line(imports, after):
    source = f"import torch\n{imports}cuda = torch.cuda.is_available()\nif cuda:\n    print(1)\nprint(cuda)\n"
    assert port_source(source, Level.TORCH).after == after


def test_a_name_that_only_an_import_of_all_names_can_bring():
    source = "from model import *\nnet = Net().cuda()\nx = torch.ones(2).cuda()\ntorch.cuda.synchronize()\n"
    assert (port_source(source, Level.ROLES).before, port_source(source, Level.ROLES).after) == (3, 0)
    other = port_source("from model import *\nnet = Net().cuda()\n", Level.ROLES)
    assert (other.rewritten, other.before, other.after) == ([], 1, 1)


@pytest.mark.parametrize(("head", "count"), [("cuda, n=f(1)", 1), ("cudas, n=cuda", 2)])
def test_a_parameter_called_as_a_device_is_no_vendor_line(head, count):
    source = f"import torch\n\n\ndef fit(\n    model, {head}\n):\n    if cuda:\n        model.cuda()\n"
    assert port_source(source, Level.TORCH).before == count + (count == 2)


def test_an_attribute_that_the_script_sets_is_no_vendor_line():
    source = (
        "import torch\n\n\nclass A:\n    def __init__(self, use):\n        self.cuda = use\n        print(self.cuda)\n"
    )
    assert (port_source(source, Level.ROLES).before, port_source(source, Level.ROLES).left) == (0, [])


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("x = moved(x, self.cuda)", 0),
        ("x = moved(x, use=self.cuda)", 0),
        ("x = map(self.cuda, x)", 1),
        ("x = moved(x, self.cuda)\n        self.cuda()", 2),
    ],
)
def test_an_attribute_that_a_function_gets_as_a_flag_is_no_vendor_line(line, count):
    outcome = port_source(f"import torch\n\n\nclass A(Base):\n    def f(self, x):\n        {line}\n", Level.ROLES)
    assert outcome.before == count
    assert bool(outcome.left) is (count > 0)


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("device_ids = [0, 1]", 0),
        ("print(self.output_device, device_ids)", 0),
        ("net = DDP(net, device_ids=device_ids)", 1),
        ("def wrapped(net, device_ids=(), output_device=None): pass", 0),
        ("class Options:\n    cuda: bool = True", 0),
        ("net = DDP(net, device_ids=[0] if many else None)", 0),
        ("net = torch.nn.DataParallel(net, device_ids=[0, 1], output_device=0)", 0),
        ("from torch.nn import DataParallel as DP\nnet = DP(net, device_ids=[0, 1])", 0),
        ("net = torch.nn.DataParallel(DDP(net, device_ids=[0]))", 1),
        ("from torch_geometric.nn import DataParallel\nnet = DataParallel(net, device_ids=[0])", 1),
        ("class DataParallel: pass\nnet = DataParallel(net, device_ids=[0])", 1),
        ("x = variable(x, cuda=True)", 0),
        ("def mode(cudnn=None):\n    if cudnn is not None:\n        print(cudnn)\nmode(cudnn=True)", 0),
        ("from torch.backends import cudnn\ncudnn.deterministic = True", 2),
        ("x = variable(x, cuda)", 1),
        ("x = cuda(x)", 0),
        ("x = cuda(x.cuda())", 1),
        ("cuda = torch.cuda", 1),
        ('use = config["cuda"]', 0),
        ('use = name in ["cuda"]', 1),
        ('parser.add_argument("--gpu", dest="cuda")', 0),
    ],
)
def test_names_of_arguments(line, count):
    assert port_source(f"import torch\n{line}\n", Level.TORCH).before == count


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ('_C.MODEL.DEVICE = "cuda"', 1),
        ("settings = {'device': 'cuda:0'}", 1),
        ("parser.add_argument('--device', default='npu')", 1),
        ("run(device='cuda')", 1),
        ("model = SentenceTransformer(name).cuda()", 1),
        ("_C.MODEL.DEVICE = 'cpu'", 0),
        ("parser.add_argument('--devices', nargs='+', default=['cuda:0'])", 1),
        ("devices = 'cuda'", 1),
        ("name = 'cuda'", 0),
        ('_C.DIST_BACKEND = "nccl"', 1),
        ("dist_params = dict(backend='nccl')", 1),
        ("dist_params = dict(backend='gloo')", 0),
        ("parser.add_argument('--dist-backend', type=str, default='nccl', help='backend')", 1),
        ("parser.add_argument('--dist-backend', default='gloo', help='gloo or nccl')", 0),
        ("session = Session(providers=['CUDAExecutionProvider'])", 1),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '1'", 1),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '1'; import os\nimport tensorflow as tf", 0),
        ("ids = os.environ['CUDA_VISIBLE_DEVICES'].split(',')", 1),
        ("ids = os.environ.get('CUDA_VISIBLE_DEVICES')", 1),
        ("ids = os.getenv('ASCEND_RT_VISIBLE_DEVICES')", 1),
        ("parser.add_argument('--ids', help='CUDA_VISIBLE_DEVICES')", 0),
        ("# os.environ['CUDA_VISIBLE_DEVICES']", 0),
        ("ids = [os.environ[each] for each in ('CUDA_VISIBLE_DEVICES', 'ASCEND_RT_VISIBLE_DEVICES')]", 0),
        ("ids = os.environ['CUDA_VISIBLE_DEVICES']; import tf\nimport tensorflow as tf", 0),
        ("if preds.is_cuda: preds = preds.cpu()", 1),
        ("x = x.cpu() if x.is_npu else x", 1),
        ("if args.is_cuda: print(1)", 0),
        ("x.is_cuda = True", 0),
        ("x = x.is_cuda()", 0),
        ("options(dist_backend='nccl'); import tf\nimport tensorflow as tf", 1),
        ("group = new_group(backend='nccl'); import pd\nimport paddle", 0),
        ("def f():\n    'device=\"cuda\"'", 0),
    ],
)
def test_a_setting_of_a_device_in_a_file_without_torch_is_reported_and_stays(line, count):
    outcome = port_source(f"import yacs\n{line}\n", Level.TORCH)
    assert outcome.source == f"import yacs\n{line}\n"
    assert (outcome.before, outcome.after, [note.line for note in outcome.left]) == (count, count, [2] * count)


def test_a_question_in_a_file_without_torch_says_what_to_ask():
    (note,) = port_source("def accuracy(x):\n    if x.is_cuda:\n        x = x.cpu()\n    return x\n", Level.ROLES).left
    assert "device.type" in note.text


TOOLS = {
    "import faiss\nindex = faiss.GpuIndexFlatL2(faiss.StandardGpuResources(), 8)": [3],
    "import faiss\nindex = faiss.index_cpu_to_all_gpus(faiss.IndexFlatL2(8))": [3],
    "import pynvml\npynvml.nvmlInit()": [2, 3],
    "from pynvml import (\n    nvmlInit,\n)": [2, 3],
    "providers = [\n    'TensorrtExecutionProvider',\n    'CUDAExecutionProvider',\n    'CPU',\n]": [
        3,
        4,
    ],
    "op = load('op', sources=['op.cpp', 'kernels/op.cu'])": [2],
    "gpus = os.environ['CUDA_VISIBLE_DEVICES']": [2],
    "parser.add_argument('--gpus', default='0', help='CUDA_VISIBLE_DEVICES')": [],
    "parser.add_argument('CUDA_VISIBLE_DEVICES', help='gpus')": [2],
    "os.environ.setdefault('ASCEND_RT_VISIBLE_DEVICES', '1')": [2],
    "env['CUDA_VISIBLE_DEVICES'] = env['ASCEND_RT_VISIBLE_DEVICES'] = '1'": [],
    "index = faiss.IndexFlatL2(8)": [],
    "class GpuIndex:\n    nvmlInit = 1": [],
    "is_source = name.endswith('.cu')": [],
}


@pytest.mark.parametrize(("lines", "numbers"), TOOLS.items())
@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_lines_of_a_vendors_tools_are_counted_and_reported(lines, numbers, level):
    outcome = port_source(f"import torch\n{lines}\n", level)
    assert (outcome.before, outcome.after) == (len(numbers), len(numbers))
    assert [note.line for note in outcome.left if note.rule == "tool"] == numbers
    again = port_source(outcome.source, level)
    assert (again.source, again.after) == (outcome.source, outcome.after)
    assert {note.text for note in again.left} == {note.text for note in outcome.left}


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("from activations.cuda.kernels import (\n    Fused,\n)", 2),
        ("try:\n    import torch_npu\nexcept ImportError:\n    torch_npu = None", 5),
        ("def make(size=2,\n         device=torch.cuda):\n    return size", 3),
        ("places = dict(\n    devices=['cuda:0', 'cuda:1'],\n)", 3),
    ],
)
@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_each_line_for_one_vendor_that_stays_is_reported(line, number, level):
    outcome = port_source(f"import torch\n{line}\nx = torch.ones(2).cuda()\n", level)
    assert number in {note.line for note in outcome.left}
    assert outcome.source.count("# TODO(accelcore): ") == len({note.line for note in outcome.left})
    again = port_source(outcome.source, level)
    assert again.source == outcome.source
    assert {note.text for note in again.left} == {note.text for note in outcome.left}


def test_a_method_of_the_projects_own_is_no_vendor_line():
    source = "import torch\n\n\nclass Net:\n    def cuda(self):\n        self.net.cuda()\n"
    assert port_source(source, Level.TORCH).before == 1


def test_equal_lines_for_one_vendor_are_reported_each():
    line = "    from activations.cuda.kernels import Fused\n"
    outcome = port_source(f"import torch\n\n\ndef f():\n{line}\n\ndef g():\n{line}", Level.TORCH)
    assert [note.line for note in outcome.left] == [5, 9]


@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("y = x.is_cuda", 1),
        ("if x.is_cuda: y = 1", 1),
        ("y = x.is_npu and x.is_cuda", 1),
        ("y = x.is_cuda()", 0),
        ("y = args.is_cuda", 0),
        ("y = self.is_cuda", 0),
        ("x.is_cuda = True\ny = x.is_cuda", 0),
        ("class A:\n    is_cuda: bool\ny = x.is_cuda", 0),
        ("is_cuda = True\ny = is_cuda", 0),
    ],
)
def test_a_question_to_a_tensor_is_counted_and_reported(line, count):
    outcome = port_source(f"import torch\n{line}\n", Level.ROLES)
    assert (outcome.before, outcome.after) == (count, count)
    assert len(outcome.left) >= count
    assert all("no rule knows" not in note.text for note in outcome.left)


def test_a_question_to_a_tensor_that_is_asked_of_all_devices_is_no_vendor_line():
    outcome = port_source("import torch\n\n\ndef f(x):\n    if x.is_cuda:\n        x = x.cpu()\n", Level.ROLES)
    assert (outcome.before, outcome.after, outcome.left) == (1, 0, [])
