"""The log of a training: its lines, after a resume and a kill too, its plots, and where else its figures go."""

from __future__ import annotations

import json
import re
import resource
import shutil
import signal
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from toys import data, loss_of, net

import accelcore
from accelcore.cli import main
from accelcore.errors import TrainingError

FIGURES = ["step", "epoch", "loss", "lr", "gradient_norm", "rows_per_second", "seconds", "memory_peak"]


def make(accel, *observers, **options):
    model = net()
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    return accel.trainer(model, optimizer, loss=loss_of, observers=observers, **options)


def train(trainer, epochs=2, *, batches=5, save=None, folder=None):
    """Train; the losses of all micro-batches. After `save` steps, save, train one step more, and end."""
    losses = []
    for _ in trainer.epochs(epochs):
        for batch in trainer.batches(data(batches, seed=3)):
            losses.append(trainer(batch).item())
            if trainer.steps == save:
                trainer.save(folder)
            if save is not None and trainer.steps > save:
                return losses
    return losses


def lines(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("every", [1, 3])
def test_a_line_has_the_figures_of_the_steps_since_the_last_one(accel, tmp_path, accumulate, every):
    log = accelcore.Log(tmp_path / "run", every=every, plot=False)
    trainer = make(accel, log, accumulate=accumulate, clip_norm=1.0, scheduler="linear")
    losses = torch.tensor(train(trainer, 2, batches=6)).view(-1, accumulate).mean(1)
    found, total = lines(tmp_path / "run"), trainer.steps
    assert [line["step"] for line in found] == list(range(every, total + 1, every))
    for line in found:
        assert list(line) == FIGURES
        step = line["step"]
        assert line["loss"] == pytest.approx(losses[step - every : step].mean().item())
        assert line["lr"] == pytest.approx(0.1 * (1 - (step - 1) / total))
        assert line["epoch"] == (step > total // 2)
        assert min(line["rows_per_second"], line["gradient_norm"], line["memory_peak"]) > 0


def test_what_is_not_known_is_left_out_and_what_is_not_finite_is_null(accel, tmp_path):
    log = accelcore.Log(tmp_path, every=2, plot=False, gradient_norm=True)
    trainer = make(accel, log)
    for batch in data(2):
        trainer(batch)
    log.write(accuracy=torch.tensor([0.5]), cost=float("inf"))
    log.close()
    first, second = lines(tmp_path)
    assert "epoch" not in first
    assert "rows_per_second" not in first
    assert first["gradient_norm"] > 0
    assert second == {"step": 2, "accuracy": 0.5, "cost": None}
    without = accelcore.Log(tmp_path / "other", every=1, plot=False)
    make(accel, without)(data(1)[0])
    without.close()
    assert "gradient_norm" not in lines(tmp_path / "other")[0]


def test_after_a_resume_no_step_is_there_twice(accel, tmp_path):
    run = tmp_path / "run"
    whole = accelcore.Log(tmp_path / "whole", every=2, plot=False)
    train(make(accel, whole))
    killed = accelcore.Log(run, every=2, plot=False)
    trainer = make(accel, killed)
    train(trainer, save=5, folder=tmp_path / "saved")
    killed.write(accuracy=0.1)  # after the save
    killed.close()
    assert [line["step"] for line in lines(run)] == [2, 4, 6, 6]
    with (run / "log.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # as a kill leaves it
    log = accelcore.Log(run, every=2, plot=False)
    resumed = make(accel, log)
    resumed.resume(tmp_path / "saved")
    train(resumed)
    assert [line["step"] for line in lines(run)] == [line["step"] for line in lines(tmp_path / "whole")]
    assert [line["loss"] for line in lines(run)[3:]] == [line["loss"] for line in lines(tmp_path / "whole")[3:]]
    resumed.resume(tmp_path / "saved")  # within a process, too
    train(resumed)
    log.close()
    assert [line["step"] for line in lines(run)] == [2, 4, 6, 8, 10]


def test_a_new_run_keeps_the_logs_of_those_before_beside_its_own(accel, tmp_path, caplog):
    for epochs in (3, 2, 1):
        log = accelcore.Log(tmp_path, every=5, plot=False)
        train(make(accel, log), epochs)
        log.close()
    assert [line["step"] for line in lines(tmp_path)] == [5]
    first, second = sorted(tmp_path.glob("log-before-*.jsonl"))
    assert len(first.read_text().splitlines()) == 3
    assert len(second.read_text().splitlines()) == 2
    assert "log of another run" in caplog.text


@pytest.mark.parametrize("trainers", [1, 2])
def test_two_logs_in_one_folder_do_not_mix_in_silence(accel, tmp_path, caplog, trainers):
    logs = [accelcore.Log(tmp_path, every=1, plot=False) for _ in range(2)]
    for own in [logs] if trainers == 1 else [[log] for log in logs]:
        train(make(accel, *own, total_steps=9), 1, batches=1)
    for log in logs:
        log.close()
    assert "log of another run" in caplog.text


def test_plots_hold_all_figures_and_load_nothing(accel, tmp_path, capsys):
    for name in ("a", "b"):
        log = accelcore.Log(tmp_path / name, every=2, plot=True)
        trainer = make(accel, log)
        train(trainer)
        log.write(accuracy=0.5)
        log.close()
    assert (tmp_path / "a/plot.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "a/plot.html").read_text()
    assert main(["plot", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "both.html")]) == 0
    assert "2 runs" in capsys.readouterr().out
    both = (tmp_path / "both.html").read_text()
    for text, runs in ((page, 1), (both, 2)):
        assert "<svg" in text
        assert not re.search(r"<script|<link|<img|@import|url\(http", text)
        assert text.count("<!-- accuracy -->") == text.count("<!-- loss -->") == 1
        assert text.count(f"<!-- {tmp_path / 'b'} -->") == (5 if runs == 2 else 0), "a legend in each panel"


def test_ctrl_c_ends_the_process_as_without_a_log_which_is_complete(tmp_path):
    script = tmp_path / "train.py"
    (tmp_path / "wandb.py").write_text(  # as the library, it ends by itself at exit
        "import atexit, types\n"
        "def init(**options):\n"
        "    atexit.register(print, 'ended', flush=True)\n"
        "    log = lambda figures, step: print('step', step, flush=True)\n"
        "    return types.SimpleNamespace(id='run', log=log, finish=lambda: print('finished', flush=True))\n"
    )
    script.write_text(
        "import os, signal, sys, torch, accelcore\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background ignores it
        "accel, model = accelcore.select('cpu'), torch.nn.Linear(2, 1)\n"
        "log = accelcore.Log(sys.argv[1], every=1, plot=True, wandb=True)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "trainer = accel.trainer(model, optimizer, loss=lambda model, rows: model(rows).sum(), observers=[log])\n"
        "trainer(torch.ones(2, 2))\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.pause()\n"
    )
    ended = subprocess.run([sys.executable, script, tmp_path / "run"], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGINT, ended.stderr
    assert len(lines(tmp_path / "run")) == 1
    assert ended.stdout.splitlines() == ["step 1", "finished", "ended"]


def test_without_matplotlib_there_is_a_log_and_a_plot_that_was_asked_for_is_refused(
    accel, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("accelcore.training.monitoring.log.find_spec", lambda name: None)
    monkeypatch.setattr("accelcore.training.monitoring.records.find_spec", lambda name: None)
    log = accelcore.Log(tmp_path, every=1)
    train(make(accel, log))
    log.close()
    assert len(lines(tmp_path)) == 10
    assert "plot" not in caplog.text, "nobody asked for one"
    for options, missing in (
        ({"plot": True}, "matplotlib"),
        ({"wandb": {}}, "wandb"),
        ({"plot": True, "tensorboard": True, "wandb": True}, "matplotlib tensorboard wandb"),
    ):
        with pytest.raises(accelcore.ConfigurationError, match=f"pip install {missing}$"):
            accelcore.Log(tmp_path, **options)
    assert main(["plot", str(tmp_path)]) == 64


def test_a_log_whose_folder_was_deleted_ends_with_a_warning(accel, tmp_path, caplog):
    log = accelcore.Log(tmp_path / "run", every=1)
    train(make(accel, log))
    shutil.rmtree(tmp_path / "run")
    log.close()
    assert "no log in" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"no log in(.|\n)*available: .*real, .*seeds/1\n"),
        ("", "log of .*empty"),
        ('{"step": 1, "loss": 2}\nnonsense\n{"step": 3}\n', "line 2 of .* damaged"),
        ('{"loss": 2}\n', "line 1 of .* damaged"),
        ('{"step": 1, "lo', "log of .*empty"),
    ],
)
def test_a_log_that_cannot_be_plotted_is_an_error_that_says_why(tmp_path, capsys, text, message):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/log.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    shutil.copytree(tmp_path / "real", tmp_path / "seeds" / "1")
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text)
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "plot.png")]) == 64
    assert re.search(message, capsys.readouterr().err)
    for name in ("plot.what", "real"):
        assert main(["plot", str(tmp_path / "real"), "-o", str(tmp_path / name)]) == 64
        assert f"{name} does not end as a plot does\n  available: .png, .svg, .pdf, .html\n" in capsys.readouterr().err
    assert main(["plot", __file__]) == 64
    assert "Not a directory" in capsys.readouterr().err


