"""Lines that stay because a rewrite would change what a script does on its own device, on the CPU or on another one."""

import pytest
from accelcore_lint.port import Level, port_source

LEVELS = pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
CHOICE = "torch.cuda.FloatTensor if {} else torch.FloatTensor"


@LEVELS
@pytest.mark.parametrize(
    ("place", "kept"),
    [
        ("class Options:\n    kind = " + CHOICE.format("torch.cuda.is_available()"), True),
        ("class Options:\n    cuda = True\n    kind = " + CHOICE.format("cuda"), True),
        ("kind = " + CHOICE.format("torch.cuda.is_available()"), False),
    ],
)
def test_a_type_in_a_class_is_used_through_its_objects(level, place, kept):
    source = f"import torch\n\n\n{place}\n\n\nx = torch.ones(2).type({'Options().' if kept else ''}kind)\n"
    assert ("kind = torch.cuda.FloatTensor if" in port_source(source, level).source) is kept


@LEVELS
@pytest.mark.parametrize(
    ("condition", "later", "kept"),
    [
        ("cuda", "cuda = False", True),
        ("cuda", "if cuda := ask():\n    pass", True),
        ("args.cuda", "args.cuda = False", True),
        ("args.cuda", "args.debug = False", False),
        ("cuda", "print(cuda)", False),
        ("cuda", "def noise(cuda):\n    return kind(2, 3)", True),
        ("cuda", "def noise(n):\n    return kind(n, 3)", False),
        ("cuda", "sizes = [kind(2, 3) for cuda in range(2)]", True),
    ],
)
def test_a_type_stays_if_its_condition_changes_below(level, condition, later, kept):
    head = "import torch\nfrom data import ask\n\nargs, cuda = ask(), ask()\n"
    source = f"{head}kind = {CHOICE.format(condition)}\n{later}\nx = kind(2, 3)\n"
    assert ("kind = torch.cuda.FloatTensor if" in port_source(source, level).source) is kept


@pytest.mark.parametrize(
    ("use", "has_index"),
    [
        ("torch.cuda.set_device(device)", True),
        ("torch.distributed.init_process_group('nccl', device_id=device)", True),
        ("print(names[device.index])", True),
        ("print(names.index('a'))", False),
    ],
)
@pytest.mark.parametrize("name", ['"cuda:0"', '"cuda", 0', '"cuda:0" if torch.cuda.is_available() else "cpu"'])
def test_a_device_keeps_an_index_that_something_needs(use, has_index, name):
    source = f"import torch\n\nnames = ['a']\ndevice = torch.device({name})\n{use}\nx = torch.ones(2, device=device)\n"
    ported = port_source(source, Level.TORCH).source
    assert ("torch.device(accelerator.type, 0)" in ported) is has_index


@LEVELS
@pytest.mark.parametrize(
    ("function", "kept"),
    [
        ("(lambda s, l: s.cuda())", True),
        ("(lambda x, y: x.cuda() + y)", False),
        ("(lambda x: x.cuda())", False),
    ],
)
def test_a_lambda_for_what_torch_loads_moves_a_storage(level, function, kept):
    source = f"import torch\n\nplace = {function}\nstate = torch.load('a.pt', place)\n"
    assert (".cuda()" in port_source(source, level).source) is kept


@pytest.mark.parametrize(
    ("use", "is_torchs"),
    [
        ("assert type(o) is torch.optim.SGD", True),
        ("print(o.__class__ == torch.optim.SGD)", True),
        ("shadow = {name: p.data for name, p in net.named_parameters()}", True),
        ("shadow = {name: p.data.clone() for name, p in net.named_parameters()}", False),
        ("print(type(loss))", False),
    ],
)
def test_an_optimizer_stays_whose_class_is_asked_for_or_whose_memory_is_kept(use, is_torchs):
    source = (
        "import torch\n\nnet = torch.nn.Linear(2, 1).cuda()\no = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        f"loss = net(torch.ones(2).cuda()).sum()\n{use}\n"
    )
    assert ("o = torch.optim.SGD(" in port_source(source, Level.ROLES).source) is is_torchs


@LEVELS
@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("torch.cuda.current_device()", True),
        ("torch.cuda.get_rng_state()", True),
        ("torch.cuda.synchronize()", True),
        ("n = torch.cuda.device_count()", False),
    ],
)
def test_a_try_that_asks_for_a_device_fails_as_before(level, line, kept):
    source = f"import torch\n\nfound = True\ntry:\n    {line}\nexcept Exception:\n    found = False\n"
    assert (f"    {line}\n" in port_source(source, level).source) is kept


@LEVELS
@pytest.mark.parametrize(
    ("started", "asks"),
    [
        ("with multiprocessing.Pool(2) as pool:\n    pool.map(work, range(2))", False),
        ("print(work(1))", True),
    ],
)
def test_no_device_is_asked_for_before_a_pool(level, started, asks):
    source = (
        "import multiprocessing\nimport torch\n\n\ndef work(i):\n    return torch.ones(1).cuda().item() + i\n\n\n"
        f'device = torch.device("cuda")\n{started}\n'
    )
    on_import = [line for line in port_source(source, level).source.splitlines() if not line.startswith(" ")]
    assert any("check_available=True" in line or "select()" in line for line in on_import) is asks


