"""Around a line that is rewritten may be anything: the result is Python whose names are defined, with its comments."""

import ast
import io
import textwrap
import tokenize
from collections import Counter

import pytest
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.rule import TODO
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LINES = [
    "x = x.cuda(  # one\n    non_blocking=True,  # two\n)  # three",
    "d = torch.device(  # why\n    'cuda' if torch.cuda.is_available()  # yes\n    else 'cpu'\n)  # end",
    "net = torch.nn.parallel.DistributedDataParallel(\n    net,  # net\n    device_ids=[local_rank],  # ids\n)",
    "loader = torch.utils.data.DataLoader(\n    data,\n    8,  # batch\n    pin_memory=True,  # pinned\n)",
    "opt = torch.optim.Adam(\n    net.parameters(),  # all\n    1e-3,  # rate\n)",
    "scaler = torch.cuda.amp.GradScaler(  # s\n    enabled=use,  # e\n)",
    "with torch.cuda.amp.autocast(  # a\n    enabled=use  # e\n):\n    y = x",
    "torch.distributed.init_process_group(  # g\n    backend='nccl',  # n\n)",
    "torch.manual_seed(1); torch.cuda.manual_seed(1)  # both",
    "torch.cuda.manual_seed_all(  # s\n    1)  # t",
    "print(f\"{torch.cuda.max_memory_allocated() / 2**20:.1f} {'a'}\")",
    "if use and torch.cuda.is_available():  # c\n    x = x.cuda()  # d\nelse:  # e\n    pass  # f",
    "device = 'cuda:0' if torch.cuda.is_available() else 'cpu'  # d",
    "def late(y, d='cuda'):\n    return y.to(d)",
    "torch.cuda.set_device(0)  # set",
    "torch.cuda.synchronize()  # wait",
    "kinds = ['cuda'] if torch.cuda.is_available() else []",
]
AROUND = [
    "{0}",
    "def work(x, net, use):\n{1}\n    return x",
    "class A:\n    def __init__(self, x, net, use):\n{2}",
    "try:\n{1}\nexcept RuntimeError as accel:\n    raise accel",
    "for accel in range(2):\n{1}",
    "if True:  # one\n    pass\nelse:  # two\n{1}",
    "def work(accel, device, x, net, use):\n{1}\n    return accel, device",
    "def work(torch, x, net, use):\n{1}",
    "accel = 1\n\ndef work(x, net, use):\n    global accel\n{1}\n    accel = x",
    "def main(x, net, use):\n{1}\n\n\nif __name__ == '__main__':\n    main(1, 2, 3)",
    "import torch.multiprocessing as mp\n\ndef work(rank, x, net, use):\n{1}\n\nmp.spawn(work, nprocs=2)",
    "@torch.no_grad()  # no\n# above\ndef work(x, net, use):\n{1}",
]
HEADS = [
    "import torch\n",
    '"""Text."""\nfrom __future__ import annotations\nimport os, torch\n',
    "import torch as th\nimport torch\n",
    "try:\n    import torch\nexcept ImportError:\n    torch = None\n",
    "device = 'cuda'\nimport torch\n",
]
GIVEN = "use, net, data, local_rank = True, None, [], 0\nx = torch.ones(2)\n"


def comments(source):
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT and not token.string.startswith(TODO)]


def undefined(source):
    """Return the names of the port's own making that a file reads and does not bind, with no regard to functions."""
    names = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    bound |= {alias.asname or alias.name.split(".")[0] for node in ast.walk(ast.parse(source))
              if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names}  # fmt: skip
    return {node.id for node in names if isinstance(node.ctx, ast.Load)} & (
        {"accel", "accelcore", "accelerator", "backend", "current_device", "functools", "contextlib"} - bound
    )


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(HEADS), st.sampled_from(AROUND), st.lists(st.sampled_from(LINES), min_size=1, max_size=3),
    st.sampled_from([Level.TORCH, Level.ROLES]),
)  # fmt: skip
def test_around_a_line_may_be_anything(head, around, lines, level):
    text = "\n".join(lines)
    source = head + GIVEN + around.format(*(textwrap.indent(text, "    " * depth) for depth in range(3))) + "\n"
    ported = port_source(source, level).source
    compile(ported, "ported", "exec")
    assert Counter(comments(ported)) == Counter(comments(source))
    own = "accel" in source and "accel" not in head + text
    assert undefined(ported) - ({"accel"} if own else set()) == set()
    assert port_source(ported, level).source == ported