def test_a_plot_lies_beside_its_log_and_one_of_several_runs_replaces_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text('{"step": 1, "memory_peak": 4194304}\n')
    assert main(["plot", "a"]) == main(["plot", "b/log.jsonl"]) == main(["plot", "a", "b"]) == 0
    assert all((tmp_path / name).is_file() for name in ("a/plot.png", "b/plot.png", "plot.png"))
    before = (tmp_path / "plot.png").read_bytes()
    assert main(["plot", "b", "a"]) == 64
    assert "-o plot.png" in capsys.readouterr().err
    assert (tmp_path / "plot.png").read_bytes() == before
    assert main(["plot", "b", "a", "-o", "plot.svg"]) == 0
    assert "memory peak, MiB" in (tmp_path / "plot.svg").read_text()
    assert main(["plot", "nowhere"]) == 64
    told = capsys.readouterr().err
    assert "No such file or directory" in told
    assert "Errno" not in told


def test_figures_go_to_tensorboard_and_wandb_and_a_resumed_run_is_the_same_one(accel, tmp_path, monkeypatch):
    told = []

    class SummaryWriter:
        def __init__(self, log_dir, purge_step):
            told.append(("writer", purge_step))

        def add_scalar(self, tag, value, step):
            told.append((tag, step))

        def close(self):
            told.append("closed")

    def init(dir, id="new", **options):
        told.append(("run", id, options))
        return SimpleNamespace(id=id, log=lambda values, step: told.append((sorted(values), step)), finish=lambda: None)

    for name, members in (
        ("torch.utils.tensorboard", {"SummaryWriter": SummaryWriter}), ("wandb", {"init": init}),
    ):  # fmt: skip
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("accelcore.training.monitoring.records.find_spec", lambda name: name)
    for resumes in (False, True):
        log = accelcore.Log(tmp_path, every=5, plot=False, tensorboard=True, wandb={"project": "p"})
        trainer = make(accel, log)
        if resumes:
            trainer.resume(tmp_path / "saved")
        train(trainer, save=None if resumes else 5, folder=tmp_path / "saved")
        log.close()
    runs = [entry for entry in told if entry[0] in ("run", "writer")]
    assert runs == [
        ("writer", 1),
        ("run", "new", {"project": "p"}),
        ("writer", 6),
        ("run", "new", {"project": "p", "resume": "allow"}),
    ]
    assert [entry[1] for entry in told if entry[0] == "loss"] == [5, 6, 10]
    figures = ["epoch", "loss", "lr", "memory_peak", "rows_per_second", "seconds"]
    assert [entry for entry in told if entry[0] == figures] == [(figures, 5), (figures, 6), (figures, 10)]
    assert told.count("closed") == 2


