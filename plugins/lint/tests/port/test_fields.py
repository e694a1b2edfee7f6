"""Fields of classes of options, as `device: str = "cuda"`: a script's own have the type of the accelerator."""

import sys
import types
from unittest import mock

import pytest
import torch
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import Known, read_project
from port_sources import imported, written

SCRIPT = """import torch
from dataclasses import dataclass


@dataclass
class Options:
    device: {kind} = "cuda"


def main(options):
    net = torch.nn.Linear(2, 2).to(options.device)
    return torch.optim.SGD(net.parameters(), lr=0.1)


if __name__ == "__main__":
    main(Options())
"""


def default_in(source, built_for, monkeypatch):
    """The default of the field of a script that another one imports, where torch is built for a device."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: built_for)
    module = types.ModuleType("options")
    monkeypatch.setitem(sys.modules, "options", module)
    exec(compile(source, "options", "exec"), module.__dict__)
    return module.Options().device


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(("built_for", "kind"), [("cuda", "cuda"), ("xpu", "xpu"), (None, "cpu")])
def test_a_field_of_a_script_has_the_type_of_the_accelerator(level, built_for, kind, monkeypatch):
    outcome = port_source(SCRIPT.format(kind="str"), level)
    assert (outcome.after, outcome.left) == (0, [])
    assert default_in(outcome.source, built_for and torch.device(built_for), monkeypatch) == kind
    assert port_source(outcome.source, level).source == outcome.source


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ("", "cpu"),
        ("from torch import nn\npool = nn.MaxPool2d(2)\n", "cpu"),
        ("import os\nos.environ.update(CUDA_VISIBLE_DEVICES='1')\n", "cuda"),
        ("from multiprocessing import Process\nProcess(target=print).start()\n", "cuda"),
    ],
)
def test_a_default_of_an_imported_module_is_the_cpu_if_there_is_no_device(tmp_path, level, more, kind):
    modules = "import torch\n\n\ndef build(device='cuda'):\n    return torch.ones(2, device=device)\n"
    train = f"{more}import torch\nfrom modules import build\n\nprint(build() + torch.ones(2).cuda())\n"
    paths = written(tmp_path, {"modules.py": modules, "train.py": train})
    ported = port_source(modules, level, read_project(paths).known(paths[0])).source

    def built_for_cuda(check_available=False):
        return None if check_available else torch.device("cuda")

    with mock.patch("torch.accelerator.current_accelerator", built_for_cuda):
        assert imported(ported).build.__defaults__ == (kind,)


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    ("source", "known"),
    [
        (SCRIPT.format(kind="str"), Known(imported=True)),
        (SCRIPT.format(kind="str").replace("torch\n", "torch\nimport submitit\n", 1), Known()),
        (SCRIPT.format(kind='Literal["cuda", "cpu"]'), Known()),
    ],
)
def test_a_field_stays_that_another_process_may_declare_or_whose_values_are_a_list(level, source, known):
    outcome = port_source(source, level, known)
    assert ' = "cuda"\n' in outcome.source
    assert outcome.after == outcome.before == 1
    assert outcome.left
