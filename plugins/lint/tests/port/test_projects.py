"""What other files of a project say of a script: what they need of its objects, and which devices they choose."""

from unittest import mock

import pytest
import torch
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import Known, read_project
from port_sources import written

APEX_USES = ["amp.init(enabled=True)", "amp._amp_state.loss_scalers[0]._loss_scale", "optimizer._amp_stash"]
TRY = "try:\n    from apex import amp\nexcept ImportError:\n    {}\n"


@pytest.mark.parametrize("use", APEX_USES)
def test_private_parts_of_apex_keep_the_whole_project_at_apex(tmp_path, use):
    train = "import torch\nfrom apex import amp\nmodel, optimizer = amp.initialize(model, optimizer)\n"
    hooks = f"import torch\nfrom apex import amp\n\n\ndef read(optimizer):\n    return amp.state_dict(), {use}\n"
    paths = written(tmp_path / "project", {"train.py": train, "hooks.py": hooks})
    project = read_project(paths)
    for path in paths:
        assert "\nfrom apex import amp\n" in port_source(path.read_text(), Level.ROLES, project.known(path)).source
    alone = read_project(written(tmp_path / "other", {"train.py": train}))
    assert "from accelcore.apex import amp" in port_source(train, Level.ROLES, alone.known(paths[0])).source


ELSEWHERE = {
    "scaler.get_growth_factor()": "GradScaler(",
    "scaler.update(2.0)": "GradScaler(",
    "scaler.state_dict()['scale']": "GradScaler(",
    "isinstance(scaler, torch.cuda.amp.GradScaler)": "GradScaler(",
    "isinstance(optimizer, torch.optim.SGD)": "torch.optim.SGD(",
    "optimizer.state[weight]['momentum_buffer']": "torch.optim.SGD(",
    "torch.save(dict(model=model, optimizer=optimizer), f'{model(weight)}.pt')": "torch.optim.SGD(",
    "torch.save(state, 'c.pt') if (state := {'optimizer': optimizer}) else 0": "torch.optim.SGD(",
    "model.module.weight": "DDP(model, device_ids",
    "model.no_sync()": "DDP(model, device_ids",
}


@pytest.mark.parametrize(("use", "kept"), ELSEWHERE.items())
def test_what_another_file_needs_of_an_object_keeps_torchs(tmp_path, use, kept):
    train = (
        "import os\nimport helpers\nimport torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\n"
        "rank = int(os.environ['LOCAL_RANK'])\nmodel = DDP(torch.nn.Linear(2, 2).cuda(), device_ids=[rank])\n"
        "model = DDP(model, device_ids=[rank])\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "scaler = torch.cuda.amp.GradScaler()\nhelpers.step(model, optimizer, scaler)\n"
    )
    helpers = f"import torch\n\n\ndef step(model, optimizer, scaler, weight=None):\n    return {use}\n"
    paths = written(tmp_path / "project", {"train.py": train, "helpers.py": helpers})
    ported = port_source(train, Level.ROLES, read_project(paths).known(paths[0])).source
    assert kept in ported
    plain = port_source(train, Level.ROLES).source
    assert all(word not in plain for word in ELSEWHERE.values())


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    ("use", "is_on"), [("state_dict()['scale']", True), ('state_dict()["scale"]', True), ("state_dict()", False)]
)
def test_a_scaler_is_on_where_another_file_takes_an_entry_of_its_state(tmp_path, level, use, is_on):
    native = (
        "import torch\n\n\nclass Native:\n    def __init__(self):\n        self.made = torch.cuda.amp.GradScaler()\n\n"
        "    def state_dict(self):\n        return self.made.state_dict()\n"
    )
    engine = f"import torch\nfrom native import Native\n\nnative = Native()\nprint(native.{use})\n"
    paths = written(tmp_path, {"native.py": native, "engine.py": engine})
    ported = port_source(native, level, read_project(paths).known(paths[0])).source
    scope = {"__name__": "native"}
    with mock.patch("torch.accelerator.current_accelerator", return_value=None):
        exec(ported, scope)
        assert bool(scope["Native"]().state_dict().get("scale")) is is_on  # of a scaler that is off it is empty


