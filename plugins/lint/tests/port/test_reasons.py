"""Reasons in comments, each true of its line; and torch's member for the name of a process group."""

import pytest
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.port_command import ported_together
from accelcore_lint.port.project import read_project
from port_sources import written

HEAD = "import torch\nimport torch.distributed as dist\n"


def test_the_file_is_named_that_lightning_trains(tmp_path):
    asked = "import torch\n\nif not torch.cuda.is_available():\n    print('slow')\n\n\ndef get_parser():\n    pass\n"
    main = "import pytorch_lightning as pl\nfrom shared import net\npl.Trainer().fit(net)\n"
    files = {"asr.py": asked, "shared.py": "from asr import get_parser\nnet = 1\n", "main.py": main}
    paths = written(tmp_path, files)
    (note,) = port_source(asked, Level.ROLES, read_project(paths).known(paths[0])).left
    assert "pytorch_lightning trains main.py" in note.text
    own = main + asked
    assert "trains this program" in port_source(own, Level.ROLES).left[0].text


@pytest.mark.parametrize("kind", ['"cuda" if "cuda" in name else "cpu"', '"cuda"'])
def test_the_device_of_an_autocast_is_not_said_to_be_off_on_the_cpu(kind):
    source = f"import torch\nkind = {kind}\ncontext = torch.amp.autocast(device_type=kind, dtype=torch.bfloat16)\n"
    texts = [note.text for note in port_source(source, Level.TORCH).left]
    assert any("enabled=" in text for text in texts)
    assert not any("does nothing" in text for text in texts)


def test_a_module_that_may_be_compiled_is_not_said_to_be():
    source = (
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x.cuda()\n\n\n"
        "made = torch.jit.script(container(torch.nn.LSTM(2, 2)))\n"
    )
    (note,) = port_source(source, Level.ROLES).left
    assert "may" in note.text


@pytest.mark.parametrize(
    ("line", "ported"),
    [
        ('dist.init_process_group(backend=dist.Backend.NCCL, init_method="env://")', "accel.join()"),
        ("group = dist.new_group(backend=dist.Backend.NCCL)", "backend=torch.distributed.get_default_backend"),
        ("backend = dist.Backend.NCCL\ndist.init_process_group(backend)", "backend = torch.distributed.get_default"),
    ],
)
def test_a_backend_that_is_a_member_is_chosen_by_the_device(line, ported):
    outcome = port_source(f"{HEAD}{line}\n", Level.ROLES)
    assert ported in outcome.source
    assert "NCCL" not in outcome.source
    assert outcome.left == []


@pytest.mark.parametrize("line", ["same = dist.get_backend() == dist.Backend.NCCL", "f(dist.Backend.NCCL)"])
def test_a_backend_that_is_a_member_stays_in_other_places(line):
    outcome = port_source(f"{HEAD}{line}\n", Level.ROLES)
    assert f"\n{line}\n" in outcome.source
    assert "branch" not in outcome.left[0].text


@pytest.mark.parametrize("line", ["from nets import *\nnet = nn.DataParallel(net, device_ids=[0, 1])"])
def test_a_wrapper_that_is_known_by_its_name_is_not_said_to_be_unknown(line):
    (note,) = port_source(f"import torch\n{line}\n", Level.ROLES).left
    assert "DataParallel" in note.text


NUMBERED = (
    "import torch\nfrom config import args\n\ndevice = torch.device('cuda:' + str(args.device)) "
    "if torch.cuda.is_available() else torch.device('cpu')\n"
)


@pytest.mark.parametrize(("more", "count"), [("", 1), ("half = torch.cuda.is_available()\nnet.to(device)\n", 2)])
def test_a_choice_that_stays_for_its_own_reason_names_no_other_line(more, count):
    texts = [note.text for note in port_source(NUMBERED + more, Level.ROLES).left]
    assert len(texts) == count
    assert "args.device" in texts[0]
    assert not any("is left tells" in text for text in texts[:1])


def test_no_file_names_itself_as_the_other_one_that_keeps_its_choice(tmp_path):
    files = {"am.py": NUMBERED, "cp.py": NUMBERED, "both.py": "import am\nimport cp\n"}
    paths = written(tmp_path, files)
    for each in ported_together(paths, Level.ROLES, read_project(paths), paths):
        assert not any(f"a line of {each.path.name}" in note.text for note in each.outcome.left)