@LEVELS
@pytest.mark.parametrize(
    ("made", "kept"),
    [
        ('{f"cuda:{i}": "20GiB" for i in range(torch.cuda.device_count())}', True),
        ('{i: f"cuda:{i}" for i in range(torch.cuda.device_count())}', True),
        ('{i: torch.device(f"cuda:{i}") for i in range(torch.cuda.device_count())}', False),
    ],
)
def test_a_dict_counts_the_devices_that_it_names(level, made, kept):
    ported = port_source(f"import torch\n\nmemory = {made}\n", level).source
    assert ("range(torch.cuda.device_count())" in ported) is kept


@LEVELS
@pytest.mark.parametrize(
    ("body", "other", "kept"),
    [
        ('"libops_cuda.so"', '"libops.so"', True),
        ('"cu118"', '"cpu"', True),
        ('"CUDA:0"', '"CPU:0"', True),
        ("cls.CUDA", "cls.CPU", True),
        ("4", "2", False),
    ],
)
def test_a_name_of_a_build_stays_with_its_question(level, body, other, kept):
    source = f"import torch\n\nname = {body} if torch.cuda.is_available() else {other}\n"
    assert ("torch.cuda.is_available()" in port_source(source, level).source) is kept


@LEVELS
@pytest.mark.parametrize(
    ("use", "kept"),
    [
        ("WhisperModel('base', device=device)", True),
        ("WhisperModel('base', str(device))", True),
        ("WhisperModel('base', **{'device': torch.device(device)})", True),
        ("WhisperModel('base')", False),
        ("WhisperModel(torch.ones(2, device=device).numpy())", False),
        ("WhisperModel(net(x.to(device)).cpu().numpy())", False),
        ("torch.ones(2, device=device)", False),
    ],
)
def test_a_package_that_knows_cuda_and_the_cpu_gets_no_other_device(level, use, kept):
    source = (
        "import torch\nfrom faster_whisper import WhisperModel\n\n"
        f"device = 'cuda' if torch.cuda.is_available() else 'cpu'\nmodel = {use}\n"
    )
    assert ("'cuda' if torch.cuda.is_available()" in port_source(source, level).source) is kept


@LEVELS
def test_such_a_package_that_asks_for_cuda_gets_it(level):
    source = "import torch\nimport ctranslate2\n\nmodel = ctranslate2.Generator(path, device='cuda')\n"
    outcome = port_source(source, level)
    assert "ctranslate2.Generator(path, device='cuda')" in outcome.source
    assert outcome.left


@pytest.mark.parametrize("graph", [True, False])
def test_autocast_in_a_whole_graph_is_torchs(graph):
    source = (
        f"import torch\n\nnet = torch.nn.Linear(2, 1).cuda()\n\n\n@torch.compile(fullgraph={graph})\ndef step(x):\n"
        "    with torch.cuda.amp.autocast():\n        return net(x)\n\n\nprint(step(torch.ones(2).cuda()))\n"
    )
    assert ("torch.autocast(accel.device.type" in port_source(source, Level.ROLES).source) is graph


@pytest.mark.parametrize(("number", "is_current"), [("1", True), ("0", False)])
def test_a_script_that_makes_another_device_current_keeps_it(number, is_current):
    source = f"import torch\n\ntorch.cuda.set_device({number})\nx = torch.ones(1).cuda()\n"
    outcome = port_source(source, Level.ROLES)
    assert ("torch.accelerator.set_device_index(1)" in outcome.source) is is_current
    assert ("x = torch.ones(1).to(current_device)" in outcome.source) is is_current
    assert not outcome.left


@LEVELS
@pytest.mark.parametrize(
    ("choices", "kept"),
    [
        ('["cpu", "cuda"]', True),
        ('("cpu", "cuda:0")', True),
        ('[torch.device("cpu"), torch.device("cuda")]', False),
        ("[2, 4]", False),
    ],
)
@pytest.mark.parametrize("index", ["torch.cuda.is_available()", "int(torch.cuda.is_available())"])
def test_a_question_that_takes_a_name_from_a_list_stays(level, choices, kept, index):
    source = f"import torch\n\nchosen = {choices}[{index}]\n"
    assert (index in port_source(source, level).source) is kept


@LEVELS
@pytest.mark.parametrize(
    ("body", "returns"),
    [("self.place = device\n        return super().to(device)", True), ("super().to(device)", False)],
)
@pytest.mark.parametrize("move", ["net = Net().cuda()", "net = Net()\nnet = net.cuda()"])
def test_a_move_whose_value_is_used_becomes_no_to_that_returns_nothing(level, body, returns, move):
    source = (
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def to(self, device):\n        "
        f"{body}\n\n\n{move}\nNet().cuda()\nx = torch.ones(2).cuda()\n"
    )
    assert port_source(source, level).source.count(".cuda()") == (0 if returns else 1)