@pytest.mark.parametrize("take", ["from tools import autocast", "from tools import *", "import tools"])
def test_an_import_stays_that_another_file_takes_from_this_one(tmp_path, take):
    tools = "import torch\nfrom torch.cuda.amp import autocast, GradScaler\n\n\ndef f(x):\n    return autocast()\n"
    called = "tools.autocast" if take == "import tools" else "autocast"
    user = f"{take}\nimport torch\n\n\ndef g(x):\n    with {called}():\n        f(x)\n"
    paths = written(tmp_path / "project", {"tools.py": tools, "user.py": user})
    ported = port_source(tools, Level.ROLES, read_project(paths).known(paths[0])).source
    assert "from torch.cuda.amp import autocast\n" in ported
    assert "torch.cuda.amp" not in port_source(tools, Level.ROLES, Known(imported=True)).source


@pytest.mark.parametrize(
    ("helper", "left"),
    [
        ("import os\n    os.environ['CUDA_VISIBLE_DEVICES'] = gpu", 1),
        ("torch.cuda.set_device(int(gpu))", 0),
        ("pass", 0),
    ],
)
def test_a_function_of_another_file_that_chooses_devices_is_obeyed(tmp_path, helper, left):
    train = (
        "import torch\nfrom setup import start\n\nnet = torch.nn.Linear(2, 2).cuda()\n\n\n"
        "def main(gpu):\n    start(gpu)\n    return torch.ones(2).cuda()\n\n\nmain('1')\n"
    )
    paths = written(
        tmp_path / "project", {"train.py": train, "setup.py": f"import torch\n\n\ndef start(gpu):\n    {helper}\n"}
    )
    outcome = port_source(train, Level.ROLES, read_project(paths).known(paths[0]))
    assert len(outcome.left) == left
    assert ("accelcore.select()" in outcome.source) == (helper == "pass")


@pytest.mark.parametrize("word", ["torch.cuda.set_device(0)", "import_module('horovod.torch')", "x = 1"])
def test_a_script_follows_a_device_that_a_file_behind_others_may_choose(tmp_path, word):
    train = "import torch\nfrom tools import start\n\nstart()\nx = torch.ones(2).cuda()\n"
    files = {
        "train.py": train,
        "tools/__init__.py": "from .jobs import start\n",
        "tools/jobs.py": f"import torch\n\n\ndef start():\n    {word}\n",
    }
    paths = written(tmp_path / "project", files)
    for given in (paths, paths[:1]):
        ported = port_source(train, Level.ROLES, read_project(given).known(paths[0])).source
        assert ("accelcore" in ported) == (word == "x = 1")


@pytest.mark.parametrize(("handler", "stays"), [("amp = None", True), ("raise ImportError('install apex')", False)])
def test_apex_stays_in_a_project_that_goes_on_without_it(tmp_path, handler, stays):
    files = {"train.py": "import torch\n" + TRY.format(handler), "tools.py": "import torch\nfrom apex import amp\n"}
    paths = written(tmp_path / "project", {name: text + "amp.initialize(net)\n" for name, text in files.items()})
    project = read_project(paths)
    for path in paths:
        ported = port_source(path.read_text(), Level.ROLES, project.known(path)).source
        assert ("from accelcore" not in ported) is stays


@pytest.mark.parametrize(
    ("use", "kept"),
    [
        ("import train as job\nparser = job.get_parser()", True),
        ("from train import get_parser\nparser = get_parser()", True),
        ("import train\ntrain.main()", False),
    ],
)
def test_an_option_keeps_its_default_if_another_file_declares_it(tmp_path, use, kept):
    train = (
        "import argparse\nimport torch\n\n\ndef get_parser():\n    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('--device', default='cuda')\n    return parser\n\n\ndef main(args):\n"
        "    return torch.ones(2, device=args.device)\n\n\n"
        "if __name__ == '__main__':\n    main(get_parser().parse_args())\n"
    )
    paths = written(tmp_path, {"train.py": train, "submit.py": f"import submitit\n{use}\n"})
    ported = port_source(train, Level.ROLES, read_project(paths).known(paths[0])).source
    assert ("default='cuda'" in ported) is kept


@pytest.mark.parametrize(
    "replaced",
    ["@mock.patch('torch.cuda.synchronize')", "monkeypatch.setattr(torch.cuda, 'synchronize', print)", "pass"],
)
def test_a_function_stays_that_a_test_replaces_by_its_name(tmp_path, replaced):
    timer = "import torch\n\n\ndef wait():\n    torch.cuda.synchronize()\n    torch.cuda.empty_cache()\n"
    lines = replaced if replaced.startswith("@") else f"def test_a(monkeypatch):\n    {replaced}\n\n"
    test = (
        f"import torch\nfrom unittest import mock\nfrom timer import wait\n\n\n{lines}\ndef test_b(*args):\n    pass\n"
    )
    paths = written(tmp_path, {"timer.py": timer, "test_timer.py": test})
    ported = port_source(timer, Level.ROLES, read_project(paths).known(paths[0])).source
    assert ("torch.cuda.synchronize()" in ported) is (replaced != "pass")
    assert "torch.get_device_module().empty_cache()" in ported


