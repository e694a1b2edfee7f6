"""Objects of the project's own: a port asks them for nothing that the original does not ask."""

import pytest
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import read_project
from port_sources import written

LEARNER = "class Learner{base}:\n    def cuda(self{more}):\n        self.where = 'its own'\n"


def _ported(folder, source, **files):
    paths = written(folder / "project", {"user.py": source, **{f"{name}.py": text for name, text in files.items()}})
    return port_source(source, Level.ROLES, read_project(paths).known(paths[0])).source


@pytest.mark.parametrize(
    ("base", "more", "moved", "kept"),
    [
        ("", "", "LEARNERS[name](model).cuda()", True),
        ("", "", "model.cuda()", True),
        ("(object)", "", "learner.cuda()", True),
        ("(nn.Module)", "", "LEARNERS[name](model).cuda()", False),
        ("", "", "model.cuda(non_blocking=True)", False),
        ("", ", non_blocking=False", "model.cuda(non_blocking=True)", True),
        ("", "", "torch.ones(2).float().cuda()", False),
        ("", "", "made.cuda()", False),
        ("", "", "torch.from_numpy(model).permute(1, 0).cuda()", False),
        ("", "", "torch.nn.functional.relu(model).cuda()", False),
        ("", "", "model.learner().cuda()", True),
    ],
)
def test_an_object_of_an_unknown_class_may_have_no_method_to(tmp_path, base, more, moved, kept):
    source = (
        "import torch\nfrom learners import LEARNERS\n\n\ndef run(name, model):\n    made = torch.nn.Linear(2, 2)\n"
        f"    learner = LEARNERS[name](model)\n    return learner, {moved}\n"
    )
    learner = LEARNER.format(base=base, more=more)
    ported = _ported(
        tmp_path, source, learners=f"import torch.nn as nn\n\n\n{learner}\n\nLEARNERS = {{'a': Learner}}\n"
    )
    assert (moved in ported) is kept
    assert ("(Learner in learners.py)" in ported) is kept


@pytest.mark.parametrize(("moved", "kept"), [("model.cuda()", True), ("made.cuda()", False)])
def test_a_question_stays_above_an_object_whose_move_is_left(tmp_path, moved, kept):
    source = (
        "import torch\nfrom learners import LEARNERS\n\n\ndef run(x, model):\n    made = torch.nn.Linear(2, 2)\n"
        f"    if torch.cuda.is_available():\n        {moved}\n        y = torch.ones(2).cuda()\n    return made(x)\n"
    )
    learner = LEARNER.format(base="", more="")
    ported = _ported(tmp_path, source, learners=f"import torch\n\n\n{learner}\n\nLEARNERS = {{'a': Learner}}\n")
    assert ("if torch.cuda.is_available():" in ported) is kept
    assert (moved in ported) is kept


@pytest.mark.parametrize(
    ("above", "kept"), [("x = torch.ones(2)", False), ("y = 2", True), ("for x in data: pass", True)]
)
@pytest.mark.parametrize(
    "line", ["import learners", "from other.learners import Learner", "import middle", "import torch"]
)
def test_only_an_object_that_may_come_to_a_script_may_be_of_the_projects_class(tmp_path, line, above, kept):
    source = f"import torch\n{line}\nfrom data import data\n\nx = data[0]\n{above}\nx = x.cuda()\n"
    learner = LEARNER.format(base="", more="") + "        return self\n"
    files = {"learners": learner, "middle": "from .models.learners import Learner\n"}
    ported = _ported(tmp_path, f"{source}train(x)\n", **files)
    assert ("x.cuda()" in ported) is (kept and line != "import torch")


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        ("x = Variable(x.cuda())", False),
        ("x = x.cuda()\n        y = Variable(x)", False),
        ("x = x.cuda()\n        y = F.relu(x)", False),
        ("x = x.cuda()\n        x = x.part\n        y = F.relu(x)", True),
        ("x = x.cuda()\n        y = take(x)", True),
        ("net = torch.nn.Linear(2, 2)\n        if x:\n            net = Net()\n        net = net.cuda()", False),
    ],
)
@pytest.mark.parametrize("own", [True, False])
def test_what_a_function_of_tensors_gets_is_a_tensor(tmp_path, lines, kept, own):
    source = (
        "import torch\nfrom learners import take, Net\nfrom torch.autograd import Variable\n"
        f"from torch.nn import functional as F\n\n\ndef run(loader):\n    for x in loader:\n        {lines}\n"
    )
    learner = LEARNER.format(base="(nn.Module)" if own else "", more="") + "        return self\n"
    learner += (
        "\n\ndef take(net):\n    return net\n\n\nclass Net(nn.Module):\n    pass\n\n\nx = Learner()\nnet = take(x)\n"
    )
    ported = _ported(tmp_path, source, learners=f"import torch.nn as nn\n\n\n{learner}")
    assert (".cuda()" in ported) is kept


