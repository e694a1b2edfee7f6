"""The best checkpoint stays beside the newest ones, and is found again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from toys import data, loss_of, net

import accelcore
from accelcore.cli import main


def make(accel):
    model = net()
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    return accel.trainer(model, optimizer, loss=loss_of)


def save(trainer, folder, metrics, keep=1, mode="min"):
    """Train a step before each save; the weights that were saved, by step."""
    weights = {}
    for metric in metrics:
        trainer(data(1)[0])
        trainer.save(folder, keep=keep, best=metric, mode=None if metric is None else mode)
        weights[trainer.steps] = trainer.model[0].weight.detach().clone()
    return weights


def steps(folder):
    return sorted(int(path.name.split("-")[1]) for path in folder.iterdir())


@pytest.mark.parametrize(
    ("mode", "metrics", "keep", "left"),
    [
        ("min", [3.0, 1.0, 2.0, 4.0], 1, [2, 4]),
        ("min", [3.0, 1.0, 2.0, 4.0], 2, [2, 3, 4]),
        ("min", [3.0, 1.0, 1.0, 4.0], 1, [2, 4]),
        ("min", [3.0, None, float("nan"), float("-inf"), 5], 1, [1, 5]),
        ("min", [-0.5, torch.tensor(-0.7), -0.6], 1, [2, 3]),
        ("min", [-0.5, np.float32(-0.7), np.array(-0.6)], 1, [2, 3]),
        ("min", [1, 2, 3], None, [1, 2, 3]),
        ("max", [3.0, 4.0, 4.0, 1.0], 1, [2, 4]),
        ("max", [0, None, float("nan"), float("inf"), -5], 1, [1, 5]),
    ],
)
def test_the_first_of_the_best_is_kept(accel, tmp_path, mode, metrics, keep, left):
    save(make(accel), tmp_path, metrics, keep, mode)
    assert steps(tmp_path) == left


def test_a_run_keeps_its_mode_and_another_run_may_have_another(accel, tmp_path):
    trainer, resumed, other = make(accel), make(accel), make(accel)
    save(trainer, tmp_path / "run", [0.1, 0.2, None])
    resumed.resume(tmp_path / "run")
    for each in (trainer, resumed):
        with pytest.raises(accelcore.ConfigurationError, match=r"mode='max'(.|\n)*step-00000001 (.|\n)*mode='min'"):
            save(each, tmp_path / "run", [0.9], mode="max")
        assert steps(tmp_path / "run") == [1, 3]
    save(resumed, tmp_path / "run", [0.05])
    assert steps(tmp_path / "run") == [5]
    save(resumed, tmp_path / "another", [0.9], mode="max")
    save(other, tmp_path / "run", [0.7, 0.9, 0.8, 0.6, 0.6, 0.6], mode="max", keep=None)
    assert other.resume(tmp_path / "run", best=True).name == "step-00000002"


def test_after_a_resume_the_best_is_remembered_and_can_be_resumed_and_exported(accel, tmp_path, capsys):
    weights = save(make(accel), tmp_path, [2.0, 1.0, 3.0])
    trainer = make(accel)
    assert trainer.resume(tmp_path).name == "step-00000003"
    weights |= save(trainer, tmp_path, [1.5, 2.5])
    assert steps(tmp_path) == [2, 5]
    best = make(accel)
    assert best.resume(tmp_path, best=True).name == "step-00000002"
    assert torch.equal(best.model[0].weight, weights[2])
    for options, step in ((["--best"], 2), ([], 5)):
        assert main(["export", *options, str(tmp_path), str(tmp_path / "model.safetensors")]) == 0
        assert torch.equal(load_file(tmp_path / "model.safetensors")["0.weight"], weights[step])
        assert "(replaced)" not in capsys.readouterr().out
        (tmp_path / "model.safetensors").unlink()
    save(trainer, tmp_path, [0.5])
    assert steps(tmp_path) == [6]
    assert main(["export", str(tmp_path), str(tmp_path / "new" / "model.safetensors")]) == 0
    assert "model.safetensors (in a new folder): model from" in capsys.readouterr().out
    assert main(["export", str(tmp_path), str(tmp_path / "new" / "model.safetensors")]) == 0
    assert "model.safetensors (replaced): model from" in capsys.readouterr().out


def test_trainers_that_are_saved_together_have_a_best_checkpoint(accel, tmp_path, caplog):
    caplog.set_level("INFO")
    one, two = make(accel), make(accel)
    both = accelcore.Together(one=one, two=two)
    for metric in (2.0, 1.0, 3.0, 4.0):
        one(data(1)[0])
        both.save(tmp_path, keep=1, best=metric)
    assert steps(tmp_path) == [2, 4]
    assert both.resume(tmp_path, best=True).name == "step-00000002"
    assert (one.steps, two.steps) == (2, 0)
    assert f"resumed from {tmp_path / 'step-00000002'}: one step 2; two step 0" in caplog.text
    assert {record.levelname for record in caplog.records if "resumed from" in record.message} == {"INFO"}


def test_without_a_metric_there_is_no_best(accel, tmp_path, caplog):
    trainer = make(accel)
    assert trainer.resume(tmp_path, best=True) is None
    save(trainer, tmp_path, [None, float("nan")])
    assert "metric of this checkpoint is nan" in caplog.text
    with pytest.raises(accelcore.CheckpointError, match=r"has a metric(.|\n)*best=metric"):
        trainer.resume(tmp_path, best=True)
    for wrong in ("low", True, torch.ones(2)):
        with pytest.raises(accelcore.ConfigurationError, match="is not a number"):
            trainer.save(tmp_path, best=wrong)
    caplog.clear()
    trainer = make(accel)
    trainer(data(1)[0])
    with pytest.raises(accelcore.ConfigurationError, match=r"mode='highest'(.|\n)*max"):
        trainer.save(tmp_path, best=1, mode="highest")
    with pytest.raises(accelcore.ConfigurationError, match="mode='max' needs best="):
        trainer.save(tmp_path, keep=1, mode="max")
    assert not caplog.text, "only a save that is done warns that the batch came not through trainer.batches"


def test_the_direction_of_a_metric_is_reported_once_unless_it_is_given(accel, tmp_path, caplog):
    caplog.set_level("INFO")
    trainer = make(accel)
    save(trainer, tmp_path / "given", [0.5])
    assert "best" not in caplog.text
    for _ in range(2):
        trainer.save(tmp_path / "silent", best=0.5)
    assert caplog.text.count("the lowest is the best") == 1


RANKS = """
import sys, torch, accelcore
accel = accelcore.select("cpu")
with accel.distributed() as job:
    model = torch.nn.Linear(3, 1)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    trainer = accel.trainer(model, optimizer, parallel="ddp", loss=lambda model, rows: model(rows).mean())
    trainer(torch.ones(2, 3))
    trainer.save(sys.argv[1], best=0.25)
    metrics = float(job.rank), 1.0 if job.rank else None
    for folder, own in (*((sys.argv[1], metric) for metric in metrics), (f"{sys.argv[1]}-{job.rank}", None)):
        try:
            trainer.save(folder, best=own)
        except accelcore.ConfigurationError as error:
            print("refused", "different" in str(error), f"in {folder}, with best={own}" in str(error))
"""


def test_ranks_that_disagree_are_refused(fork_ranks, tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    ended = [rank.finish() for rank in fork_ranks(tmp_path / "ranks.py", tmp_path / "run", size=2)]
    assert [rank.stdout for rank in ended] == ["refused True True\n" * 3] * 2, ended[0].stderr
    assert len(list((tmp_path / "run").iterdir())) == 1
    assert not list(tmp_path.glob("run-*"))
