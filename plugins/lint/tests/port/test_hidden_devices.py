"""Scripts that hide devices by an environment variable: the device is chosen after that."""

import os
from unittest import mock

import pytest
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import read_project
from port_sources import imported, left_by_rules, written

SPAWNED = """import os
import torch
import torch.multiprocessing as mp


def main():
    os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"
    mp.spawn(work, nprocs=2)


def work(gpu):
    torch.cuda.set_device(gpu)
    step(torch.nn.Linear(2, 2).cuda())


def step(model):
    return model(torch.ones(1, 2).cuda())


main()
"""


def test_a_process_that_is_started_has_the_variables_of_its_parent():
    outcome = port_source(SPAWNED, Level.ROLES)
    assert not left_by_rules(outcome)
    assert "def work(gpu):\n    accel = accelcore.select(local_rank=gpu)\n" in outcome.source
    assert "def step(model):\n    current_device = torch.accelerator" in outcome.source


@pytest.mark.parametrize(
    ("before", "after", "made"),
    [
        ("", "work(0)", "accel = accelcore.select()"),
        ("work(0)", "", None),
        ("", "work(0)\nwork(1)", "current_device = torch.accelerator.current_accelerator("),
        ("", "work(0)\nprint(work)", None),
    ],
)
def test_a_function_that_is_called_after_devices_are_hidden_chooses_the_device(before, after, made):
    source = (
        "import os\nimport torch\n\n\ndef work(n):\n    return torch.ones(n).cuda()\n\n\n"
        f'{before}\nos.environ["CUDA_VISIBLE_DEVICES"] = "1"\n{after}\n'
    )
    outcome = port_source(source, Level.ROLES)
    assert len(left_by_rules(outcome)) == (made is None)
    assert made is None or f"def work(n):\n    {made}" in outcome.source


HIDDEN = """import os
import torch


def hot(y):
    return torch.eye(2).cuda()


def test(loader):
    return [hot(x) for x in loader]


def main(args):
    if args.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = args.gpu
        print(torch.cuda.is_available())
    model = torch.nn.Linear(2, 2).cuda()
    hot(model)
    test([1])


main(parse())
"""


def test_a_device_is_chosen_after_devices_are_hidden_also_under_a_condition():
    source = port_source(HIDDEN, Level.ROLES).source
    assert "print(torch.accelerator.is_available())\n    accel = accelcore.select()\n" in source
    assert source.count("current_device = ") == 1
    assert "torch.eye(2).to(current_device)" in source


def test_a_device_that_is_chosen_below_a_line_is_not_used_in_it():
    source = (
        "import os\nimport torch\nprint(torch.cuda.is_available())\n"
        'os.environ["CUDA_VISIBLE_DEVICES"] = "1"\nx = torch.ones(2).cuda()\n'
    )
    once = port_source(source, Level.ROLES).source
    assert port_source(once, Level.ROLES).source == once
    assert (
        once.index("torch.accelerator.is_available")
        < once.index("accel = accelcore.select()")
        < once.index(".to(accel.device)")
    )


YOLO = """import torch
from utils.torch_utils import select_device


def train(opt, device):
    with torch.cuda.amp.autocast():
        x = torch.zeros(1).cuda()
    return torch.cuda.amp.GradScaler().scale(x)


def main(opt):
    train(opt, select_device(opt.device))
"""


