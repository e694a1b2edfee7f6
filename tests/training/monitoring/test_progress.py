"""The progress of a training: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import re

import pytest
import torch
from toys import data, loss_of, net

import accelcore

LINE = re.compile(
    r"epoch (\d)  step (\d+)/10  loss ([\d.]+)  lr ([\d.e-]+)  ([\d,]+) rows/s(?:  (\d+:\d\d:\d\d) left)?"
)


def make(accel, *observers, **options):
    model = net()
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    return accel.trainer(model, optimizer, loss=loss_of, observers=observers, **options)


def train(trainer, epochs=2):
    return [trainer(batch).item() for _ in trainer.epochs(epochs) for batch in trainer.batches(data(5))]


def test_without_a_terminal_lines_say_where_the_training_is(accel, capfd):
    losses = train(make(accel, accelcore.Progress(seconds=1e-9)))
    shown = capfd.readouterr()
    found = [LINE.fullmatch(line).groups() for line in shown.err.splitlines()]
    assert shown.out == ""
    assert [int(step) for _, step, *_ in found] == list(range(1, 11))
    for epoch, step, loss, lr, _, _ in found:
        assert int(epoch) == (int(step) > 5)
        assert float(loss) == pytest.approx(losses[int(step) - 1], rel=1e-3)
        assert float(lr) == 0.1
    assert found[-1][-1] in (None, "0:00:00")


def test_a_daemon_without_standard_output_trains(accel, monkeypatch):
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{stream}", None)
    assert len(train(make(accel, accelcore.Progress(seconds=1e-9)))) == 10


def test_lines_are_rare_and_the_last_step_has_one(accel, capfd):
    train(make(accel, accelcore.Progress()))
    steps = [int(LINE.fullmatch(line)[2]) for line in capfd.readouterr().err.splitlines()]
    assert steps == [1, 10], "the first step, and the last"


def test_what_is_not_known_is_not_shown(accel, capfd):
    trainer = make(accel, accelcore.Progress(seconds=1e-9))
    for batch in data(2):
        trainer(batch)
    assert re.fullmatch(r"step 1  loss [\d.]+  lr 0.1\n", capfd.readouterr().err)


def test_on_a_terminal_there_is_a_bar_that_is_over_with_the_training(accel, capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    trainer = make(accel, accelcore.Progress())
    train(trainer)
    shown = capfd.readouterr().err
    assert "step 10/10" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is back"
    train(trainer, 4)
    assert "step 20/20" in capfd.readouterr().err


def test_progress_changes_no_number_and_reads_no_loss_before_the_next_step(accel, capfd):
    seen, unseen = make(accel, accelcore.Progress(seconds=1e-9)), make(accel)
    assert train(seen) == train(unseen)
    assert all(map(torch.equal, seen.model.parameters(), unseen.model.parameters()))


def test_a_time_that_is_none_is_refused():
    with pytest.raises(accelcore.ConfigurationError, match="seconds=0"):
        accelcore.Progress(seconds=0)
