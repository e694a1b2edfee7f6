"""Questions about a vendor that stay, because a line that depends on them would fail or change on other devices."""

import contextlib
from unittest import mock

import pytest
import torch
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import Known
from accelcore_lint.port.uses import uses_in
from port_sources import imported

OTHER = "torch.backends.mps.is_available()"
LOAD = "state = torch.load(path, map_location={})"


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        (f"half = not torch.cuda.is_available() and {OTHER}", True),
        (f"half = {OTHER} and not torch.cuda.is_available()", True),
        (f"half = not torch.cuda.is_available() and not {OTHER}", False),
        (f"half = torch.cuda.is_available() or {OTHER}", False),
        (LOAD.format("'cpu' if not torch.cuda.is_available() else None"), True),
        (LOAD.format("None if torch.cuda.is_available() else torch.device('cpu')"), True),
        ("map_location = None if torch.cuda.is_available() else 'cpu'", True),
        ("batch = 8 if torch.cuda.device_count() > 1 else 4", False),
        ("rank = torch.distributed.get_rank() if torch.cuda.is_available() else 0", True),
        ("rank = torch.distributed.is_available() if torch.cuda.is_available() else 0", False),
    ],
)
def test_a_question_stays_whose_answer_elsewhere_is_the_originals(line, kept):
    source = f"import torch\n\n\ndef chosen(path, other):\n    {line}\n    return locals()\n"
    assert ("torch.cuda." in port_source(source, Level.ROLES).source) is kept


MARKS = {
    "needs = pytest.mark.skipif(not torch.cuda.is_available(), reason='')": "@needs",
    "": "@pytest.mark.skipif(not torch.cuda.is_available(), reason='')",
    "found = torch.cuda.is_available()": "@pytest.mark.skipif(not found, reason='')",
}


@pytest.mark.parametrize(("made", "mark"), MARKS.items())
@pytest.mark.parametrize(("asserted", "kept"), [("x.device.type == 'cuda'", True), ("x.sum() == 2", False)])
def test_a_test_for_one_vendor_is_still_skipped_elsewhere(made, mark, asserted, kept):
    source = f"import pytest\nimport torch\n\n{made}\n\n\n{mark}\ndef test_move():\n    x = torch.ones(2).cuda()\n"
    ported = port_source(f"{source}    assert {asserted}\n", Level.ROLES).source
    assert ("torch.cuda.is_available()" in ported) is kept


@pytest.mark.parametrize(("name", "kept"), [("found", True), ("n", False)])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_question_stays_that_a_function_gets_by_another_name_above_what_is_left(name, kept, is_first):
    run = "def run(x, fast):\n    if fast:\n        torch.cuda.CUDAGraph()\n"
    main = f"def main(x, n):\n    found = torch.cuda.is_available()\n    run(x, fast={name})\n    if found:\n"
    parts = [run, f"{main}        x.cuda()\n"]
    source = "import torch\n\n\n" + "\n\n".join(parts if is_first else reversed(parts))
    assert ("found = torch.cuda" in port_source(source, Level.TORCH).source) is kept


@pytest.mark.parametrize(("guarded", "kept"), [("self.cuda()", True), ("self.net = torch.nn.DataParallel(net)", False)])
def test_a_named_question_opens_no_condition_over_what_is_left(guarded, kept):
    source = (
        "import torch\n\nUSE = torch.cuda.is_available()\n\n\nclass Agent:\n    def __init__(self, net):\n"
        f"        self.net = net\n        if USE:\n            {guarded}\n\n    def step(self):\n        if USE:\n"
        "            torch.cuda.synchronize()\n\n    def cuda(self):\n        self.net.cuda()\n"
    )
    assert ("USE = torch.cuda.is_available()" in port_source(source, Level.ROLES).source) is kept


@pytest.mark.parametrize(("moved", "kept"), [("model", True), ("torch.ones(2)", False)])
def test_a_question_stays_if_beside_what_is_left_there_is_only_a_switch(moved, kept):
    source = (
        "import torch\nimport torch.backends.cudnn as cudnn\n\n\n"
        "class Bank:\n    def cuda(self):\n        return self\n\n\n"
        f"def run(model):\n    if torch.cuda.is_available():\n        {moved}.cuda()\n        cudnn.benchmark = True\n"
    )
    assert ("if torch.cuda.is_available()" in port_source(source, Level.ROLES).source) is kept


