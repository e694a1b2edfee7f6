"""Training loops at level trainer: which are taken, which are left and why, and that those taken train as before."""

import port_runs
import pytest
from accelcore_lint.port import Level, port_source

SCRIPT = """import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader


def progress(batches):
    return batches


def main(model, batches):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    schedule = StepLR(optimizer, 2, 0.5)
    loader = DataLoader(batches, 1)
    n = 2
    optimizer.zero_grad()
    for i, x in enumerate({data}):
        x = x.to(device)
{body}
        print("loss", model(x).square().mean().item())


torch.manual_seed(0)
main(torch.nn.Linear(4, 1), [torch.full((2, 4), float(k)) for k in range(1, 7)])
"""
PLAIN = """
optimizer.zero_grad()
loss = model(x).square().mean()
loss.backward()
optimizer.step()
"""
ONE_LINE = PLAIN.replace("loss = model(x).square().mean()\nloss.", "model(x).square().mean().")
WINDOW = """
loss = model(x).square().mean()
(loss / n).backward()
if (i + 1) % n == 0:
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
"""

NAME = '"cuda" if torch.cuda.is_available() else "cpu"'
CLIP = "torch.nn.utils.clip_grad_norm_(\n    parameters=model.parameters(),\n    max_norm=0.5,\n)\n"


def script(body, data="batches"):
    return SCRIPT.format(data=data, body="\n".join(f"        {line}" for line in body.strip().splitlines()))


TAKEN = [
    pytest.param(script(PLAIN), id="plain, over data that it does not know"),
    pytest.param(
        script(PLAIN).replace('torch.device("cuda" if torch.cuda.is_available() else "cpu")', NAME),
        id="a device's name",
    ),
    pytest.param(script(PLAIN, "progress(batches)"), id="a call"),
    pytest.param(script(PLAIN, "loader"), id="a loader"),
    pytest.param(script(PLAIN.replace("loss.backward()", "loss.mean().backward()")), id="an expression"),
    pytest.param(script(PLAIN.replace("loss.backward()", "(loss + loss / n).backward()")), id="a sum"),
    pytest.param(script(ONE_LINE), id="a forward pass in the line of backward"),
    pytest.param(script(PLAIN + "schedule.step()\n"), id="a schedule after each batch"),
    pytest.param(script("if i > 3:\n    break\n" + PLAIN, "loader"), id="an end before the forward pass"),
    pytest.param(script("if i == 1:\n    continue\n" + PLAIN + "if i == 4:\n    return\n"), id="a batch left out"),
    pytest.param(script(PLAIN.replace("optimizer.step", CLIP + "optimizer.step")), id="clipping over several lines"),
    pytest.param(script("if torch.cuda.is_available():\n    x = x.cuda()\n" + PLAIN), id="moved if there is a device"),
]


@pytest.mark.parametrize("source", TAKEN)
def test_a_loop_that_is_taken_trains_as_before(source, monkeypatch):
    pytest.importorskip("accelcore")
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    outcome = port_source(source, Level.TRAINER)
    assert [note.text.split(";")[0] for note in outcome.loops] == ["replaced by a trainer"]
    assert "trainer.forward(x)" in outcome.source
    whole = "enumerate(loader)" in source and "break" not in source
    assert ("trainer.batches(loader)" in outcome.source) == whole
    assert port_runs.losses(outcome.source) == pytest.approx(port_runs.losses(source), rel=1e-5)


EVALUATED = """
optimizer.zero_grad()
with torch.no_grad():
    before = model(x)
loss = model(x).square().mean()
loss.backward()
optimizer.step()
if i % 2 == 0:
    model = model.eval()
    print("loss", model(x).square().mean().item())
    model = model.train()
"""


def test_an_evaluation_in_a_loop_calls_the_model(monkeypatch):
    pytest.importorskip("accelcore")
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    source = script(EVALUATED)
    outcome = port_source(source, Level.TRAINER)
    assert [line.strip() for line in outcome.source.splitlines() if "trainer.forward(" in line] == [
        "loss = trainer.forward(x).square().mean()"
    ]
    assert port_runs.losses(outcome.source) == pytest.approx(port_runs.losses(source), rel=1e-5)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (script(PLAIN + PLAIN), "backward 2 times"),
        (script(WINDOW, "loader"), "under a condition"),
        (script(PLAIN).replace("    n = 2", "    model, n = torch.nn.Linear(4, 1), 2"), "made again"),
        (script(PLAIN).replace("(model.parameters()", "([*model.parameters(), *other.parameters()]"), "one model"),
        (script(PLAIN).replace("x.to(device)", 'x.to(options["device"])'), "accel.device"),
        (script(PLAIN + "print(model.weight.grad)\n"), ".grad"),
        (script(PLAIN.replace("loss.backward()", "if loss > 9:\n    continue\nloss.backward()")), "skip the update"),
        (script(PLAIN.replace("optimizer.step()", "if loss > 9:\n    break\noptimizer.step()")), "skip the update"),
        (script("y = x.cuda(pick(i))\n" + PLAIN), "was left"),
        (script("if use_gpu:\n    x = x.cuda()\n" + PLAIN), "use_gpu"),
        (script("x = x.cuda() if use_gpu else x\n" + PLAIN), "use_gpu"),
        (script(PLAIN).replace("    n = 2", "    model = torch.nn.DataParallel(model)"), "one process"),
        (script(PLAIN).replace("    n = 2", "    dist.init_process_group('nccl')"), "several ranks"),
    ],
)
def test_a_loop_that_is_left_says_why(source, words):
    (note,) = port_source(source, Level.TRAINER).loops
    assert words in note.text


@pytest.mark.parametrize(
    "source",
    [
        script("# model = torch.nn.parallel.DistributedDataParallel(model)  # DataParallel(model)\n" + PLAIN),
        script(PLAIN + "# loss.backward()\n# x.cuda()\n"),
        script(PLAIN.replace("optimizer.step()", "optimizer.step() # no scaler")),
        script("for y in x:  # optimizer.step() is below\n    pass\n" + PLAIN),
    ],
)
def test_comments_are_no_steps_of_a_loop(source):
    (note,) = port_source(source, Level.TRAINER).loops
    assert "replaced" in note.text


def test_a_model_that_is_made_again_below_a_commented_optimizer_is_found():
    source = script(PLAIN).replace("    n = 2", "    model, n = torch.nn.Linear(4, 1), 2")
    source = source.replace("    optimizer = ", "    # plain\n    optimizer = ")
    (note,) = port_source(source, Level.TRAINER).loops
    assert "made again" in note.text
