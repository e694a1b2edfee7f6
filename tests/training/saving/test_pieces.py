"""Checkpoints that every rank has written a piece of: read by any number of ranks, under any strategy."""

from __future__ import annotations

from collections import ChainMap
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import accelcore
from accelcore.checkpoint.export import export
from accelcore.checkpoint.store import find
from accelcore.cli import main
from tests.training.saving.pieces_ranks import RUNS, make, state

RANKS = Path(__file__).with_name("pieces_ranks.py")
# Of five ranks, two of which have nothing of a bias of six elements, one run; the others with `full`.
OF_FIVE = ("ours",)
OTHERS = tuple(run for run in RUNS if run not in OF_FIVE)


@pytest.fixture(scope="module")
def saved(fork_ranks, tmp_path_factory):
    """The folder that four ranks saved to, and what they had."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, started(fork_ranks, folder, "save", size=4)


@pytest.fixture(scope="module")
def resumed(fork_ranks, saved):
    """What as many ranks have after a resume under a strategy."""

    @cache
    def resumed(size, parallel, runs):
        return started(fork_ranks, saved[0], "resume", parallel, *runs, size=size)

    return resumed


def started(fork_ranks, folder, what, *rest, size):
    ended = [rank.finish(300) for rank in fork_ranks(RANKS, what, folder, *rest, size=size)]
    assert [rank.returncode for rank in ended] == [0] * size, "\n".join(rank.stderr for rank in ended)
    name = f"{what}-{'-'.join(rest)}-{size}"
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(size)]


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name].float(), value.float()), name


@pytest.mark.parametrize(
    ("size", "parallel", "runs", "run"),
    [
        *((2, parallel, tuple(RUNS), run) for parallel in ("fsdp", "ddp", "zero1") for run in RUNS),
        *((5, "fsdp", OF_FIVE, run) for run in OF_FIVE),
        *(pytest.param(5, "fsdp", OTHERS, run, marks=pytest.mark.full) for run in OTHERS),
    ],
)
def test_any_number_of_ranks_resumes_it_under_any_strategy(saved, resumed, size, parallel, runs, run):
    expected = saved[1][0][run]
    for rank in resumed(size, parallel, runs):
        model = rank[run]["model"]
        if run == "bf16" and parallel != "fsdp":  # there the masters are exact, and the model rounded
            model = {name: value.bfloat16() for name, value in model.items()}
            equal(model, {name: value.bfloat16() for name, value in expected["model"].items()})
        else:
            equal(model, expected["model"])
        equal(rank[run]["moments"], expected["moments"])
        assert any(not torch.equal(value, model[name]) for name, value in rank[run]["after"].items()), "it stands still"


@pytest.mark.parametrize("run", ["ours", "torch", "wrapped", "state", "state of torch"])
def test_one_process_resumes_it(saved, run, accel):
    trainer = make(accel, run, seed=5, parallel="none")
    trainer.resume(saved[0] / run)
    expected = saved[1][0][run]
    equal(state(trainer)["model"], expected["model"])
    equal(state(trainer)["moments"], expected["moments"])


def test_each_rank_writes_what_it_holds(saved):
    folder, ranks = saved
    files = find(folder / "ours").manifest["files"]
    everything = sum(files[name]["bytes"] for name in files)
    assert all(rank["ours"]["bytes"] < everything / 2 for rank in ranks)
    assert {f"model-{rank:05d}" for rank in range(4)} < set(files)
    assert files["model"]["bytes"] < files["model-00000"]["bytes"]
    assert "model-00000" not in find(folder / "whole").manifest["files"]


@pytest.mark.parametrize("run", ["state", "state of torch"])
def test_each_rank_writes_the_state_of_what_it_updates(saved, resumed, run):
    folder, ranks = saved
    checkpoint = find(folder / run)
    states = [checkpoint.read(f"rank-{rank:05d}")["optimizer"]["state"] for rank in range(4)]
    assert all(0 < len(own) < len(ChainMap(*states)) for own in states)
    assert sum(map(len, states)) == len(ChainMap(*states))
    assert "state" not in checkpoint.read("shared")["optimizer"]
    for rank in resumed(2, "zero1", tuple(RUNS)):
        assert rank[run]["own"] < len(ranks[0][run]["moments"]), "it holds what others update, too"


@pytest.mark.parametrize("run", ["ours", "bf16", "whole", "state"])
def test_the_model_is_exported_to_one_file(saved, run, tmp_path):
    folder, ranks = saved
    taken = export(folder / run, tmp_path / "out" / "model.safetensors")
    assert taken.parent == folder / run
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = dict(ranks[0][run]["model"])
    del expected["head.weight"]  # tied
    equal(found, expected)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_the_command_exports_too(saved, tmp_path, monkeypatch, capsys):
    assert main(["export", str(saved[0] / "ours"), str(tmp_path / "model.safetensors")]) == 0
    assert str(find(saved[0] / "ours").path) in capsys.readouterr().out
    assert "embedding.weight" in load_file(tmp_path / "model.safetensors")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["export", str(saved[0] / "ours"), "~/model.safetensors"]) == 0
    assert "model.safetensors (replaced)" in capsys.readouterr().out
    assert main(["export", str(saved[0] / "our"), str(tmp_path / "model.safetensors")]) != 0
    said = capsys.readouterr().err
    assert "there is no checkpoint" in said
    assert "why: there is no such folder\n  what to do: give the folder" in said


def test_there_has_to_be_something_to_export(tmp_path):
    with pytest.raises(accelcore.CheckpointError, match="there is no checkpoint"):
        export(tmp_path, tmp_path / "model.safetensors")


def test_a_piece_that_was_changed_is_noticed(saved, tmp_path):
    folder, _ = saved
    path = find(folder / "ours").path
    twin = tmp_path / path.name
    twin.mkdir()
    for file in path.iterdir():
        (twin / file.name).write_bytes(file.read_bytes())
    data = bytearray((twin / "model-00002.safetensors").read_bytes())
    data[-1] ^= 1
    (twin / "model-00002.safetensors").write_bytes(data)
    with pytest.raises(accelcore.CheckpointError, match=r"model-00002\.safetensors was changed"):
        find(tmp_path)


@pytest.mark.parametrize("moment", [2, -3, -7])
def test_a_job_that_is_killed_while_it_saves_leaves_the_checkpoint_before(fork_ranks, tmp_path, moment, accel):
    ended = [rank.finish() for rank in fork_ranks(RANKS, "die", tmp_path, moment, size=2)]
    assert ended[moment > 0].returncode == -9
    left = [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")]
    assert left == ["step-00000001"]
    trainer = make(accel, "ours", seed=5, parallel="none")
    assert trainer.resume(tmp_path).name == "step-00000001"
    assert trainer.save(tmp_path).name == "step-00000001-1"
    assert not (tmp_path / ".incomplete").exists()