def test_all_files_name_the_one_whose_line_keeps_their_choices(tmp_path):
    choice = "import torch\n\n\ndef place():\n    return torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"
    tells = "\n\ndef step(net, device):\n    return graph(net) if device.type == 'cuda' else net.step()\n"
    files = {"b.py": choice, "c.py": choice, "d.py": choice, "e.py": choice + tells}
    files |= {"one.py": "import e\nimport d\n", "two.py": "import d\nimport c\n", "three.py": "import c\nimport b\n"}
    paths = written(tmp_path, files)
    outcomes = {
        each.path.name: each.outcome for each in ported_together(paths, Level.ROLES, read_project(paths), paths)
    }
    for name in ("b.py", "c.py", "d.py"):
        assert ["e.py" in note.text for note in outcomes[name].left] == [True]
    texts = [note.text for note in outcomes["e.py"].left]
    assert len(texts) == 2
    assert "this file" in texts[0]


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(("text", "kept"), [('"cuda:" + str(k)', True), ("f'cuda:{k}'", True), ("other", False)])
def test_a_device_stays_that_is_compared_with_the_name_of_a_vendors_device(level, text, kept):
    line = 'self.last_device = "cuda:" + str(max(self.map.keys()))'
    source = (
        f"import torch\n\n\nclass Net(torch.nn.Module):\n    def split(self):\n        {line}\n\n"
        "    def forward(self, h, k, other):\n"
        f"        return h if {text} != self.last_device else h.to(self.last_device)\n"
    )
    outcome = port_source(source, level)
    assert (line in outcome.source) is kept
    assert f"{text} != self.last_device" in outcome.source
    assert any("change both" in note.text for note in outcome.left) is kept


def _reasons(source, level=Level.ROLES):
    return {note.line: note.text for note in port_source(source, level).left}


TWICE = (
    "import torch\n\n\ndef f(net, x):\n"
    "    if torch.cuda.is_available():\n        x = x.cuda()\n        {}\n"
    "    y = net(x)\n"
    "    if torch.cuda.is_available():\n        x = x.cuda()\n"
    "    return y\n"
)


def test_only_a_condition_above_lines_that_are_left_is_said_to_guard_them(tmp_path):
    reasons = _reasons(TWICE.format("s = torch.cuda.CUDAGraph()\n        x = x.cuda(stream=s)"))
    assert "what it guards is left" in reasons[5]
    files = {"one.py": TWICE.format("x.sum()"), "two.py": "import one\nimport pytorch_lightning as pl\npl.Trainer()\n"}
    paths = written(tmp_path, files)
    texts = [note.text for note in port_source(files["one.py"], Level.ROLES, read_project(paths).known(paths[0])).left]
    assert len(texts) == 2
    assert all("pytorch_lightning" in text for text in texts)


def test_a_condition_that_uses_what_another_one_sets_is_not_said_to_guard_what_is_left():
    source = (
        "import torch\n\n\ndef f(net):\n    s = None\n"
        "    if torch.cuda.is_available():\n        s = torch.cuda.CUDAGraph()\n"
        "    if torch.cuda.is_available():\n        net.cuda()\n        net(s)\n"
    )
    reasons = _reasons(source)
    assert "what it guards is left" in reasons[6]
    assert "certain" in reasons[8]
    assert "what it guards" not in reasons[8]


@pytest.mark.parametrize("test", ["not x.is_cuda", "x.is_cuda", "x.device.type != 'cuda'"])
def test_no_condition_is_said_to_be_skipped_that_other_accelerators_may_enter(test):
    source = f"import torch\nfrom . import ops_cuda\n\n\ndef f(x):\n    if {test}:\n        return ops_cuda.g(x)\n"
    (text,) = _reasons(source).values()
    assert "skip" not in text
    assert "as the CPU does" in text


@pytest.mark.parametrize("called", ["self.device = self.choose()", "pass"])
def test_a_device_below_the_line_that_hides_others_is_not_said_to_be_above_it(called):
    source = (
        "import os\nimport torch\n\n\nclass Run:\n    def __init__(self, args):\n        self.args = args\n"
        f"        {called}\n        self.net = make().cuda()\n\n    def choose(self):\n"
        "        os.environ['CUDA_VISIBLE_DEVICES'] = self.args.gpu\n        return torch.device('cuda:0')\n"
    )
    hidden = [text for text in _reasons(source).values() if "ACCEL_DEVICE" in text]
    assert hidden
    assert not any("below" in text for text in hidden)