def test_wrong_options_are_refused(accel, tmp_path):
    for options, message in (
        ({"folder": tmp_path, "every": 0}, "every=0"),
        ({"folder": 3}, "3 is not a path"),
        ({"folder": ""}, "'' is not a path"),
    ):
        with pytest.raises(accelcore.ConfigurationError, match=message):
            accelcore.Log(**options)
    log = accelcore.Log(tmp_path / "file")
    with pytest.raises(accelcore.ConfigurationError, match="no trainer"):
        log.write(accuracy=1)
    trainer = make(accel, log)
    with pytest.raises(accelcore.ConfigurationError, match=r"accuracy='high'(.|\n)*not a number"):
        log.write(accuracy="high")
    for own in ("step", "epoch", "loss", "lr"):
        with pytest.raises(accelcore.ConfigurationError, match=f"{own}=3.0(.|\n)*valid_{own}"):
            log.write(**{own: 3.0})
    with pytest.raises(accelcore.ConfigurationError, match="two trainers"):
        make(accel, log)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"log.jsonl cannot be written(.|\n)*path is a file"):
        trainer(data(1)[0])


RANKS = """
import json, sys, torch, accelcore
accel = accelcore.select("cpu")
with accel.distributed() as job:
    model = torch.nn.Linear(3, 1)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    log = accelcore.Log(sys.argv[1], every=2, plot=False)
    trainer = accel.trainer(
        model, optimizer, parallel="ddp", loss=lambda model, rows: model(rows).square().mean(), scheduler="linear",
        observers=[log, accelcore.Progress(seconds=1e-9)],
    )
    for epoch in trainer.epochs(2):
        for rows in trainer.batches(torch.utils.data.DataLoader(torch.ones(16, 3), 2)):
            trainer(rows)
        log.write(rank=job.rank)
    assert trainer.optimizer.param_groups[0]["lr"] < 1e-9
    log.close()
"""


def test_the_main_rank_writes_and_shows(fork_ranks, tmp_path):
    (tmp_path / "ranks.py").write_text(RANKS)
    ended = [rank.finish() for rank in fork_ranks(tmp_path / "ranks.py", tmp_path / "run", size=2)]
    assert [rank.returncode for rank in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    found = lines(tmp_path / "run")
    assert [line["step"] for line in found] == [2, 4, 4, 6, 8, 8]
    assert [line["rank"] for line in found if "rank" in line] == [0, 0]
    assert "step 8/8" in ended[0].stderr
    assert "step" not in ended[1].stderr


def test_a_relative_folder_stays_where_the_script_was_when_it_was_named(accel, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    log = accelcore.Log("run", every=1, plot=False)
    monkeypatch.chdir(tmp_path / "elsewhere")
    train(make(accel, log), 1)
    assert len(lines(tmp_path / "run")) == 5


def test_a_full_disk_is_an_error_that_names_the_log_and_closing_it_adds_none(accel, tmp_path):
    """A limit on the size of files stands for the full disk."""
    log = accelcore.Log(tmp_path / "run", every=1, plot=False)
    trainer = make(accel, log)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
    try:
        with pytest.raises(TrainingError, match=r"log.jsonl"):
            train(trainer)
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