@pytest.mark.parametrize(("index", "kept"), [("pick(), ", True), ("", False)])
def test_a_condition_over_a_copy_that_is_left_stays(index, kept):
    move = f"x = x.cuda({index}non_blocking=True)"
    source = f"import torch\n\n\ndef step(x, args):\n    if torch.cuda.is_available():\n        {move}\n    return x\n"
    assert ("if torch.cuda.is_available():" in port_source(source, Level.ROLES).source) is kept


@pytest.mark.parametrize(
    "test",
    [
        "device.type == torch.device('cuda').type and not torch.cuda.is_available()",
        "device.type == 'cuda' and not torch.cuda.is_available()",
        "not torch.cuda.is_available() and 'cuda' in device.type",
    ],
)
def test_what_a_caller_has_written_still_falls_back_to_the_cpu(test):
    source = f"import torch\n\n\ndef chosen(device):\n    if {test}:\n        return 'cpu'\n    return device\n"
    module = imported(port_source(source, Level.ROLES).source)
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert module.chosen(torch.device("cuda")) == "cpu"
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        assert module.chosen(torch.device("cuda")) == torch.device("cuda")


@pytest.mark.parametrize(
    ("value", "kept"), [("torch.cuda.memory_summary()", True), ("torch.cuda.memory_reserved()", False)]
)
@pytest.mark.parametrize("is_first", [True, False])
def test_methods_stay_that_read_what_another_method_does_not_set_elsewhere(value, kept, is_first):
    methods = [
        f"    def stop(self):\n        if torch.cuda.is_available():\n            self.peak = {value}\n",
        "    def show(self):\n        if torch.cuda.is_available():\n            print(self.peak)\n",
        "    def other(self):\n        return torch.cuda.is_available()\n",
    ]
    source = "import torch\n\n\nclass Trace:\n" + "\n".join(methods if is_first else reversed(methods))
    ported = port_source(source, Level.ROLES).source
    assert ported.count("if torch.cuda.is_available():") == (2 if kept else 0)
    assert "return torch.cuda" not in ported


@pytest.mark.parametrize(("below", "kept"), [("model.cuda()", True), ("torch.ones(1).cuda()", False)])
def test_the_default_of_an_option_stays_if_a_line_below_the_option_does(below, kept):
    source = (
        "import argparse\nimport torch\nfrom nets import Net\n\n\ndef main():\n"
        "    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('--cuda', type=bool, default=torch.cuda.is_available())\n"
        f"    args = parser.parse_args()\n    model = Net()\n    if args.cuda:\n        {below}\n\n\nmain()\n"
    )
    known = Known(own_moves=frozenset({"Net"}))
    assert ("default=torch.cuda.is_available()" in port_source(source, Level.ROLES, known).source) is kept


@pytest.mark.parametrize(("line", "kept"), [("x = x.cuda()", True), ("torch.cuda.synchronize()", False)])
@pytest.mark.parametrize("indent", ["", "    "])
def test_a_move_stays_below_a_question_that_a_file_of_the_project_answers_by_hiding_devices(indent, line, kept):
    hides = f"import os\nif no_gpu:\n    pass\n{indent}os.environ['CUDA_VISIBLE_DEVICES'] = '-1'\n"
    known = Known(imported=True, uses=frozenset(uses_in(hides)))
    source = f"import torch\n\n\ndef loss(x):\n    if torch.cuda.is_available():\n        {line}\n    return x\n"
    ported = port_source(source, Level.ROLES, known).source
    assert ("if torch.cuda.is_available():" in ported) is (kept and bool(indent))


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')", True),
        ("device = torch.device('cuda') if torch.cuda.is_available() else torch.device('cpu')", True),
        ("use_cuda = torch.cuda.is_available()", True),
        ("use_cuda = not args.cpu and torch.cuda.is_available()", False),
        ("print('there is one' if torch.cuda.is_available() else 'there is none')", False),
    ],
)
@pytest.mark.parametrize(("env", "hidden"), [("os.environ", ""), ("os.environ", "1"), ("env", "-1")])
def test_a_choice_stays_in_a_file_that_hides_all_devices(env, hidden, line, kept):
    source = (
        "import os\nimport torch\n\n\ndef main(args):\n    env = os.environ.copy()\n    if args.cpu:\n"
        f"        {env}['CUDA_VISIBLE_DEVICES'] = '{hidden}'\n    {line}\n    return locals()\n"
    )
    asked = "torch.cuda.is_available()" in port_source(source, Level.TORCH).source
    assert asked is (kept and env == "os.environ" and hidden != "1")


