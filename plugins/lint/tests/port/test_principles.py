"""What a port must never do in a project: choose a device on import, call `to` of what has none, mix two apexes."""

import re
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.port_command import port
from accelcore_lint.port.project import Known, read_project
from click.testing import CliRunner
from port_sources import imported, written

DOCS = Path(__file__).parents[4] / "docs"
BODIES = [
    "return x.cuda()",
    "device = torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')\n    return x.to(device)",
    "return torch.utils.data.DataLoader(x, pin_memory=True)",
    "return torch.optim.SGD([x.cuda()], 0.1)",
    "with torch.cuda.amp.autocast():\n        torch.cuda.amp.GradScaler().scale(x).backward()",
    "torch.cuda.manual_seed(0)\n    torch.cuda.synchronize()",
    "args = argparse.ArgumentParser().parse_args()\n    return x.cuda()",
]
FORMS = {
    "function": "def {name}(x):\n    {body}\n",
    "default": "def {name}(x, device=torch.device('cuda'), kind='cuda' if torch.cuda.is_available() else 'cpu'):\n"
    "    {body}\n",
    "method": "def {name}(x):\n    {body}\n\n\nclass {name}_module(torch.nn.Module):\n    def forward(self, x):\n"
    "        return {name}(x.cuda())\n",
    "documented": '"""Says "it".\n\nSee work(x) (2019), "[1]".\n"""\nimport torch\n\n\ndef {name}(x):\n    {body}\n',
}
TAILS = {
    "nothing": "",
    "registers": "KINDS = {}\nKINDS.update(work=work)\nfor name in ('a', 'b'):\n    KINDS[name] = name\n",
    "options at the top": "parser = argparse.ArgumentParser()\nparser.add_argument('--n', default=1)\n"
    "args = parser.parse_args([])\n",
    "guard": "if __name__ == '__main__':\n    print(work(torch.ones(2)))\n",
    "training guard": "if __name__ == '__main__':\n    for x in torch.utils.data.DataLoader([1.0]):\n"
    "        work(x).backward()\n",
}


@pytest.mark.parametrize(
    ("form", "tail"),
    [
        pytest.param(form, tail, marks=[] if (row + column) % len(FORMS) == 0 else pytest.mark.full)
        for row, form in enumerate(FORMS)
        for column, tail in enumerate(TAILS)
    ],
)
def test_a_module_that_others_import_chooses_no_device_on_import(form, tail):
    names = ["work", *(f"work_{number}" for number in range(1, len(BODIES)))]
    functions = [FORMS[form].format(name=name, body=body) for name, body in zip(names, BODIES, strict=True)]
    source = "\n\n".join(["import argparse\nimport torch\n", *functions, TAILS[tail]])
    known = Known(imported="guard" in tail)
    ported = port_source(source, Level.ROLES, known).source
    assert ported != source
    imported(ported)
    assert port_source(ported, Level.ROLES, known).source == ported


@pytest.mark.parametrize(
    "lines",
    [
        "@torch.cuda.amp.custom_fwd\ndef forward(ctx, x):\n    return x\n",
        "class F:\n    device = torch.device('cuda')\n",
        "DEVICE = torch.device('cuda')\n\n\ndef f():\n    return DEVICE\n",
        "def f(device='cuda', other=torch.device('cuda')):\n    return device\n",
    ],
)
@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_module_asks_no_question_on_import_that_it_did_not_ask(lines, level):
    ported = port_source(f"import torch\n\n\n{lines}", level).source
    with mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("cuda")) as asked:
        imported(ported)
    assert all(not call.args and not call.kwargs for call in asked.call_args_list)


