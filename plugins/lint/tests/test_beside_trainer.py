"""What a script does beside accelcore's trainer, which does it itself."""

from __future__ import annotations

import pytest
from accelcore_lint.lint import check

SCRIPT = """
import accelcore
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import StepLR

accel = accelcore.select()
o = accel.optimizers.create("sgd", net.parameters())
{before}
t = accel.trainer(net, o, loss={loss}{options})
for b in t.batches(loader):
    t(b)
    {line}
    t.save("x")
"""


def marked(line="pass", before="", options="", loss="f", code="ACC315"):
    """Return the lines that a rule marks in a script."""
    return lines_of(SCRIPT.format(line=line, before=before, options=options, loss=loss), code)


def lines_of(text, code):
    return {text.splitlines()[each.line - 1].strip() for each in check(text) if each.code == code}


@pytest.mark.parametrize(
    "line",
    [
        "o.zero_grad()",
        "net.zero_grad()",
        "o.step()",
        "clip_grad_norm_(net.parameters(), 1.0)",
        "t.backward(scaler.scale(f(net, b)))",
    ],
)
def test_what_the_trainer_does_itself_is_found_in_its_loop(line):
    assert marked(line) == {line}
    assert not marked(before=line if "t." not in line else "")  # before the trainer is made


@pytest.mark.parametrize(
    ("loop", "found"),
    [
        ("for i, b in enumerate(t.batches(loader)):", True),
        ("for b in loader:", False),
        ("for b in t.evaluate(loader):", False),
    ],
)
def test_a_loop_over_its_batches_that_never_calls_the_trainer_is_found(loop, found):
    text = SCRIPT.format(line="pass", before="", options="", loss="f").partition("for b in")[0]
    text += f"{loop}\n    loss = f(net, b)\n    loss.backward()\n    o.step()\n    o.zero_grad()\n"
    marks = [(each.line, each.write) for each in check(text) if each.code == "ACC315"]
    first = text.count("\n") - 2
    assert marks == ([(first, "Write t.backward(loss)."), (first + 1, "Write t.update().")] if found else [])
    assert not [each for each in check(text.replace("o.step", "p.step")) if each.code == "ACC315"]


def test_a_scaled_loss_of_the_trainer_is_found():
    assert marked(loss="lambda m, b: scaler.scale(f(m, b))")
    scaled = "def f(m, b): return t.scaler.scale(m(b))"
    assert marked(before=scaled) == {scaled}
    assert not marked(before=scaled, loss="g")


@pytest.mark.parametrize(
    ("loop", "options", "line", "found"),
    [
        ("b in loader", "", "t(b)", True),
        ("i, b in enumerate(tqdm(loader))", "", "t.backward(f(net, b))", True),
        ("b in loader", ", accumulate=2", "t(b)", True),
        ("b in t.batches(loader)", "", "t(b)", False),
        ("b in loader", "", "f(net, b)", False),
        ("b in data", "", "t(b)", False),
    ],
)
def test_a_loop_that_trains_on_a_loader_itself_is_found(loop, options, line, found):
    loader = "from torch.utils.data import DataLoader\nloader = DataLoader(data)"
    text = SCRIPT.format(line="pass", before=loader, options=options, loss="f").partition("for b in")[0]
    text += f"for {loop}:\n    {line}\n"
    saved = ((text + f"t.{call}", True) for call in ("save('x')", "resume('x')", "batches(loader)"))
    for script, is_saved in (*saved, (text, False)):
        wrong = found and (is_saved or bool(options))
        assert lines_of(script, "ACC315") == ({f"for {loop}:"} if wrong else set())


@pytest.mark.parametrize(
    ("options", "line", "found"),
    [
        ("", "s.step()", True),
        (", scheduler=s", "pass", False),
        (", **options", "s.step()", False),
        ("", "t.save('x', extra={'scheduler': s.state_dict()})", False),
    ],
)
def test_a_scheduler_that_the_trainer_is_not_given_is_found(options, line, found):
    before = "s = StepLR(o, 1)"
    assert marked(line, before, options, code="ACC316") == ({before} if found else set())
    assert not marked(before="def other(o): return StepLR(o, 1)", code="ACC316")