@pytest.mark.parametrize(
    "test",
    [
        *("given == dist.Backend.NCCL", "'CUDA out of memory. ' not in str(given)"),
        "own.DataParallel(given, device_ids=gpus)",
    ],
)
def test_a_comparison_with_one_vendors_backend_or_error_and_an_own_wrapper_are_reported(test):
    source = f"import torch.distributed as dist\n\n\ndef is_so(given):\n    return {test}\n"
    assert [note.line for note in port_source(f"{source}\ndevice = 'cuda'\n", Level.ROLES).left] == [5]


@pytest.mark.parametrize(
    ("choice", "made"),
    [
        ("'cuda' if x.is_cuda else 'cpu'", "x.device.type"),
        ('torch.device("cuda" if x.is_cuda else "cpu")', "torch.device(x.device.type)"),
        ("x.get_device() if x.is_cuda else torch.device('cpu')", "x.device"),
        ("'cuda' if x.is_cuda else 'mps'", None),
        ("y.get_device() if x.is_cuda else torch.device('cpu')", None),
    ],
)
def test_a_name_that_a_tensor_chooses_is_that_of_its_device(choice, made):
    outcome = port_source(f"import torch\n\n\ndef f(x, y):\n    return g({choice})\n", Level.ROLES)
    assert (f"return g({made})\n" in outcome.source and not outcome.left) is (made is not None)


@pytest.mark.parametrize(
    ("left", "done"), [("torch.cuda.get_device_properties(0)", False), ("torch.nn.DataParallel(net).cuda()", True)]
)
@pytest.mark.parametrize(
    "head",
    [
        "if torch.cuda.device_count() > 1:\n    print({})\n",
        "for i in range(torch.cuda.device_count()):\n    print({})\n",
        "print([{} for i in range(torch.cuda.device_count())])\n",
        "n = torch.cuda.device_count()\nif n > 1:\n    print({})\n",
        "n = torch.cuda.device_count()\nfor i in range(n):\n    print({})\n",
        "n = torch.cuda.device_count()\nif n > 1:\n    print({}, n)\n",
        "print(torch.cuda.device_count() > 1 and {})\n",
        "def f():\n    return not (torch.cuda.device_count() < 1 or x or {})\n",
    ],
)
def test_a_count_of_devices_stays_over_a_line_that_fails_on_others(head, left, done):
    ported = port_source("import torch\n" + head.format(left), Level.ROLES).source
    assert (".current_accelerator()).device_count()" in ported) is done


@pytest.mark.parametrize(
    ("handler", "kept"),
    [
        ("except Exception:\n    gpu = False", True),
        ("except (AssertionError, OSError):\n    gpu = None", True),
        ("except:\n    device = torch.device('cpu')", True),
        ("except RuntimeError:\n    raise", False),
        ("except RuntimeError as e:\n    print('no memory')\n    x = None", False),
        ("except KeyboardInterrupt:\n    gpu = False", False),
        ("except RuntimeError:\n    print('no')", False),
    ],
)
def test_a_use_by_which_a_script_asks_for_a_device_stays(handler, kept):
    source = f"import torch\ntry:\n    x = torch.ones(2).cuda()\n    gpu = torch.cuda.is_available()\n{handler}\n"
    ported = port_source(source, Level.ROLES).source
    assert ("x = torch.ones(2).cuda()" in ported) is kept
    assert ("torch.cuda.is_available()" in ported) is kept  # it would say yes where the move fails


@pytest.mark.parametrize(("line", "kept"), [("torch.cuda.get_device_properties(0)", True), ("x.cuda()", False)])
def test_a_default_stays_if_a_line_that_fails_elsewhere_depends_on_it(line, kept):
    source = f"import torch\n\n\ndef f(x, gpu=torch.cuda.is_available()):\n    if gpu:\n        {line}\n\n\nf(1)\n"
    assert ("gpu=torch.cuda.is_available()" in port_source(source, Level.ROLES).source) is kept


@pytest.mark.parametrize(("more", "kept"), [("; net.half()", True), ("", False)])
def test_a_condition_over_a_device_that_is_made_current_and_left_stays(more, kept):
    source = f"import torch\nif torch.cuda.is_available():\n    torch.cuda.set_device(0){more}\n    net.cuda()\n"
    assert ("if torch.cuda.is_available():" in port_source(source, Level.ROLES).source) is kept