def test_defaults_that_are_set_when_others_import_a_script_are_its_builds_accelerator():
    source = (
        "import argparse\nimport torch\n{}\n\n"
        "def predict(x, device=torch.device('cuda')):\n    return x.to(device)\n\n\n"
        "def main():\n    args = argparse.ArgumentParser().parse_args()\n    predict(torch.ones(2)).cuda()\n\n\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    outcome = port_source(source.format(""), Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    assert imported(outcome.source).predict(torch.ones(1)).device.type == "cpu"
    with mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("meta")):
        assert imported(outcome.source).predict(torch.ones(1)).device.type == "meta"
    outcome = port_source(source.format("import ray\n"), Level.ROLES)  # on a host that may have another build
    assert "device=torch.device('cuda')" in outcome.source
    assert len(outcome.left) == 1


@pytest.mark.parametrize(
    "line",
    ["from train import work", "import train", "from .train import (\n    other,\n    work,\n)", "from . import train"],
)
def test_a_script_that_another_file_imports_is_known(tmp_path, line):
    paths = written(
        tmp_path / "project", {"train.py": "work = 1\n", "tune.py": line + "\n", "test_it.py": "import tune\n"}
    )
    project = read_project(paths)
    assert [project.known(path).imported for path in paths] == [True, False, False]
    assert read_project(paths[:1]).known(paths[0]).imported


OWN = """class Sampler:
    def cuda(self):
        self.where = "its own"


class Bigger(Sampler):
    pass


def make():
    return Bigger()
"""


@pytest.mark.parametrize("made", ["Sampler()", "Bigger()", "make()", "loss.Sampler()"])
@pytest.mark.parametrize("named", ["sampler", "self.sampler"])
def test_an_own_method_of_the_project_is_still_the_one_that_is_called(tmp_path, made, named):
    user = (
        "import torch\nimport loss\nfrom loss import Bigger, Sampler, make\n\n\ndef run(self):\n"
        f"    {named} = {made}\n    {named}.cuda()\n    return {named}.where\n\n\n"
        "def move():\n    return torch.ones(2).cuda()\n"
    )
    paths = written(tmp_path / "project", {"loss.py": OWN, "user.py": user})
    project = read_project(paths)
    outcome = port_source(user, Level.ROLES, project.known(paths[1]))
    assert outcome.after == 1
    assert "return torch.ones(2).to(current_device)" in outcome.source
    loss = imported(OWN, "loss")
    assert imported(outcome.source, loss=loss).run(types.SimpleNamespace()) == "its own"
    assert read_project(paths[1:]).known(paths[1]) == project.known(paths[1])


@pytest.mark.parametrize(
    ("head", "before"),
    [
        ("device=None", ""),
        ("*, device=None", ""),
        ("given=None", "    device = given\n"),
        ("given=None", "    device = given if given else None\n"),
        ("options=types.SimpleNamespace(device=None)", "    device = options.__dict__.get('device')\n"),
    ],
)
def test_a_move_to_none_goes_to_the_current_device(head, before):
    source = f"import types\nimport torch\n\n\ndef moved(x, {head}):\n{before}    return x.cuda(device)\n"
    ported = port_source(source, Level.ROLES).source
    module = imported(ported)
    assert "cuda" not in ported

    class Tensor:
        def to(self, device):
            return device

    assert module.moved(Tensor()) == torch.device("cpu")


def test_a_setting_is_kept_that_takes_back_what_another_file_sets(tmp_path):
    seeds = "import torch\n\n\ndef fixed():\n    torch.backends.cudnn.benchmark = False\n    torch.manual_seed(0)\n"
    main = "import torch.backends.cudnn as cudnn\nimport seeds\ncudnn.benchmark = {}\n"
    paths = written(tmp_path / "project", {"seeds.py": seeds, "main.py": main.format("args.fast")})
    outcome = port_source(seeds, Level.ROLES, read_project(paths).known(paths[0]))
    assert (outcome.source, outcome.left) == (seeds, [])
    paths[1].write_text(main.format("False"))
    assert "benchmark" not in port_source(seeds, Level.ROLES, read_project(paths).known(paths[0])).source
    for other in ("cudnn.enabled, cudnn.benchmark = True, True", 'setattr(cudnn, "benchmark", True)'):
        paths[1].write_text(main.format("False") + other + "\n")
        assert "benchmark" in port_source(seeds, Level.ROLES, read_project(paths).known(paths[0])).source


