"""What would be on two devices, or on one that a host lacks, and what the CPU's own autocast keeps."""

import pytest
import torch
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.mac import lacks_of_mps
from accelcore_lint.port.port_command import ported_together
from accelcore_lint.port.project import read_project
from port_sources import imported, written

CHOICE = "device = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')"
NUMBERED = "device = torch.device('cuda:' + str(n)) if torch.cuda.is_available() else torch.device('cpu')"
NUMBERED_BELOW = NUMBERED.replace(" if ", " \\\n    if ")
QUESTION = "if torch.cuda.is_available():\n"


def program(folder, files):
    """The outcomes of files that are ported in one run, by their names."""
    paths = written(folder, files)
    return {each.path.name: each.outcome for each in ported_together(paths, Level.TORCH, read_project(paths), paths)}


@pytest.mark.parametrize("flag", ["False", "True", None])
def test_autocast_of_cuda_leaves_the_cpus_own_as_it_is(flag):
    given = "" if flag is None else f"enabled={flag}"
    source = (
        "import torch\nfrom accelerate import Accelerator\n\n\ndef work(x, w):\n"
        f"    with torch.cuda.amp.autocast({given}):\n        return x @ w\n"
    )
    ported = port_source(source, Level.TORCH).source
    assert "cuda" not in ported
    space = {}
    exec(ported.replace("from accelerate import Accelerator\n", ""), space)
    x = torch.ones(2, 2)
    assert space["work"](x, x).dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert space["work"](x, x).dtype is torch.bfloat16


@pytest.mark.parametrize("library", ["accelerate", "json"])
@pytest.mark.parametrize("given", ["", "enabled=False"])
def test_autocast_that_an_object_makes_before_the_cpus_own_stays(given, library):
    line = f"torch.cuda.amp.autocast({given})"
    source = f"import torch\nimport {library}\n\n\nclass A:\n    def __init__(self):\n        self.context = {line}\n"
    assert (line in port_source(source, Level.TORCH).source) is (library == "accelerate")


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize("given", ["'cuda'", "'cuda', enabled = False"])
def test_autocast_that_decorates_leaves_the_cpus_own_as_it_is(given, level, monkeypatch):
    source = (
        "import torch\nfrom torch.amp import autocast\nfrom accelerate import Accelerator\n\n\n"
        "class Net(torch.nn.Module):\n"
        f"    @torch.no_grad()\n    @autocast({given})\n    def work(self, x):\n        return x @ x\n"
    )
    outcome = port_source(source, level)
    assert outcome.left == []
    ported = outcome.source.replace("from accelerate import Accelerator\n", "")
    assert "cuda" not in ported
    work = imported(ported).Net().work
    x = torch.ones(2, 2, requires_grad=True)
    assert work(x).dtype is torch.float32
    assert not work(x).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert work(x).dtype is torch.bfloat16
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("meta"))
    made = []
    monkeypatch.setattr(torch, "autocast", lambda *args, **options: made.append((args, options)) or torch.no_grad())
    imported(ported)
    ((kind, options),) = made
    assert kind == ("meta",)
    assert options == {"dtype": torch.float16} | ({"enabled": False} if "False" in given else {})