def test_yolos_function_hides_devices():
    outcome = port_source(YOLO, Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    assert "accelcore" not in outcome.source
    assert "def train(opt, device):\n    current_device = torch.accelerator.current_accelerator(" in outcome.source
    assert (
        'torch.autocast(current_device.type, dtype=torch.float16, enabled=current_device.type != "cpu")'
        in outcome.source
    )
    assert 'torch.amp.GradScaler(current_device.type, enabled=current_device.type != "cpu")' in outcome.source


BY_HAND = """import os
import torch


def main(args):
    os.environ["CUDA_VISIBLE_DEVICES"] = args.gpus
    torch.cuda.set_device(args.gpu)
    return torch.ones(2).cuda()


if __name__ == "__main__":
    main(parse())
"""


def test_a_device_chosen_by_hand_is_asked_for_in_the_function_that_hides_others():
    head, _, body = port_source(BY_HAND, Level.ROLES).source.partition("def main")
    assert "accelerator" not in head
    assert "current_device = " in body


@pytest.mark.parametrize("first", [0, 1])
def test_a_function_that_hides_devices_asks_below_that_line(first):
    lines = "    os.environ['CUDA_VISIBLE_DEVICES'] = gpu\n", "    print(gpu)\n"
    setup = f"def setup(gpu):\n{lines[first]}{lines[1 - first]}    return torch.ones(2).cuda()\n"
    source = f"import os\nimport torch\n\n\n{setup}\n\nfor gpu in ('0', '1'):\n    print(setup(gpu))\n"
    ported = port_source(source, Level.ROLES).source
    assert ".cuda()" not in ported
    assert ported.index("] = gpu") < ported.index("current_device = torch.accelerator")


GUARDED = """import os
import torch


def show(x):
    return x


if __name__ == "__main__":
    {first}
    x = torch.ones(2).cuda()
    {last}
"""


@pytest.mark.parametrize(
    ("above", "is_left"),
    [
        ("args = parse()", False),
        ("args = [Net()]", True),
        ("args = collect()", True),
        ("args = [vis]", False),
        ("@decorated\n    def inner():\n        pass", True),
    ],
)
def test_what_the_guard_cannot_have_run_before_asks_in_its_functions(above, is_left):
    source = (
        "import os\nimport torch\n\n\ndef parse():\n    return os.sys.argv\n\n\n"
        "class Net(torch.nn.Module):\n    def forward(self, x):\n        return x.cuda()\n\n\n"
        "def collect():\n    return Net()\n\n\ndef decorated(f):\n    return collect\n\n\n"
        "def vis(x):\n    vis = x\n\n\n"
        f"if __name__ == '__main__':\n    {above}\n    os.environ['CUDA_VISIBLE_DEVICES'] = '1'\n    vis(Net()(1))\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert len(left_by_rules(outcome)) == is_left
    assert ("def forward(self, x):\n        current_device = torch.accelerator" in outcome.source) is not is_left


@pytest.mark.parametrize(
    ("lines", "is_left"),
    [
        ("if torch.cuda.is_available():\n        x = x.cuda()\n    return x", False),
        ("n = torch.cuda.current_device()\n    return x.cuda(), n", False),
        ("if len(x) and torch.cuda.is_available():\n        x = x.cuda()\n    return x", True),
        ("if len(x):\n        torch.cuda.is_available()\n    return x.cuda()", True),
        ("ask = lambda: torch.cuda.is_available()\n    return x.cuda(), ask", True),
        ("x = x.cuda()\n    return x, torch.cuda.is_available()", True),
        ("'torch.cuda.is_available()'  # torch.cuda.is_available()\n    return x.cuda()", True),
        ("hide('1')\n    if torch.cuda.is_available():\n        x = x.cuda()\n    return x", True),
        ("indirect()\n    if torch.cuda.is_available():\n        x = x.cuda()\n    return x", True),
    ],
)
def test_a_function_that_asks_anyway_asks_where_it_did(lines, is_left):
    source = (
        "import os\nimport torch\n\n\ndef hide(n):\n    os.environ['CUDA_VISIBLE_DEVICES'] = n\n\n\n"
        f"def indirect():\n    hide('2')\n\n\ndef use(x):\n    {lines}\n\n\n"
        "def run(x):\n    use(x)\n    hide('0')\n    use(x)\n\n\nrun(torch.ones(1))\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert bool(left_by_rules(outcome)) is is_left
    assert ("x.to(current_device)" in outcome.source) is not is_left


@pytest.mark.parametrize("is_first", [True, False])
def test_a_line_of_the_guard_asks_below_the_one_that_hides_devices(is_first):
    lines = 'os.environ["CUDA_VISIBLE_DEVICES"] = "0, 1"', "show(x)"
    outcome = port_source(GUARDED.format(first=lines[not is_first], last=lines[is_first]), Level.ROLES)
    left = left_by_rules(outcome)
    assert len(left) == (not is_first)
    assert all("an environment variable may hide devices" in note.text for note in left)
    if is_first:
        asked = outcome.source.index("accelerator.current_accelerator(")
        assert outcome.source.index('= "0, 1"') < asked < outcome.source.index("torch.ones(2)")


@pytest.mark.parametrize("line", ["torch.cuda.manual_seed(3)", "torch.cuda.empty_cache()"])
@pytest.mark.parametrize(
    ("before", "after", "kept"), [("{}", "", 1), ("", "{}", 0), ("if torch.cuda.is_available():\n        {}", "", 0)]
)
def test_a_line_that_asks_for_no_device_does_not_begin_to_above_one_that_hides_them(line, before, after, kept):
    source = (
        f"import os\nimport torch\n\n\ndef main(gpu):\n    {before.format(line)}\n"
        f'    os.environ["CUDA_VISIBLE_DEVICES"] = gpu\n    {after.format(line)}\n\n\nmain("1")\n'
    )
    outcome = port_source(source, Level.TORCH)
    assert outcome.source.count("torch.cuda.") == len(left_by_rules(outcome)) == kept


@pytest.mark.parametrize(("made", "hides"), [("os.environ", True), ("os.environ.copy()", False), ("dict(x=1)", False)])
def test_variables_for_another_process_hide_no_device(made, hides):
    source = (
        f"import os\nimport torch\nenv = {made}\n\n\ndef start():\n    env['CUDA_VISIBLE_DEVICES'] = '1'\n\n\n"
        "def work(x):\n    x.cuda()\n\n\nwork(torch.ones(2))\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert len(left_by_rules(outcome)) == hides


ABOVE = """import os
import torch


def build(data):
    return torch.utils.data.DataLoader(data, 8, pin_memory=True)


def free():
    torch.cuda.empty_cache()


def main(args):
    {above}
    os.environ["CUDA_VISIBLE_DEVICES"] = args.gpus
    torch.cuda.set_device(args.gpu)
    {below}
    return torch.ones(2).cuda()


if __name__ == "__main__":
    main(parse())
"""


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    "line",
    [
        "torch.utils.data.DataLoader([1], 8, pin_memory=True)",
        "build([1])",
        "torch.cuda.empty_cache()",
        "free()",
        "torch.cuda.reset_peak_memory_stats()",
        "torch.cuda.manual_seed(3)",
    ],
)
def test_no_line_above_the_one_that_hides_devices_begins_to_ask_for_one(level, line):
    once, below = (
        port_source(ABOVE.format(above=a, below=b), level).source for a, b in ((line, "pass"), ("pass", line))
    )
    assert "accelerator" not in once.partition("def main")[2].partition("os.environ[")[0]
    called = once.partition(f"def {line.partition('(')[0]}(")[2].partition("\n\n")[0]
    assert "accelerator" not in called
    assert "accelerator.set_device_index(" in once.partition("os.environ[")[2]
    assert below.count("torch.cuda.") <= once.count("torch.cuda.")
    assert port_source(once, level).source == once


@pytest.mark.parametrize(("line", "stays"), [('os.environ["CUDA_VISIBLE_DEVICES"] = "1"', True), ("pass", False)])
def test_a_module_beside_a_script_that_hides_devices_does_not_ask_to_pin_memory(tmp_path, line, stays):
    files = {
        "loaders.py": "import torch\n\n\ndef build(data):\n    torch.cuda.synchronize()\n"
        "    return torch.utils.data.DataLoader(data, pin_memory=True)\n",
        "train.py": f"import os\nfrom loaders import build\n\nloader = build([1])\n{line}\n",
    }
    paths = written(tmp_path, files)
    outcome = port_source(files["loaders.py"], Level.ROLES, read_project(paths).known(paths[0]))
    assert ("pin_memory=True" in outcome.source) is stays
    assert not outcome.left


@pytest.mark.parametrize("level", [Level.ROLES, Level.TRAINER])
@pytest.mark.parametrize("given", ["'1,3'", "str(\n        args.gpu  # why\n    )", "args.gpu"])
@pytest.mark.parametrize("environ", ["os.environ", "environ"])
def test_the_variables_of_both_vendors_hide_devices_where_one_did(monkeypatch, level, given, environ):
    head = "import os\nfrom os import environ\nimport torch\n\n\ndef hide(args):\n"
    source = f"{head}    {environ}['CUDA_VISIBLE_DEVICES'] = {given}\n    return torch.ones(1)\n"
    outcome = port_source(source, level)
    assert (outcome.after, outcome.left) == (0, [])
    monkeypatch.setattr(os, "environ", found := {})
    imported(outcome.source).hide(mock.Mock(gpu="1,3"))
    assert found == {"CUDA_VISIBLE_DEVICES": "1,3", "ASCEND_RT_VISIBLE_DEVICES": "1,3"}
    assert ("# why" in outcome.source) is ("# why" in source)
    assert port_source(outcome.source, level).source == outcome.source


@pytest.mark.parametrize(("given", "left"), [("made.cuda", [4]), ("prog_args.cuda", [])])
def test_a_variable_counts_as_rewritten_only_if_its_line_changes(given, left):
    source = f"import os\nimport torch\n\nos.environ['CUDA_VISIBLE_DEVICES'] = {given}\nx = torch.ones(2)\n"
    outcome = port_source(source, Level.ROLES)
    changed = "ASCEND_RT_VISIBLE_DEVICES" in outcome.source
    assert [note.rule for note in outcome.rewritten] == ["variable"] * changed
    assert changed is not bool(left)
    assert sorted({note.line for note in outcome.left}) == left


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        (Level.TORCH, "os.environ['CUDA_VISIBLE_DEVICES'] = '1'"),
        (Level.ROLES, "os.environ['CUDA_VISIBLE_DEVICES'] = '-1'"),
        (Level.ROLES, "os.environ['CUDA_VISIBLE_DEVICES'] = ''"),
        (Level.ROLES, "os.environ['CUDA_VISIBLE_DEVICES'] = gpu\nprint(os.environ['CUDA_VISIBLE_DEVICES'])"),
        (Level.ROLES, "env = dict(os.environ)\nenv['CUDA_VISIBLE_DEVICES'] = gpu"),
        (Level.ROLES, "# TODO(accelcore): a reason\nos.environ['CUDA_VISIBLE_DEVICES'] = gpu"),
    ],
)
def test_a_variable_of_one_vendor_stays_where_it_may_mean_more_than_which_devices_are_used(level, lines):
    outcome = port_source(f"import os\nimport torch\n\ngpu = '1'\n{lines}\nx = torch.ones(2)\n", level)
    assert "ASCEND" not in outcome.source
    assert outcome.left


def test_a_help_text_with_the_name_of_the_variable_is_no_use_of_it():
    option = "    parser.add_argument('--gpus', help='CUDA_VISIBLE_DEVICES')\n"
    line = "    os.environ['CUDA_VISIBLE_DEVICES'] = gpus\n"
    outcome = port_source(f"import os\nimport torch\n\n\ndef f(parser, gpus):\n{option}{line}", Level.ROLES)
    assert (outcome.before, outcome.after, outcome.left) == (1, 0, [])
    assert option in outcome.source


@pytest.mark.parametrize(
    "lines",
    [
        "gpu = int(os.environ['LOCAL_RANK'])\nos.environ['CUDA_VISIBLE_DEVICES'] = str(gpu)\nwork()",
        "gpu = int(os.environ['LOCAL_RANK'])\nos.environ.setdefault('CUDA_VISIBLE_DEVICES', str(gpu))\nwork()",
        "gpu = int(os.environ['RANK']) % 8\nos.environ['CUDA_VISIBLE_DEVICES'] = f'{gpu}'\nwork()",
        "def main(i, n):\n    os.environ['CUDA_VISIBLE_DEVICES'] = str(i)\n    work()\n\n\nmp.spawn(main, nprocs=2)",
        "def main(i, ids):\n    os.environ['CUDA_VISIBLE_DEVICES'] = ids[i]\n    work()\n\n\nmp.spawn(main, (IDS,), 2)",
    ],
)
def test_a_rank_that_shows_itself_one_device_takes_that(lines):
    source = (
        "import os\nimport torch\nimport torch.multiprocessing as mp\n\n\ndef work():\n"
        f"    return torch.nn.Linear(2, 2).cuda()\n\n\n{lines}\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert "accelcore.select(" not in outcome.source
    assert "torch.nn.Linear(2, 2).to(current_device)" in outcome.source
    assert len(outcome.left) == lines.count("setdefault")
    assert port_source(outcome.source, Level.ROLES).source == outcome.source


def test_each_line_that_hides_devices_hides_those_of_all_vendors(monkeypatch):
    line = "os.environ['CUDA_VISIBLE_DEVICES'] = str(i)"
    source = f"import os\n\nimport torch\n\n\ndef first(i):\n    {line}\n\n\ndef second(i):\n    {line}  # its own\n"
    ported = port_source(source, Level.ROLES).source
    module = imported(ported)
    for hide in (module.first, module.second):
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        hide(3)
        assert os.environ["ASCEND_RT_VISIBLE_DEVICES"] == os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    assert port_source(ported, Level.ROLES).source == ported
