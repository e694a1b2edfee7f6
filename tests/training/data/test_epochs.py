"""Epochs: those that are left."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import accelcore


def make(accel, **options):
    model = nn.Linear(4, 1)
    optimizer = accel.optimizers.create("sgd", model.parameters())
    return accel.trainer(model, optimizer, loss=lambda m, b: m(b).sum(), **options)


DATA = [torch.ones(2, 4)] * 3


def test_those_are_given_that_are_left(accel, tmp_path, caplog):
    trainer = make(accel)
    seen = []
    for epoch in trainer.epochs(3):
        for batch in trainer.batches(DATA):
            trainer(batch)
        seen.append((epoch, trainer.epoch, trainer.steps))
        trainer.save(tmp_path)
    assert seen == [(0, 1, 3), (1, 2, 6), (2, 3, 9)]
    assert not caplog.records

    again = make(accel)
    again.resume(tmp_path)
    caplog.set_level("INFO")
    assert list(again.epochs(3)) == []
    assert "finished (epochs done: 3, asked for: 3)" in caplog.text
    assert list(again.epochs(5)) == [3, 4]


def test_an_epoch_that_is_left_early_counts_and_one_that_was_not_finished_goes_on(accel, tmp_path):
    trainer = make(accel)
    for epoch in trainer.epochs(2):
        for number, batch in enumerate(trainer.batches(DATA)):
            trainer(batch)
            if number == epoch:
                break
        if epoch == 0:
            assert trainer.epoch == 1
    assert trainer.steps == 3
    for batch in trainer.batches(DATA):
        trainer(batch)
        trainer.save(tmp_path)
        break
    resumed = make(accel)
    resumed.resume(tmp_path)
    assert [(epoch, sum(1 for _ in resumed.batches(DATA))) for epoch in resumed.epochs(4)] == [(2, 2), (3, 3)]


def test_an_epoch_counts_where_its_batches_were_read_in_another_way(accel):
    trainer = make(accel)
    for epoch in trainer.epochs(2):
        assert trainer.epoch == epoch
    assert trainer.epoch == 2


@pytest.mark.parametrize("total", [-1, 2.0, True, None, "3"])
def test_what_is_no_number_of_epochs_is_refused(accel, total):
    with pytest.raises(accelcore.ConfigurationError, match="number of epochs"):
        make(accel).epochs(total)


def test_a_loader_in_place_of_a_number_of_epochs_is_named_by_its_class(accel):
    with pytest.raises(accelcore.ConfigurationError, match=r"^a DataLoader is(.|\n)*trainer\.batches\(loader\)"):
        make(accel).epochs(torch.utils.data.DataLoader([1.0]))


def test_a_loop_that_resumes_and_saves_in_each_epoch_ends(accel, tmp_path):
    trainer, seen = make(accel), []
    for _ in trainer.epochs(3):
        trainer.resume(tmp_path)
        seen.append(trainer.epoch)
        list(map(trainer, trainer.batches(DATA)))
        trainer.save(tmp_path)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("is_loop", [True, False])
def test_batches_that_are_kept_and_not_read_to_the_end_are_one_epoch(accel, tmp_path, is_loop):
    def loader():
        return torch.utils.data.DataLoader(torch.arange(24.0).view(6, 4), 2, shuffle=True, generator=torch.Generator())

    def train(trainer, data):
        for epoch in trainer.epochs(3):
            batches = trainer.batches(data)
            for batch in batches if is_loop else iter(batches.__next__, None):
                trainer(batch)
                if trainer.steps == 2 * epoch + 2:
                    break
            seen.append((epoch, float(batch.sum())))
        trainer.save(tmp_path)
        return float(next(trainer.batches(data)).sum())

    seen, trainer, data = [], make(accel), loader()
    following = train(trainer, data)
    assert ([epoch for epoch, _ in seen], trainer.steps) == ([0, 1, 2], 6)
    resumed = make(accel)
    resumed.resume(tmp_path)
    assert resumed.epoch == 3
    assert float(next(resumed.batches(loader())).sum()) == following


def test_batches_of_an_epoch_that_has_ended_are_refused(accel):
    trainer = make(accel)
    batches = trainer.batches(DATA)
    epochs = trainer.epochs(2)
    next(epochs), next(batches), next(epochs)
    with pytest.raises(accelcore.TrainingError, match=r"lost its position(.|\n)*epoch"):
        next(batches)


def test_a_loop_that_resumes_from_the_same_checkpoint_in_each_epoch_is_refused(accel, tmp_path):
    trainer = make(accel)
    list(map(trainer, trainer.batches(DATA)))
    trainer.save(tmp_path)

    def train():
        for _ in trainer.epochs(5):
            trainer.resume(tmp_path)
            list(map(trainer, trainer.batches(DATA)))

    with pytest.raises(accelcore.TrainingError, match=r"epoch 2 again(.|\n)*trainer\.resume"):
        train()
    assert trainer.steps == 2 * len(DATA)


@pytest.mark.parametrize("way", ["loader", "batches", "break"])
def test_a_window_that_is_open_when_the_epochs_end_is_reported(accel, caplog, way):
    trainer = make(accel, accumulate=2)
    for _ in trainer.epochs(1):
        for batch in DATA if way == "loader" else trainer.batches(DATA):
            trainer(batch)
            if way == "break":
                break
    says = "ended within a window, after 1 of 2 micro-batches: trainer.flush()"
    assert [says in record.message for record in caplog.records] == [True] * (way != "batches")


@pytest.mark.parametrize("way", ["whole", "next", "break"])
def test_another_loop_over_batches_in_an_epoch_is_refused_before_it_trains(accel, way):
    trainer, begun = make(accel), []

    def train():
        for epoch in trainer.epochs(4):
            begun.append(epoch)
            for batch in trainer.batches(DATA):
                trainer(batch)
                if way == "break":
                    break
            if way == "next":
                next(iter(trainer.batches(DATA)))
            for batch in trainer.batches(DATA):
                trainer(batch)

    with pytest.raises(accelcore.TrainingError, match=r"another loop(.|\n)*epoch 0(.|\n)*trainer\.evaluate"):
        train()
    assert begun == [0]
    assert trainer.steps == (1 if way == "break" else len(DATA))


def test_loops_over_batches_behind_a_loop_over_epochs_are_epochs(accel):
    trainer = make(accel)
    for _ in trainer.epochs(4):
        for _ in trainer.batches(DATA):
            break
        break
    list(map(trainer, trainer.batches(DATA)))
    assert trainer.epoch == 2
    for epoch in trainer.epochs(4):
        list(map(trainer, trainer.batches(DATA)))
        trainer.epoch = epoch  # the script says where it is
        list(map(trainer, trainer.batches(DATA)))
    assert trainer.epoch == 4


def test_a_script_sets_the_epoch_to_begin_it_again(accel):
    trainer = make(accel)
    for epoch in trainer.epochs(2):
        with contextlib.suppress(MemoryError):
            for _ in trainer.batches(DATA):
                raise MemoryError
        with pytest.raises(accelcore.TrainingError, match=rf"trainer\.epoch = {epoch} first"):
            next(trainer.batches(DATA))
        trainer.epoch = epoch
        list(map(trainer, trainer.batches(DATA)))
    assert (trainer.epoch, trainer.steps) == (2, 2 * len(DATA))


def test_a_script_sets_the_epoch_after_a_loop_whose_iterator_it_keeps(accel):
    trainer = make(accel)
    epochs = trainer.epochs(4)
    for _ in epochs:
        list(map(trainer, trainer.batches(DATA)))
        break
    with pytest.raises(accelcore.TrainingError, match=r"trainer\.epoch = 1"):
        next(trainer.batches(DATA))
    trainer.epoch = 1
    list(map(trainer, trainer.batches(DATA)))
    assert (trainer.epoch, trainer.steps) == (2, 2 * len(DATA))


def test_a_loop_over_batches_begins_in_the_epoch_to_which_the_script_moves(accel):
    trainer, begun = make(accel), []
    for epoch in trainer.epochs(4):
        begun.append(epoch)
        if epoch == 0:
            trainer.epoch = 2
        list(map(trainer, trainer.batches(DATA)))
    assert (begun, trainer.steps) == ([0, 3], 2 * len(DATA))


def test_a_loop_over_epochs_in_another_is_refused(accel):
    trainer = make(accel)

    def train():
        for _ in trainer.epochs(4):
            for _ in trainer.epochs(2):
                list(map(trainer, trainer.batches(DATA)))

    with pytest.raises(accelcore.TrainingError, match=r"inside the loop over trainer\.epochs\(4\)"):
        train()
    for _ in trainer.epochs(3):  # one that was left, as by an error or by break, is not inside
        break
    assert [*trainer.epochs(5)] == [2, 3, 4]
