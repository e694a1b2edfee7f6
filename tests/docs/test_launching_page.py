"""The page on launching does what it says: its script under every launcher.

Of those that are not here ranks get the variables that they would set, in forks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import accelcore

PAGE = (Path(__file__).parents[2] / "docs" / "launching.md").read_text()


def block(language, words):
    """The one block of the page in a language that has these words."""
    (found,) = [text for text in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S) if words in text]
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where `train.py` is; and where forks start."""
    (tmp_path / "train.py").write_text(block("python", "accel.distributed() as job"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCEL_DEVICE", "cpu")
    return tmp_path


def start(command, **environ):
    """What a command of the page printed; `python` and `accelcore` are those of the tests."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, env={**os.environ, "PATH": path, **environ}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_schedulers_grant_is_what_the_backends_state():
    """The column of ROCm is compared by the plugin's own tests."""
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("|")]
    table = {re.split("`| of ", row[0])[0]: row[1:] for row in rows if len(row) == 5}
    for column, name in (("CUDA", "cuda"), ("Ascend NPU", "npu"), ("CPU", "cpu")):
        probe, place = accelcore.installed()[name], table["field"].index(column)
        stated = {field: table[field][place] for field in ("visible_devices", "slurm", "kubernetes", "ray")}
        assert stated == {field: getattr(probe, field) for field in stated}, name
        assert (table["exclusive"][place] == "yes") is probe.exclusive


@pytest.mark.full  # README's script does, too
@pytest.mark.usefixtures("folder")
def test_the_script_trains_on_two_ranks_under_accelcore_run():
    said = start(["bash", "-euc", block("sh", "accelcore run --nproc 2 train.py")])
    assert re.fullmatch(r"2 ranks, loss \d\.\d{3}\n", said)


@pytest.mark.full  # torch's launcher is also what `accelcore run` starts
@pytest.mark.usefixtures("folder")
def test_torchrun_does_the_same():
    command = "torchrun --nproc-per-node 2 train.py"
    assert command in PAGE.replace("\n", " ")
    said = start(command.split(), OMP_NUM_THREADS="1")
    assert re.fullmatch(r"2 ranks, loss \d\.\d{3}\n", said)


@pytest.mark.full  # tests/jobs gives ranks their places too
def test_a_script_that_starts_its_own_ranks_says_which_each_is(folder, fork):
    (folder / "spawn.py").write_text(
        block("py", "multiprocessing.spawn").replace("tcp://127.0.0.1:29500", f"file://{folder}/m")
    )
    done = fork(folder / "spawn.py").finish()
    assert (done.returncode, done.stdout) == (0, "2 ranks\n"), done.stderr


PODS = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}
WORKER = """
import torch.distributed as dist

dist.init_process_group("gloo")  # as Ray Train does before the loop
import train

assert dist.is_initialized(), "the group was not the script's to close"
dist.destroy_process_group()
"""


# Which variables of which launcher are read is in tests/jobs/test_launchers.py.
ALIKE = [pytest.param(launcher, marks=pytest.mark.full) for launcher in ("mpirun", "PyTorchJob", "MPICH")]


@pytest.mark.parametrize("launcher", ["srun", "Ray Train", *ALIKE])
def test_the_script_trains_with_the_variables_of(folder, fork, fork_ranks, launcher):
    (folder / "worker.py").write_text(WORKER)
    if launcher == "Ray Train":
        ranks = fork_ranks("worker.py")
    else:
        ranks = [fork("train.py", **place) for place in without_torchrun(launcher)]
    ended = [rank.finish() for rank in ranks]
    assert [rank.returncode for rank in ended] == [0, 0], "\n".join(rank.stderr for rank in ended)
    assert re.fullmatch(r"2 ranks, loss \d\.\d{3}\n", ended[0].stdout)


@pytest.mark.parametrize("command", ["srun python train.py", "mpirun -n 2 python train.py"])
def test_the_page_starts_the_script_by(command):
    assert block("sh", command).splitlines()[-1] == command


def without_torchrun(launcher):
    """What another launcher leaves for each of two ranks, at a port that is free where it names one."""
    from forks import places

    for place in places(2):
        rank, meeting = place["RANK"], {name: place[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
        if launcher == "srun":
            step = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}
            yield step | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_NUM_TASKS": "2"}
        elif launcher == "mpirun":
            ranks = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
            sizes = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
            yield ranks | sizes | {"PMIX_NAMESPACE": f"prterun-{os.getpid()}@1"}
        elif launcher == "PyTorchJob":
            yield meeting | {"RANK": rank, "WORLD_SIZE": "2", "PET_NODE_RANK": rank, **PODS}
        else:
            ranks = {"PMI_RANK": rank, "MPI_LOCALRANKID": rank}
            yield meeting | ranks | {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}


def test_options_that_the_page_names_exist():
    from accelcore.cli.commands import run

    commands = re.findall(r"accelcore run (.*?)train\.py", PAGE, re.S)
    named = {option for command in commands for option in re.findall(r"--[a-z-]+", command)}
    assert {"--nproc", "--nnodes", "--rdzv-endpoint", "--max-restarts"} <= named
    assert named <= {name for parameter in run.params for name in parameter.opts}