@pytest.mark.parametrize(
    ("below", "kept"),
    [
        ("gpu = device and torch.cuda.is_available()\n    return torch.cuda.get_device_name(0) if gpu else ''", True),
        ("gpu = device and torch.cuda.is_available()\n    return torch.ones(2).cuda() if gpu else None", False),
        ("return torch.ones(2).cuda()", False),
    ],
)
@pytest.mark.parametrize(
    "line", ["assert torch.cuda.is_available()", "if not torch.cuda.is_available():\n        raise OSError"]
)
def test_an_assertion_stays_beside_a_question_that_does(line, below, kept):
    source = f"import torch\n\n\ndef f(device):\n    {line}\n    {below}\n\n\nf('')\n"
    assert (line.split(":")[0] in port_source(source, Level.TORCH).source) is kept


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("bitsandbytes.optim", "AdamW8bit"),
        ("nvidia.dali.plugin.pytorch", "DALIClassificationIterator"),
        ("faiss", "faiss.StandardGpuResources"),
        ("torch.optim", "AdamW"),
    ],
)
def test_a_question_for_another_tool_of_one_vendor_stays(package, name):
    start = f"import {package}" if "." in name else f"from {package} import {name}"
    source = f"import torch\n{start}\nmade = None\nif torch.cuda.is_available():\n    made = {name}()\nrun(made)\n"
    assert ("if torch.cuda.is_available():" in port_source(source, Level.ROLES).source) is (package != "torch.optim")


@pytest.mark.parametrize("given", ["torch.cuda.is_available()", "has_cuda"])
def test_only_an_answer_that_another_package_gets_stays(given):
    source = (
        "import accelerate\nimport torch\n\nhas_cuda = torch.cuda.is_available()\n"
        f"accelerator = accelerate.Accelerator(cpu=not {given})\n\n\n"
        "def step(x):\n    if torch.cuda.is_available():\n        x = x.cuda()\n    return x\n"
    )
    ported = port_source(source, Level.TORCH).source
    assert f"cpu=not {given}" in ported
    assert ("has_cuda = torch.cuda.is_available()" in ported) is (given == "has_cuda")
    assert "x = x.to(" in ported
    assert "    if torch.cuda.is_available():" not in ported


def test_a_number_of_devices_in_a_text_is_shown_as_it_is():
    source = 'import torch\nshown = "%d GPUs" % torch.cuda.device_count()\nshare = 4 // torch.cuda.device_count()\n'
    module = imported(port_source(source, Level.TORCH).source)
    assert (module.shown, module.share) == ("0 GPUs", 4)


@pytest.mark.parametrize(
    "made",
    [
        "partial(torch.autocast, device_type='cuda')",
        "dict(device_type='cuda')",
        "{'device_type': 'cuda', 'dtype': 0}",
    ],
)
def test_an_autocast_that_is_called_elsewhere_does_not_begin_to_work_on_the_cpu(made):
    outcome = port_source(f"from functools import partial\nimport torch\nautocast = {made}\n", Level.ROLES)
    assert f"autocast = {made}" in outcome.source
    assert [note.line for note in outcome.left] == [3]


def test_a_condition_with_a_check_in_it_is_no_assertion():
    source = (
        "import torch\nif torch.cuda.is_available():\n    for size in sizes:\n        if size % 2:\n"
        "            raise ValueError\ngpu = torch.cuda.is_available() and torch.cuda.get_device_name(0)\n"
    )
    assert "if torch.accelerator.is_available():" in port_source(source, Level.TORCH).source


@pytest.mark.parametrize("flag", ["config['use_cuda']", "config.use_cuda"])
@pytest.mark.parametrize(("below", "kept"), [("Net().cuda()", True), ("torch.ones(1).cuda()", False)])
def test_a_question_stays_that_turns_off_a_flag_of_a_line_that_is_left(flag, below, kept):
    source = (
        "import torch\nfrom nets import Net\n\n\ndef check(config):\n"
        f"    if {flag} and not torch.cuda.is_available():\n        {flag} = False\n        print('CPU')\n"
        f"    return config\n\n\ndef run(args):\n    if args.use_cuda:\n        {below}\n"
    )
    known = Known(own_moves=frozenset({"Net"}))
    assert ("not torch.cuda.is_available()" in port_source(source, Level.TORCH, known).source) is kept