@pytest.mark.parametrize("is_library", [True, False])
def test_a_file_that_defines_cuda_still_moves_tensors(is_library):
    lines = "    def cuda(self):\n        self.net.cuda()\n\n"
    lines += "    def step(self, x):\n        return x.cuda(non_blocking=1)\n"
    source = f"import torch\n\n\nclass Learner:\n{lines}\n"
    ported = port_source(source if is_library else f"{source}\nLearner().step(torch.ones(2))\n", Level.ROLES).source
    assert "self.net.cuda()" in ported
    assert "x.cuda(" not in ported


@pytest.mark.parametrize("given", ["device_id=device", "device_id=torch.device(f'cuda:{local_rank}')"])
def test_a_process_group_gets_a_device_with_an_index(given):
    source = (
        "import os\nimport torch\nimport torch.distributed as dist\n\n\ndef start():\n"
        "    local_rank = int(os.environ['LOCAL_RANK'])\n    device = torch.device(f'cuda:{local_rank}')\n"
        f"    dist.init_process_group(backend='nccl', {given})\n    torch.cuda.set_device(local_rank)\n"
        "    return device\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert "torch.device(current_device.type, local_rank)" in ported
    assert "device_id=current_device" not in ported


@pytest.mark.parametrize(
    ("guarded", "kept"), [("print(torch.cuda.get_device_name(0))", True), ("torch.cuda.synchronize()", False)]
)
def test_a_condition_in_a_project_that_knows_mps_opens_only_for_what_mps_has(tmp_path, guarded, kept):
    source = f"import torch\n\n\ndef show(device_type):\n    if device_type == 'cuda':\n        {guarded}\n"
    common = "import torch\n\n\ndef detect():\n    return 'mps' if torch.backends.mps.is_available() else 'cpu'\n"
    ported = _ported(tmp_path, source, common=common)
    assert ("if device_type == 'cuda':" in ported) is kept
    assert "if device_type == 'cuda':" not in _ported(tmp_path / "other", source)


@pytest.mark.parametrize(
    ("moved", "kept"),
    [
        ("x, y = x.cuda(), y.cuda()", False),
        ("y = x.cuda().sum()", False),
        ("x.cuda()", True),
        ("return x.cuda()", True),
    ],
)
@pytest.mark.parametrize("returns", [True, False])
def test_the_value_of_a_method_that_returns_nothing_is_not_used(tmp_path, moved, kept, returns):
    learners = LEARNER.format(base="", more="") + "        return self\n" * returns
    source = f"import torch\n\n\ndef run(x, y):\n    {moved}\n    return x, y\n"
    assert (".cuda()" in _ported(tmp_path, source, learners=learners)) is (kept or returns)


@pytest.mark.parametrize(
    ("learner", "net", "kept"),
    [
        ("class Learner:", "class Net(nn.Module):", False),
        ("class Learner:", "class Net(Base):", True),
        ("class Learner:", "class Net(Learner):", True),
        ("class Learner:", "class Net(nn.Module, Learner):", True),
        ("class Net:\n    pass\n\n\nclass Learner:", "class Net(nn.Module):", True),
    ],
)
def test_a_module_that_the_project_defines_is_torchs(tmp_path, learner, net, kept):
    learner += "\n    def __init__(self):\n        self.net = Net()\n\n    def cuda(self):\n        self.net.cuda()\n"
    nets = f"import torch.nn as nn\n\n\n{net}\n    pass\n"
    source = f"import torch\nfrom nets import Net\n\n\n{learner}        return self\n"
    assert ("self.net.cuda()" in _ported(tmp_path, source, nets=nets)) is kept


@pytest.mark.parametrize("where", ["user", "nets", ""])
@pytest.mark.parametrize("owner", ["self", "self.net", "x", "devices"])
def test_an_object_with_a_get_device_of_its_own_may_have_no_device(tmp_path, owner, where):
    own = "\n    def get_device(self):\n        return next(self.parameters()).device.index\n"
    nets = "import torch.nn as nn\nfrom other import devices\n\n\nclass Net(nn.Module):\n"
    step = f"    def step(self, x, mask):\n        return x * mask.cuda({owner}.get_device(), non_blocking=True)\n"
    ported = _ported(
        tmp_path,
        f"import torch\n{nets}{step}{own * (where == 'user')}",
        nets=f"{nets}    pass\n{own * (where == 'nets')}",
    )
    is_tensors = not where and owner in ("self.net", "x")
    assert (f"mask.to({owner}.device, non_blocking=True)" in ported) is is_tensors
    assert (f"mask.cuda({owner}.get_device(), non_blocking=True)" in ported) is not is_tensors


@pytest.mark.parametrize(
    ("moves", "call", "more", "kept"),
    [
        ("self.net.cuda()", "self.cuda()", "", False),
        ("self.net.cuda()", "self.other.cuda()", "", True),
        ("self.net.cuda(), self.make().cuda()", "self.cuda()", "", True),
        ("self.net.cuda(), move(self)", "self.cuda()", "", True),
        ("self.net.cuda(), torch.cuda.nvtx.mark('moved')", "self.cuda()", "", True),
        ("self.net.cuda()", "self.cuda()", "class Other(Agent):\n    def cuda(self):\n        take()\n", True),
    ],
)
def test_a_call_of_the_classs_own_method_stays_as_it_is_and_its_question_does_not(tmp_path, moves, call, more, kept):
    source = (
        "import torch\nUSE = torch.cuda.is_available()\n\n\nclass Agent:\n    def __init__(self):\n"
        f"        self.net = torch.nn.Linear(2, 2)\n        if USE:\n            {call}\n\n"
        f"    def cuda(self):\n        {moves}\n"
    )
    ported = _ported(tmp_path, source, others=f"from user import Agent\n{more}")
    assert ("USE = torch.cuda.is_available()" in ported) is kept
    assert (call in ported, "self.net.to(" in ported) == (True, True)
    assert _ported(tmp_path / "again", ported, others=f"from user import Agent\n{more}") == ported


@pytest.mark.parametrize(
    ("line", "use", "kept"),
    [
        ("from somelib.scenes import Scene", "made(1)", True),
        ("import somelib", "made = somelib.Scene(2)", True),
        ("from somelib.scenes import Scene", "made.eval()", False),
        ("from somelib.scenes import Scene", "made = torch.nn.DataParallel(made)", False),
        ("from somelib.scenes import Scene", "made = torch.nn.Linear(2, 2)", False),
        ("from scenes import Scene", "made(1)", False),
        ("from .scenes import Scene", "made(1)", False),
        ("from segmentation_models_pytorch import Scene", "made(1)", False),
        ("from timm.models import Scene", "made(1)", False),
        ("from torchvision.models import Scene", "made(1)", False),
    ],
)
def test_an_object_of_another_packages_class_may_have_no_method_to(tmp_path, line, use, kept):
    name = "somelib.Scene" if line == "import somelib" else "Scene"
    source = f"import torch\n{line}\n\n\ndef run():\n    made = {name}(1)\n    made.cuda()\n    {use}\n"
    ported = _ported(tmp_path, source, scenes="class Scene:\n    pass\n")
    assert ("    made.cuda()\n" in ported) is kept
    assert ("made.to(" in ported) is not kept


@pytest.mark.parametrize(("owner", "kept"), [("data", True), ("self.batch", True), ("data.x", False), ("x", False)])
def test_a_graph_of_another_package_has_no_device(tmp_path, owner, kept):
    source = f"import torch\n\n\ndef run(self, data, x):\n    if {owner}.is_cuda:\n        x = x.cuda()\n    return x\n"
    graphs = "from torch_geometric.data import Data\n"
    assert (f"if {owner}.is_cuda:" in _ported(tmp_path, source, graphs=graphs)) is kept
    assert f"if {owner}.is_cuda:" not in _ported(tmp_path / "again", source)


@pytest.mark.parametrize(
    ("more", "body", "kept"),
    [
        ("", "return self.to(device)", False),
        (", non_blocking=False", "return self.to(device)", True),
        ("", '"""Move it."""\n        return self.to("cuda")', False),
        ("", "return self.to(torch.device(device))", False),
        ("", "return self.to(device or 'cuda')", False),
        ("", "return self.to(f'cuda:{device}')", False),
        ("", "return self.to(device).half()", True),
        ("", "return self.to(device, torch.half)", True),
        ("", "return self.to('cuda:1')", True),
        ("", "return self.to(self.where)", True),
        ("", "self.to(device)", True),
        ("", "self.moved = True\n        return self.to(device)", True),
        ("", "return self.to(device).eval()\n\n    def npu(self):\n        self.where = 0", True),
    ],
)
def test_a_method_cuda_that_only_calls_to_is_no_other_one(tmp_path, more, body, kept):
    batch = (
        "class Batch:\n    def to(self, device):\n        self.x = self.x.to(device)\n        return self\n\n"
        f"    def cuda(self, device='cuda'{more}):\n        {body}\n"
    )
    source = "import torch\nfrom batches import Batch\n\n\ndef run(batch: Batch):\n    return batch.cuda()\n"
    ported = _ported(tmp_path, source, batches=f"import torch\n\n\n{batch}")
    assert ("return batch.cuda()" in ported) is kept


@pytest.mark.parametrize(("returned", "kept"), [("", False), ("        return self\n", True)])
def test_a_method_cuda_without_a_value_is_to_if_that_has_none_either(tmp_path, returned, kept):
    bank = (
        "import torch\n\n\nclass Other:\n    def to(self, device):\n        return self\n\n\n"
        f"class Bank:\n    def to(self, device):\n        self.x = self.x.to(device)\n{returned}\n"
        "    def cuda(self):\n        self.to('cuda:0')\n"
    )
    source = "import torch\nfrom banks import Bank\nbank = Bank()\nbank.cuda()\n"
    assert ("bank.cuda()" in _ported(tmp_path, source, banks=bank)) is kept


@pytest.mark.parametrize(
    ("method", "used", "is_left"),
    [
        ("def cuda(self, *args):\n        return (a.to(self.device) for a in args)", "x, y = self.cuda(x, y)", False),
        ("def cuda(self, *args):\n        return (a.cuda() for a in args)", "x, y = self.cuda(x, y)", True),
        ("def cuda(self, *args):\n        return fetched(args)", "x, y = self.cuda(x, y)", True),
        ("def cuda(self, *args):\n        return (a.to('cuda:1') for a in args)", "x, y = self.cuda(x, y)", True),
        ("def cuda(self):\n        self.probs = self.probs.cuda()", "Table().cuda()", False),
        ("def cuda(self):\n        self.probs = self.probs.cuda()", "table = Table()\n        table.cuda()", False),
        ("def cuda(self):\n        self.probs = self.probs.cuda()", "table.cuda()", True),
    ],
)
def test_a_call_of_the_classes_own_method_stays_and_is_left_only_if_a_line_of_the_method_is(method, used, is_left):
    source = f"import torch\n\n\nclass Table:\n    {method}\n\n    def run(self, x, y, table):\n        {used}\n"
    if "table = " in used:
        source = source.replace(", table)", ")")
    outcome = port_source(source, Level.ROLES)
    assert used in outcome.source
    assert bool(outcome.left) is is_left
    assert is_left or outcome.harmless