def test_seeds_of_all_devices_are_not_said_to_stand_alone():
    source = (
        "import torch\n\n\ndef f(net, seed):\n    if seed is not None:\n        torch.manual_seed(seed)\n"
        "    net = torch.nn.DataParallel(net)\n    if seed is not None:\n        torch.cuda.manual_seed_all(seed)\n"
    )
    assert "alone" not in _reasons(source)[9]
    assert "torch.manual_seed(" in _reasons(source)[9]


def test_a_tensor_that_has_the_name_of_a_packed_sequence_elsewhere_is_not_said_to_be_one():
    source = (
        "import torch\nfrom torch.nn.utils.rnn import pack_padded_sequence\n\n\n"
        "def f(x, n):\n    x = pack_padded_sequence(x, n)\n    return x.is_cuda\n\n\n"
        "def g(x):\n    mask = torch.BoolTensor(x.size())\n    if x.is_cuda:\n        mask = mask.cuda()\n"
        "    return mask\n"
    )
    reasons = _reasons(source)
    assert "may be a packed sequence" in reasons[12]
    assert ".data" in reasons[7]


@pytest.mark.parametrize("line", ["def f(x: torch.cuda.FloatTensor): pass", "def f() -> torch.cuda.FloatTensor: pass"])
def test_an_annotation_is_not_said_to_make_a_tensor(line):
    (text,) = _reasons(f"import torch\n{line}\n").values()
    assert "annotation" in text
    assert "torch.Tensor" in text
    assert "zeros" not in text