@pytest.mark.parametrize(
    ("body", "given"),
    [
        ('if device == "cuda":\n            self.x = self.x.to(device)', "accel.device.type"),
        ("self.number = device.split(':')[-1]", "accel.device.type"),
        ("self.x = self.x.to(device)", "accel.device"),
    ],
)
def test_a_method_to_that_takes_a_name_gets_one(body, given):
    source = (
        "import torch\n\n\nclass Batch:\n    def to(self, device):\n        "
        f'{body}\n        return self\n\n\nbatch = Batch().to("cuda")\nx = torch.ones(2, device="cuda")\n'
    )
    assert f"Batch().to({given})" in port_source(source, Level.ROLES).source


@pytest.mark.parametrize(
    ("text", "has_index"),
    [
        ('path = f"{dev}:1"', False),
        ('path = "{}:{}".format(dev, 1)', False),
        ('path = "%s:%d" % (dev, 1)', False),
        ('path = str(dev) + ":1"', False),
        ("print(str(dev))", True),
        ('path = f"{size}:1"', True),
    ],
)
def test_a_device_of_which_a_text_is_made_has_no_index(text, has_index):
    source = f"import torch\n\nsize = 3\ndev = torch.device('cuda')\n{text}\n"
    made = "accel.device" if has_index else "torch.device(accel.device.type)"
    assert f"dev = {made}\n" in port_source(source, Level.ROLES).source


@pytest.mark.parametrize(
    ("use", "has_index"),
    [('int(dev.split(":")[1])', True), ("int(dev[-1])", True), ("torch.ones(2, device=dev)", False)],
)
@pytest.mark.parametrize("name", ['"cuda:0"', '"cuda:0" if torch.cuda.is_available() else "cpu"'])
def test_a_name_keeps_an_index_that_is_read(use, has_index, name):
    ported = port_source(f"import torch\n\ndev = {name}\nn = {use}\n", Level.TORCH).source
    assert (":0" in ported or "type, 0)" in ported) is has_index


@LEVELS
@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("backend = 'nccl' if device.startswith('cuda') else 'gloo'", True),
        ("if device.startswith('cuda'):\n    x = x.to(device)", True),
        ("if device.startswith('cuda'):\n    print(device)", False),
        ("wide = device.startswith('cuda')\nx = x.to(device) if wide else x", True),
    ],
)
def test_a_question_for_the_beginning_of_a_name_decides_as_others_do(level, line, kept):
    source = f"import torch\n\nx = torch.ones(2)\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'\n{line}\n"
    assert ("device = 'cuda' if torch" in port_source(source, level).source) is kept


@pytest.mark.parametrize(("line", "is_torchs"), [("self.mixed = autocast()", True), ("mixed = autocast()", False)])
def test_autocast_that_an_object_keeps_can_be_copied(line, is_torchs):
    source = (
        "import torch\nfrom torch.cuda.amp import autocast\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n"
        f"        super().__init__()\n        {line}\n\n\nnet = Net().cuda()\nnet(torch.ones(2).cuda())\n"
    )
    assert ("= torch.autocast(accel.device.type" in port_source(source, Level.ROLES).source) is is_torchs


@LEVELS
@pytest.mark.parametrize(
    ("test", "lines", "kept"),
    [
        ("", ("    return torch.load(path)", "return torch.load(path, map_location='cpu')"), True),
        ("", ("    return torch.load(path)", "return torch.load(path, map_location=device)"), True),
        ("not ", ("    return torch.load(path, map_location='cpu')", "return torch.load(path)"), True),
        ("", ("    return torch.ones(2).cuda()", "return torch.load(path, map_location='cpu')"), False),
    ],
)
def test_a_load_to_where_cuda_saved_keeps_its_question(level, test, lines, kept):
    body = "\n    ".join((f"if {test}torch.cuda.is_available():", *lines))
    ported = port_source(f"import torch\n\n\ndef load(path, device):\n    {body}\n", level)
    assert ("torch.cuda.is_available()" in ported.source) is kept
    assert bool(ported.left) is kept


@LEVELS
@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        ("if device.type == 'cuda':\n    net = net.half()", True),
        ("if device.type == 'cuda':\n    print(net)", False),
        ("try:\n    torch.cuda.init()\n    torch.cuda.current_device()\nexcept Exception:\n    wide = False", True),
    ],
)
def test_a_question_for_a_precision_and_one_by_a_try_keep_the_others(level, lines, kept):
    head = "import torch\nfrom data import net, x, device\n\nwide = torch.cuda.is_available()\n"
    source = f"{head}{lines}\nif wide:\n    x = x.cuda()\n"
    assert ("wide = torch.cuda.is_available()" in port_source(source, level).source) is kept


@LEVELS
@pytest.mark.parametrize(
    ("rest", "kept"),
    [("return Norm.apply(x)", True), ("return norm_cuda.forward(x)", True), ("return norm(x.cuda())", False)],
)
def test_a_return_for_the_cpu_stays_above_lines_of_which_none_is_rewritten(level, rest, kept):
    source = f"import torch\nimport norm_cuda\n\n\ndef f(x):\n    if not x.is_cuda:\n        return x\n    {rest}\n"
    assert ("if not x.is_cuda:" in port_source(source, level).source) is kept