def test_an_import_stands_above_the_first_line_that_needs_it():
    for head in HEADS[3:]:
        scope = {}
        exec(port_source(f"{head}x = torch.ones(2, device='cpu')\ny = x.to('cuda')\n", Level.ROLES).source, scope)
        assert "accelcore" in scope


LIBRARY = """import logging

import torch

logging.basicConfig()
logger = logging.getLogger(__name__)
logger.info("imported")


def to_gpu(x, local_rank=0):
    torch.cuda.set_device(local_rank)
    torch.cuda.synchronize()
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).cuda(), device_ids=[local_rank])
    print(torch.cuda.max_memory_allocated(), torch.optim.SGD(net.parameters(), 0.1))
    return x.cuda(non_blocking=True), torch.device("cuda")
"""


def test_a_module_without_a_script_follows_the_device_that_the_script_makes_current():
    ported = port_source(LIBRARY, Level.ROLES)
    assert (ported.after, ported.left) == (0, [])
    assert "accelcore" not in ported.source
    assert "local_rank=0):\n    if torch.accelerator.is_available():" in ported.source
    assert ported.source.count("    current_device = torch.accelerator.current_accelerator(") == 1
    assert "torch.accelerator.set_device_index(local_rank)" in ported.source
    assert "x.to(current_device, non_blocking=True), current_device" in ported.source


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_function_of_one_line_takes_the_device_of_its_module(level):
    source = "import torch\n\n\ndef to_gpu(x): return x.cuda()\n"
    ported = port_source(source, level)
    assert (ported.after, ported.left) == (0, [])
    compile(ported.source, "ported", "exec")
    hidden = "import os\nimport torch\n\n\ndef hide(n):\n    os.environ['CUDA_VISIBLE_DEVICES'] = n\n\n\n"
    assert port_source(f"{hidden}def to_gpu(x): return x.cuda()\n\n\nhide(n)\nto_gpu(x)\n", level).left


