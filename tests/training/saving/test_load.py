"""Begin a new run with the model and the optimizer's state of a checkpoint, compared with a run by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import accelcore
from accelcore import CheckpointError, Policy

DATA = torch.randn(8, 6, 4, generator=torch.Generator().manual_seed(1))
KINDS = {"adamw": (torch.optim.AdamW, {}), "sgd": (torch.optim.SGD, {"momentum": 0.9})}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))


def loss(model, rows):
    return model(rows).square().mean()


def make(accel, name="adamw", model=None, lr=0.02, ours=True, **options):
    model = net() if model is None else model
    kind, given = KINDS[name]
    optimizer = kind(model.parameters(), lr=lr, **given)
    return accel.trainer(model, accel.optimizers.fastest(optimizer) if ours else optimizer, loss=loss, **options)


def by_hand(kind, epochs, model, state=None, data=DATA, falls=True, **options):
    """Train with a new cosine; return the losses, and the optimizer's state."""
    optimizer = kind(model.parameters(), **options)
    if state is not None:
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(data))
    losses = []
    for rows in data.repeat(epochs, *[1] * (data.dim() - 1)):
        optimizer.zero_grad()
        value = loss(model, rows)
        value.backward()
        optimizer.step()
        if falls:
            schedule.step()
        losses.append(value.item())
    return losses, optimizer.state_dict()["state"]


def train(trainer, epochs):
    return [trainer(rows).item() for _ in trainer.epochs(epochs) for rows in trainer.batches(list(DATA))]


