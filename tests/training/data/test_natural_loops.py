"""The loop that a person writes first, and what it is told."""

from __future__ import annotations

import gc
import weakref
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import accelcore

TOLD = "no batch of this training came through trainer.batches(loader)"


@pytest.fixture(autouse=True)
def no_other_trainer():
    """Collect the trainers of other tests: the log does not ask for a stream if one of them has read batches."""
    gc.collect()


def make(accel, loss=lambda model, batch: model(batch).square().mean()):
    model = nn.Linear(4, 2)
    return accel.trainer(model, accel.optimizers.create("sgd", model.parameters(), lr=0.1), loss=loss)


def loader():
    return DataLoader(torch.ones(6, 4), 2)


def test_a_loop_past_the_stream_is_told_once_when_it_saves(accel, tmp_path, caplog):
    trainer = make(accel)
    for _ in range(trainer.epoch, 2):
        for batch in loader():
            trainer(batch)
        trainer.save(tmp_path)
    assert caplog.text.count(TOLD) == 1
    assert "for batch in trainer.batches(loader):" in caplog.text


def test_a_loop_over_the_loader_alone_is_told_at_save_and_one_that_sets_its_epoch_nothing(accel, tmp_path, caplog):
    first = make(accel)
    first.epoch = 0  # of its own loop
    first(torch.ones(2, 4))
    first.save(tmp_path / "first")
    trainer = make(accel)
    while trainer.steps < 3:
        trainer(torch.ones(2, 4))
    assert not caplog.records
    trainer.save(tmp_path)
    assert caplog.text.count(TOLD) == 1
    caplog.clear()
    again = make(accel)
    again.resume(tmp_path)
    again(torch.ones(2, 4))
    again.epoch = 5
    again.save(tmp_path)
    assert again.epoch == 5
    assert not caplog.records


def test_an_epoch_that_is_set_is_the_next_and_is_saved(accel, tmp_path):
    trainer = make(accel)
    for batch in trainer.batches(loader()):
        trainer(batch)
    trainer.epoch = 5
    for batch in trainer.batches(loader()):
        trainer(batch)
        trainer.save(tmp_path)
        assert trainer.epoch == 5
    assert trainer.epoch == 6
    again = make(accel)
    again.resume(tmp_path)
    assert again.epoch == 5
    again.epoch = 7
    assert [(epoch, len(list(again.batches(loader())))) for epoch in again.epochs(8)] == [(7, 3)]
    with pytest.raises(accelcore.ConfigurationError, match="epoch=-1"):
        again.epoch = -1


def test_a_loop_over_epochs_in_which_each_sets_its_own_epoch_ends(accel):
    trainer, seen = make(accel), []
    for epoch in trainer.epochs(2):
        trainer.epoch = epoch
        trainer(torch.ones(2, 4))
        seen.append(epoch)
        assert len(seen) < 3, "this loop would never end"
    assert seen == [0, 1]


def test_a_loop_inside_which_the_epoch_is_set_is_over(accel):
    trainer = make(accel)
    batches = trainer.batches(loader())
    trainer(next(batches))
    trainer.epoch = 3
    with pytest.raises(accelcore.TrainingError, match="lost its position"):
        next(batches)


def test_aux_keeps_no_graph_alive(accel):
    class Kept:
        pass

    kept = []

    def loss(model, batch):
        out = model(batch)
        out.grad_fn.metadata["kept"] = one = Kept()  # lives as long as the graph
        kept.append(weakref.ref(one))
        return out.sum(), {"out": out, "rows": batch, "parts": [(out.mean(), 3), "text"]}

    trainer = make(accel, loss)
    rows = torch.ones(2, 4)
    trainer(rows)
    gc.collect()
    assert kept[0]() is None
    assert trainer.aux["rows"] is rows
    assert trainer.aux["parts"][1] == "text"
    assert not trainer.aux["out"].requires_grad
    torch.testing.assert_close(trainer.aux["parts"][0][0], trainer.aux["out"].mean())


def test_a_batch_may_be_a_mapping_of_rows_without_a_truth_value(accel):
    class Batch(UserDict):  # as a TensorDict
        def __bool__(self):
            raise RuntimeError("no truth value")

        def __len__(self):
            return 20

        def __iter__(self):
            return iter([Batch()] * 20)

        def items(self):
            return self.data.items()

        def values(self):
            return self.data.values()

    batches = [Batch(x=torch.zeros(1, 4)), Batch(x=torch.ones(3, 4))]
    assert make(accel).evaluate(batches).mean(lambda batch: batch["x"].mean()) == 0.75
    with pytest.raises(Exception, match="shapes cannot be multiplied") as caught:
        make(accel, loss=lambda model, batch: model(batch["x"].mT).sum())(batches[1])
    if hasattr(caught.value, "__notes__"):  # Python 3.11
        assert "Batch of ('x': float32 (3, 4) on cpu)" in caught.value.__notes__[0]


def test_batches_that_are_made_once_and_read_in_a_second_epoch_are_told(accel):
    trainer = make(accel)
    batches = trainer.batches(loader())
    trainer(next(batches))
    for batch in batches:
        trainer(batch)
    with pytest.raises(accelcore.ConfigurationError, match=r"read once: call trainer\.batches\(loader\) again"):
        next(iter(batches))
    assert trainer.steps == 3


def test_a_count_is_no_mean_as_a_number_either(accel):
    trainer = make(accel)
    with pytest.raises(accelcore.TrainingError, match="whole number"):
        trainer.evaluate(loader()).mean(lambda batch: int((batch > 0).sum()))
    assert trainer.evaluate(loader()).mean(lambda batch: float(batch.mean())) == 1