def test_a_condition_that_uses_what_a_condition_that_stays_sets_stays():
    source = (
        "import torch\nif device.type == 'cuda':\n    start = torch.cuda.CUDAGraph()\nelse:\n    begun = time()\n"
        "if device.type == 'cuda':\n    start.query()\n    torch.cuda.synchronize()\n"
        "if device.type == 'cuda':\n    torch.cuda.synchronize()\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert ported.count("if device.type == 'cuda':") == 2
    assert ported.count('if device.type != "cpu":') == 1


@pytest.mark.parametrize(
    "line",
    ["to_gpu(x)", "run(to_gpu)", "if __name__ == '__main__':\n    to_gpu(x).backward()", "for i in x: to_gpu(i)"],
)
def test_a_module_that_does_something_is_a_script(line):
    assert "accel = accelcore.select()" in port_source(f"{LIBRARY}\n\n{line}\n", Level.ROLES).source


def test_a_condition_stays_if_all_that_it_guards_is_left():
    guard = "import torch\nif torch.cuda.is_available():\n    kinds.append('cuda')\n"
    assert "if torch.cuda.is_available():\n" in port_source(guard, Level.ROLES).source
    counted = guard + "    if torch.cuda.device_count() > 1:\n        kinds.append('cuda:1')\n"
    assert "if torch.cuda.is_available():\n" in port_source(counted, Level.ROLES).source
    both = port_source(guard + "    x = x.cuda()\n", Level.ROLES).source
    assert 'if accel.device.type != "cpu":\n' in both
    assert "accel" not in port_source(guard, Level.ROLES).source.replace("(accelcore)", "")


@pytest.mark.parametrize("asked", ["str(device) == 'cuda'", "device == torch.device('cuda')"])
def test_a_device_that_is_compared_by_its_name_has_no_number(asked):
    source = f"import torch\ndevice = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\nis_fast = {asked}\n"
    assert "device = torch.device(accel.device.type)\n" in port_source(source, Level.ROLES).source


def test_a_name_of_a_device_keeps_its_number():
    source = (
        "import torch\ntorch.cuda.set_device(which())\n"
        'device = "cuda:1"\n'
        'first_device = "cuda:0" if torch.cuda.is_available() else "cpu"\n'
    )
    ported = port_source(source, Level.ROLES).source
    assert 'f"{current_device.type}:1"' in ported
    assert 'f"{current_device.type}:0"' in ported


@pytest.mark.parametrize("line", ["isinstance(optimizer, torch.optim.Adam)", "type(optimizer)", "optimizer.__class__"])
def test_an_optimizer_whose_class_is_asked_for_stays_torchs(line):
    source = f"import torch\noptimizer = torch.optim.Adam(net.parameters())\nprint({line})\nx = x.cuda()\n"
    assert "torch.optim.Adam(net.parameters())" in port_source(source, Level.ROLES).source


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        ("import higher", True),
        ("import os, higher", True),
        ("from opacus import PrivacyEngine", True),
        ("from torch_optimizer import Lookahead", True),
        ("from tools import lower", False),
    ],
)
def test_an_optimizer_stays_torchs_for_a_library_that_knows_torchs_classes(lines, kept):
    source = f"import torch\n{lines}\noptimizer = torch.optim.Adam(net.parameters())\nx = x.cuda()\n"
    assert ("torch.optim.Adam(net.parameters())" in port_source(source, Level.ROLES).source) is kept


APEX = """import apex
import torch
from apex.optimizers import FusedAdam
optimizer = FusedAdam(net.parameters())
net = apex.parallel.convert_syncbn_model(net)
"""


@pytest.mark.parametrize(
    ("more", "imports"),
    [
        ("", "from accelcore import apex\nimport torch\nfrom accelcore.apex.optimizers import FusedAdam\n"),
        ("group = apex.parallel.create_syncbn_process_group(2)\n", "\nimport apex\nimport torch\n"),
        ("norm = apex.normalization.FusedRMSNorm\n", "\nimport apex\nimport torch\n"),
        ("wrapper = apex.parallel.DistributedDataParallel\n", "from accelcore import apex\n"),
        ("from apex.fp16_utils import FP16_Optimizer\nFP16_Optimizer(optimizer)\n", "\nfrom apex.optimizers import Fu"),
    ],
)
def test_words_of_apex_that_belong_together_stay_together(more, imports):
    assert imports in port_source(APEX + more, Level.ROLES).source


def test_an_argument_list_after_pinned_memory_stays_valid():
    source = "import torch\nloader = torch.utils.data.DataLoader(data, pin_memory=True, *more)\nx = x.cuda()\n"
    assert "pin_memory=True, *more" in port_source(source, Level.ROLES).source


def test_the_number_of_the_current_device_as_a_device_is_the_device():
    source = (
        "import torch\nx = torch.ones(2, device=torch.cuda.current_device())\ny = x.to(torch.cuda.current_device())\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert "device=accel.device)\ny = x.to(accel.device)\n" in ported


def test_a_function_that_is_given_to_a_launcher_is_not_called_by_the_script():
    source = (
        "import torch\nfrom mine import dist\n\n\ndef main(args):\n    x = torch.ones(2).cuda()\n\n\n"
        'if __name__ == "__main__":\n    dist.launch(main, 2, args=(args,))\n'
    )
    assert "select" not in port_source(source, Level.ROLES).source


