"""The page on launching does what it says: its script under every launcher, those that are not here imitated."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent / "docs" / "launching.md").read_text()

# `srun` and `mpirun` as far as ranks can tell: so many processes beside each other, each told its place.
IMITATION = """#!{python}
import os, subprocess, sys

name, *words = os.path.basename(sys.argv[0]), *sys.argv[1:]
if name == "mpirun":
    assert words[0] == "-n", words
    count, command = int(words[1]), words[2:]
    def place(rank):
        ranks = {{"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}}
        sizes = {{"OMPI_COMM_WORLD_SIZE": count, "OMPI_COMM_WORLD_LOCAL_SIZE": count}}
        return ranks | sizes | {{"PMIX_NAMESPACE": f"prterun-{{os.getpid()}}@1"}}
else:
    count, command = int(os.environ["SLURM_NTASKS"]), words
    def place(rank):
        ranks = {{"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": count}}
        return ranks | {{"SLURM_STEP_ID": 0, "SLURM_STEP_NODELIST": "localhost"}}
ranks = [
    subprocess.Popen(command, env=dict(os.environ) | {{key: str(value) for key, value in place(rank).items()}})
    for rank in range(count)
]
sys.exit(max(rank.wait(100) for rank in ranks))
"""


def block(language, words):
    """The one block of the page in a language that has these words."""
    (found,) = [text for text in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S) if words in text]
    return found


@pytest.fixture
def folder(tmp_path):
    """Where `train.py` is, and the launchers are in `bin`."""
    (tmp_path / "train.py").write_text(block("python", "accel.distributed() as job"))
    (tmp_path / "bin").mkdir()
    for name in ("srun", "mpirun"):
        (tmp_path / "bin" / name).write_text(IMITATION.format(python=sys.executable))
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def start(folder, command, **environ):
    """What a command of the page printed; `python` and `accelcore` are those of the tests."""
    path = os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, cwd=folder, env={**os.environ, "PATH": path, **environ}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        ("accelcore run --nproc 2 train.py", {}),
        pytest.param("mpirun -n 2 python train.py", {}, marks=pytest.mark.full),
        ("srun python train.py", {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}),
    ],
)
def test_the_script_trains_on_two_ranks_under(folder, words, environ):
    said = start(folder, ["bash", "-euc", block("sh", words)], ACCEL_DEVICE="cpu", **environ)
    assert re.fullmatch(r"2 ranks, loss \d\.\d{3}\n", said)


def test_torchrun_does_the_same(folder):
    command = "torchrun --nproc-per-node 2 train.py"
    assert command in PAGE.replace("\n", " ")
    said = start(folder, command.split(), ACCEL_DEVICE="cpu", OMP_NUM_THREADS="1")
    assert re.fullmatch(r"2 ranks, loss \d\.\d{3}\n", said)


def test_a_script_that_starts_its_own_ranks_says_which_each_is(folder):
    (folder / "spawn.py").write_text(
        block("py", "multiprocessing.spawn").replace("tcp://127.0.0.1:29500", f"file://{folder}/m")
    )
    assert start(folder, [sys.executable, "spawn.py"], ACCEL_DEVICE="cpu") == "2 ranks\n"


PODS = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}
WORKER = """
import torch.distributed as dist

dist.init_process_group("gloo")  # as Ray Train does before the loop
import train

assert dist.is_initialized(), "the group was not the script's to close"
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", ["PyTorchJob", "MPICH", "Ray Train"])
def test_the_script_trains_with_the_variables_of(folder, fork, fork_ranks, monkeypatch, launcher):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    (folder / "worker.py").write_text(WORKER)
    if launcher == "Ray Train":
        ranks = fork_ranks("worker.py")
    else:
        ranks = [fork("train.py", **place) for place in without_torchrun(launcher)]
    ended = [rank.finish() for rank in ranks]
    assert [rank.returncode for rank in ended] == [0, 0], "\n".join(rank.stderr for rank in ended)
    assert re.fullmatch(r"2 ranks, loss \d\.\d{3}\n", ended[0].stdout)


def without_torchrun(launcher):
    """What another launcher leaves for each of two ranks, at a port that is free."""
    from forks import places

    for place in places(2):
        meeting = {name: place[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
        if launcher == "PyTorchJob":
            yield meeting | {"RANK": place["RANK"], "WORLD_SIZE": "2", "PET_NODE_RANK": place["RANK"], **PODS}
        else:
            ranks = {"PMI_RANK": place["RANK"], "MPI_LOCALRANKID": place["RANK"]}
            yield meeting | ranks | {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}


def test_options_that_the_page_names_exist():
    from accelcore.cli.run_command import run

    commands = re.findall(r"accelcore run (.*?)train\.py", PAGE, re.S)
    named = {option for command in commands for option in re.findall(r"--[a-z-]+", command)}
    assert {"--nproc", "--nnodes", "--rdzv", "--max-restarts"} <= named
    assert named <= {name for parameter in run.params for name in parameter.opts}