@pytest.mark.parametrize(
    "choice",
    [
        "torch.device('cuda')",
        "'cuda'",
        "torch.device('cuda', 0)",
        "torch.ones(2, device='cuda')",
        "torch.ones(2).cuda()",
    ],
)
@pytest.mark.parametrize("test", ["with mock.patch('torch.cuda.is_available'):\n        ", ""])
def test_a_device_stays_below_a_question_that_a_test_answers(tmp_path, choice, test):
    source = (
        "import torch\n\n\ndef get(device):\n    if torch.cuda.is_available():\n"
        f"        device = {choice}\n    return device\n"
    )
    test = f"from unittest import mock\nfrom chosen import get\n\n\ndef test_a():\n    {test}get('cpu')\n"
    paths = written(tmp_path, {"chosen.py": source, "test_chosen.py": test})
    ported = port_source(source, Level.ROLES, read_project(paths).known(paths[0])).source
    assert (f"        device = {choice}\n" in ported) is ("mock.patch" in test)
    assert ("if torch.cuda.is_available():" in ported) is ("mock.patch" in test)


@pytest.mark.parametrize(
    ("end", "other", "kept"),
    [
        ("if __name__ == '__main__':\n    wait()\n", "import os\n", False),
        ("if __name__ == '__main__':\n    wait()\n", "from examples.timer import wait\n", True),
        ("if __name__ == '__main__':\n    wait()\n", "from unittest import mock\nrun('examples/timer.py')\n", True),
        ("", "import os\n", True),
    ],
)
def test_a_function_does_not_stay_in_a_script_that_no_test_runs(tmp_path, end, other, kept):
    timer = f"import torch\n\n\ndef wait():\n    torch.cuda.synchronize()\n\n\n{end}"
    patch = "@mock.patch('torch.cuda.synchronize')\ndef test_a(wait):\n    pass\n"
    test = f"from unittest import mock\n{patch if 'run(' not in other else ''}"
    other += f"\n\n{patch}" if "run(" in other else ""
    paths = written(tmp_path, {"timer.py": timer, "test_net.py": test, "other.py": other})
    ported = port_source(timer, Level.ROLES, read_project(paths).known(paths[0])).source
    assert ("torch.cuda.synchronize()" in ported) is kept


def test_a_negated_question_stays_that_a_test_replaces_by_its_name(tmp_path):
    net = "import torch\n\n\ndef f(x):\n    if not torch.cuda.is_available():\n        return x\n    return x.cuda()\n"
    test = "from unittest import mock\n\n\n@mock.patch('torch.cuda.is_available')\ndef test_f(asked):\n    pass\n"
    paths = written(tmp_path, {"net.py": net, "test_net.py": test})
    ported = port_source(net, Level.ROLES, read_project(paths).known(paths[0])).source
    assert "if not torch.cuda.is_available():" in ported
    assert "x.cuda()" not in ported


@pytest.mark.parametrize(("replaces", "kept"), [("torch.cuda.is_available", True), ("torch.cuda.empty_cache", False)])
def test_a_function_that_names_a_device_stays_if_a_test_replaces_its_question(tmp_path, replaces, kept):
    best = (
        "import torch\n\n\ndef get_device():\n    if torch.cuda.is_available():\n        return 'cuda'\n"
        "    return 'cpu'\n"
    )
    test = f"from unittest import mock\n\n\n@mock.patch('{replaces}')\ndef test_best(asked):\n    pass\n"
    paths = written(tmp_path, {"best.py": best, "test_best.py": test})
    ported = port_source(best, Level.ROLES, read_project(paths).known(paths[0])).source
    assert ("return 'cuda'" in ported) is kept


@pytest.mark.parametrize(("patch", "kept"), [("@mock.patch('torch.cuda.is_available')\n", True), ("", False)])
def test_a_test_asks_the_function_that_only_another_test_replaces(tmp_path, patch, kept):
    test = (
        "import pytest\nimport torch\nfrom unittest import mock\n\n\n@mock.patch('torch.cuda.is_available')\n"
        f"def test_a(asked):\n    pass\n\n\n{patch}@pytest.mark.skipif(not torch.cuda.is_available(), reason='')\n"
        "def test_b(*args):\n    assert torch.ones(2).cuda().sum() == 2\n"
    )
    paths = written(tmp_path, {"test_net.py": test})
    ported = port_source(test, Level.ROLES, read_project(paths).known(paths[0])).source
    assert ("skipif(not torch.cuda.is_available()" in ported) is kept