@pytest.mark.parametrize(("name", "kept"), [("where", True), ("device", False)])
@pytest.mark.parametrize(
    ("lines", "question"),
    [
        (
            "{0} = 'cuda:0'\n    n = torch.cuda.device_count()\n    if n == 0:\n        {0} = 'cpu'",
            "cuda.device_count()",
        ),
        (
            "{0} = 'cpu'\n    if torch.cuda.is_available():\n        x = x.cuda()\n        {0} = 'cuda'",
            "cuda.is_available()",
        ),
    ],
)
def test_a_question_stays_beside_the_name_of_a_device_that_is_left(lines, question, name, kept):
    source = f"import torch\n\n\ndef f(x):\n    {lines.format(name)}\n    return x, {name}\n"
    assert (question in port_source(source, Level.TORCH).source) is kept


@pytest.mark.parametrize("given", ["amp_device", "device_type=amp_device"])
@pytest.mark.parametrize(("use", "kept"), [("pass", True), ("x.to(amp_device)", False)])
def test_a_name_that_only_autocast_gets_does_not_begin_to_work_on_the_cpu(given, use, kept):
    source = (
        "import torch\n\n\ndef f(x, other):\n    amp_device = 'mps' if other else 'cuda'\n    "
        f"with torch.autocast({given}, dtype=torch.bfloat16):\n        return (x @ x).dtype\n    {use}\n"
    )
    ported = port_source(source, Level.TORCH).source
    assert ("'cuda'" in ported) is kept
    with pytest.warns(UserWarning, match="CUDA is not available") if kept else contextlib.nullcontext():
        assert imported(ported).f(torch.ones(2, 2), False) is (torch.float32 if kept else torch.bfloat16)


@pytest.mark.parametrize(("other", "kept"), [("mps", True), ("none", False)])
def test_an_autocast_for_one_vendor_does_not_begin_on_an_accelerator_that_the_script_names(other, kept):
    test = "x.device.type == 'cuda'"
    source = (
        f"import contextlib\nimport torch\n\n\ndef f(x, kind='{other}'):\n"
        f"    with torch.autocast(x.device.type) if {test} else contextlib.nullcontext():\n        return x @ x\n"
    )
    assert (test in port_source(source, Level.TORCH).source) is kept


@pytest.mark.parametrize("truth", ["{}", "True if {} else False", "1 if {} else 0"])
@pytest.mark.parametrize(("uses", "kept"), [("kind(x)", True), ("None", False)])
def test_a_flag_stays_however_it_is_written_if_a_type_below_it_does(truth, uses, kept):
    flag = truth.format("torch.cuda.is_available()")
    kind = "torch.cuda.FloatTensor if cuda else torch.FloatTensor" if kept else "2 if cuda else 1"
    source = f"import torch\n\n\ndef loaded(x):\n    cuda = {flag}\n    kind = {kind}\n    return {uses}\n"
    assert ("torch.cuda.is_available()" in port_source(source, Level.ROLES).source) is kept


@pytest.mark.parametrize(
    ("number", "kept"), [("[5]", True), ("[5:]", True), ("[-1]", False), (".split(':')[1]", False)]
)
def test_a_device_stays_whose_number_is_read_by_its_place_in_the_name(number, kept):
    source = (
        "import torch\n\nDEVICE = 'cuda:0'\n\n\ndef main(args):\n    if torch.cuda.is_available():\n"
        f"        torch.cuda.set_device(int(args.device{number}))\n    return torch.ones(2).to(DEVICE)\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert ("DEVICE = 'cuda:0'" in ported) is ("torch.cuda.is_available()" in ported) is kept


@pytest.mark.parametrize(
    ("other", "kept"),
    [("(2, kind='torch.FloatTensor')", True), ("('torch.FloatTensor')", True), ("(2, kind='a')", False)],
)
@pytest.mark.parametrize("test", ["torch.cuda.is_available()", "found"])
def test_a_question_stays_that_names_a_type_of_the_cpu_where_another_file_has_one_vendors(test, other, kept):
    answer = "found = torch.cuda.is_available()\n" if test == "found" else ""
    source = f"import torch\n\n{answer}if {test}:\n    net = build(2).cuda()\nelse:\n    net = build{other}\n"
    ported = port_source(source, Level.ROLES).source
    assert ("torch.cuda.is_available()" in ported) is kept
    assert "build(2).to(accel.device)" in ported
