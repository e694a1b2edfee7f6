"""A question that stays and decides where something is: the others of its program stay, too."""

import port_runs
import pytest
import torch
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.port_command import ported_together
from accelcore_lint.port.project import read_project
from port_sources import written

CHOICE = "device = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')"


def program(folder, files, level=Level.TORCH):
    """The outcomes of files that are ported in one run, by their names."""
    paths = written(folder, files)
    return {each.path.name: each.outcome for each in ported_together(paths, level, read_project(paths), paths)}


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("data = [d.to(device) for d in data] if device.type == 'cuda' else data", True),
        ("state = net.module.state_dict() if device.type == 'cuda' else net.state_dict()", True),
        ("if device.type == 'cuda':\n        graph(net)\n    else:\n        net.step()", True),
        (
            "if device.type == 'cuda':\n        data = data.to(device, other(0))\n        torch.cuda.nvtx.mark('x')",
            True,
        ),
        ("used = torch.cuda.memory_stats() if torch.cuda.is_available() else 0", False),
        ("if device.type == 'cuda':\n        torch.cuda.nvtx.range_pop()", False),
        ("if device.type == 'cuda':\n        torch.cuda.nvtx.range_pop()\n    else:\n        print('CPU')", False),
        (
            "if device.type == 'cuda':\n        torch.cuda.ipc_collect()\n    else:\n        torch.mps.empty_cache()",
            False,
        ),
        ("if device.type == 'cuda':\n        torch.cuda.nvtx.mark('x')\n    else:\n        net.step()", True),
        ("data = data.to(device)", False),
    ],
)
@pytest.mark.parametrize("files", [1, 3])
def test_the_device_of_a_program_stays_if_a_line_tells_cuda_from_all_others(tmp_path, files, line, kept):
    step = f"def step(net, data, device):\n    {line}\n    return net(data)\n"
    head = "import torch\n" if files == 1 else "import torch\nfrom between import step\n"
    texts = {"train.py": f"{head}\n{CHOICE}\nnet = torch.nn.Linear(2, 2).to(device)\n"}
    if files == 1:
        texts["train.py"] += f"\n\n{step}"
    else:
        texts |= {"between.py": "from helpers import step\n", "helpers.py": f"import torch\n\n\n{step}"}
    texts["other.py"] = f"import torch\n\n{CHOICE}\nprint(torch.ones(1).to(device))\n"
    made = program(tmp_path, texts)
    assert (CHOICE in made["train.py"].source) is kept
    assert CHOICE not in made["other.py"].source
    again = program(tmp_path / "again", {name: outcome.source for name, outcome in made.items()})
    assert {name: outcome.source for name, outcome in again.items()} == {
        name: outcome.source for name, outcome in made.items()
    }


@pytest.mark.parametrize(
    ("line", "opens"),
    [
        ("if torch.cuda.is_available():\n        torch.cuda.empty_cache()", True),
        ("if torch.cuda.is_available():\n        torch.cuda.synchronize()  # all\n        gc.collect()", True),
        ("mem = torch.cuda.memory_reserved() / 1e9 if torch.cuda.is_available() else 0", True),
        ("mem = torch.cuda.memory_reserved() / 1e9 if torch.cuda.is_available() else 4", False),
        ("if torch.cuda.is_available():\n        torch.cuda.empty_cache()\n        net.cuda()", False),
        ("if torch.cuda.is_available():\n        torch.cuda.empty_cache()\n    else:\n        net.cpu()", False),
    ],
)
@pytest.mark.parametrize(("level", "is_method"), [(Level.TORCH, True), (Level.ROLES, False)])
def test_a_question_whose_answer_changes_no_result_opens_where_others_stay(tmp_path, level, line, opens, is_method):
    more = f"def step(net):\n    {line}\n"
    more = f"class Loop:\n    {more.replace(chr(10), chr(10) + '    ')}\n" if is_method else more
    helpers = "import torch\n\n\ndef f(x, device):\n    return x.half().to(device) if device.type == 'cuda' else x\n"
    main = f"import gc\nimport torch\nfrom helpers import f\n\n{CHOICE}\n\n\n{more}"
    source = program(tmp_path, {"main.py": main, "helpers.py": helpers}, level)["main.py"].source
    assert CHOICE in source
    assert (source.count("torch.cuda.is_available()") == 1) is opens


