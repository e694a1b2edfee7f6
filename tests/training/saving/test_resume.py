"""Saving and going on: bit-same results, whatever happens in between."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelcore.checkpoint import store

KILLED = Path(__file__).with_name("killed_run.py")


@pytest.mark.parametrize(
    ("save_after", "options"),
    [
        (1, {}),
        (6, {}),  # the last batch of the first epoch, still inside the loop
        (8, {"precision": "fp16"}),
        (9, {"accumulate": 4}),  # in the middle of a window
        (11, {"accumulate": 4, "precision": "fp16"}),
        (8, {"workers": 2}),
        (8, {"generator": 11}),
        (8, {"optimizer": "sgd", "momentum": 0.9}),
        (8, {"optimizer": "rmsprop", "centered": True}),
        (8, {"route": "loop"}),
    ],
    ids=str,
)
def test_a_resumed_run_is_bit_same(accel, tmp_path, save_after, options, build, run, final):
    def start():
        seed = options.get("generator")
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return build(accel, **{**options, "generator": generator})

    undisturbed, loader = start()
    expected = run(undisturbed, loader)

    first, loader = start()
    losses = run(first, loader, save_after=save_after, folder=tmp_path)
    second, loader = start()
    assert second.resume(tmp_path) is not None
    assert second.steps == first.steps
    losses += run(second, loader)

    assert losses == expected
    assert second.skipped == undisturbed.skipped
    for name, value in final(undisturbed).items():
        assert torch.equal(value, final(second)[name]), name


def test_saved_between_two_epochs(accel, tmp_path, build, run):
    undisturbed, loader = build(accel)
    expected = run(undisturbed, loader)
    first, loader = build(accel)
    losses = run(first, loader, epochs=2)
    first.save(tmp_path)
    second, loader = build(accel)
    second.resume(tmp_path)
    assert second.epoch == 2
    assert losses + run(second, loader) == expected


@pytest.mark.parametrize("route", ["fused", "loop"])
def test_a_channels_last_run_resumes_bit_same(accel, tmp_path, route):
    def start():
        accel.runtime.seed(2)
        model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        optimizer = accel.optimizers.create("adamw", model.parameters(), lr=1e-2, route=route)
        return accel.trainer(model, optimizer, loss=lambda m, b: m(b).square().mean())

    batches = [torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last) for _ in range(6)]
    undisturbed, first, second = start(), start(), start()
    expected = [undisturbed(batch).item() for batch in batches]
    losses = [first(batch).item() for batch in batches[:3]]
    first.save(tmp_path)
    second.resume(tmp_path)
    assert losses + [second(batch).item() for batch in batches[3:]] == expected
    assert torch.equal(undisturbed.model.weight, second.model.weight)


def test_the_generator_of_a_sampler_is_part_of_the_position(accel, tmp_path, build, run, noisy):
    def start():
        trainer, _ = build(accel)
        sampler = torch.utils.data.RandomSampler(range(22), generator=torch.Generator().manual_seed(8))
        return trainer, DataLoader(noisy(), 4, sampler=sampler)

    expected = run(*start())
    trainer, loader = start()
    losses = run(trainer, loader, save_after=9, folder=tmp_path)
    trainer, loader = start()
    trainer.resume(tmp_path)
    assert losses + run(trainer, loader) == expected


def test_persistent_workers_keep_the_order_after_a_resume(accel, tmp_path, caplog):
    class Rows(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.tensor([float(index)])

    def start():
        accel.runtime.seed(4)
        model = nn.Linear(1, 1)
        trainer = accel.trainer(
            model, accel.optimizers.create("sgd", model.parameters(), lr=0.01), loss=lambda m, b: m(b).square().mean()
        )
        return trainer, DataLoader(Rows(), 2, shuffle=True, num_workers=1, persistent_workers=True)

    def rows(trainer, loader, save_after=None):
        seen = []
        for _ in range(trainer.epoch, 3):
            for batch in trainer.batches(loader):
                trainer(batch)
                seen += batch.flatten().tolist()
                if len(seen) == save_after:
                    trainer.save(tmp_path)
                    return seen
        return seen

    expected = rows(*start())
    seen = rows(*start(), save_after=12)
    trainer, loader = start()
    trainer.resume(tmp_path)
    assert seen + rows(trainer, loader) == expected
    assert "persistent" in caplog.text


def test_killed_in_mid_epoch_and_resumed_with_workers_and_shuffling(fork, tmp_path):
    """SIGKILL, twice, at moments of its own choosing, two loader workers; the losses are those of a quiet run."""

    def train(folder, *arguments):
        ended = fork(KILLED, folder, *arguments).finish()
        assert ended.returncode in (0, -signal.SIGKILL), ended.stderr
        return ended.returncode

    assert train(tmp_path / "quiet") == 0
    for batch in ("7", "17"):
        assert train(tmp_path / "killed", "--kill-at", batch) == -signal.SIGKILL
    assert train(tmp_path / "killed") == 0

    def losses(name):
        lines = (tmp_path / name / "losses.jsonl").read_text().splitlines()
        return {entry["batch"]: entry["loss"] for entry in map(json.loads, lines)}

    quiet = losses("quiet")
    assert len(quiet) == 24
    assert losses("killed") == quiet  # what was done twice after a kill overwrites, and so must agree too


@pytest.mark.parametrize("now", [{"accumulate": 2, "clip_norm": 1.0}, {"accumulate": 4}])
def test_options_that_change_the_results_are_reported(accel, tmp_path, caplog, now):
    def make(**options):
        model = nn.Linear(3, 1)
        return accel.trainer(model, torch.optim.SGD(model.parameters()), loss=lambda m, b: m(b).mean(), **options)

    trainer = make(accumulate=2, clip_norm=1.0)
    for _ in range(2):
        trainer(torch.ones(2, 3))
    path, other = trainer.save(tmp_path), make(**now)
    caplog.clear()
    other.resume(path)
    said = [line for line in caplog.messages if "resumed from" not in line]
    expected = [] if "clip_norm" in now else [("accumulate=2", "has 4"), ("clip_norm=1.0", "has None")]
    assert len(said) == len(expected)
    assert all(word in line for line, words in zip(said, expected, strict=True) for word in words)


def test_on_another_number_of_ranks_another_accumulate_can_be_right(accel, tmp_path, caplog):
    def make(**options):
        model = nn.Linear(3, 1)
        return accel.trainer(model, torch.optim.SGD(model.parameters()), loss=lambda m, b: m(b).mean(), **options)

    whole = store.Checkpoint(make(accumulate=2, clip_norm=1.0).save(tmp_path / "one"))
    parts = {name: whole.read(name) for name in whole.manifest["files"]}
    with store.alone(tmp_path / "two"):
        for name, tree in {**parts, "rank-00001": parts["rank-00000"]}.items():
            store.write_file(tmp_path / "two", name, tree)
        facts = {key: whole.manifest[key] for key in ("run", "trainers", "device", "accelcore", "torch")}
        store.finish(tmp_path / "two", 0, {**facts, "world_size": 2})
    make(accumulate=4, clip_norm=2.0).resume(tmp_path / "two")
    assert "clip_norm=1.0" in caplog.text
    assert "accumulate" not in caplog.text


def test_a_resume_reports_what_was_trained_before_it_and_is_lost(accel, tmp_path, caplog, build, run):
    caplog.set_level("INFO")
    trainer, loader = build(accel)
    trainer.save(tmp_path)
    run(trainer, loader)
    caplog.clear()
    trainer.resume(tmp_path)
    assert "until step 18, epoch 3" in caplog.text
    assert "lost" in caplog.text
    caplog.clear()
    trainer.resume(tmp_path)
    assert "lost" not in caplog.text


def test_going_back_to_the_best_loses_nothing_that_was_saved(accel, tmp_path, caplog, build, run):
    caplog.set_level("INFO")
    trainer, loader = build(accel)
    for metric in (0.5, 0.7):
        for batch in trainer.batches(loader):
            trainer(batch)
        trainer.save(tmp_path, best=metric)
    trainer.resume(tmp_path, best=True)
    assert "resumed from" in caplog.text
    assert "lost" not in caplog.text


def test_nothing_to_resume_is_none(accel, tmp_path, build):
    trainer, _ = build(accel)
    assert trainer.resume(tmp_path / "nowhere") is None
    assert trainer.resume(tmp_path) is None
    (tmp_path / ".incomplete").mkdir()
    assert trainer.resume(tmp_path) is None


def test_a_state_moves_between_routes_without_changing_the_route(accel, tmp_path, build, run):
    fused, loader = build(accel, route="fused")
    run(fused, loader, epochs=1)
    fused.save(tmp_path)
    loop, loader = build(accel, route="loop")
    loop.resume(tmp_path)
    group = loop.optimizer.param_groups[0]
    assert (group["fused"], group["foreach"]) == (None, False)
    assert group["lr"] == fused.optimizer.param_groups[0]["lr"]
    assert all(state["step"] == 6 for state in loop.optimizer.state.values())
    run(loop, loader, epochs=2)


def test_tied_weights_stay_tied_and_extra_state_travels(accel, tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 4)
            self.head = nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.seen = 0

        def forward(self, tokens):
            self.seen += 1
            return self.head(self.embedding(tokens)).square().mean()

        def get_extra_state(self):
            return {"seen": self.seen, "names": ("a", {1: 2.5})}

        def set_extra_state(self, state):
            self.seen, self.names = state["seen"], state["names"]

    model = Tied()
    trainer = accel.trainer(model, accel.optimizers.create("adamw", model.parameters()))
    trainer(torch.arange(7))
    trainer.save(tmp_path)
    other = Tied()
    resumed = accel.trainer(other, accel.optimizers.create("adamw", other.parameters()))
    resumed.resume(tmp_path)
    assert other.head.weight is other.embedding.weight
    assert torch.equal(other.head.weight, model.head.weight)
    assert (other.seen, other.names) == (1, ("a", {1: 2.5}))