def test_a_seed_that_is_drawn_is_drawn_as_often_as_before():
    drawn = "import torch\ntorch.manual_seed(draw())\ntorch.cuda.manual_seed(draw())\n"
    assert port_source(drawn, Level.ROLES).source.count("draw()") == 2
    same = drawn.replace("draw()", "int(args.seed)")
    assert "cuda" not in port_source(same, Level.ROLES).source


@pytest.mark.parametrize("given", ["'cuda:1'", "1"])
def test_a_device_that_is_made_current_is_so_by_its_number(given):
    source = f"import torch\n\n\ndef use():\n    torch.cuda.set_device({given})\n    x = torch.ones(2).cuda()\n"
    ported = port_source(source, Level.ROLES)
    assert (ported.after, ported.left) == (0, [])
    assert "torch.accelerator.set_device_index(1)" in ported.source


def test_a_model_whose_state_is_saved_is_wrapped_in_a_job_of_one_rank_as_well():
    source = (
        "import torch\nnet = torch.nn.parallel.DistributedDataParallel(net.cuda(), device_ids=[local_rank])\n"
        "torch.save(net.{}(), path)\n"
    )
    saved = port_source(source.format("state_dict"), Level.ROLES).source
    assert "DistributedDataParallel(net.to(accel.device), device_ids=[accel.device] if accel.device.type" in saved
    assert "accel.replicate(net.to(accel.device))" in port_source(source.format("cost"), Level.ROLES).source
    part = source.format("cost").replace("net = torch", "model.parts(lambda net: torch").replace("rank])", "rank]))")
    assert "DistributedDataParallel(net.to(accel.device), device_ids=[accel" in port_source(part, Level.ROLES).source


def test_a_module_that_imports_torch_late_does_not_choose_a_device_when_it_is_imported():
    source = "def use(x):\n    import torch\n\n    return torch.cuda.get_device_name(), x.cuda()\n"
    ported = port_source(source, Level.ROLES)
    assert ported.source.startswith("def use(x):\n    import torch\n")
    assert "accelcore.select" not in ported.source
    assert {note.line for note in ported.left} == {4}


def test_devices_that_an_option_counts_are_not_all_devices():
    source = (
        "import torch\nif args.n < 0:\n    args.n = torch.cuda.device_count()\n"
        "net = torch.nn.DataParallel(net, device_ids=list(range(args.n)))\n"
    )
    assert "device_ids=list(range(args.n))" in port_source(source, Level.ROLES).source


def test_a_device_is_chosen_in_the_block_that_begins_what_may_choose_devices():
    source = (
        "import torch\n\n\ndef main():\n    with Engine() as engine:\n        args = engine.args\n"
        "        net = Net().cuda()\n        return net\n\n\nmain()\n"
    )
    inside = "        args = engine.args\n        accel = accelcore.select()\n"
    assert inside in port_source(source, Level.ROLES).source
    outside = source.replace("return net\n", "pass\n    return net.cuda()\n")
    assert "    accel = accelcore.select()\n    with Engine()" in port_source(outside, Level.ROLES).source


def test_a_name_of_a_device_may_be_a_string_with_nothing_to_format():
    source = "import torch\n\n\ndef dev():\n    return torch.device(f'cuda')\n\n\ndev()\n"
    assert "return accel.device\n" in port_source(source, Level.ROLES).source


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("x.cuda(local_rank)", "x.to(torch.device(current_device.type, local_rank))"),
        ("x.cuda(0)", "x.to(torch.device(current_device.type, 0))"),
        ("f'cuda:{local_rank}'", 'f"{current_device.type}:{local_rank}"'),
        ("torch.device('cuda', local_rank)", "torch.device(current_device.type, local_rank)"),
        ("x.cuda()", "x.to(current_device)"),
    ],
)
def test_a_number_in_a_module_without_a_script_stays_a_number(line, becomes):
    source = f"import torch\n\n\ndef use(x, local_rank):\n    device = {line}\n    return device\n"
    assert f"    device = {becomes}\n" in port_source(source, Level.ROLES).source