def test_a_condition_stays_if_another_file_chooses_its_device_for_cuda_or_the_cpu(tmp_path):
    helpers = (
        "import torch\n\n\ndef select(name):\n    if name != 'cpu' and torch.cuda.is_available():\n"
        "        arg = 'cuda:0'\n"
        "    else:\n        arg = 'cpu'\n    return torch.device(arg)\n"
    )
    main = "import torch\nfrom helpers import select\n\nhalf = torch.cuda.is_available() and name != 'cpu'\n"
    made = program(tmp_path, {"main.py": main, "helpers.py": helpers})
    assert "half = torch.cuda.is_available()" in made["main.py"].source
    assert "half = torch.cuda" not in port_source(main, Level.TORCH).source


@pytest.mark.parametrize("move", ["toks.cuda()", "toks.to(device='cuda')", 'toks.to("cuda:0")'])
def test_a_move_of_any_form_stays_below_a_question_that_a_file_answers_by_hiding_devices(tmp_path, move):
    hides = "import os\n\n\ndef f(cpu):\n    if cpu:\n        os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
    main = f"import torch\n\n\ndef moved(toks):\n    if torch.cuda.is_available():\n        return {move}\n"
    made = program(tmp_path, {"main.py": main, "hides.py": hides})
    assert "if torch.cuda.is_available():" in made["main.py"].source


@pytest.mark.parametrize("form", ["args = dotdict({{'gpu': {}}})", "args.gpu = {}"])
@pytest.mark.parametrize(
    ("location", "kept"),
    [("None if args.gpu else 'cpu'", True), ("'cpu' if not args.gpu else None", True), ("'cpu'", False)],
)
@pytest.mark.parametrize("is_apart", [True, False])
def test_a_flag_stays_that_also_decides_where_a_state_is_loaded_to(tmp_path, is_apart, form, location, kept):
    flag = form.format("torch.cuda.is_available()")
    load = f"def load(path, args):\n    return torch.load(path, map_location={location})\n"
    files = {"main.py": f"import torch\nfrom loads import load\n\n{flag}\n", "loads.py": f"import torch\n\n\n{load}"}
    if not is_apart:
        files = {"main.py": f"import torch\n\n{flag}\n\n\n{load}"}
    assert (flag in program(tmp_path, files)["main.py"].source) is kept


@pytest.mark.parametrize(("package", "kept"), [("lightning", True), ("pytorch_lightning", True), ("accelerate", False)])
def test_a_number_of_devices_stays_if_lightning_chooses_them(tmp_path, package, kept):
    made = "Trainer(devices=count())" if kept else "Accelerator()"
    main = f"from {package} import {made.split('(')[0]}\nfrom helpers import count\n\n{made}\n"
    helpers = "import torch\n\n\ndef count():\n    return torch.cuda.device_count() or 1\n"
    outcome = program(tmp_path, {"main.py": main, "helpers.py": helpers})["helpers.py"]
    assert ("torch.cuda.device_count()" in outcome.source) is kept


@pytest.mark.parametrize(
    ("nested", "kept"), [("if os.getenv('MPS'):\n            return 'mps'", True), ("pass", False)]
)
def test_a_choice_stays_before_a_branch_of_another_accelerator_that_asks_more(nested, kept):
    source = (
        "import os\nimport torch\n\n\ndef get():\n    if torch.cuda.is_available():\n"
        "        return torch.device('cuda')\n"
        f"    elif torch.backends.mps.is_available():\n        {nested}\n    return 'cpu'\n"
    )
    assert ("torch.cuda.is_available()" in port_source(source, Level.TORCH).source) is kept


@pytest.mark.parametrize(
    ("between", "at_roles"),
    [("torch.nn.utils.clip_grad_norm_(w, 1.0)", False), ("scaler.unscale_(o)\nclip_grad_norm_(w, 1.0)", True)],
)
def test_a_scaler_is_off_on_the_cpu_where_gradients_are_read_as_it_scales_them(between, at_roles):
    source = (
        "import torch\n\nw = torch.ones(1).cuda()\nscaler = torch.cuda.amp.GradScaler()\n"
        f"scaler.scale(w).backward()\n{between}\nscaler.step(o)\n"
    )
    ported = port_source(source, Level.TORCH).source
    assert 'scaler = torch.amp.GradScaler(device.type, enabled=device.type != "cpu")\n' in ported
    ported = port_source(source, Level.ROLES).source
    made = "accel.scaler.create()"
    made = made if at_roles else f'{made} if accel.device.type != "cpu" else accel.scaler.none()'
    assert f"scaler = {made}\n" in ported


