"""Names that a function gives to a condition or to a type, questions for types, sizes, and defaults of keys."""

import pytest
import torch
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import Known
from port_sources import imported

FLAG = """import torch


def move(x, y, seen):
    on_device = {flag}
    if on_device:
        {guarded}
    z = y.cuda() if on_device else y
    {last}
    return z
"""


@pytest.mark.parametrize("flag", ["x.is_cuda", "x.device.type == 'cuda'", "seen and x.is_cuda"])
@pytest.mark.parametrize(
    ("guarded", "last", "opens"),
    [
        ("y = y.cuda()", "pass", True),
        ("y = y.cuda(pick())", "pass", False),
        ("print('no device is asked')", "pass", False),
        ("y = y.cuda()", "print(on_device)", False),
        ("y = y.cuda()", "on_device = seen", False),
    ],
)
def test_a_name_of_a_condition_opens_if_all_that_asks_it_is_rewritten(flag, guarded, last, opens):
    ported = port_source(FLAG.format(flag=flag, guarded=guarded, last=last), Level.ROLES).source
    assert ('x.device.type != "cpu"' in ported) is opens
    assert (flag in ported) is not opens


@pytest.mark.parametrize(("place", "kept"), [("x.is_cuda = True", True), ("is_cuda = x.ndim", False)])
def test_a_variable_of_a_functions_own_is_no_attribute(place, kept):
    source = f"import torch\n\n\ndef move(x, y):\n    if y.is_cuda:\n        y = x.cuda()\n    {place}\n    return y\n"
    assert ("if y.is_cuda:" in port_source(source, Level.ROLES).source) is kept


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("config.get('device', 'cuda')", "config.get('device', current_device.type)"),
        ("getattr(args, 'device', 'cuda:0')", "getattr(args, 'device', f\"{current_device.type}:0\")"),
        ("config.get('name', 'cuda')", "config.get('name', 'cuda')"),
        ("config.get('cuda', 'device')", "config.get('cuda', 'device')"),
        ("get('cuda')", "get('cuda')"),
    ],
)
def test_a_default_of_a_key(line, new):
    source = f"import torch\n\n\ndef ask(config, args, f, get):\n    return {line}\n"
    assert new in port_source(source, Level.ROLES).source


@pytest.mark.parametrize(
    ("guard", "body", "opens"),
    [
        ("if {}:", "w = w.half()", True),
        ("if w is None or {}:", "w = w.cuda()", True),
        ("if w is None or {}:", "w = w.half()", False),
        ("if {}:", "w = nms_kernel(w)", False),
        ("while {}:", "w = w.half()", False),
    ],
)
def test_a_question_for_a_type_of_one_device_asks_for_the_dtype(guard, body, opens):
    test = "z.type() == 'torch.cuda.HalfTensor'"
    source = f"import torch\n\n\ndef f(z, w):\n    {guard.format(test)}\n        {body}\n    return w\n"
    ported = port_source(source, Level.ROLES).source
    assert ('z.dtype == torch.float16 and z.device.type != "cpu"' in ported) is opens
    assert (test in ported) is not opens