@pytest.mark.parametrize("off", ["config.use_gpu = False", "p.add_argument('--use_gpu', action='store_true')", "pass"])
@pytest.mark.parametrize(
    "chosen",
    [
        "device = 'cuda:0' if config.use_gpu else 'cpu'",
        "if config.use_gpu:\n    print(1)\n    device = torch.device('cuda')\nelse:\n    device = torch.device('cpu')",
    ],
)
def test_the_device_of_a_module_stays_if_a_flag_that_may_be_off_chooses_it_elsewhere(tmp_path, chosen, off):
    buffer = f"import torch\n\n{CHOICE}\n\n\nclass Buffer:\n    pass\n"
    agent = f"import torch\nfrom settings import config\n\n{chosen}\n"
    files = {"buffer.py": buffer, "agent.py": agent, "settings.py": f"{off}\n"}
    outcome = program(tmp_path, files)["buffer.py"]
    assert (CHOICE in outcome.source) is (off != "pass")
    follows = buffer.replace("else 'cpu'", "and config.use_gpu else 'cpu'")
    files |= {"agent.py": f"{agent}if config.quiet:\n    device = 'cuda'\n", "quiet.py": "quiet = False\n"}
    files |= {"other.py": follows}
    if off == "pass":  # the answer itself is no option, also where a question that fails is one without a device
        answer = "try:\n    use_gpu = torch.cuda.is_available()\nexcept Exception:\n    use_gpu = False\n"
        files |= {"agent.py": f"import torch\n{answer}{chosen.replace('config.', '')}\n", "buffer.py": buffer}
        assert CHOICE not in program(tmp_path, files)["buffer.py"].source
    assert all("chooses the device by" not in note.text for note in program(tmp_path, files)["other.py"].left)


def test_a_number_of_devices_stays_if_composer_chooses_the_device():
    source = (
        "import torch\nfrom composer.devices import DeviceGPU\nfrom composer.trainer import Trainer\n\n"
        "if torch.cuda.device_count() > 0:\n    device = DeviceGPU(0)\nelse:\n    device = 'cpu'\n"
        "Trainer(device=device)\n"
    )
    assert "if torch.cuda.device_count() > 0:" in port_source(source, Level.TORCH).source


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(("index", "kept"), [("1", True), ("0", False)])
@pytest.mark.parametrize(
    "form",
    [
        QUESTION + "    one = torch.device('cuda:{}')\nelse:\n    one = torch.device('cpu')\n",
        "device = torch.device('cuda:{}' if torch.cuda.is_available() else 'cpu')\n",
        "device = 'cuda:{}' if torch.cuda.is_available() else 'cpu'\n",
    ],
)
def test_a_further_device_stays_under_a_question_for_any(form, index, kept, level):
    source = f"import torch\n\n{form.format(index)}"
    ported = port_source(source, level).source
    assert ("torch.cuda.is_available()" in ported) is kept
    assert (f"cuda:{index}" in ported) is kept


@pytest.mark.parametrize(
    ("used", "kept"),
    [
        ("net.load_state_dict(weights)", False),
        ("net.load_state_dict(weights['net'])\nepoch = weights['last_epoch']", False),
        ("net.load_state_dict(weights['net'])\ntorch.set_rng_state(weights['random'])", True),
        ("epoch = weights['epoch']", True),
        ("for key, value in weights.items():\n    new[key[7:]] = value\nnet.load_state_dict(weights)", False),
        ("for key, value in weights.items():\n    new[key] = value.numpy()\nnet.load_state_dict(weights)", True),
        ("for key, value in weights.items():\n    new[key] = value", True),
        ("if next(iter(weights))[:7] in weights.keys():\n    new = {}\nnet.load_state_dict(weights)", False),
        ("for key, net in self.weights.items():\n    net.load_state_dict(weights[key])", False),
        ("for key, net in self.weights.items():\n    net.data = weights[key]", True),
        ("weights.eval()\nprint(weights(x))", False),
        ("weights.eval()\nprint(weights['best'])", True),
        ("print(weights.sum())", True),
    ],
)
def test_a_load_and_the_question_above_it_are_rewritten_together_or_not(used, kept):
    source = (
        f"import torch\n\n{QUESTION}    net = net.cuda()\n    weights = torch.load(path)\n"
        f"else:\n    weights = torch.load(path, map_location=torch.device('cpu'))\n{used}\n"
    )
    still = source.replace("net.cuda()", "net")
    assert (QUESTION in port_source(still, Level.TORCH).source) is (kept or ".eval()" in used)
    ported = port_source(source, Level.TORCH).source
    assert (QUESTION in ported) is kept
    assert ("weights = torch.load(path, map_location=device)" in ported) is not kept


