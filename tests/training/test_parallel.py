"""Several ranks train one model: what two ranks compute is what one would on the whole batch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accelcore.checkpoint import store

RANKS = Path(__file__).with_name("ranks.py")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(scenario, folder, world_size):
    """Run a scenario as a launcher would; what each rank found."""
    port = free_port()
    ranks = []
    for rank in range(world_size):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, "-W", "error::UserWarning", str(RANKS), scenario, str(folder)]
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(errors)
    return [json.loads((folder / f"{scenario}-{rank}.json").read_text()) for rank in range(world_size)]


def flat(found):
    return torch.cat([torch.tensor(values) for values in found["weights"]])


def by_hand(window, *, short=None, clip=None):
    """Weights of one process that takes, for each update, the rows of both ranks' micro-batches at once."""
    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
    targets = inputs.sum(1, keepdim=True)
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = [index for pair in range(0, 16, 4) for index in range(pair, pair + 4)]
    for start_ in range(0, 16, 4 * window):
        rows = order[start_ : start_ + 4 * window]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[rows]), targets[rows]).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("scenario", "window", "clip", "steps"),
    [("plain", 1, None, 4), ("accumulated", 2, 0.5, 2), ("short_window", 3, None, 2)],
)
def test_two_ranks_compute_what_one_does_on_both_shares(tmp_path, scenario, window, clip, steps):
    first, second = start(scenario, tmp_path, 2)
    assert first["weights"] == second["weights"]
    assert first["steps"] == second["steps"] == steps
    torch.testing.assert_close(flat(first), by_hand(window, clip=clip))
    assert not set(first["seen"]) & set(second["seen"])
    assert len(first["seen"] + second["seen"]) == 16


def test_shuffling_shares_every_row_out_once_an_epoch_in_a_new_order(tmp_path):
    first, second = start("shuffled", tmp_path, 2)
    for mine, other in zip(first["epochs"], second["epochs"], strict=True):
        assert len(set(mine) | set(other)) == 16
    assert first["epochs"][0] != first["epochs"][1]


def test_a_stream_is_shared_out_by_batches_and_all_ranks_get_as_many(tmp_path):
    first, second, third = start("iterable", tmp_path, 3)
    assert [first["mine"], second["mine"], third["mine"]] == [
        [[0, 1], [6, 7]],
        [[2, 3], [8, 9]],
        [[4, 5], [10, 11]],
    ]
    assert first["whole"] == third["whole"] == [[number, number + 1] for number in range(0, 14, 2)]


def test_a_sampler_of_the_users_own(tmp_path):
    first, second = start("own_sampler", tmp_path, 2)
    assert len(set(first["seen"]) | set(second["seen"])) == 16
    assert "shard=False" in first["refused"]


def test_an_overflow_on_one_rank_is_skipped_by_all(tmp_path):
    first, second = start("overflow_on_one_rank", tmp_path, 2)
    assert first["skipped"] == second["skipped"] >= 1
    assert first["weights"] == second["weights"]
    assert flat(first).isfinite().all()


def test_a_forward_pass_around_the_replicas_is_refused_and_the_next_right_one_works(tmp_path):
    for found in start("bare_forward", tmp_path, 2):
        assert "trainer.forward" in found["refused"]
        assert found["closed"] is True


def test_an_evaluation_does_not_excuse_a_step_around_the_replicas(tmp_path):
    for found in start("around_after_evaluation", tmp_path, 2):
        assert "trainer.forward" in found["refused"]


def test_a_parameter_left_out_of_the_last_backward_is_trained_as_by_hand(tmp_path):
    for found in start("unused_parameter", tmp_path, 2):
        assert "parts.sometimes.weight" in found["refused"]
        assert found["unchanged"]


def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_job_goes_on(tmp_path):
    first, second = start("failed_save", tmp_path, 2)
    assert "could be saved" in first["refused"]
    assert "another rank" in second["refused"]
    assert first["then"] == second["then"] == "step-00000000"


def test_ranks_that_would_train_apart_are_refused(tmp_path):
    for found in start("none_is_refused", tmp_path, 2):
        assert 'parallel="ddp"' in found["refused"]


def test_two_ranks_resume_bit_same_in_the_middle_of_a_window(tmp_path):
    found = start("resumed", tmp_path, 2)
    for rank in found:
        assert rank["losses"] == rank["expected"]
    assert found[0]["path"] == found[1]["path"]
    parts = store.Checkpoint(Path(found[0]["path"])).manifest["files"]
    assert sorted(parts) == ["model", "rank-00000", "rank-00001", "training"]