HALF = """import torch

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
net = torch.nn.Linear(4, 1).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=1e7)
scaler = torch.amp.GradScaler("cuda")
for step in range(3):
    x = torch.full((8, 4), 1e-4).to(device)
    with torch.autocast("cuda", dtype=torch.float16):
        loss = net(x).float().mean() * 1e-4
    scaler.scale(loss).backward()
    {reads}
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print("loss", loss.item())
    print("loss", read)
"""


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize(
    "reads", ["read = net.weight.grad.sum().item()", "read = clip_grad_norm_(net.parameters(), 1.0).item()"]
)
def test_gradients_that_are_read_as_they_are_scaled_do_not_vanish_on_the_cpu(monkeypatch, level, reads):
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    source = HALF.format(reads=reads.replace("clip", "torch.nn.utils.clip"))
    expected = port_runs.losses(source)
    assert 0.0 not in expected
    assert port_runs.losses(port_source(source, level).source) == pytest.approx(expected, rel=1e-5, abs=0.0)


OFF = ', enabled=accel.device.type != "cpu"'


@pytest.mark.parametrize(
    ("made", "given", "becomes"),
    [
        ("GradScaler()", "", ""),
        ("GradScaler()\nclip_grad_norm_(w, 1.0)", "", OFF),
        ("GradScaler()\nclip_grad_norm_(w, 1.0)", "enabled=amp", f"{OFF} and amp"),
        ("GradScaler()\nclip_grad_norm_(w, 1.0)", "enabled=False", ", enabled=False"),
        ("GradScaler()\nscaler.unscale_(o)\nclip_grad_norm_(w, 1.0)", "", ""),
        ("GradScaler(enabled=dev.type == 'cuda')", "", OFF),
        ("GradScaler(enabled=torch.cuda.is_available())", "", OFF),
        ("GradScaler(enabled=amp)", "enabled=amp", ", enabled=amp"),
        ("GradScaler() if torch.cuda.is_available() else None", "", OFF),
    ],
)
def test_autocast_is_off_on_the_cpu_where_the_scaler_is(made, given, becomes):
    source = f"import torch\nfrom torch.cuda.amp import GradScaler, autocast\n\nscaler = {made}\n"
    ported = port_source(f"{source}with autocast({given}):\n    y = net(x)\n", Level.ROLES).source
    assert f"with accel.autocast(torch.float16{becomes}):\n" in ported
    guarded = f"{source}if torch.cuda.is_available():\n    with autocast({given}):\n        y = net(x)\n"
    given = f", {given}" if given else ""
    assert f"with accel.autocast(torch.float16{given}):\n" in port_source(guarded, Level.ROLES).source


@pytest.mark.parametrize(("imports", "becomes"), [("from loop import Loop", OFF), ("import json", "")])
def test_autocast_of_a_script_is_off_on_the_cpu_beside_a_scaler_of_a_module(tmp_path, imports, becomes):
    loop = "import torch\n\n\nclass Loop:\n    def __init__(self):\n        self.scaler = torch.cuda.amp.GradScaler()\n"
    train = f"import torch\n{imports}\n\nwith torch.cuda.amp.autocast():\n    y = net(x)\n"
    made = program(tmp_path, {"train.py": train, "loop.py": loop, "other.py": "import loop\n"}, Level.ROLES)
    assert "enabled=current_device.type != " in made["loop.py"].source
    assert f"with accel.autocast(torch.float16{becomes}):\n" in made["train.py"].source


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    ("line", "kept"), [("data = [d.to(dev) for d in data] if dev.type == 'cuda' else data", True), ("pass", False)]
)
def test_a_type_of_tensor_stays_that_the_same_question_chooses(tmp_path, level, line, kept):
    choice = "Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.Tensor\n"
    nets = f"import torch\n\n{choice}\n\ndef noise(x):\n    return Tensor(x.size()).normal_()\n"
    step = f"import torch\nfrom nets import noise\n\n\ndef step(data, dev):\n    {line}\n    return noise(data[0])\n"
    made = program(tmp_path, {"nets.py": nets, "step.py": step}, level)
    assert (choice in made["nets.py"].source) is kept
    assert ("Tensor(x.size()).normal_()" in made["nets.py"].source) is kept


