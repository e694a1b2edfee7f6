"""Places in the data: after a break, a rollback, a resume at any moment, the rows that come are the right ones."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import accelcore


def make(accel):
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    trainer = accel.trainer(
        model, accel.optimizers.create("sgd", model.parameters(), lr=0.01), loss=lambda m, b: m(b[0]).square().mean()
    )
    return trainer, DataLoader(TensorDataset(torch.arange(12.0).view(12, 1)), 2, shuffle=True)


def rows(batch):
    return batch[0].flatten().tolist()


def test_an_epoch_left_by_break_is_over_in_one_run_and_after_a_resume(accel, tmp_path):
    """Twice: once straight through, once saved after the break, and resumed. Then once saved in the loop."""

    def run(*, save=None, resume=False):
        trainer, loader = make(accel)
        seen, places = [], []
        if resume:
            trainer.resume(tmp_path / save)
        for epoch in range(trainer.epoch, 3):
            for number, batch in enumerate(trainer.batches(loader)):
                trainer(batch)
                seen.append(rows(batch))
                if save == "in the loop" and not resume and (epoch, number) == (1, 2):
                    trainer.save(tmp_path / save)
                if epoch == 1 and number == 2 and not (resume and save == "in the loop"):
                    break
            places.append(trainer.epoch)
            if save == "after the break" and epoch == 1 and not resume:
                trainer.save(tmp_path / save)
        return seen, places

    straight, places = run()
    assert places == [1, 2, 3]
    assert [len(straight), len({row for batch in straight[:6] for row in batch})] == [6 + 3 + 6, 12]
    assert run(save="after the break")[0] == straight
    assert run(save="after the break", resume=True) == (straight[9:], [3])
    assert run(save="in the loop")[0] == straight
    rest, places = run(save="in the loop", resume=True)
    assert places == [2, 3]  # what was saved in the loop is in the middle of the epoch, whose rest comes first
    assert sorted(row for batch in straight[6:9] + rest[:3] for row in batch) == list(range(12))


@pytest.mark.parametrize("rolled_back_to", ["before the first batch", "in mid-epoch", "in the next epoch"])
def test_a_rollback_within_a_loop_ends_it_and_a_new_loop_is_where_the_checkpoint_is(accel, tmp_path, rolled_back_to):
    trainer, loader = make(accel)
    trainer.save(tmp_path / "before the first batch")
    loop = trainer.batches(loader)
    first = [next(loop) for _ in range(3)]
    for batch in first:
        trainer(batch)
    trainer.save(tmp_path / "in mid-epoch")
    rest = list(loop)
    following = trainer.batches(loader)
    next(following)
    trainer.save(tmp_path / "in the next epoch")
    second = [next(following) for _ in range(2)]

    trainer.resume(tmp_path / rolled_back_to)
    with pytest.raises(accelcore.TrainingError, match="lost its position"):
        next(following)
    with pytest.raises(StopIteration):
        next(following)
    assert trainer.epoch == (rolled_back_to == "in the next epoch")
    assert trainer.steps == {"before the first batch": 0}.get(rolled_back_to, 3)
    again = list(map(rows, trainer.batches(loader)))
    if rolled_back_to == "in mid-epoch":
        assert again == list(map(rows, rest))
    elif rolled_back_to == "in the next epoch":
        assert again[:2] == list(map(rows, second))
        assert len(again) == 5
    else:
        assert again == list(map(rows, first + rest))


def test_a_second_loop_over_one_stream_ends_the_first(accel):
    trainer, loader = make(accel)
    outer = trainer.batches(loader)
    next(outer)
    inner = list(trainer.batches(loader))
    assert len(inner) == 6
    with pytest.raises(accelcore.TrainingError, match="another loop"):
        next(outer)
    assert trainer.epoch == 2


class Counting:
    """Counts epochs itself, and has another order in each."""

    def __init__(self, told=False):
        self.epoch = 0
        if told:
            self.set_epoch = lambda epoch: setattr(self, "epoch", epoch)

    def __iter__(self):
        order = torch.randperm(6, generator=torch.Generator().manual_seed(self.epoch))
        self.epoch += 1
        return iter([(torch.tensor([[float(row)]]),) for row in order])


@pytest.mark.parametrize(
    ("data", "is_same"),
    [
        (Counting, False),
        (lambda: Counting(told=True), True),
        (lambda: DataLoader(TensorDataset(torch.rand(12, 1)), 2, shuffle=True, num_workers=1), False),  # other values
        (lambda: DataLoader(TensorDataset(torch.arange(12.0).view(12, 1)), 2, shuffle=True), True),
        (lambda: [["text"], ["more"], ["last"]], True),
    ],
)
def test_a_resume_within_an_epoch_of_another_order_is_reported(accel, tmp_path, caplog, data, is_same):
    loader = data()
    trainer, _ = make(accel)
    list(trainer.batches(loader))
    loop = trainer.batches(loader)
    next(loop)
    next(loop)
    trainer.save(tmp_path)
    rest = [repr(batch) for batch in loop]

    trainer, _ = make(accel)
    torch.manual_seed(1)
    trainer.resume(tmp_path)
    loader = data()
    resumed = [repr(batch) for batch in trainer.batches(loader)]
    assert (resumed == rest) == is_same
    assert ("may repeat rows, and omit others" in caplog.text) != is_same


class Closed(Mapping):
    """Moves itself to a device, and lets nobody else read its entries, as a stack of rows of unequal length."""

    def __getitem__(self, name):
        raise RuntimeError("the rows are of unequal length")

    def __iter__(self):
        return iter(["rows"])

    def __len__(self):
        return 1

    def to(self, device):
        return (torch.ones(2, 1, device=device),)


def test_a_batch_whose_parts_only_its_class_may_read_is_no_error(accel):
    trainer, _ = make(accel)
    for batch in trainer.batches([Closed()]):
        trainer(batch)
    assert trainer.steps == 1


class Largest(TorchDispatchMode):
    """Note the number of elements of the largest tensor that is made, and is no view."""

    elements = 0

    def __torch_dispatch__(self, function, kinds, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        if isinstance(made, torch.Tensor) and not function.is_view:
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=["contiguous", "permuted"])
def test_a_first_batch_is_not_copied(accel, order):
    trainer, _ = make(accel)
    batch = torch.arange(60_000.0).view(10, 20, 300).permute(order)
    with Largest() as largest:
        (given,) = trainer.batches([batch])
    assert torch.equal(given, batch)
    assert 0 < largest.elements < batch.numel() / 3