def test_a_setting_is_kept_that_takes_back_another_one_of_its_file():
    lines = "torch.backends.cudnn.benchmark = {}\ntrain()\ntorch.backends.cudnn.benchmark = False\n"
    assert port_source("import torch\n" + lines.format("True"), Level.ROLES).source.endswith(lines.format("True"))
    assert "cudnn" not in port_source("import torch\n" + lines.format("False"), Level.ROLES).source


@pytest.mark.parametrize(
    "helper", ["from timm.utils import (\n    ApexScaler,\n)", "from mmcv.runner import build_optimizer"]
)
def test_apex_stays_beside_what_another_package_drives_it_by(helper):
    source = (
        "from apex import amp\nfrom apex.parallel import DistributedDataParallel as DDP\n{}\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nmodel, optimizer = amp.initialize(model, optimizer)\n"
        "model = DDP(model)\n"
    )
    outcome = port_source("import torch\n" + source.format(helper), Level.ROLES)
    assert "\nfrom apex import amp\n" in outcome.source
    assert "accelcore.apex import" not in outcome.source
    assert "\nfrom apex.parallel import DistributedDataParallel as DDP\n" in outcome.source
    assert outcome.left
    assert "optimizer = torch.optim.SGD(" in outcome.source
    ours = port_source("import torch\n" + source.format("import x"), Level.ROLES).source
    assert "from accelcore.apex import amp" in ours
    assert "torch.optim" not in ours


