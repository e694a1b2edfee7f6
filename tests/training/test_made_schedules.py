"""Schedules that the trainer makes: by name or by function, when it knows the number of updates."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import accelcore

ROWS = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
LOADER = DataLoader(ROWS, 2)  # 5 batches, 3 windows of 2


class Rates(accelcore.Observer):
    """The learning rate of each window."""

    def begin(self, trainer):
        self.trainer, self.seen = trainer, []

    def batch(self, batch):
        self.rate = float(self.trainer.optimizer.param_groups[0]["lr"])

    def step(self, steps):
        self.seen.append(self.rate)


def make(accel, scheduler="cosine", *, create=None, **options):
    model, rates = nn.Linear(3, 2), Rates()
    optimizer = (create or accel.optimizers.create)("adamw", model.parameters(), lr=0.1)
    options = {"loss": lambda model, rows: model(rows).square().mean(), "accumulate": 2, **options}
    return accel.trainer(model, optimizer, scheduler=scheduler, observers=[rates], **options), rates


def train(trainer, epochs, loader=LOADER, *, stop=None, folder=None):
    """Train; or, until `stop` windows are closed, and save then."""
    for _ in trainer.epochs(epochs):
        for batch in trainer.batches(loader):
            trainer(batch)
            if trainer.steps == stop:
                trainer.save(folder)
                return


AFTER = {  # of the share of the updates that are done
    "constant": lambda share: 1.0,
    "linear": lambda share: 1 - share,
    "cosine": lambda share: (1 + math.cos(math.pi * share)) / 2,
    "function": lambda share: 0.5 ** (12 * share // 4),
}
OF_TORCH = {"function": lambda optimizer, updates: StepLR(optimizer, updates // 3, gamma=0.5)}


@pytest.mark.parametrize(
    ("name", "warmup"),
    [*((name, warmup) for name in AFTER for warmup in (0, 3, 0.2) if name != "function" or not warmup)],
)
def test_a_named_schedule_rises_and_falls_over_all_updates(accel, name, warmup):
    trainer, rates = make(accel, OF_TORCH.get(name, name), warmup=warmup)
    rising = 3 if warmup else 0
    train(trainer, 5 if rising else 4)
    fall = 12
    assert trainer.total_steps == rising + fall == trainer.steps
    up = [0.1 * (step + 1) / (rising + 1) for step in range(rising)]
    assert rates.seen == pytest.approx(up + [0.1 * AFTER[name](step / fall) for step in range(fall)])


def test_a_rate_that_is_a_tensor_stays_that_tensor_and_follows_the_same_schedule(accel):
    """Captured steps read the tensor. torch 2.7 makes `initial_lr` the rate, and overwrites both."""
    found = []
    for lr in (0.1, torch.tensor(0.1)):
        trainer, rates = make(accel, warmup=3, create=lambda name, params, lr, _lr=lr: torch.optim.SGD(params, lr=_lr))
        train(trainer, 4)
        found.append(rates.seen)
        assert float(trainer.optimizer.param_groups[0]["initial_lr"]) == pytest.approx(0.1)
    assert trainer.optimizer.param_groups[0]["lr"] is lr
    assert found[1] == pytest.approx(found[0], abs=1e-6)


def torchs(name, parameters, lr):
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


RISING = {"warmup": 2}
ONE_CYCLE = {"scheduler": lambda optimizer, updates: OneCycleLR(optimizer, 0.2, updates)}  # it adds options to groups


@pytest.mark.parametrize(
    ("create", "given", "stop"),
    [
        (None, RISING, 2),
        (torchs, RISING, 6),
        (None, {**RISING, "total_steps": 12}, 6),
        (None, ONE_CYCLE, 6),
        (torchs, {**ONE_CYCLE, "accumulate": 1}, 7),
    ],
)
def test_a_resumed_schedule_goes_on_where_it_was_before_it_could_be_known(accel, tmp_path, create, given, stop, caplog):
    whole, expected = make(accel, create=create, **given)
    train(whole, 4)
    trainer, before = make(accel, create=create, **given)
    train(trainer, 4, stop=stop, folder=tmp_path)
    resumed, after = make(accel, create=create, **given)
    assert (resumed.scheduler is None) == ("total_steps" not in given)
    resumed.resume(tmp_path)
    assert resumed.scheduler.last_epoch == stop
    train(resumed, 4)
    assert before.seen + after.seen == expected.seen
    trainer.resume(tmp_path)  # and the scheduler that is there goes back
    assert trainer.scheduler.last_epoch == stop
    assert not caplog.records


def test_nothing_is_trained_as_long_as_the_number_of_updates_is_unknown(accel, tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(ROWS)

    trainer, _ = make(accel)
    weight = trainer.model.weight.clone()
    unknown = r"number of updates is not known(.|\n)*epochs\(n\)(.|\n)*total_steps="
    for attempt in (
        lambda: trainer(ROWS),
        lambda: trainer.backward(trainer.forward(ROWS).mean()),
        lambda: list(trainer.batches(LOADER)),
        lambda: train(trainer, 2, DataLoader(Stream(), 2)),
    ):
        with pytest.raises(accelcore.ConfigurationError, match=unknown):
            attempt()
    for loader, says in ((TensorDataset(ROWS), "rows, not batches"), (ROWS, "rows, not batches"), (5, "not a loader")):
        with pytest.raises(accelcore.ConfigurationError, match=says):
            train(trainer, 2, loader)
    assert trainer.total_steps is None
    assert torch.equal(trainer.model.weight, weight)
    trainer.save(tmp_path)
    fresh, _ = make(accel)
    fresh.resume(tmp_path)  # from before its schedule was made
    train(fresh, 2)
    streamed, rates = make(accel, total_steps=6)
    train(streamed, 2, DataLoader(Stream(), 2))
    assert rates.seen == pytest.approx([0.1 * AFTER["cosine"](step / 6) for step in range(6)])


def test_a_resumed_run_of_another_length_says_how_to_keep_the_schedule(accel, tmp_path):
    trainer, _ = make(accel)
    train(trainer, 4, stop=4, folder=tmp_path)
    longer, _ = make(accel)
    longer.resume(tmp_path)
    with pytest.raises(
        accelcore.ConfigurationError,
        match=r"12 updates, and .* 18(.|\n)*trainer\.load\(.*optimizer=True(.|\n)*total_steps=12",
    ):
        train(longer, 6)
    for options, message in (
        ({"total_steps": 18}, "12 updates, and .* 18"),
        ({"warmup": 2}, '"cosine" with warmup=0, .*="cosine" with warmup=2'),
        ({"scheduler": "linear", "total_steps": 12}, '"cosine" with .*="linear" with'),
        ({"scheduler": None}, '"cosine" .* no scheduler'),
    ):
        with pytest.raises(accelcore.CheckpointError, match=message):
            make(accel, **options)[0].resume(tmp_path)
    kept, rates = make(accel, total_steps=12)
    kept.resume(tmp_path)
    train(kept, 4)
    assert len(rates.seen) == 8


@pytest.mark.parametrize("options", [{}, {"total_steps": 12}, {"warmup": 2}])
def test_a_schedule_that_is_added_on_resume_is_refused(accel, tmp_path, options):
    trainer, _ = make(accel, scheduler=None)
    train(trainer, 4, stop=4, folder=tmp_path)
    with pytest.raises(accelcore.CheckpointError, match=r"no scheduler(.|\n)*remove(.|\n)*trainer\.load"):
        make(accel, **options)[0].resume(tmp_path)


def test_a_scheduler_of_the_script_that_the_saved_run_had_not_is_reported(accel, tmp_path, caplog):
    trainer, _ = make(accel, scheduler=None)
    trainer.save(tmp_path)
    again, _ = make(accel, scheduler=None)
    StepLR(again.optimizer, 1)
    again.resume(tmp_path)
    (record,) = (each for each in caplog.records if each.levelname == "WARNING")
    assert "scheduler is not restored" in record.getMessage()


OF_NAME = {
    "cosine": CosineAnnealingLR,
    "linear": lambda optimizer, updates: LinearLR(optimizer, 1.0, 0.0, updates),
}
ENDED = "the schedule ended at update"


@pytest.mark.parametrize("name", OF_NAME)
@pytest.mark.parametrize("warmup", [0, 1])
def test_a_schedule_that_has_ended_trains_at_0_and_warns_once(accel, tmp_path, caplog, name, warmup):
    """Up to its last update it has torch's own rates; torch's cosine would then rise again."""
    optimizer, expected = torch.optim.SGD([torch.zeros(1)], lr=0.1), [0.05] * warmup
    theirs, end = OF_NAME[name](optimizer, 4), 4 + warmup
    for _ in range(4):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    found = []
    for stop, warnings in ((end, 0), (end + 1, 1), (10, 1)):  # each part resumes the one before
        caplog.clear()
        trainer, rates = make(accel, name, warmup=warmup, total_steps=end, accumulate=1)
        if found:
            trainer.resume(tmp_path)
        weight = trainer.model.weight.clone()
        train(trainer, 2, stop=stop, folder=tmp_path)
        found += rates.seen
        assert torch.equal(trainer.model.weight, weight) == (stop > end)
        assert caplog.text.count(f"{ENDED} {end}, and a later update was trained") == warnings
        assert caplog.text.count(ENDED) == warnings
    assert found == pytest.approx(expected + [0.0] * (10 - end), rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("make_torchs", "raises"),
    [(CosineAnnealingLR, None), (lambda optimizer, updates: OneCycleLR(optimizer, 0.2, updates), "Tried to step 5")],
    ids=["cosine", "one cycle"],
)
def test_a_scheduler_of_a_function_goes_on_past_its_end_as_torchs_does_and_warns(accel, caplog, make_torchs, raises):
    optimizer, expected = torch.optim.SGD([torch.zeros(1)], lr=0.1), []
    theirs = make_torchs(optimizer, 4)
    for _ in range(5):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step() if len(expected) < 5 else None
    trainer, rates = make(accel, lambda optimizer, updates: make_torchs(optimizer, updates), total_steps=4)
    with pytest.raises(accelcore.TrainingError, match=raises) if raises else nullcontext():
        train(trainer, 2)
    assert rates.seen[:5] == pytest.approx(expected[: len(rates.seen)], abs=0)
    assert caplog.text.count(f"{ENDED} 4, and a later update was trained") == 1


def warm(optimizer, then, rising=2):
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=rising), then(optimizer)], [rising])


WRONG = {  # for 8 epochs of 3 updates, which are 5 batches
    "StepLR": lambda optimizer: StepLR(optimizer, 3),
    "MultiStepLR": lambda optimizer: MultiStepLR(optimizer, [3, 6]),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 8),
    "CosineAnnealingLR rising": lambda optimizer: CosineAnnealingLR(optimizer, 16),
    "ExponentialLR": lambda optimizer: ExponentialLR(optimizer, 0.5),
    "SequentialLR": lambda optimizer: warm(optimizer, lambda optimizer: CosineAnnealingLR(optimizer, 6)),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.1, 40),
}
RIGHT = {
    "StepLR": lambda optimizer: StepLR(optimizer, 1, gamma=0.9),
    "MultiStepLR": lambda optimizer: MultiStepLR(optimizer, [3, 20]),
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 23),
    "CosineAnnealingWarmRestarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 4),
    "ExponentialLR": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "LinearLR": lambda optimizer: LinearLR(optimizer, 0.1, total_iters=4),
    "LinearLR falling": lambda optimizer: LinearLR(optimizer, 1.0, 0.1, 24),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.1, 24),
    "ConstantLR": lambda optimizer: ConstantLR(optimizer, 0.1, 8),
    "PolynomialLR": lambda optimizer: PolynomialLR(optimizer, 24),
    "SequentialLR": lambda optimizer: warm(optimizer, lambda optimizer: CosineAnnealingLR(optimizer, 22)),
    "SequentialLR holding": lambda optimizer: SequentialLR(
        optimizer, [PolynomialLR(optimizer, 9), ConstantLR(optimizer, 0.1, 9)], [9]
    ),
    "ChainedScheduler": lambda optimizer: ChainedScheduler([LinearLR(optimizer, 1.0, 0.5, 3), StepLR(optimizer, 9)]),
}


@pytest.mark.parametrize(
    ("wrong", "name", "is_function", "options"),
    [
        *((True, name, False, {}) for name in WRONG),
        *((False, name, False, {}) for name in RIGHT),
        *((wrong, "StepLR", True, {}) for wrong in (True, False)),
        (True, "StepLR", False, {"schedule_by": "window"}),
    ],
)
def test_a_scheduler_for_another_number_of_steps_is_reported_unless_it_was_asked_for(
    accel, caplog, name, is_function, wrong, options
):
    function = (WRONG if wrong else RIGHT)[name]
    model = nn.Linear(3, 2)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    scheduler = (lambda optimizer, updates: function(optimizer)) if is_function else function(optimizer)
    trainer = accel.trainer(
        model, optimizer, loss=lambda model, rows: model(rows).mean(), accumulate=2, scheduler=scheduler, **options
    )
    for epoch in trainer.epochs(8):
        for batch in trainer.batches(LOADER):
            if epoch < 2:
                trainer(batch)
    lines = [record.message for record in caplog.records if "another number of steps" in record.message]
    assert [line.split()[0] for line in lines] == [name.split()[0]] * (wrong and not options)
    for word in ('schedule_by="script"', "24 updates", 'schedule_by="window"'):
        assert all(word in line for line in lines)


@pytest.mark.parametrize(("given", "warns"), [(None, False), (3, False), (6, False), (7, True)])
def test_a_schedule_that_does_not_come_to_its_end_is_reported(accel, caplog, given, warns):
    trainer, _ = make(accel, total_steps=given)
    train(trainer, 2)
    assert ("total_steps=7, and trainer.epochs(...) makes 6 updates if each epoch" in caplog.text) == warns


def test_a_schedule_that_the_trainer_has_counted_is_not_reported_when_later_epochs_are_shorter(accel, caplog):
    trainer, _ = make(accel)
    for epoch in trainer.epochs(2):
        list(map(trainer, trainer.batches(DataLoader(ROWS, 5) if epoch else LOADER)))
    assert (trainer.steps, caplog.text) == (4, "")


def test_a_scheduler_of_another_class_may_have_a_word_of_torchs_for_something_else(accel, caplog):
    class Cycles(LambdaLR):
        T_max = None

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = Cycles(optimizer, lambda step: 1.0)
    trainer = accel.trainer(model, optimizer, loss=lambda model, rows: model(rows).mean(), scheduler=scheduler)
    train(trainer, 2)
    assert "another number of steps" not in caplog.text


def test_no_warmup_may_be_written_in_two_ways(accel, tmp_path):
    make(accel, total_steps=3, warmup=0)[0].save(tmp_path)
    assert make(accel, total_steps=3, warmup=0.0)[0].resume(tmp_path)


def test_a_constant_rate_has_no_end(accel, caplog):
    trainer, rates = make(accel, "constant", total_steps=2)
    train(trainer, 2)
    assert rates.seen == [0.1] * 6
    assert "schedule" not in caplog.text


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_a_named_schedule_changes_the_rates_of_added_groups_and_those_that_the_script_has_set(accel, name, warmup):
    trainer, rates = make(accel, name, warmup=warmup)
    groups = trainer.optimizer.param_groups
    for epoch in trainer.epochs(4):
        if epoch == 2:  # 6 of 12 updates are done
            expected = groups[0]["lr"] / 2
            groups[0]["lr"] = expected
            trainer.model.more = nn.Parameter(torch.ones(2))
            trainer.optimizer.add_param_group({"params": [trainer.model.more], "lr": 0.01})
            trainer.refresh()
        for batch in trainer.batches(LOADER):
            trainer(batch)
        if epoch >= 2:
            done = [AFTER[name]((steps - warmup) / (12 - warmup)) for steps in (6, trainer.steps)]
            assert [group["lr"] for group in groups] == pytest.approx(
                [lr * done[1] / done[0] for lr in (expected, 0.01)]
            )
    assert rates.seen[6] == expected


@pytest.mark.parametrize("lr", [{}, {"lr": None}], ids=["none", "None"])
def test_a_name_needs_a_learning_rate(accel, lr):
    optimizer = torch.optim.SGD((model := nn.Linear(3, 2)).parameters(), lr=0.1)
    del optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0].update(lr)
    with pytest.raises(accelcore.ConfigurationError, match="no learning rate"):
        accel.trainer(model, optimizer, loss=lambda model, rows: model(rows).sum(), scheduler="cosine", total_steps=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler": "cosin"}, r"'cosin' is unknown(.|\n)*mean 'cosine'"),
        ({"scheduler": 3}, "3 is not a scheduler"),
        ({"scheduler": lambda optimizer: None}, r"not a scheduler(.|\n)*function of optimizer and number of updates"),
        ({"scheduler": CosineAnnealingLR}, "not a scheduler"),
        ({"scheduler": "cosine", "schedule_by": "script"}, "schedule_by='script' needs"),
        ({"scheduler": None, "warmup": 5}, "warmup=5 .*None(.|\\n)*schedule by name"),
        ({"scheduler": OF_TORCH["function"], "warmup": 5}, r"warmup=5 (.|\n)*schedule by name(.|\n)*SequentialLR"),
        ({"warmup": -1}, "warmup=-1"),
        ({"warmup": 1.0}, r"warmup=1.0(.|\n)*share of all updates below 1"),
        ({"total_steps": 0}, "total_steps=0"),
        ({"warmup": 12, "total_steps": 12}, "as long as the whole training, of 12"),
        ({"scheduler": lambda optimizer, updates: updates, "total_steps": 3}, "3 is not a scheduler"),
    ],
)
def test_what_makes_no_schedule_is_refused(accel, options, message):
    with pytest.raises(accelcore.ConfigurationError, match=message):
        make(accel, **options)


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_loader_without_batches_makes_no_schedule_and_is_named(accel, warmup):
    trainer, _ = make(accel, warmup=warmup)
    with pytest.raises(accelcore.TrainingError, match="the loader has no batches"):
        train(trainer, 2, DataLoader(ROWS, 20, drop_last=True))