def test_a_part_of_a_state_is_loaded_to_the_device_as_well():
    source = (
        f"import torch\n\n{QUESTION}    net.load_state_dict(torch.load(path)['net'])\n"
        "else:\n    net.load_state_dict(torch.load(path, map_location='cpu')['net'])\nnet.cuda()\n"
    )
    ported = port_source(source, Level.ROLES).source
    assert "net.load_state_dict(torch.load(path, map_location=accel.device)['net'])" in ported
    assert "cuda" not in ported


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    ("test", "after", "is_placed"),
    [
        ("not args.path", "net = net.to(device)", False),
        ("args.cuda", "net = net.to(device)", True),
        ("torch.cuda.is_available()", "net = net.to(device)", True),
        ("torch.cuda.is_available()", "print(net)", False),
    ],
)
def test_a_model_that_an_option_keeps_on_the_cpu_is_not_loaded_to_the_device(level, test, after, is_placed):
    """Without a `map_location`, what was saved from the CPU is read to the CPU, also beside an accelerator."""
    source = (
        "import torch\n\ndevice = torch.device('cuda' if torch.cuda.is_available() and args.cuda else 'cpu')\n"
        f"net = Net()\nnet.to(device)\ntrain(net)\nif {test}:\n    net = torch.load(path)\nelse:\n"
        f"    net = torch.load(args.path, map_location=lambda storage, location: storage)\n{after}\nnet.eval()\n"
    )
    assert ("net = torch.load(path, map_location=" in port_source(source, level).source) is is_placed


@pytest.mark.parametrize(("yes", "no"), [("1", "0"), ("True", "False")])
@pytest.mark.parametrize("kept", [True, False])
def test_a_flag_that_two_branches_set_is_a_flag(yes, no, kept):
    line = "torch.cuda.nvtx.mark('x')" if kept else "net.cuda()"
    source = f"import torch\n\n{QUESTION}    use_cuda = {yes}\nelse:\n    use_cuda = {no}\nif use_cuda:\n    {line}\n"
    assert (QUESTION in port_source(source, Level.TORCH).source) is kept


def test_devices_that_a_function_of_another_file_hides_are_not_asked_for_before(tmp_path):
    helper = "import os\nimport torch\n\n\ndef set_gpu(gpus):\n    os.environ['CUDA_VISIBLE_DEVICES'] = gpus\n"
    main = (
        "from helper import *\n\n\nclass Runner:\n    def __init__(self):\n"
        "        if torch.cuda.is_available():\n            self.device = torch.device('cuda')\n\n\n"
        "if __name__ == '__main__':\n    set_gpu('1')\n    Runner()\n"
    )
    source = program(tmp_path, {"main.py": main, "helper.py": helper})["main.py"].source
    assert "current_accelerator" not in source


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    "lines",
    [
        "torch.cuda.manual_seed_all(seed)\ntorch.manual_seed(seed)",
        f"torch.manual_seed(seed)\n{NUMBERED}\n{QUESTION}    torch.cuda.manual_seed_all(seed)",
        f"torch.manual_seed(seed)\n{NUMBERED_BELOW}\n{QUESTION}    torch.cuda.manual_seed_all(seed)",
        "torch.manual_seed(seed)\nprint(\n    seed,\n)\ntorch.cuda.manual_seed_all(seed)",
    ],
)
def test_a_seed_of_all_devices_goes_where_torchs_own_stands_by(lines, level):
    source = f"import torch\n\nseed = 1\n{lines}\nnet = torch.nn.DataParallel(net)\n"
    ported = port_source(source, level).source
    assert "manual_seed_all" not in ported
    assert "\nif torch" not in ported
    drawn = source.replace("torch.manual_seed(seed)", "torch.manual_seed(seed)\nx = torch.rand(1, device=d)", 1)
    drawn = drawn.replace("torch.cuda.manual_seed_all(seed)\n", "torch.cuda.manual_seed_all(seed)\nx = draw()\n", 1)
    assert "manual_seed_all" in port_source(drawn, level).source