@pytest.mark.parametrize(
    ("options", "line", "found"),
    [
        (", scheduler=s", "s.step()", True),
        (", scheduler=s", "p.step()", False),
        (", scheduler=s, schedule_by='script'", "s.step()", False),
        (", scheduler=s, **options", "s.step()", False),
    ],
)
def test_a_step_of_a_scheduler_that_the_trainer_steps_is_found(options, line, found):
    assert marked(line, "s = StepLR(o, n)", options, code="ACC316") == ({line} if found else set())


@pytest.mark.parametrize(
    ("scheduler", "options", "found"),
    [
        ("CosineAnnealingLR(o, n * len(loader))", "accumulate=4, scheduler=s", True),
        ("CosineAnnealingLR(o, T_max=len(loader) * n)", "accumulate=m, scheduler=s", True),
        ("OneCycleLR(o, 1, total_steps=steps)", "accumulate=4, scheduler=s", True),
        ("OneCycleLR(o, 1, epochs=n, steps_per_epoch=len(loader))", "accumulate=4, scheduler=s", True),
        ("n * len(loader)", 'accumulate=4, scheduler="cosine", total_steps=s', True),
        ("n * len(loader)", 'scheduler="cosine", total_steps=s', False),
        ("CosineAnnealingLR(o, n * len(loader))", "accumulate=1, scheduler=s", False),
        ("CosineAnnealingLR(o, n * len(loader))", "scheduler=s", False),
        ("CosineAnnealingLR(o, n * len(loader))", 'scheduler=s, parallel="ddp"', False),
        ("CosineAnnealingLR(o, n * len(loader) // 4)", "accumulate=4, scheduler=s", False),
        ("CosineAnnealingLR(o, m * len(loader))", "accumulate=4, scheduler=s", False),
        ("CosineAnnealingLR(o, n * len(other))", "accumulate=4, scheduler=s", False),
        ("CosineAnnealingLR(o, n * len(loader))", 'accumulate=4, scheduler=s, schedule_by="script"', False),
    ],
)
def test_a_schedule_of_all_batches_is_found_where_an_update_takes_several(scheduler, options, found):
    lines = scheduled(scheduler, options)
    assert len(lines) == found
    assert lines <= {f"s = {scheduler}", f"t = accel.trainer(net, o, loss=f, {options})"}


@pytest.mark.parametrize(("sampler", "found"), [("", True), (", sampler=DistributedSampler(data)", False)])
def test_a_schedule_of_all_batches_is_found_where_each_rank_has_its_share(sampler, found):
    scheduler = "CosineAnnealingLR(o, n * len(loader))"
    loader = f"from torch.utils.data import DataLoader\nloader = DataLoader(data{sampler})\n"
    made = scheduled(scheduler, 'scheduler=s, parallel="ddp"', loader)
    assert made == ({f"s = {scheduler}"} if found else set())
    assert not scheduled(scheduler, 'scheduler=s, parallel="none"', loader)


def scheduled(scheduler, options, before=""):
    """Return the lines that the rule marks in a script with a scheduler `s`, and a loop over `n` epochs."""
    head, loop = SCRIPT.format(
        line="pass", before=f"{before}steps = n * len(loader)\ns = {scheduler}", options=f", {options}", loss="f"
    ).split("for b in")
    head = head.replace("import StepLR", "import CosineAnnealingLR, OneCycleLR, StepLR")
    return lines_of(f"{head}for e in t.epochs(n):\n  for b in{loop}".replace("\n    ", "\n      "), "ACC316")


@pytest.mark.parametrize(
    ("test", "found"),
    [
        ("job.is_main", True),
        ("job.is_main and e % 2", True),
        ("job.rank == 0", True),
        ("not rank", True),
        ("not job.is_main", False),
        ("job.is_main or e % 2", False),
        ("job.rank == 1", False),
        ("e == 0", False),
    ],
)
@pytest.mark.parametrize("call", ["t.save('y')", "t.evaluate(loader)"])
def test_a_call_of_one_rank_that_all_must_make_is_found(test, found, call):
    line = f"if {test}: {call}"
    assert marked(line, code="ACC317") == ({line} if found else set())
    assert not marked(f"if {test}: other.save('y')", code="ACC317")


