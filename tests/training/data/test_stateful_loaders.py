"""Loaders that know their own position: a resume brings them to it, and loads nothing again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset


class Numbers:
    """A loader with torchdata's protocol, that remembers what it was asked for."""

    def __init__(self, count=8):
        self.count, self.at, self.finished, self.read, self.epochs = count, 0, False, [], []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __iter__(self):
        self.at, self.finished = 0 if self.finished else self.at, False
        while self.at < self.count:
            self.at += 1
            self.read.append(self.at)
            yield torch.tensor([[float(self.at)]])
        self.finished = True

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        if state["at"] > self.count:
            raise ValueError("it has no such place")
        self.at = state["at"]


class Rows(Dataset):
    """Rows with noise that is drawn when they are read."""

    def __init__(self):
        self.reads = 0

    def __len__(self):
        return 12

    def __getitem__(self, row):
        self.reads += 1
        return torch.tensor([row + torch.rand(()).item()])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(12.0).view(12, 1))


def make(accel):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.01)
    return accel.trainer(model, optimizer, loss=lambda model, rows: model(rows).square().mean())


def run(trainer, loader, *, save=None, epochs=2):
    """The batches of the epochs that are left; `save`: after how many to save and stop, and where."""
    seen = []
    for _ in trainer.epochs(epochs):
        for batch in trainer.batches(loader):
            seen.append([*batch.flatten().tolist(), trainer(batch).item()])
            if save and len(seen) == save[0]:
                trainer.save(save[1])
                return seen
    return seen


@pytest.mark.parametrize("after", [3, 8, 11])
def test_a_loader_goes_on_from_its_own_state_and_loads_nothing_again(accel, tmp_path, after):
    expected = run(make(accel), Numbers())
    seen = run(make(accel), Numbers(), save=(after, tmp_path))
    for _ in range(2):  # the second time from what was saved by one that had read nothing yet
        trainer, loader = make(accel), Numbers()
        trainer.resume(tmp_path)
        trainer.save(tmp_path)
        assert seen + run(trainer, loader) == expected
        assert len(loader.read) == 16 - after
        assert loader.epochs == list(range(after > 8, 2))


def test_of_what_is_behind_an_epoch_the_next_begins_anew(accel, tmp_path):
    trainer = make(accel)
    run(trainer, Numbers(), epochs=1)
    trainer.save(tmp_path)
    trainer, loader = make(accel), Numbers()
    trainer.resume(tmp_path)
    assert len(run(trainer, loader)) == 8
    trainer.epoch = 1
    assert len(run(trainer, loader)) == 8


def test_the_loader_has_to_be_the_one_that_was_saved(accel, tmp_path):
    run(make(accel), Numbers(), save=(5, tmp_path))
    for loader, says in (([torch.ones(1, 1)] * 8, "this list has no state_dict"), (Numbers(4), "it has no such place")):
        trainer = make(accel)
        trainer.resume(tmp_path)
        with pytest.raises(Exception, match=says):  # of the loader, it is the loader's own
            next(iter(trainer.batches(loader)))


def test_a_checkpoint_of_a_loader_without_a_state_is_replayed_by_one_that_has_one(accel, tmp_path):
    rows = [torch.tensor([[float(number + 1)]]) for number in range(8)]
    expected = run(make(accel), rows)
    seen = run(make(accel), rows, save=(5, tmp_path))
    trainer, loader = make(accel), Numbers()
    trainer.resume(tmp_path)
    assert seen + run(trainer, loader) == expected
    assert len(loader.read) == 16


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torch 2.13 of torchdata 0.11
@pytest.mark.parametrize("after", [2, 6, 8])
@pytest.mark.parametrize("workers", [0, 1])
def test_torchdatas_loader_goes_on_bit_same(accel, tmp_path, after, workers):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def start(seed):
        trainer = make(accel)
        torch.manual_seed(seed)
        return trainer, loaders.StatefulDataLoader(Rows(), 2, shuffle=True, num_workers=workers)

    def rows(seen):
        return [[int(value) for value in batch[:2]] for batch in seen] if workers else seen

    expected = run(*start(1))
    seen = run(*start(1), save=(after, tmp_path))
    trainer, loader = start(1)
    trainer.resume(tmp_path)
    assert rows(seen + run(trainer, loader)) == rows(expected)  # numbers that its workers drew it does not bring back
    if not workers:
        assert loader.dataset.reads == 24 - 2 * after


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated", "ignore:'pin_memory' argument is set")
def test_torchdatas_loader_that_is_pinned_tells_the_position_of_the_training(accel, tmp_path):
    """Workers read ahead; what the training has not been given is not behind it."""
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    trainer = make(accel)
    loader = loaders.StatefulDataLoader(Stream(), 2, num_workers=1)
    loader.pin_memory = True  # as where there is a device to pin for
    batches = trainer.batches(loader)
    next(batches)
    assert trainer.save(tmp_path)
    resumed = make(accel)
    resumed.resume(tmp_path)
    rest = list(resumed.batches(loaders.StatefulDataLoader(Stream(), 2, num_workers=1)))
    assert torch.cat(rest).flatten().tolist() == list(range(2, 12))
