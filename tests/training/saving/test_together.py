"""Several trainers, one checkpoint: there is never one of them without the others."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import accelcore
from accelcore.checkpoint.export import export
from accelcore.cli import main

RUN = Path(__file__).with_name("together_run.py")


def epochs(folder, rank=0):
    """What each epoch came to, by its number; one that was trained twice has to come to the same."""
    found = {}
    for line in (folder / f"losses-{rank}").read_text().splitlines():
        epoch, loss = json.loads(line)
        assert found.setdefault(epoch, loss) == loss
    return found


def steps_of(checkpoint):
    return json.loads((checkpoint / "manifest.json").read_text())["trainers"]


def test_a_run_that_is_killed_between_the_two_goes_on_as_if_it_had_not_been(fork, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert fork(RUN, whole, "never").finish().returncode == 0
    assert fork(RUN, killed, 3).finish().returncode == -signal.SIGKILL
    assert sorted(path.name for path in (killed / ".incomplete").iterdir()) == ["generator"]
    found = list(killed.glob("step-*"))
    assert sorted(steps_of(path)["critic"] for path in found) == [8, 16]
    assert all(steps_of(path)["generator"] * 2 == steps_of(path)["critic"] for path in found)
    assert fork(RUN, killed, "never").finish().returncode == 0
    assert epochs(killed) == epochs(whole)
    assert not (killed / ".incomplete").exists()
    assert {path.name: steps_of(path) for path in killed.glob("step-*")} == {
        "step-00000024": {"generator": 12, "critic": 24},
        "step-00000032": {"generator": 16, "critic": 32},
    }


def test_in_a_job_a_rank_that_cannot_save_one_of_them_saves_none_and_all_ranks_say_so(fork_ranks, tmp_path):
    """The critic is divided among the ranks, the generator is not."""
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    for folder, when in ((whole, "never"), (torn, 2), (torn, "never")):
        ended = [rank.finish() for rank in fork_ranks(RUN, folder, when)]
        assert [rank.returncode for rank in ended] == [0, 0], "\n".join(rank.stderr for rank in ended)
        if when == 2:
            assert (torn / "refused-1").read_text() == "8 no room for the critic\n"
            assert (torn / "refused-0").read_text().startswith("8 another rank could not save")
            assert sorted(path.name for path in torn.glob("step-*")) == ["step-00000012", "step-00000016"]
            shutil.rmtree(torn / "step-00000016")  # so that the last run has something left to do
    for rank in range(2):
        assert epochs(torn, rank) == epochs(whole, rank)
        refusal = (tmp_path / f"whole-another-job-{rank}").read_text()
        assert f"this process is rank {rank} of 2 to generator, rank 0 of 1 to alone" in refusal


def pair(accel, *, width=4):
    """Two trainers that share a layer, with windows of other lengths."""
    accel.runtime.seed(2)
    trunk = nn.Linear(3, width)
    first, second = (nn.Sequential(trunk, nn.Dropout(0.2), nn.Linear(width, out)) for out in (1, 2))
    trainers = (
        accel.trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            loss=lambda model, batch: model(batch).square().mean(),
            accumulate=accumulate,
        )
        for model, accumulate in ((first, 3), (second, 5))
    )
    return dict(zip(("first", "second"), trainers, strict=True))


def train(trainers, batches):
    return [trainer(batch).item() for batch in batches for trainer in trainers.values()]


BATCHES = torch.randn(11, 4, 3, generator=torch.Generator().manual_seed(1))


def test_both_go_on_from_the_middle_of_their_windows_to_the_bit(accel, tmp_path):
    """With gradients of both on the parameters that they share."""
    undisturbed = pair(accel)
    train(undisturbed, BATCHES[:4])
    undisturbed["first"].extra["best"] = 0.5
    path = accelcore.Together(**undisturbed).save(tmp_path)
    expected = train(undisturbed, BATCHES[4:])

    resumed = pair(accel)
    assert accelcore.Together(**resumed).resume(tmp_path) == path
    assert resumed["first"].extra == {"best": 0.5}
    assert [trainer.steps for trainer in resumed.values()] == [1, 0]
    assert train(resumed, BATCHES[4:]) == expected
    for name, trainer in resumed.items():
        assert trainer.steps == undisturbed[name].steps
        for key, value in trainer.model.state_dict().items():
            assert torch.equal(value, undisturbed[name].model.state_dict()[key])


def test_what_belongs_to_all_is_saved_beside_what_is_each_ones_own(accel, tmp_path):
    trainers, others = pair(accel), pair(accel)
    trainers["first"].extra["best"] = 0.5
    both, again = accelcore.Together(**trainers), accelcore.Together(**dict(reversed(others.items())))
    both.save(tmp_path / "without")
    assert both.extra == {}
    both.save(tmp_path, extra={"best": 0.25, "average": torch.ones(2)})
    again.resume(tmp_path)
    assert others["first"].extra == {"best": 0.5}
    assert others["second"].extra == {}
    assert torch.equal(again.extra["average"], torch.ones(2))
    assert again.extra.pop("best") == 0.25
    again.save(tmp_path / "later")
    both.resume(tmp_path / "later")
    assert list(both.extra) == ["average"]
    both.resume(tmp_path / "without")
    assert both.extra == {}


def test_each_has_its_files_in_a_folder_and_what_is_renamed_is_found(accel, tmp_path):
    trainers = pair(accel)
    both = accelcore.Together(**trainers)
    assert both.resume(tmp_path) is None
    path = both.save(tmp_path)
    train(trainers, BATCHES)
    model = load_file(path / "second" / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in model.items()} == {
        name: tuple(value.shape) for name, value in trainers["second"].model.state_dict().items()
    }
    path.rename(tmp_path / "best")
    assert both.resume(tmp_path) == tmp_path / "best"
    assert torch.equal(model["0.weight"], trainers["first"].model[0].weight)
    (tmp_path / "best" / "second" / "shared.safetensors").write_bytes(b"")
    with pytest.raises(accelcore.CheckpointError, match=r"best is damaged\n.* why: second/shared.safetensors has 0 of"):
        both.resume(tmp_path)
    (tmp_path / "best" / "manifest.json").write_text('{"files')
    with pytest.raises(accelcore.CheckpointError, match=r"why: manifest\.json cannot be read as JSON: Unterminated"):
        both.resume(tmp_path)


def test_where_one_does_not_fit_the_others_are_left_as_they_were(accel, tmp_path):
    accelcore.Together(**pair(accel)).save(tmp_path)
    mixed = {"first": pair(accel)["first"], "second": pair(accel, width=5)["second"]}
    train(mixed, BATCHES)
    before = {key: value.clone() for key, value in mixed["first"].model.state_dict().items()}
    with pytest.raises(accelcore.CheckpointError, match="to another model"):
        accelcore.Together(**mixed).resume(tmp_path)
    assert mixed["first"].steps == 3
    assert all(torch.equal(value, before[key]) for key, value in mixed["first"].model.state_dict().items())


def test_a_checkpoint_is_resumed_as_it_was_saved(accel, tmp_path):
    trainers = pair(accel)
    both, other = accelcore.Together(**trainers), accelcore.Together(a=trainers["first"], second=trainers["second"])
    saved = both.save(tmp_path / "both")
    trainers["first"].save(tmp_path / "alone")
    with pytest.raises(accelcore.CheckpointError, match=r"folder in a checkpoint.*\n.*Together\(...\)\.resume\("):
        trainers["first"].resume(saved / "first")
    (saved / "manifest.json").rename(saved / "manifest.txt")
    with pytest.raises(accelcore.CheckpointError, match=r"without its manifest\.json"):
        trainers["first"].resume(saved / "first")
    (saved / "manifest.txt").rename(saved / "manifest.json")
    for resume, says in (
        (
            lambda: trainers["first"].resume(tmp_path / "both"),
            r"first, second, .* one trainer\n.*by accelcore\.Together\(first=..., second=...\)\.resume",
        ),
        (lambda: both.resume(tmp_path / "alone"), r"one trainer, .* resuming first, second\n.*by trainer\.resume"),
        (lambda: other.resume(tmp_path / "both"), "first, second, .* a, second"),
    ):
        with pytest.raises(accelcore.CheckpointError, match=says):
            resume()


def test_the_model_of_one_is_exported_by_its_name(accel, tmp_path, capsys):
    trainers = pair(accel)
    saved, file = accelcore.Together(**trainers).save(tmp_path / "both"), tmp_path / "model.safetensors"
    alone = trainers["first"].save(tmp_path / "alone")
    assert main(["export", "--trainer", "second", str(tmp_path / "both"), str(file)]) == 0
    assert f"model second from {saved}" in capsys.readouterr().out
    for name, value in trainers["second"].model.state_dict().items():
        assert torch.equal(load_file(file)[name], value)
    file.unlink()
    for folder, trainer, says in (
        (saved, None, r"holds several trainers, and none was named\n  available: first, second\n.*--trainer first"),
        (saved, "third", r"has no trainer 'third'\n  available: first, second"),
        (alone, "first", r"has no trainer 'first'"),
        (saved / "first", None, r"folder in a checkpoint.*\n.*--trainer first "),
    ):
        with pytest.raises(accelcore.CheckpointError, match=says):
            export(folder, file, trainer=trainer)
    assert not file.exists()


def test_what_cannot_be_saved_together_is_refused(accel, tmp_path):
    trainer, second = pair(accel).values()
    with pytest.raises(accelcore.ConfigurationError, match=r"need names\n.*generator=train_g"):
        accelcore.Together(trainer, second)
    for trainers, says in (
        ({}, "no trainers"),
        ({"g": trainer.model}, "g is a Sequential"),
        ({"g": trainer, "d": trainer}, "under two names"),
        ({"g": trainer, "G": second}, "differ in case only"),
        ({"a/b": trainer}, r"'a/b' cannot be a trainer's name, which becomes the name of a folder"),
    ):
        with pytest.raises(accelcore.ConfigurationError, match=says):
            accelcore.Together(**trainers)
    with pytest.raises(accelcore.ConfigurationError, match=r"extra=.*dict"):
        accelcore.Together(a=trainer).save(tmp_path, extra=[1])


def test_what_is_no_folder_is_refused(accel, tmp_path):
    trainer = pair(accel)["first"]
    (tmp_path / "file").touch()
    for saver in (trainer, accelcore.Together(a=trainer)):
        for act in (saver.save, saver.resume):
            with pytest.raises(accelcore.ConfigurationError, match=r"None.*path"):
                act(None)
            for name, says in (
                ("a\0b", r"'a\\x00b' is not a path"),
                ("a" * 300, r"aaa.* 300 characters(.|\n)*shorter"),
                ("a/" * 3000, r"6000(.|\n)*shorter"),
            ):
                with pytest.raises(accelcore.ConfigurationError, match=says):
                    act(name)
        for folder in (tmp_path / "file", tmp_path / "file" / "below", Path(os.devnull)):
            with pytest.raises(accelcore.CheckpointError, match=r"(file|null) is a file\n  what to do: give a folder$"):
                saver.save(folder)