def test_another_packages_functions_for_one_vendor_are_reported():
    source = "import torch\nfrom numba import cuda\n\n\n@cuda.jit\ndef kernel(x):\n    pass\n"
    outcome = port_source(source, Level.ROLES)
    assert [note.line for note in outcome.left] == [5]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import torch\ndef f(x):\n    with x:\n\t    y = x.cuda()\n\t    z = 1\n    return x\n", "tabs and spaces"),
        ("import torch\nx = x.cuda(\n    0, async=True)\n", "line 3 names an argument async, which"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_that_says_what_to_do(tmp_path, source, said):
    script = tmp_path / "train.py"
    script.write_text(source)
    result = CliRunner().invoke(port, [str(script)], standalone_mode=False)
    assert result.return_value == 2
    assert said in result.output


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_module_that_has_only_a_part_of_torch_imports_torch(level):
    source = (
        "from torch.utils.data import DataLoader\n\n\n"
        "def make(data):\n    return DataLoader(data, pin_memory=True)\n\n\n"
        "def move(x):\n    return x.cuda()\n"
    )
    loader = imported(port_source(source, level=level).source).make([torch.ones(2)])
    assert loader.pin_memory == torch.accelerator.is_available()


SPAWNED = (
    "import torch\nimport torch.multiprocessing as mp\nfrom torch.utils.data import DataLoader\n\n\n"
    "def collate(batch):\n    return {collated}\n\n\ndef work(x):\n    return {worked}\n\n\ndef make():\n"
    "    return torch.nn.Linear(1, 2).cuda()\n\n\ndef main():\n    net = make()\n"
    "    for x in DataLoader([1.0], num_workers=2, collate_fn=collate):\n"
    "        net(x.cuda())\n    {started}\n\n\nif __name__ == '__main__':\n    {method}\n    main()\n"
)


@pytest.mark.parametrize("method", ["mp.set_start_method('forkserver')", "context = mp.get_context('spawn')"])
def test_workers_of_a_loader_select_nothing_if_they_need_no_device(method):
    source = SPAWNED.format(method=method, collated="batch", worked="x", started="pass")
    ported = port_source(source, Level.ROLES).source
    assert 'if __name__ != "__mp_main__":\n    accel = accelcore.select()' in ported
    needs = SPAWNED.format(method=method, collated="batch[0].cuda()", worked="x", started="pass")
    assert "\naccel = accelcore.select()" in port_source(needs, Level.ROLES).source


@pytest.mark.parametrize(
    "started", ["context.Process(target=work, args=(1,)).start()", "Pool(2).map(work, [1])", "pool.imap(work, [1])"]
)
def test_a_process_that_needs_a_device_asks_for_it_itself(started):
    source = SPAWNED.format(
        method="context = mp.get_context('spawn')", collated="batch", worked="x.cuda()", started=started
    )
    ported = port_source(source, Level.ROLES).source
    assert "accelcore" not in ported
    assert "def work(x):\n    current_device = " in ported
    assert "\ncurrent_device" not in ported


@pytest.mark.parametrize(
    "package", ["import ray", "from submitit import AutoExecutor", "import accelerate", "import deepspeed"]
)
def test_a_package_that_runs_functions_or_chooses_devices_keeps_that(package):
    source = (
        f"import torch\n{package}\n\n\ndef f(x):\n    return x.cuda()\n\n\n"
        "def main():\n    f(torch.ones(2)).backward()\n\n\nmain()\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    assert "accelcore" not in outcome.source


def test_a_script_that_another_library_trains_is_told_so():
    source = "import torch\nfrom accelerate import Accelerator\naccelerator = Accelerator()\ntorch.cuda.empty_cache()\n"
    (note,) = port_source(source, Level.ROLES).harmless
    assert (note.line, note.rule) == (2, "engine")
    assert note.text.startswith("accelerate ")


@pytest.mark.parametrize(("line", "wraps"), [("net = auto_model(net)", True), ("net = net.cuda()", False)])
def test_loops_of_ignite_alone_choose_no_device_and_wrap_nothing(line, wraps):
    source = (
        "import torch\nfrom apex import amp\nfrom ignite.distributed import auto_model\n"
        "from ignite.engine import Engine\nnet = torch.nn.Linear(2, 2)\n"
        f"{line}\nnet = amp.initialize(net)\ntrainer = Engine(net)\n"
    )
    notes = port_source(source, Level.ROLES).harmless
    assert [note.rule for note in notes] == ["engine"] * wraps


@pytest.mark.parametrize(
    ("lines", "name", "page"),
    [
        ("from accelerate import Accelerator\na = Accelerator()", "accelerate", "moving/accelerate.md"),
        ("from lightning_fabric import Fabric\nf = Fabric()", "lightning_fabric", "moving/fabric.md"),
        (
            "from transformers import (\n    AutoModel,\n    Trainer,\n)\nTrainer(m).train()",
            "transformers",
            "moving.md#from-hugging-faces-trainer",
        ),
        (
            "import transformers\ntransformers.Trainer(m).train()",
            "transformers",
            "moving.md#from-hugging-faces-trainer",
        ),
        (
            "import pytorch_lightning as pl\npl.Trainer().fit(m)",
            "pytorch_lightning",
            "moving.md#from-lightnings-trainer",
        ),
    ],
)
def test_a_library_that_trains_is_named_in_a_script_without_a_vendor_too(lines, name, page):
    source = f"import torch\n{lines}\n"
    outcome = port_source(source, Level.ROLES)
    (note,) = outcome.harmless
    assert outcome.source == source
    assert (note.rule, note.text.split()[0]) == ("engine", name)
    assert f"docs/{page}" in note.text
    path, _, anchor = page.partition("#")
    headings = re.findall(r"(?m)^#+ (.+)$", (DOCS / path).read_text(encoding="utf-8"))
    assert not anchor or anchor in [heading.lower().replace("'", "").replace(" ", "-") for heading in headings]


def test_a_library_that_only_helps_is_not_named():
    helped = "from transformers import AutoModel\nfrom own import Trainer\nfrom accelerate.utils import tqdm\n"
    assert port_source(helped, Level.ROLES).harmless == []
    own = "from transformers import AutoModel\nfrom own import Trainer\nTrainer(AutoModel).train()\n"
    assert port_source(own, Level.ROLES).harmless == []
    spread = "import torch\nfrom accelerate import dispatch_model\nmodel = dispatch_model(model.cuda(), {})\n"
    assert port_source(spread, Level.ROLES).harmless == []
    timed = "import torch\nfrom pytorch_lightning.utilities import rank_zero_only\ntorch.cuda.synchronize()\n"
    assert port_source(timed, Level.ROLES).harmless == []


BUILDS = [
    "from setuptools import find_packages, setup",
    "from torch.utils.cpp_extension import load",
    "from torch.utils import cpp_extension",
    "import torch.utils.cpp_extension",
    "from torch.utils.ffi import create_extension",
]


@pytest.mark.parametrize("line", BUILDS)
def test_a_file_that_builds_extensions_is_left_alone(line):
    source = f"import torch\n{line}\n\nflags = ['-O3'] if torch.cuda.is_available() else []\nx = torch.ones(2).cuda()\n"
    outcome = port_source(source, Level.ROLES)
    assert (outcome.source, outcome.before, outcome.after) == (source, 2, 2)
    assert [(note.line, note.rule) for note in outcome.left] == [(2, "build")]


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    "line", ["optimizer = torch.optim.SGD(net.parameters(), 0.1)", "DataLoader([], pin_memory=True)"]
)
def test_a_file_without_a_vendors_word_is_no_business_of_a_port(line, level):
    source = f"import torch\nfrom torch.utils.data import DataLoader\n\nnet = torch.nn.Linear(2, 2)\n{line}\n"
    assert port_source(source, level).source == source


@pytest.mark.parametrize("top", ["import torch.nn as nn", "from torch import Tensor"])
def test_a_module_that_has_a_part_of_torch_asks_it_for_the_device(top):
    outcome = port_source(f"{top}\n\n\ndef move(x):\n    return x.cuda()\n", Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    assert imported(outcome.source).move(torch.ones(1)).device.type == "cpu"


AUTOCASTS = [
    "torch.cuda.amp.autocast()",
    "torch.cuda.amp.autocast(enabled=on)",
    "torch.cuda.amp.autocast(enabled=not off and on)",
    "torch.autocast('cuda', dtype=torch.bfloat16)",
]


@pytest.mark.parametrize("made", AUTOCASTS)
@pytest.mark.parametrize("form", ["    with {}:\n        return torch.is_autocast_enabled('cpu')", "    {}"])
def test_autocast_of_a_module_does_nothing_on_the_cpu_as_before(made, form):
    if form.startswith("    with"):
        source = f"import torch\n\n\ndef f(on=True, off=False):\n{form.format(made)}\n"
    else:
        source = (
            f"import torch\non, off = True, False\n\n\n@{made}\ndef f():\n    return torch.is_autocast_enabled('cpu')\n"
        )
    ported = port_source(source, Level.ROLES).source
    assert "cuda" not in ported
    with mock.patch.object(torch.accelerator, "current_accelerator", return_value=None):
        assert imported(ported).f() is False


def test_a_scaler_of_another_package_is_reported_beside_autocast(tmp_path):
    source = (
        "import torch\nfrom {} import NativeScaler\n\nscaler = NativeScaler()\nwith torch.cuda.amp.autocast():\n"
        "    torch.ones(2).cuda().backward()\n"
    )
    outcome = port_source(source.format("timm.utils"), Level.ROLES)
    assert [(note.line, note.rule) for note in outcome.left] == [(4, "scaler")]
    paths = written(tmp_path / "project", {"train.py": source.format("tools"), "tools.py": "NativeScaler = object\n"})
    assert port_source(source.format("tools"), Level.ROLES, read_project(paths).known(paths[0])).left == []