_CHOICE = 'device = torch.device({} if torch.cuda.is_available() else "cpu")\n'
_OPTIONS = "import argparse\nparser = argparse.ArgumentParser()\n{}\nargs = parser.parse_args()\n"


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    ("above", "choice", "stays"),
    [
        (_OPTIONS.format("parser.add_argument('--device', default='cuda')"), _CHOICE.format("args.device"), False),
        (_OPTIONS.format("parser.add_argument('--device')"), _CHOICE.format("args.device"), True),
        (
            _OPTIONS.format("parser.add_argument('--device', default='cuda', choices=['cuda', 'cpu'])"),
            _CHOICE.format("args.device"),
            True,
        ),
        (
            "config = load()\n",
            "has_one = torch.cuda.is_available()\ndevice = torch.device(config['device'] if has_one else 'cpu')\n",
            True,
        ),
        ("", _CHOICE.format("config.get('device', 'cuda')"), True),
        ("", "device = torch.device('cpu') if not torch.cuda.is_available() else torch.device(config.device)\n", True),
        ("name = 'cuda'\n", _CHOICE.format("name"), True),
        ("dev = 'cuda'\n", _CHOICE.format("dev"), False),
        ("dev = 'cuda:0' if wanted else 'cpu'\n", _CHOICE.format("dev"), False),
        ("dev = 'cuda:1'\n", _CHOICE.format("dev"), True),
        ("dev = torch.device('cuda')\n", "dev = dev if torch.cuda.is_available() else torch.device('cpu')\n", False),
        ("", _CHOICE.format("args.gpu"), False),
        ("", _CHOICE.format("int(number)"), False),
    ],
)
def test_a_choice_stays_if_the_name_in_it_may_be_a_vendors(level, above, choice, stays):
    outcome = port_source(f"import torch\n{above}{choice}", level)
    assert ("torch.cuda.is_available()" in outcome.source) is stays
    assert any("name comes from elsewhere" in note.text for note in outcome.left) is stays


@pytest.mark.parametrize(("used", "kept"), [("found()", True), ("other()", False)])
def test_a_question_stays_if_a_function_returns_nothing_by_one_that_is_left(used, kept):
    first = f"def chosen(other):\n    if torch.cuda.is_available():\n        torch.cuda.set_device({used}[0])\n"
    second = (
        "def found():\n    if not torch.cuda.is_available():\n        return\n    return torch.cuda.utilization(0)\n"
    )
    ported = port_source(f"import torch\n\n\n{first}\n\n{second}", Level.ROLES).source
    assert ("torch.cuda.is_available()" in ported.split("def found")[0]) is kept


@pytest.mark.parametrize("more", ["", " and installed"])
@pytest.mark.parametrize(("other", "kept"), [("x.npu()", False), ("x.npu(), y.npu()", True)])
def test_branches_for_two_vendors_stay_if_both_would_ask_the_same(other, more, kept):
    source = (
        "import torch\n\n\ndef moved(x, y, device, installed):\n    if 'cuda' in device:\n        x.cuda()\n"
        f"    elif 'npu' in device{more}:\n        {other}\n"
    )
    assert ("if 'cuda' in device:" in port_source(source, Level.ROLES).source) is kept


def test_a_condition_over_data_parallel_opens_to_all_accelerators():
    source = (
        "import torch\n\n\ndef made(net, device):\n    model = net()\n    if device.type == 'cuda':\n"
        "        model = torch.nn.DataParallel(model)\n    else:\n        model.eval()\n    return model.cuda()\n"
    )
    assert 'if device.type != "cpu":' in port_source(source, Level.ROLES).source


