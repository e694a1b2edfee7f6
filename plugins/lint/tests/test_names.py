"""What names stand for, and what a training loop does in which order."""

from __future__ import annotations

import ast

import pytest
from accelcore_lint.flow import BACKWARD, CLIP, FOREIGN, STEP, UNSCALE, ZERO, flows
from accelcore_lint.script import Script


def resolved(source):
    """What the script calls last."""
    script = Script(source)
    last = [node for node in ast.walk(script.tree) if isinstance(node, ast.Call)][-1]
    return script.names.resolve(last.func)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch.cuda.synchronize()", "torch.cuda.synchronize"),
        ("import torch as t\nt.cuda.synchronize()", "torch.cuda.synchronize"),
        ("import torch.cuda.amp as amp\namp.autocast()", "torch.cuda.amp.autocast"),
        ("import torch.cuda.amp\ntorch.cuda.amp.autocast()", "torch.cuda.amp.autocast"),
        ("from torch.cuda import amp as a\na.autocast()", "torch.cuda.amp.autocast"),
        ("import torch\nc = torch.cuda\nc.synchronize()", "torch.cuda.synchronize"),
        (
            "try:\n    from apex import amp\nexcept ImportError:\n    amp = None\namp.initialize()",
            "apex.amp.initialize",
        ),
        ("def f():\n    import torch\n    torch.compile()", "torch.compile"),
        ("from .torch import cuda\ncuda.synchronize()", ".torch.cuda.synchronize"),
        ("import torch\ntorch = object()\ntorch.compile()", ""),
        ("import torch\ndef f(torch):\n    torch.compile()", ""),
        ("import torch\nc = torch.cuda\nc = torch.cpu\nc.synchronize()", ""),
        ("import torch\nclass A:\n    torch = 1\n    def f(self):\n        torch.compile()", "torch.compile"),
        ("import torch\n[torch.compile() for torch in ()]", ""),
        ("def f():\n    global torch\n    import torch\ntorch.compile()", "torch.compile"),
        ("print()", "print"),
        ("a = b\nb = a\na()", ""),
    ],
)
def test_a_name_stands_for_what_python_would_find(source, name):
    assert resolved(source) == name


LOOP = """
import torch

class Trainer:
    def __init__(self, model):
        self.optimizer = torch.optim.SGD(model.parameters())
        self.scaler = torch.amp.GradScaler()

    def train(self, loader, parameters):
        for i, batch in enumerate(loader):
            self.scaler.scale(self.loss_of(batch) / 4).backward()
            if (i + 1) % 4 == 0:
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(parameters, 1)
                self.scaler.step(self.optimizer)
                self.optimizer.zero_grad()
"""


def test_a_flow_has_events_in_order_and_their_objects():
    (flow,) = flows(Script(LOOP))
    assert [event.kind for event in flow.events] == [BACKWARD, UNSCALE, CLIP, STEP, ZERO]
    backward, *_, step, _ = flow.events
    assert (backward.scaler, step.key, step.scaler) == ("self.scaler", "self.optimizer", "self.scaler")
    assert ast.unparse(backward.loss) == "self.loss_of(batch) / 4"
    (window,) = flow.windows
    assert (ast.unparse(window.count), window.counter, window.flushes) == ("4", "i", False)


def test_branches_of_one_statement_exclude_each_other():
    source = (
        "if a:\n    loss.backward()\nelif b:\n    optimizer.step()\nelse:\n    optimizer.zero_grad()\noptimizer.step()"
    )
    (flow,) = flows(Script(source))
    backward, first, zero, last = flow.events
    assert backward.excludes(first)
    assert first.excludes(zero)
    assert not backward.excludes(last)
    assert not last.excludes(zero)


@pytest.mark.parametrize(
    "call", ["accelerator.backward(loss)", "self.fabric.backward(loss)", "engine.step()", "self.manual_backward(loss)"]
)
def test_a_framework_that_trains_is_seen(call):
    (flow,) = flows(Script(f"for batch in loader:\n    loss = f(batch)\n    {call}"))
    assert flow.of(FOREIGN)
    assert flow.foreign