@pytest.mark.parametrize(
    ("options", "found"),
    [(", mode='max'", True), (", mode='max', best=1", False), (", mode='max', **best", False), ("", False)],
)
def test_a_mode_without_a_metric_is_found(options, found):
    line = f"t.save('y'{options})"
    assert marked(line, code="ACC317") == ({line} if found else set())


@pytest.mark.parametrize(
    ("options", "line", "found"),
    [
        (", accumulate=4", "t.backward(f(net, b) / 4)", True),
        (", accumulate=n", "t.backward(f(net, b) / n)", True),
        (", accumulate=4", "t.backward(f(net, b))", False),
        (", accumulate=4", "t.backward(f(net, b) / 3)", False),
        ("", "t.backward(f(net, b) / n)", False),
        (", accumulate=4", "if i % 4 == 0: t.update()", True),
        (", accumulate=4", "if i > 4: t.update()", False),
        ("", "if i % 4 == 0: t.update()", False),
    ],
)
def test_what_the_trainer_counts_itself_is_found(options, line, found):
    assert marked(line, options=options) == ({line} if found else set())


def test_a_loss_that_was_divided_before_is_found():
    line = "loss = f(net, b) / n; t.backward(loss)"
    assert marked(line, options=", accumulate=n") == {line}


@pytest.mark.parametrize(
    ("scheduler", "options", "epochs", "found"),
    [
        ("CosineAnnealingLR(o, T_max=n)", ", scheduler=s", "n", True),
        ("CosineAnnealingLR(o, n)", ", scheduler=s", "n", True),
        ("CosineAnnealingLR(o, n * len(loader))", ", scheduler=s", "n", False),
        ("CosineAnnealingLR(o, T_max=n)", ", scheduler=s, schedule_by='script'", "n", False),
        ("CosineAnnealingLR(o, T_max=n)", ", scheduler=s, **options", "n", False),
        ("StepLR(o, 30)", ", scheduler=s", "90", True),
        ("StepLR(o, 1000)", ", scheduler=s", "90", False),
        ("StepLR(o, steps)", ", scheduler=s", "90", False),
    ],
)
def test_a_scheduler_of_epochs_that_is_stepped_after_each_update_is_found(scheduler, options, epochs, found):
    before = f"s = {scheduler}"
    text = SCRIPT.format(line="pass", before=before, options=options, loss="f")
    text = text.replace("import StepLR", "import CosineAnnealingLR, StepLR").replace(
        "for b in", f"for e in t.epochs({epochs}):\n  for b in"
    )
    text = text.replace("\n    ", "\n      ")
    assert {each.line for each in check(text) if each.code == "ACC316"} == ({8} if found else set())


@pytest.mark.parametrize(
    ("loop", "line", "found"),
    [
        ("for e in range(9):", "pass", True),
        ("for e in range(9):", "batches = loader", True),
        ("for e in t.epochs(9):", "pass", False),
        ("for e in range(first, 9):", "pass", False),
        ("for e in range(9):", "if e < t.epoch: continue", False),
        ("for e in range(9):", "if t.steps == 9: break", False),
    ],
)
def test_a_loop_over_epochs_that_starts_again_after_a_resume_is_found(loop, line, found):
    text = SCRIPT.format(line="pass", before="", options="", loss="f").partition("for b in")[0]
    batches = "batches" if line.startswith("batches") else "t.batches(loader)"
    inside = f"{loop}\n    {line}\n    for b in {batches}:\n        t(b)\n"
    marks = [(each.line, each.write) for each in check(f"{text}t.resume('x')\n{inside}") if each.code == "ACC315"]
    assert marks == ([(text.count("\n") + 2, "Write for e in t.epochs(9).")] if found else [])
    assert not [each for each in check(text + inside) if each.code == "ACC315"]


@pytest.mark.parametrize("line", ["p.zero_grad()", "p.step()", "clip_grad_norm_(other.parameters(), 1.0)"])
def test_other_models_and_optimizers_are_not_found(line):
    assert not marked(line)
    assert not marked(line, before="s = StepLR(p, 1)")