@pytest.mark.parametrize("ours", [True, False], ids=["by name", "of torch"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("flat", [True, False])
def test_a_new_schedule_keeps_the_optimizers_state_as_by_hand(accel, tmp_path, name, ours, flat):
    kind, options = KINDS[name]
    model = net()
    first, state = by_hand(kind, 1, model, lr=0.02, **options)
    second, _ = by_hand(kind, 2, model, state, lr=0.01, **options)
    trainer = make(accel, name, ours=ours, flat=flat, scheduler="cosine")
    assert train(trainer, 1) == pytest.approx(first, rel=1e-4)
    trainer.save(tmp_path, extra={"best": 3})
    new = make(accel, name, ours=ours, flat=flat, scheduler="cosine", lr=0.01)
    assert new.load(tmp_path, optimizer=True) == {"best": 3}
    assert (new.steps, new.epoch) == (0, 0)
    assert train(new, 2) == pytest.approx(second, rel=1e-4)
    assert new.steps == 16


def test_without_the_optimizer_its_state_starts_new(accel, tmp_path):
    model = net()
    by_hand(torch.optim.AdamW, 1, model, lr=0.02)
    expected, _ = by_hand(torch.optim.AdamW, 1, model, lr=0.02)
    trainer = make(accel, scheduler="cosine")
    train(trainer, 1)
    new = make(accel, scheduler="cosine")
    new.load(trainer.save(tmp_path))
    assert train(new, 1) == pytest.approx(expected, rel=1e-4)


def test_masters_are_exact_and_a_window_is_left_out(accel, tmp_path):
    low = Policy(model_dtype="bfloat16", autocast="bfloat16")
    trainer = make(accel, precision=low, accumulate=2)
    for rows in DATA[:3]:
        trainer(rows)
    path = trainer.save(tmp_path)
    exact = make(accel)
    exact.load(path, optimizer=True)
    assert not torch.equal(exact.model[0].weight, exact.model[0].weight.bfloat16().float())
    for precision in (low, "fp32"):
        new = make(accel, precision=precision, accumulate=3)
        new.load(path, optimizer=True)
        assert new.window_closed
        back = make(accel)
        back.load(new.save(tmp_path / str(precision)[:4]), optimizer=True)
        _assert_same_state(back, exact)


def test_options_that_need_a_state_which_was_not_saved(accel, tmp_path):
    model = net()
    trainer = accel.trainer(model, accel.optimizers.create("adamw", model.parameters()), loss=loss)
    train(trainer, 1)
    trainer.save(tmp_path)
    model = net()
    new = accel.trainer(model, accel.optimizers.create("adamw", model.parameters(), amsgrad=True), loss=loss)
    before = model[0].weight.clone()
    with pytest.raises(CheckpointError, match="amsgrad=True"):
        new.load(tmp_path, optimizer=True)
    torch.testing.assert_close(model[0].weight, before, rtol=0, atol=0)
    new.load(tmp_path)
    new(DATA[0])


def test_a_schedule_within_the_optimizer_which_would_not_begin_new_is_refused(accel, tmp_path):
    def bertadam():
        model = net()
        optimizer = accel.optimizers.create("bertadam", model.parameters(), lr=0.1, t_total=8)
        return accel.trainer(model, optimizer, loss=loss)

    trainer = bertadam()
    train(trainer, 1)
    trainer.save(tmp_path)
    new = bertadam()
    with pytest.raises(CheckpointError, match="t_total=8"):
        new.load(tmp_path, optimizer=True)
    new.load(tmp_path)
    before = new.model[0].weight.clone()
    new(DATA[0])
    assert not torch.equal(new.model[0].weight, before)


def test_a_folder_is_named_from_within_it(accel, tmp_path, monkeypatch):
    trainer = make(accel)
    train(trainer, 1)
    monkeypatch.chdir(trainer.save(tmp_path, extra={"best": 1}))
    for name in (".", ".."):
        assert make(accel).load(name) == {"best": 1}


def test_another_optimizer_or_other_groups_are_refused(accel, tmp_path):
    trainer = make(accel)
    train(trainer, 1)
    trainer.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"it is 'adamw', and this one is 'sgd'"):
        make(accel, "sgd").load(tmp_path, optimizer=True)
    model = net()
    halves = [{"params": list(model[number].parameters())} for number in (0, 2)]
    for groups, says in ((halves, "1 parameter groups, and this one has 2"), (halves[:1], r"lacks '2\.bias'")):
        model[2].requires_grad_(len(groups) == 2)
        new = accel.trainer(model, accel.optimizers.create("adamw", groups), loss=loss)
        with pytest.raises(CheckpointError, match=says):
            new.load(tmp_path, optimizer=True)


def test_a_new_run_may_train_other_parameters(accel, tmp_path, caplog):
    trainer = make(accel)
    train(trainer, 1)
    trainer.save(tmp_path)
    model = net()
    model[0].requires_grad_(False)
    new = make(accel, model=model)
    new.load(tmp_path, optimizer=True)
    model[0].requires_grad_(True)
    new.refresh()
    assert float(new(DATA[0])) == float(trainer(DATA[0]))
    assert not caplog.records


def test_one_of_several_trainers(accel, tmp_path):
    one, other = make(accel), make(accel, model=nn.Linear(4, 1))
    train(one, 1), train(other, 1)
    path = accelcore.Together(one=one, other=other).save(tmp_path)
    new = make(accel, model=nn.Linear(4, 1))
    with pytest.raises(CheckpointError, match=r"one, other(.|\n)*trainer\.load\(.*step-00000008/one"):
        new.load(tmp_path, optimizer=True)
    new.load(path / "other", optimizer=True)
    assert [float(new(rows)) for rows in DATA[:2]] == [float(other(rows)) for rows in DATA[:2]]


def test_another_programs_optimizer_under_options_of_ones_own(accel, tmp_path):
    model = net()
    _, state = by_hand(torch.optim.AdamW, 1, model, lr=0.5)
    optimizer = {
        "state": state,
        "param_groups": torch.optim.AdamW(model.parameters(), lr=0.5).state_dict()["param_groups"],
    }
    torch.save({"model": model.state_dict(), "optimizer": optimizer}, tmp_path / "file.pt")
    torch.save({"model": model.state_dict()}, tmp_path / "model.pt")
    expected, _ = by_hand(torch.optim.AdamW, 1, model, state, lr=0.01)
    new = make(accel, scheduler="cosine", lr=0.01)
    with pytest.raises(CheckpointError, match="no state of an optimizer"):
        new.load(tmp_path / "model.pt", optimizer=True)
    new.load(tmp_path / "file.pt", optimizer=True)
    assert train(new, 1) == pytest.approx(expected, rel=1e-4)
    new.load(tmp_path / "file.pt", optimizer=False)
    assert new.optimizer.param_groups[0]["lr"] < 1e-6


def test_a_job_begins_with_the_checkpoint_of_one_process_and_the_reverse(fork_ranks, accel, tmp_path):
    """Both were saved within an epoch, which `resume` refuses."""
    model, trainer = net(), make(accel)
    for number, rows in enumerate(trainer.batches(list(DATA))):
        trainer(rows)
        if number == 4:
            trainer.save(tmp_path / "one")
            break
    _, state = by_hand(torch.optim.AdamW, 1, model, data=DATA[:5], falls=False, lr=0.02)
    torch.save(DATA, tmp_path / "data.pt")
    ended = [rank.finish() for rank in fork_ranks(Path(__file__).with_name("load_ranks.py"), tmp_path)]
    assert [rank.returncode for rank in ended] == [0, 0], "\n".join(rank.stderr for rank in ended)
    expected, state = by_hand(torch.optim.AdamW, 1, model, state, data=DATA.unflatten(0, (4, 2)), lr=0.01)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert found[0].keys() == {"ddp", "zero1", "fsdp"}
    for parallel in found[0]:
        losses = [sum(both) / 2 for both in zip(*(each[parallel] for each in found), strict=True)]
        assert losses == pytest.approx(expected, rel=1e-4)
    after, _ = by_hand(torch.optim.AdamW, 1, model, state, lr=0.03)
    for parallel in found[0]:
        with pytest.raises(CheckpointError, match=r"within an epoch by a job of size 2(.|\n)*trainer\.load"):
            make(accel).resume(tmp_path / parallel)
        new = make(accel, scheduler="cosine", lr=0.03)
        new.load(tmp_path / parallel, optimizer=True)
        assert train(new, 1) == pytest.approx(after, rel=1e-4)
        same = make(accel)
        same.load(tmp_path / f"low-{parallel}", optimizer=True)
        _assert_same_state(same, trainer)


def _assert_same_state(one, other):
    for ours, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    ours, theirs = (each.optimizer.state_dict()["state"] for each in (one, other))
    assert ours.keys() == theirs.keys() != set()
    for number, entry in theirs.items():
        for key, value in entry.items():
            torch.testing.assert_close(ours[number][key], value, rtol=0, atol=0)


def test_a_load_within_a_window_is_refused(accel, tmp_path):
    path = make(accel).save(tmp_path)
    trainer = make(accel, accumulate=2)
    trainer(DATA[0])
    with pytest.raises(accelcore.TrainingError, match=r"within a window(.|\n)*flush"):
        trainer.load(path)
    trainer.flush()
    trainer.load(path)


def test_a_path_that_is_wrong_names_what_is_near(accel, tmp_path):
    path = make(accel).save(tmp_path / "runs" / "first")
    for given, says in ((path.parent.with_name("frist"), "did you mean .*first"), (tmp_path, "runs/first")):
        with pytest.raises(CheckpointError, match=says):
            make(accel).load(given, optimizer=True)


def test_a_schedule_of_another_length_names_the_checkpoint_to_load(accel, tmp_path):
    trainer = make(accel, scheduler="cosine")
    train(trainer, 1)
    path = trainer.save(tmp_path)
    longer = make(accel, scheduler="cosine")
    longer.resume(tmp_path)
    with pytest.raises(accelcore.ConfigurationError, match="optimizer=True") as raised:
        train(longer, 2)
    assert f'"{path}"' in str(raised.value)
