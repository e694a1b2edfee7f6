"""Every strategy on two ranks, against one process that computes what both would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.training.parallel.strategy_models import DECAY, LEVELS, LR, Net, Normed, batch, loss_at_level, loss_of, used
from tests.training.parallel.strategy_ranks import CASES

RANKS = Path(__file__).with_name("strategy_ranks.py")
# Gradients and states outside of flat memory: also in test_zero1.py, and combined ones in a narrower dtype. Flat memory
# under torch's wrapper: both are tried apart.
FULL = ("combine", "zero1", "ddp flat")
TOLERANCE = {"combine bf16": {"rtol": 0.05, "atol": 0.02}}


@pytest.fixture(scope="module")
def lonely(fork_ranks, tmp_path_factory):
    """A job whose ranks wait for seconds, beside all others: its folder and its ranks."""
    folder = tmp_path_factory.mktemp("lonely")
    return folder, fork_ranks(RANKS, "lonely", folder)


@pytest.fixture(
    scope="module", params=[pytest.param(case, marks=pytest.mark.full if case in FULL else ()) for case in CASES]
)
def job(request, fork_ranks, tmp_path_factory, lonely):
    """What both ranks found, and how near to the oracle they have to be."""
    folder = tmp_path_factory.mktemp("job")
    ended = [rank.finish() for rank in fork_ranks(RANKS, request.param, folder)]
    assert [rank.returncode for rank in ended] == [0, 0], "\n".join(rank.stderr for rank in ended)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return found, TOLERANCE.get(request.param, {"rtol": 1e-4, "atol": 1e-5})


class Pair:
    """Two ranks in one process: a model each, gradients averaged by hand, None where neither has one."""

    def __init__(self, make_optimizer):
        self.models = [Net(0), Net(0)]
        self.optimizers = [make_optimizer(model) for model in self.models]

    def backward(self, rank, number, share, use, rows=8):
        (loss_of(self.models[rank], (batch(rank, number, rows), use)) * share).backward()

    def update(self, *, scale=1.0, clip=None):
        for pair in zip(*(model.parameters() for model in self.models), strict=True):
            gradients = [parameter.grad for parameter in pair if parameter.grad is not None]
            mean = None if not gradients else sum(gradients) * scale / 2
            for parameter in pair:
                parameter.grad = None if mean is None else mean.clone()
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        for mine, theirs in zip(*(model.buffers() for model in self.models), strict=True):
            theirs.copy_(mine)

    def state(self):
        return {name: value.double().flatten() for name, value in self.models[0].state_dict().items()}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, eps=1e-3)


def close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(found[name], dtype=torch.float64), value, msg=name, **tolerance)


WINDOWS = [("plain", 1, None), ("accumulated", 2, 0.3), ("scaled", 1, None), ("short", 4, None)]


@pytest.mark.parametrize("torch_has", ["trains", "older torch"])
@pytest.mark.parametrize(("name", "window", "clip"), WINDOWS)
def test_two_ranks_train_as_one_process_that_averages(job, torch_has, name, window, clip):
    (first, second), tolerance = job
    if torch_has not in first:
        pytest.skip("only sharded models need what older versions of torch lack")
    pair = Pair(adamw)
    for start in range(0, 6, window):
        numbers = range(start, min(start + window, 6))
        for rank in range(2):
            for number in numbers:
                pair.backward(rank, number, 1 / len(numbers), used(rank, number))
        pair.update(clip=clip)
    found = first[torch_has][name]
    assert found == second[torch_has][name], "parameters or buffers of the ranks are apart"
    close(found, pair.state(), tolerance)
    never = torch.tensor(found["never.weight"])
    assert torch.equal(never, Net(0).never.weight.double().flatten()), "decayed without a gradient"


def test_weighted_windows_are_the_mean_over_all_rows(job):
    (first, second), tolerance = job
    pair = Pair(adamw)
    for model in pair.models:
        model.norm.eval()
    for numbers in ((0, 1), (2, 3), (4,)):
        counts = {(rank, number): 2 + 3 * rank + number for rank in range(2) for number in numbers}
        for (rank, number), rows in counts.items():
            pair.backward(rank, number, 2 * rows / sum(counts.values()), True, rows)
        pair.update()
    assert first["weighted"] == second["weighted"]
    close(first["weighted"], pair.state(), tolerance)


def test_an_overflow_on_one_rank_skips_the_step_on_all(job):
    (first, second), _ = job
    for found in (first["overflows"], second["overflows"]):
        assert found["unchanged"]
        assert found["skipped"] == 1
    assert first["overflows"]["after"] == second["overflows"]["after"]


def test_layers_frozen_and_unfrozen_later_are_followed_and_a_replaced_one_is_refused(job):
    (first, second), tolerance = job
    pair = Pair(lambda model: torch.optim.SGD(model.parameters(), lr=LR))
    for model in pair.models:
        model.sometimes.requires_grad_(False)
    for number in range(6):
        for model in pair.models:
            if number == 2:
                model.sometimes.requires_grad_(True)
            if number == 4:
                model.inward.requires_grad_(False)
        for rank in range(2):
            pair.backward(rank, number, 1, True)
        pair.update()
    expected = {name: value for name, value in pair.state().items() if not name.startswith("never")}
    assert first["changes"]["state"] == second["changes"]["state"]
    close({name: first["changes"]["state"][name] for name in expected}, expected, tolerance)
    assert "'never.weight'" in first["changes"]["refused"]
    assert first["changes"]["refused"] == second["changes"]["refused"]


def test_masters_add_up_what_bf16_would_lose(job):
    (first, second), _ = job
    assert first["masters"] == second["masters"]
    weights = torch.tensor(first["masters"])
    torch.testing.assert_close(weights, torch.full_like(weights, 1 - 40 * 5e-4), rtol=0, atol=2**-8)


def test_masters_start_on_all_ranks_from_what_rank_0_was_given(job):
    given = [parameter.flatten().tolist() for parameter in Normed().parameters()]
    for rank in job[0]:
        assert rank["starts"] == {"bf16": given, "O2": given}


def level_by_hand(level):
    """Two ranks in one process: fp16 but for O2's norm, gradients averaged in fp32, O2's masters updated."""
    models = [Normed().half(), Normed().half()]
    if level == "O2":
        for model in models:
            model.norm.load_state_dict(Normed().norm.state_dict())
            model.norm.float()
            model.norm.register_forward_hook(lambda module, given, out: out.half())
    masters = [parameter.detach().float() for parameter in Normed().parameters()]
    for number in range(6):
        for rank, model in enumerate(models):
            (loss_at_level(model, batch(rank, number).half()) * (scale := 128 if level == "O2" else 1)).backward()
        for master, *pair in zip(masters, *(model.parameters() for model in models), strict=True):
            gradient = sum(parameter.grad.float() for parameter in pair) / 2 / scale
            master -= LR * gradient
            for parameter in pair:
                parameter.grad = None
                parameter.data.copy_(master if level == "O2" else parameter.float() - LR * gradient)
        for mine, theirs in zip(*(model.buffers() for model in models), strict=True):
            theirs.copy_(mine)
    expected = {name: value.double().flatten() for name, value in models[0].state_dict().items()}
    names = [name for name, _ in models[0].named_parameters()]
    return expected | {
        name: master.double().flatten() for name, master in zip(names, masters, strict=True) if level == "O2"
    }


@pytest.mark.parametrize("level", LEVELS)
def test_levels_are_the_loop_by_hand(job, request, level):
    (first, second), _ = job
    if isinstance(first["levels"][level], str):
        assert (level, request.node.callspec.params["job"]) == ("O3", "fsdp")
        assert "masters" in first["levels"][level]
        return
    assert first["levels"][level] == second["levels"][level]
    start = {name: value.double().flatten() for name, value in Normed().state_dict().items()}
    for name, value in level_by_hand(level).items():
        mine = torch.tensor(first["levels"][level][name], dtype=torch.float64)
        assert (mine - value).norm() <= 0.05 * (value - start[name]).norm(), name


def test_a_backward_pass_that_failed_in_a_job_ends_its_training(job):
    for found in job[0]:
        assert found["failures"][0] == "MemoryError: backward"
        assert found["failures"][1].startswith("TrainingError: this trainer cannot go on")
        assert "--max-restarts" in found["failures"][1]


def test_batches_that_nobody_divides_among_the_ranks_are_told_of_once(job):
    first, second = (found["shared_batch"] for found in job[0])
    for loop in ("one call", "three calls"):
        told = [record for record in first[loop] if "came through trainer.batches(loader)" in record]
        assert len(told) == 1, loop
        assert first[f"{loop}, streams"] == []
    assert not any(second.values())


def test_a_job_resumes_together_or_not_at_all(job):
    for found in job[0]:
        assert found["checkpoints"]["same"], "a resume in an open window is not bit-same"
        assert "do not find the same checkpoint" in found["checkpoints"]["one rank"]
        assert found["checkpoints"]["unchanged"]


def test_an_open_window_goes_on_under_another_strategy(job):
    for found in job[0]:
        if "refused" in found["checkpoints"]:
            assert "is sharded" in found["checkpoints"]["refused"]
            continue
        expected = {name: torch.tensor(value).double() for name, value in found["checkpoints"]["whole"].items()}
        close(found["checkpoints"]["crossed"], expected, {"rtol": 0.05, "atol": 0.02})


def test_large_gradients_are_taken_in_as_they_come(job, request):
    for found in job[0]:
        if found["large"] is None:
            pytest.skip("gradients of shards are reduced by torch")
        assert found["large"] < (0.02 if "bf16" in request.node.callspec.params["job"] else 1e-4)


def test_complex_parameters_train_or_are_refused(job, request):
    for found in job[0]:
        if request.node.callspec.params["job"] == "fsdp":
            assert "'always' cannot be divided among ranks: it is complex" in found["waves"]
        elif isinstance(found["waves"], str):  # torch 2.7
            assert request.node.callspec.params["job"] == "ddp"
            assert "complex" in found["waves"]
            assert "combine_ddp" in found["waves"]
        else:
            assert found["waves"] < (0.02 if "bf16" in request.node.callspec.params["job"] else 1e-5)


def test_an_observer_of_one_rank_changes_no_parameter(job):
    (first, second), _ = job
    assert len(first["observed"]["norms"]) == 2
    assert first["observed"]["state"] == second["observed"]["state"]


def test_a_save_that_only_one_rank_begins_says_so(lonely):
    folder, ranks = lonely
    for rank in ranks:
        rank.finish()
    said = json.loads((folder / "lonely-0.json").read_text())
    assert "not every rank of the job came to trainer.save()" in said
    assert "if job.is_main" in said