def test_a_process_group_in_capitals_is_one():
    source = "import torch\n\ntorch.distributed.init_process_group(backend='NCCL', rank=rank, world_size=2)\n"
    outcome = port_source(source, Level.TORCH)
    assert (outcome.before, outcome.after) == (1, 0)
    assert "get_default_backend_for_device" in outcome.source


@pytest.mark.parametrize(
    ("line", "found"), [("torch.tensor(np.log(a))", True), ("torch.tensor(np.log(a), dtype=torch.float32)", False)]
)
def test_the_report_names_float64_of_numpy(tmp_path, line, found):
    assert ("float64" in lacks_of_mps({tmp_path / "a.py": f"x = {line}.to(device)\n"})) is found


@pytest.mark.parametrize(
    ("lines", "kept"),
    [
        ("local_rank = 0", True),
        ("local_rank = 0\n    if args.many:\n        local_rank = int(os.environ['LOCAL_RANK'])", False),
        ("pass", False),
    ],
)
def test_a_local_rank_that_is_one_number_is_not_this_ranks_device(lines, kept):
    source = (
        "import os\nimport torch\nimport torch.distributed as dist\n\n\n"
        f"def run(model, args):\n    {lines}\n    return model.to(local_rank)\n\n\n"
        "local_rank = int(os.environ['LOCAL_RANK'])\ntorch.cuda.set_device(local_rank)\n"
        "dist.init_process_group('nccl')\n"
        "run(torch.nn.Linear(2, 2).cuda(), None)\n"
    )
    assert ("return model.to(local_rank)" in port_source(source, Level.ROLES).source) is kept


@pytest.mark.parametrize(("line", "is_own"), [("    global local_rank\n", True), ("", False)])
def test_a_local_rank_that_a_function_sets_for_all_is_this_ranks_device(line, is_own):
    source = (
        "import os\nimport torch\nimport torch.distributed as dist\n\nlocal_rank = 0\n\n\ndef set_up():\n"
        f"{line}    local_rank = int(os.environ['LOCAL_RANK'])\n    torch.cuda.set_device(local_rank)\n"
        "    dist.init_process_group('nccl')\n\n\ndef run():\n    set_up()\n"
        "    return torch.ones(2).to(torch.device('cuda', local_rank))\n\n\nrun()\n"
    )
    assert ("return torch.ones(2).to(accel.device)" in port_source(source, Level.ROLES).source) is is_own


NONE, CPU = "map_location = None", "map_location = 'cpu'"


@pytest.mark.parametrize(
    ("lines", "stays"),
    [
        (f"if {{}}:\n    {NONE}\nelse:\n    {CPU}", True),
        (f"{NONE}\nif not {{}}:\n    {CPU}", True),
        (f"{NONE}\nif not {{}}:\n    map_location = {{{{'cuda:0': 'cpu'}}}}", True),
        ("map_location = {{}}\nif not {}:\n    map_location = lambda storage, loc: storage.cpu()", True),
        (f"{NONE}\nif ddp:\n    map_location = lambda s, l: s.cuda(rank)\nif not {{}}:\n    {CPU}", True),
        ("kept = {{}}\nif not {}:\n    kept['map_location'] = torch.device('cpu')", True),
        ("kept = {{}} if {} else {{'map_location': 'cpu'}}", True),
        ("kept = {{}} if {} else {{'map_location': {{'cuda:0': 'cpu'}}}}", True),
        ("kept = {{}} if {} else {{'map_location': lambda s, l: s}}", True),
        ("map_location = {{}} if {} else {{'cuda:0': 'cpu'}}", True),
        ("def place():\n    if not {}:\n        return 'cpu'\n    return None", True),
        ("def get_device():\n    if {}:\n        return 'cuda'\n    return 'cpu'", False),
        (f"map_location = 'cuda'\nif not {{}}:\n    {CPU}", False),
        (f"if {{}}:\n    map_location = lambda storage, loc: storage.cuda()\nelse:\n    {CPU}", False),
    ],
)
def test_what_is_loaded_where_cuda_saved_it_is_loaded_to_the_cpu_on_others(lines, stays):
    question = "torch.cuda.is_available()"
    moves = f"if {question}:\n    net.cuda()\n"
    ported = port_source(f"import torch\n\n{lines.format(question)}\n{moves}", Level.ROLES).source
    assert ported.count(question) == stays
    assert "net.to(" in ported
    both = lines.replace(NONE, f"{NONE}; net.cuda()")
    if both.startswith("if"):
        ported = port_source(f"import torch\n\n{both.format(question)}\n{moves}", Level.ROLES).source
        assert ported.count(question) == (2 if NONE in both else 0)