@pytest.mark.parametrize(("hides", "kept"), [("os.environ['CUDA_VISIBLE_DEVICES'] = args.gpu", True), ("pass", False)])
def test_the_device_of_a_module_stays_beside_a_flag_under_which_another_file_hides_devices(tmp_path, hides, kept):
    flag = "args.use_gpu = True if torch.cuda.is_available() and args.use_gpu else False"
    choice = "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')"
    files = {
        "run.py": f"import torch\nfrom chosen import device_of\nfrom options import args\n\n{flag}\n",
        "chosen.py": (
            "import os\nimport torch\nfrom nets import Net\n\n\ndef device_of(args):\n    if args.use_gpu:\n"
            f"        {hides}\n        return torch.device('cuda:0')\n    return torch.device('cpu')\n"
        ),
        "nets.py": f"import torch\n\n{choice}\n\n\nclass Net(torch.nn.Module):\n    pass\n",
    }
    assert (choice in program(tmp_path, files)["nets.py"].source) is kept


STREAM = "stream = torch.cuda.default_stream()"


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    ("asked", "line", "kept"),
    [
        ("args.use_gpu = args.use_gpu and torch.cuda.is_available()", f"if args.use_gpu:\n        {STREAM}", True),
        ("args.use_gpu = torch.cuda.is_available()", "d = torch.device('cuda:' + n[0]) if args.use_gpu else 0", True),
        ("args['gpu'] = torch.cuda.is_available()", f"if args['gpu']:\n        {STREAM}", True),
        ("args['gpu'] = torch.cuda.is_available()", f"if args['cpu']:\n        {STREAM}", False),
        ("args = dict(gpu=torch.cuda.is_available())", f"if args.get('gpu'):\n        {STREAM}", True),
        ("args.use_gpu = torch.cuda.is_available()", f"if args.use_gpu:\n        x.cuda()\n        {STREAM}", False),
        ("args.use_gpu = torch.cuda.is_available()", f"if args.debug:\n        {STREAM}", False),
    ],
)
def test_a_flag_stays_if_a_file_of_the_program_asks_it_above_lines_that_are_left(tmp_path, level, asked, line, kept):
    files = {
        "start.py": f"import torch\n\n\ndef start(args, x):\n    {line}\n",
        "train.py": f"import torch\nfrom start import start\n{asked}\nstart(args, torch.ones(2))\n",
    }
    made = program(tmp_path, files, level)
    assert ("torch.cuda.is_available()" in made["train.py"].source) is kept
    again = program(tmp_path / "again", {name: outcome.source for name, outcome in made.items()}, level)
    assert [each.source for each in again.values()] == [each.source for each in made.values()]


def test_a_flag_of_another_program_with_the_same_helpers_decides_nothing(tmp_path):
    one = "import torch\nimport helpers\nargs.gpu = torch.cuda.is_available()\nif args.gpu:\n    x = x.cuda()\n"
    other = f"import torch\nimport helpers\nif args.gpu:\n    {STREAM}\n"
    made = program(tmp_path, {"one.py": one, "other.py": other, "helpers.py": "import torch\n"})
    assert "torch.cuda" not in made["one.py"].source


def test_the_reason_for_a_flag_that_stays_names_the_file_whose_lines_are_left(tmp_path):
    files = {
        "options.py": "import torch\n\n\ndef read(args):\n    args.gpu = torch.cuda.is_available()\n",
        "model.py": f"import torch\n\n\ndef build(args):\n    if args.gpu:\n        {STREAM}\n",
        "train.py": "import torch\nfrom model import build\nfrom options import read\nread(args)\nbuild(args)\n",
    }
    (note,) = program(tmp_path, files)["options.py"].left
    assert "model.py" in note.text


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize("together", [True, False])
def test_a_question_stays_beside_one_in_a_file_that_the_same_script_imports(tmp_path, level, together):
    place = f"import torch\n\n\ndef place(net):\n    {CHOICE}\n"
    tells = "if device.type == 'cuda':\n        torch.cuda.nvtx.mark('x')\n    else:\n        net.step()"
    files = {
        "nets.py": f"{place}    {tells}\n",
        "bench.py": f"{place}    return net(torch.ones(1).to(device))\n",
        "one.py": "import nets\n" + "import bench\n" * together,
        "two.py": "import bench\n",
    }
    made = program(tmp_path, files, level)
    assert CHOICE in made["nets.py"].source
    assert (CHOICE in made["bench.py"].source) is together