@pytest.mark.parametrize(
    ("line", "size", "certain"),
    [
        ("n = lengths.max().item()", "n", True),
        ("n = int(lengths[0])", "n", True),
        ("pass", "torch.Size(shape)", True),
        ("pass", "most", True),
        ("most = shape", "most", False),
        ("n = lengths.tolist()", "n[0]", False),
        ("for n in lengths: pass", "n", False),
        ("pass", "shape", False),
    ],
)
def test_a_tensor_of_a_size_is_made_on_the_device(line, size, certain):
    source = (
        f"import torch\n\n\ndef f(lengths, shape, most=4096):\n    {line}\n    return torch.cuda.LongTensor({size})\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert (f"torch.empty({size}, dtype=torch.int64, device=current_device)" in ported) is certain
    assert (f"torch.cuda.LongTensor({size})" in ported) is not certain


@pytest.mark.parametrize(
    ("name", "guard", "certain"),
    [
        ("get_device", "torch.cuda.is_available()", True),
        ("best", "torch.cuda.is_available()", False),
        ("device", "x", False),
    ],
)
def test_a_function_that_is_called_as_a_device_returns_its_type(name, guard, certain):
    source = f"import torch\n\n\ndef {name}(x):\n    if {guard}:\n        return 'cuda'\n    return 'cpu'\n"
    outcome = port_source(source, Level.ROLES)
    assert ("return current_device.type" in outcome.source) is certain
    assert (outcome.after == 0) is certain


@pytest.mark.parametrize("module", ["torch.cuda.amp", "torch.cuda.amp.grad_scaler"])
def test_an_annotation_of_a_scaler_is_of_any_device(module):
    source = f"import torch\nfrom {module} import GradScaler\n\n\nclass A:\n    scaler: GradScaler = None\n\n"
    outcome = port_source(f"{source}    def get(self) -> GradScaler:\n        return self.scaler\n", Level.ROLES)
    assert outcome.after == 0
    assert "scaler: torch.amp.GradScaler = None" in outcome.source


def test_a_device_map_takes_the_name_of_a_device():
    source = "import torch\nfrom transformers import AutoModel\n\n"
    source += "model = AutoModel.from_pretrained(path, device_map='cuda:0')\n"
    assert "device_map=str(accel.device)" in port_source(source, Level.ROLES).source


@pytest.mark.parametrize(
    ("value", "precision"),
    [
        ("True", '"high"'),
        ("args.tf32", '"high" if args.tf32 else "highest"'),
        ("True if args else False", '"high" if (True if args else False) else "highest"'),
    ],
)
def test_the_precision_of_products_follows_the_scripts_own_value(value, precision):
    source = f"import torch\n\n\ndef f(args):\n    torch.backends.cuda.matmul.allow_tf32 = {value}\n"
    assert f"    torch.set_float32_matmul_precision({precision})\n" in port_source(source, Level.ROLES).source


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    ("first", "later", "kept"),
    [
        ("pass", "pass", False),
        ("x = x * 2", "pass", False),
        ("pass", "x = x.cpu()", True),
        ("pass", "made = lambda x: FloatTensor(2)", True),
        ("pass", "def inner(x):\n        return FloatTensor(2)", True),
        ("pass", "print(FloatTensor)", True),
    ],
)
def test_a_type_that_a_tensor_chooses_makes_tensors_where_that_one_is(level, first, later, kept):
    source = (
        "import torch\n\n\ndef offsets(x, anchors):\n    {}\n"
        "    FloatTensor = torch.cuda.FloatTensor if x.is_cuda else torch.FloatTensor\n"
        "    Long = torch.cuda.LongTensor if x.is_cuda else torch.LongTensor\n    {}\n"
        "    return torch.zeros(2).type(FloatTensor), FloatTensor(x.shape), FloatTensor(2, 1), Long([1])\n"
    )
    ported = port_source(source.format(first, later), level).source
    assert ("torch.cuda.FloatTensor" in ported) is kept
    if not kept:
        assert "cuda" not in ported
        for device in ("cpu", "meta"):
            made = imported(ported).offsets(torch.ones(3, device=device), [1])
            assert [each.device.type for each in made] == [device] * 4
            assert [each.dtype for each in made] == [torch.float32] * 3 + [torch.int64]
            assert [tuple(each.shape) for each in made] == [(2,), (3,), (2, 1), (1,)]


@pytest.mark.parametrize(
    ("head", "body", "known"),
    [
        ("counts, m=0.5", "x = 1.0 / np.sqrt(counts)\n    x = x * (m / np.max(x))\n    x = T(x)", True),
        ("counts", "x = []\n    x.append(counts)\n    x = T(x).t()", True),
        ("counts", "x = [0] * counts\n    x = T(x)", True),
        ("counts, m", "x = np.sqrt(counts)\n    x = x * m\n    x = T(x)", False),
        ("x", "x = x * 2\n    x = T(x)", False),
        ("xs", "for x in xs:\n        x = T(x)", False),
    ],
)
def test_data_of_the_host_is_moved_after_it_became_a_tensor(head, body, known):
    source = f"import numpy as np\nimport torch\n\n\ndef f({head}):\n    {body}\n    return x\n\n\nx = f(1).sum()\n"
    ported = port_source(source.replace("T(", "torch.cuda.FloatTensor("), Level.ROLES, Known(imported=True)).source
    assert ("x = torch.FloatTensor(x).to(current_device)" in ported) is known
    assert ("torch.cuda" in ported) is not known
