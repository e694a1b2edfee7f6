"""Summaries by torchsummary, which knows CUDA and the CPU only: a choice of the device beside one stays."""

import pytest
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import read_project
from port_sources import written

LEVELS = pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
CHOICE = "torch.device('cuda' if torch.cuda.is_available() else 'cpu')"
SCRIPT = """import torch
from torchsummary import summary

{choice}
net = torch.nn.Linear(2, 2).to(device)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
{call}
net(torch.ones(2).to(device)).sum().backward()
"""
MODEL = """import torch
from torchsummary import summary


class Net(torch.nn.Module):
    def forward(self, x):
        if torch.cuda.is_available():
            x = x.cuda()
        return x


{head}
    device = CHOICE
    net = Net().to(device)
    summary(net, (3, 2))
{tail}""".replace("CHOICE", CHOICE)
USER = f"import torch\nfrom model import Net\n\ndevice = {CHOICE}\nnet = Net().to(device)\nnet(torch.ones(2))\n"


@LEVELS
@pytest.mark.parametrize(
    ("choice", "call", "kept"),
    [
        (f"device = {CHOICE}", "summary(net, (3, 2))", True),
        (f"device = {CHOICE}", "summary(net, (3, 2), device=device.type)", True),
        (f"device = {CHOICE}", "summary(net, (3, 2), device='cpu')", False),
        (f"device = {CHOICE}", "print(summary)", False),
        ("device = 'cuda:0' if torch.cuda.is_available() else 'cpu'", "summary(net, (3, 2))", True),
        (
            "found = torch.cuda.is_available()\ndevice = torch.device('cuda:0' if found else 'cpu')",
            "summary(net, 2)",
            True,
        ),
        ("device = 'cpu'\nif torch.cuda.is_available():\n    device = 'cuda'", "summary(net, (3, 2))", True),
        ("device = torch.device('cuda')", "summary(net, (3, 2))", False),
    ],
)
def test_a_choice_of_the_device_stays_beside_a_summary(level, choice, call, kept):
    outcome = port_source(SCRIPT.format(choice=choice, call=call), level)
    assert (choice.split("= ", 1)[1].split("\n")[0] in outcome.source) is (kept or choice.startswith("device = 'cpu'"))
    assert ("torch.cuda.is_available()" in outcome.source) is kept
    assert port_source(outcome.source, level).source == outcome.source


@LEVELS
@pytest.mark.parametrize(
    ("head", "tail"),
    [('if __name__ == "__main__":', ""), ("def show():", '\n\nif __name__ == "__main__":\n    show()\n')],
)
def test_a_summary_that_a_module_shows_by_itself_keeps_no_choice_of_a_program(tmp_path, level, head, tail):
    model = MODEL.format(head=head, tail=tail)
    paths = written(tmp_path, {"model.py": model, "train.py": USER})
    project = read_project(paths)
    module, program = (port_source(path.read_text(), level, project.known(path)) for path in paths)
    assert f"device = {CHOICE}" in module.source
    assert module.source.count("torch.cuda.is_available()") == 1
    assert not module.splits
    assert "cuda" not in program.source