@pytest.mark.parametrize(
    ("name", "kept"), [("[f'cuda:{i}' for i in range(n)]", True), ("'cuda:' + str(n)", True), ("net.cuda()", False)]
)
def test_an_assertion_stays_above_the_name_of_a_device_that_stays(name, kept):
    source = (
        "import torch\n\nif n > 1:\n    assert torch.cuda.is_available() and torch.cuda.device_count() >= n\n"
        f"    where = {name}\nelse:\n    where = None\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert ("assert torch.cuda.is_available() and torch.cuda.device_count() >= n" in outcome.source) is kept


ASKED = "import torch\nimport torch.backends.cudnn as cudnn\n\n\ndef check(x):\n    {}\n    return x\n"


@pytest.mark.parametrize(
    ("line", "is_left"),
    [
        ("if not cudnn.is_acceptable(x): raise ValueError(x)", True),
        ("assert torch.backends.cudnn.is_available()", True),
        ("kind = 'fast' if torch.backends.cuda.is_built() else 'slow'", True),
        ("if cudnn.version() >= 7000: x = fast(x)", True),
        ("if cudnn.is_available(): cudnn.benchmark = True", False),
        ("if cudnn.is_available():\n        cudnn.benchmark = True\n        x = fast(x)", True),
        ("print('cuDNN', cudnn.is_available(), cudnn.version())", False),
        ("info = {'cuDNN': cudnn.version()}", False),
        ("assert cudnn.enabled", False),
        ("x = torch._C._cudnn_convolution(x, x)", True),
        ("x = torch.cudnn_convolution(x, x)", True),
        ("if torch._C._cuda_getDeviceCount() > 0: x = x + 1", True),
    ],
)
def test_only_what_changes_nothing_on_other_devices_is_called_harmless(line, is_left):
    outcome = port_source(ASKED.format(line), Level.ROLES)
    assert bool(outcome.left) is is_left
    assert is_left or outcome.harmless
    assert outcome.before == 2 + line.count("\n        cudnn")
    assert line.split("\n")[0] in outcome.source
    assert port_source(outcome.source, Level.ROLES).source == outcome.source


def test_switches_of_attention_are_not_said_to_be_ignored_on_the_cpu():
    source = "import torch\ntorch.backends.cuda.enable_flash_sdp(False)\n"
    (note,) = port_source(source, Level.ROLES).harmless
    assert "ignore" not in note.text
    assert "sdpa_kernel" in note.text


@pytest.mark.parametrize("loop", ["for i in range(n):\n    kinds.append(f'cuda:{i}')", "print(f'cuda:{n}')"])
def test_a_number_of_devices_is_not_called_a_condition(loop):
    source = (
        f"import torch\nn = torch.cuda.device_count()\n{loop}\nif n > 1:\n    f(torch.cuda.get_device_capability())\n"
    )
    note = next(note for note in port_source(source, Level.ROLES).left if note.line == 2)
    assert "number" in note.text
    assert "condition" not in note.text


@pytest.mark.parametrize(("command", "is_left"), [("f'CUDA_VISIBLE_DEVICES={n} {line}'", True), ("line", False)])
def test_a_number_of_devices_stays_if_each_command_gets_one_by_a_variable_of_one_vendor(command, is_left):
    head = "import os\nimport torch\n\n\ndef run(line):\n    for n in range(torch.cuda.device_count()):\n"
    source = f"{head}        os.system({command})\n"
    outcome = port_source(source, Level.ROLES)
    assert bool(outcome.left) is is_left
    assert ("torch.cuda.device_count()" in outcome.source) is is_left


def test_a_layer_of_apex_is_reported_with_torchs():
    source = "import torch\nfrom apex import amp\nfrom apex.normalization import FusedLayerNorm\namp._amp_state\n"
    outcome = port_source(f"{source}norm = FusedLayerNorm(3)\n", Level.ROLES)
    assert any("torch.nn.LayerNorm" in note.text for note in outcome.left)


COMMENTED = (
    "import os\nimport torch\n\n\ndef place(net):\n"
    '    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")\n    return net.to(device)\n'
)


@pytest.mark.parametrize(
    "comment",
    [
        '# os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu',
        "# dist.init_process_group('nccl'); torch.cuda.set_device(rank)",
        '# values = {"cuda": 1, "cpu": 2}',
        "# import horovod.torch as hvd",
        "# torch.device('mps') '",
    ],
)
@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_comment_is_no_line_of_the_program(comment, level, tmp_path):
    move = "\n\ndef main(net, x):\n    return place(net)(x.cuda())\n"
    main = "\n\nif __name__ == '__main__':\n    main(torch.nn.Linear(2, 2), torch.ones(2, 2))\n"
    files = {"train.py": f"import torch\nfrom engine import place{move}{main}", "engine.py": COMMENTED}
    paths = written(tmp_path, files)
    plain = ported_together(paths, level, read_project(paths), paths)
    commented = {name: text.replace("\n\n\n", f"\n\n\n{comment}\n", 1) for name, text in files.items()}
    paths = written(tmp_path, commented)
    for each, before in zip(ported_together(paths, level, read_project(paths), paths), plain, strict=True):
        assert each.outcome.source.replace(f"{comment}\n", "") == before.outcome.source
        assert each.outcome.left == []


def test_a_string_with_a_mark_of_a_comment_stays_a_line_of_the_program(tmp_path):
    files = {"train.py": COMMENTED + "place(torch.nn.Linear(2, 2))\n"}
    files["train.py"] += 'note = "a # b"; values = {"cuda": 1, "cpu": 2}\n'
    paths = written(tmp_path, files)
    (ported,) = ported_together(paths, Level.ROLES, read_project(paths), paths)
    assert any("for CUDA" in note.text for note in ported.outcome.left)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ("model, device_ids=ids, **options", "device_ids"),
        ("model, **options", "starred"),
        ("model, [rank]", "position"),
    ],
)
def test_devices_of_a_wrapper_are_said_to_be_given_as_they_are(given, word):
    head = f"{HEAD}from torch.nn.parallel import DistributedDataParallel as DDP\n\n\n"
    source = f"{head}def wrapped(model, ids, rank, options):\n    model.cuda()\n    return DDP({given})\n"
    (note,) = port_source(source, Level.ROLES).left
    assert word in note.text
    assert ("position" in note.text) is (word == "position")


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(("test", "is_left"), [('device.startswith("npu:")', False), ("device", True)])
def test_a_device_whose_name_is_asked_for_its_index_has_one(test, is_left, level):
    source = f"import torch\n\n\ndef choose(device):\n    if {test}:\n        torch.npu.set_device(device)\n"
    outcome = port_source(source, level)
    assert ("torch.npu.set_device(device)" in outcome.source) is is_left
    assert any("no index" in note.text for note in outcome.left) is is_left


@pytest.mark.parametrize("owner", ["super()", "super(Net, self)"])
def test_a_method_that_is_inherited_is_not_said_to_be_the_files_own(owner):
    source = (
        f"import torch\n\n\nclass Net(torch.nn.Module):\n    def cuda(self):\n        {owner}.cuda()\n        f()\n"
    )
    (note,) = port_source(source, Level.ROLES).left
    assert "inherited" in note.text