@pytest.mark.parametrize("test", ["{}", "not {}", "gpu and {}"])
@pytest.mark.parametrize(
    ("place", "more", "stays"),
    [
        ("map_location=torch.device('cpu')", "", True),
        ("weights_only=True, map_location='cpu'", "", True),
        ("map_location=lambda storage, loc: storage", "", True),
        ("map_location='meta'", "", False),
        ("map_location='cpu'", "; print(path)", False),
    ],
)
def test_what_two_calls_load_stays_on_the_cpu_without_cuda_and_no_other_line_for_it(test, place, more, stays):
    question = "torch.cuda.is_available()"
    loads = f"state = torch.load({f'path, {place}'.rpartition(', map')[0]}){more}", f"state = torch.load(path, {place})"
    one, other = reversed(loads) if "not" in test else loads
    use = "own = net.state_dict()\nown.update({k: v for k, v in state['net'].items() if k in own})\n"
    lines = f"if {test.format(question)}:\n    {one}\nelse:\n    {other}\n{use}net.load_state_dict(own)\nnet.cuda()\n"
    outcome = port_source(f"import torch\n\n{lines}", Level.ROLES)
    assert (lines.removesuffix("net.cuda()\n") in outcome.source) is stays
    assert [note.rule for note in outcome.harmless] == ["device check"] * stays
    assert (outcome.left == []) is stays
    restored = lines.replace(use, "").replace("(own)", "(state['net'])")
    again = port_source(f"import torch\n\n{restored}", Level.ROLES)
    assert (again.after, again.harmless) == (0, [])


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    ("number", "use", "count"),
    [
        ("torch.cuda.current_device()", "", 0),
        ("torch.cuda.current_device()", "\n    net.to(device)", 1),
        ("torch.cuda.device_count() - 1", "", 2),
        ("number", "", 1),
    ],
)
def test_what_is_loaded_to_the_number_of_the_current_device_is_loaded_to_that(level, number, use, count):
    source = (
        f"import torch\n\n\ndef load(net, path, number):\n    device = {number}\n"
        f"    net.load_state_dict(torch.load(path, map_location=lambda storage, loc: storage.cuda(device))){use}\n\n\n"
        "device = torch.device('cpu' if args.cpu else 'cuda')\nload(net, args.path, args.number)\nnet.to(device)\n"
    )
    outcome = port_source(source, level)
    assert (outcome.after, len(outcome.left)) == (count, count)
    assert ("storage.cuda(device)" in outcome.source) is (number != "torch.cuda.current_device()")


def test_a_device_is_not_chosen_while_a_graph_is_captured():
    source = (
        "import torch\n\n\ndef step(x):\n    return x.cuda()\n\n\ngraph = torch.cuda.CUDAGraph()\n"
        "with torch.cuda.graph(graph):\n    step(torch.ones(2))\n"
    )
    assert "\naccel = accelcore.select()\n" in port_source(source, Level.ROLES).source