@pytest.mark.parametrize(
    ("head", "is_hider"), [("", True), ("\n\nif __name__ == '__main__':\n", False), ("\n    if hidden:\n    ", True)]
)
def test_a_file_that_hides_devices_when_it_is_run_has_no_function_that_does(tmp_path, head, is_hider):
    nets = f"import os\n\n\ndef build():\n    print(1){head}\n    os.environ['CUDA_VISIBLE_DEVICES'] = '1'\n"
    train = "import nets\nimport torch\nx = torch.ones(2).cuda()\nnets.build()\n"
    paths = written(tmp_path / "project", {"train.py": train, "nets.py": nets})
    assert (len(port_source(train, Level.ROLES, read_project(paths).known(paths[0])).left) == 1) is is_hider


@pytest.mark.parametrize("own", ["", "os.environ['CUDA_VISIBLE_DEVICES'] = args.devices\n"])
@pytest.mark.parametrize(("flag", "kept"), [("use_gpu", True), ("verbose", False)])
def test_a_flag_under_which_another_file_hides_devices_is_for_one_vendors(tmp_path, flag, kept, own):
    base = (
        f"import os\nimport torch\n\n\ndef pick(args):\n    if args.{flag}:\n"
        "        os.environ['CUDA_VISIBLE_DEVICES'] = args.gpu\n        return torch.device(f'cuda:{args.gpu}')\n"
        "    return torch.device('cpu')\n"
    )
    run = (
        "import os\nimport base\nimport torch\nargs.use_gpu = args.use_gpu and torch.cuda.is_available()\n"
        f"{own}base.pick(args)\n"
    )
    paths = written(tmp_path, {"run.py": run, "base.py": base})
    ported = port_source(run, Level.ROLES, read_project(paths).known(paths[0])).source
    assert ("and torch.cuda.is_available()" in ported) is kept


@pytest.mark.parametrize(
    ("takes", "kept"), [("from util import T", True), ("import util\nutil.T(2)", True), ("", False)]
)
def test_a_type_that_another_file_takes_stays(tmp_path, takes, kept):
    util = "import torch\nT = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor\n"
    paths = written(tmp_path, {"util.py": util, "train.py": f"{takes}\n"})
    ported = port_source(util, Level.ROLES, read_project(paths).known(paths[0])).source
    assert ("torch.cuda.FloatTensor" in ported) is kept


@pytest.mark.parametrize(
    ("use", "kept"),
    [
        ("tensors.to_tensor(x)", False),
        ("tensors.to_tensor(x, False)", False),
        ("tensors.to_tensor(x, False, torch.LongTensor)", True),
        ("tensors.to_tensor(x, dtype=torch.LongTensor)", True),
        ("tensors.to_tensor(*x)", True),
        ("tensors.to_tensor(x, **more)", True),
        ("list(map(tensors.to_tensor, x))", True),
    ],
)
@pytest.mark.parametrize("last", ["torch.from_numpy(x).type(dtype)", "torch.from_numpy(x).type(dtype), dtype"])
def test_a_parameter_is_the_type_that_is_its_default_if_no_file_gives_another(tmp_path, use, kept, last):
    source = (
        "import torch\n\nUSE = torch.cuda.is_available()\n"
        "FLOAT = torch.cuda.FloatTensor if USE else torch.FloatTensor\n\n\n"
        f"def to_tensor(x, copy=True, dtype=FLOAT):\n    return {last}\n"
    )
    other = f"import tensors\nimport torch\n\n\ndef run(x, more):\n    return {use}\n"
    paths = written(tmp_path, {"tensors.py": source, "other.py": other})
    ported = port_source(source, Level.TORCH, read_project(paths).known(paths[0])).source
    kept = kept or last.endswith(", dtype")
    assert ("FLOAT = torch.cuda.FloatTensor if USE else torch.FloatTensor" in ported) is kept
    assert ("USE = torch.cuda.is_available()" in ported) is kept
    assert (".type(dtype).to(device)" in ported) is not kept
    scope = {}
    exec(ported, scope)
    assert scope["to_tensor"](torch.ones(2, dtype=torch.float64).numpy())[0].dtype == torch.float32
