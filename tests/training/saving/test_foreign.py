"""Files that other programs have saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import accelcore
from accelcore import CheckpointError, Policy


def net():
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def make(accel, optimizer="adamw", model=None, **options):
    model = net() if model is None else model
    return accel.trainer(
        model, accel.optimizers.create(optimizer, model.parameters(), lr=0.01),
        loss=lambda m, b: m(b).square().mean(), **options,
    )  # fmt: skip


def rows():
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def trained():
    """A model and an optimizer, trained by hand, and what they do next."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        _step(model, optimizer)
    return model, optimizer


def _step(model, optimizer):
    optimizer.zero_grad()
    loss = model(rows()).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def wrapped(state, prefix):
    return {prefix + name: value for name, value in state.items()}


def lightning(model, optimizer):
    extra = {"criterion.weight": torch.ones(2)}
    return {
        "epoch": 4, "global_step": 12, "pytorch-lightning_version": "2.6.0", "loops": {}, "lr_schedulers": [],
        "state_dict": {**wrapped(model, "model."), **extra}, "optimizer_states": [optimizer],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("tree", "rest"),
    [
        (lambda model, optimizer: {"model": model, "optimizer": optimizer, "epoch": 4}, {"epoch": 4}),
        (
            lambda model, optimizer: {
                "model_state_dict": wrapped(model, "module._orig_mod."), "optimizer_state_dict": optimizer, "args": {},
            },
            {"args": {}},
        ),
        (lightning, {"epoch": 4, "global_step": 12}),
    ],
    ids=["torch", "wrapped", "Lightning"],
)  # fmt: skip
def test_a_training_goes_on_as_by_hand(accel, trained, tmp_path, caplog, tree, rest):
    model, optimizer = trained
    torch.save(tree(model.state_dict(), optimizer.state_dict()), tmp_path / "last.pth")
    trainer = make(accel)
    found = trainer.load(tmp_path / "last.pth")
    assert rest.items() <= found.items()
    assert ("criterion.weight" in caplog.text) == ("loops" in found)
    for _ in range(3):
        assert float(trainer(rows())) == pytest.approx(_step(model, optimizer), rel=1e-5)


def test_folders_of_accelerate(accel, trained, tmp_path):
    model, optimizer = trained
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.bin")
    state = model.state_dict()
    names = list(state)
    parts = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for part, members in parts.items():
        save_file({name: state[name] for name in members}, tmp_path / part)
    index = {"weight_map": {name: part for part, members in parts.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    several = make(accel)
    several.load(tmp_path)
    save_file(state, tmp_path / "model.safetensors")
    one = make(accel)
    one.load(tmp_path)
    expected = [_step(model, optimizer) for _ in range(2)]
    for trainer in (several, one):
        assert [float(trainer(rows())) for _ in range(2)] == pytest.approx(expected, rel=1e-5)


def test_weights_alone_and_in_another_dtype(accel, tmp_path):
    """Also a checkpoint's, of one's own: to begin another training with."""
    model = nn.Linear(4, 1)
    torch.save(model.half().state_dict(), tmp_path / "half.pt")
    trainer = make(accel, model=nn.Linear(4, 1))
    assert trainer.load(tmp_path / "half.pt") == {}
    torch.testing.assert_close(trainer.model.weight, model.weight.float())
    trainer(rows())
    path = trainer.save(tmp_path / "own")
    low = make(accel, model=nn.Linear(4, 1), precision=Policy(model_dtype="bfloat16"), flat=True)
    low.load(path)
    torch.testing.assert_close(low.model.weight, trainer.model.weight.bfloat16())
    low.save(tmp_path / "low")
    back = make(accel, model=nn.Linear(4, 1))
    back.resume(tmp_path / "low")
    torch.testing.assert_close(back.model.weight, trainer.model.weight, rtol=0, atol=0)  # its masters were exact


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('it was run')",))


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"model": net().state_dict(), "code": Evil()}, r"would run code\n  why: [^\x1b]*exec"),
        ({"weights": net().state_dict()}, "no state_dict of a model"),
        (
            {"model": nn.Linear(2, 2).state_dict()},
            r"9 missing in the checkpoint: 0\.weight, (\S+, ){4}\.\.\.\n +2 unknown to the model: weight, bias\n.*give",
        ),
        ({"model": net().state_dict(), "optimizer": [1, 2]}, "not the state_dict of one"),
        (
            {"model": net().state_dict(), "optimizer": torch.optim.AdamW(net()[0].parameters()).state_dict()},
            "other parameter groups",
        ),
        ([1, 2], "holds a list"),
        (
            {**wrapped(net().state_dict(), "a."), **wrapped(net().state_dict(), "b.")},
            "2 parts of the file (.*): a., b.",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(accel, tmp_path, tree, says):
    torch.save(tree, tmp_path / "file.pth")
    trainer = make(accel)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(CheckpointError, match=says):
        trainer.load(tmp_path / "file.pth")
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    trainer(rows())


def test_what_is_no_such_file(accel, tmp_path):
    (tmp_path / "text.pth").write_text("nothing")
    (tmp_path / "empty").mkdir()
    for path, says in (
        ("text.pth", "not a file of torch.save"),
        ("empty", "neither a checkpoint nor"),
        ("x.pth", "x.pth"),
    ):
        with pytest.raises(CheckpointError, match=says):
            make(accel).load(tmp_path / path)


def test_a_file_is_no_checkpoint_to_resume_from(accel, tmp_path):
    torch.save({}, tmp_path / "file.pth")
    with pytest.raises(CheckpointError, match=r"trainer\.load"):
        make(accel).resume(tmp_path / "file.pth")
    assert isinstance(accelcore.CheckpointError("x"), RuntimeError)


def test_a_file_that_is_not_there(accel, tmp_path):
    model = nn.Linear(2, 2)
    trainer = accel.trainer(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(accelcore.CheckpointError, match=r"no file .*missing\.pt(.|\n)*correct the path"):
        trainer.load(tmp_path / "missing.pt")


def test_a_job_loads_a_file_whole_or_divided(fork_ranks, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        _step(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(state, tmp_path / "file.pt")
    torch.save(rows(), tmp_path / "rows.pt")
    script = Path(__file__).with_name("foreign_ranks.py")
    ended = [rank.finish() for rank in fork_ranks(script, tmp_path)]
    assert [rank.returncode for rank in ended] == [0, 0], "\n".join(rank.stderr for rank in ended)
    _step(model, optimizer)
    for found in (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)):
        assert len(found) == 6
        for rest, weights in found.values():
            assert rest == {"epoch": 3}
            for name, value in model.state_dict().items():
                torch.testing.assert_close(weights[name], value)
