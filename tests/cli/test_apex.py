"""accelcore run --apex: a script for apex as it is, its import lines, too."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from accelcore import apex

SCRIPTS = Path(__file__).parents[1] / "apex" / "scripts"
STAND_IN = str(Path(apex.__file__).parent / "stand_in")
# Runs a command with os.execve replaced by one that prints the path that it is given.
PLANNED = """
import os, sys
from accelcore.cli import main

def execve(file, command, environ):
    print(environ.get("PYTHONPATH", ""))
    sys.exit("torch" in sys.modules)

os.execve = execve
main({arguments!r})
"""
ALL_WAYS = """
import subprocess, sys
import apex
import apex.amp
from apex import amp
from apex.amp import initialize
from apex.optimizers import NpuFusedSGD
from apex.parallel import convert_syncbn_model

assert apex.amp is amp and initialize is amp.initialize
finds = "from importlib.util import find_spec; print(find_spec('apex').origin, file=sys.stderr)"
subprocess.run([sys.executable, "-c", "import sys; " + finds], check=True)
"""


def planned(machine, *arguments):
    done = machine.python("-c", PLANNED.format(arguments=["run", *arguments]))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split(os.pathsep), done.stderr


def documents(text):
    """JSON that two ranks wrote: each document whole, but perhaps not on a line of its own."""
    while text := text.strip():
        found, end = json.JSONDecoder().raw_decode(text)
        yield found
        text = text[end:]


@pytest.mark.full  # tests/apex/test_ranks.py trains the same script on two ranks
def test_a_script_for_two_ranks_runs_as_it_is_and_so_do_its_children(machine):
    machine.write("train.py", ALL_WAYS + (SCRIPTS / "train_resnet.py").read_text(encoding="utf-8"))
    arguments = ("--amp", "--opt-level", "O2", "--combine-ddp", "--steps", "3")
    done = machine.run("run", "--apex", "--nproc", "2", "train.py", *arguments)
    assert done.returncode == 0, done.stderr
    first, second = documents(done.stdout)
    assert first["state"] == second["state"]
    assert first["losses"] != second["losses"]
    assert done.stderr.count(STAND_IN) == 2
    assert "No module named 'apex'" in machine.run("run", "train.py").stderr


def test_what_was_on_the_path_stays_and_torch_is_not_imported(machine):
    machine.write("train.py", "")
    machine.module("helper", "")
    path, said = planned(machine, "--apex", "train.py")
    assert path == [STAND_IN, *machine.environ["PYTHONPATH"].split(os.pathsep)]
    assert said == ""
    assert STAND_IN not in planned(machine, "train.py")[0]


def test_an_installed_apex_is_hidden_and_that_is_said_in_one_line(machine):
    machine.write("train.py", "")
    machine.module("apex", "")
    path, said = planned(machine, "--apex", "train.py")
    assert path[0] == STAND_IN
    assert (
        said == f"accelcore: --apex: the script imports accelcore.apex, not the installed {machine.sites[0]}/apex.py\n"
    )
    machine.variables["PYTHONPATH"] = os.pathsep.join([STAND_IN, str(Path(apex.__file__).parents[2])])  # a run in a run
    assert planned(machine, "--apex", "train.py")[1] == ""


@pytest.mark.parametrize("beside", ["apex.py", "apex/__init__.py"])
@pytest.mark.parametrize("script", [("src/train.py",), ("-m", "train")])
def test_an_apex_beside_the_script_is_a_mistake(machine, beside, script):
    folder = machine.folder / "src" if script[0] != "-m" else machine.folder
    (folder / beside).parent.mkdir(parents=True, exist_ok=True)
    (folder / beside).touch()
    (folder / "train.py").touch()
    done = machine.run("run", "--apex", *script)
    assert done.returncode == 64
    assert "cannot replace the apex beside the script" in done.stderr
