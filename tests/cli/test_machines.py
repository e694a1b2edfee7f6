"""Jobs of several machines: launchers beside each other on this one, or each in a network of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import forks
import pytest

# On the first start the second machine's rank is killed; the ranks of the second write down where they were.
TRAIN = """
import os, signal, torch, accelcore
from pathlib import Path

with accelcore.select("cpu").distributed() as job:
    total = job.all_reduce(torch.tensor(job.rank + 1.0))
    first = not Path("killed").exists()
    job.barrier()
    if first and job.rank == 1:
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    job.barrier()
    Path(f"rank-{job.rank}").write_text(f"{os.environ['MACHINE']} {job.local_rank} {job.world_size} {total.item()}")
"""


def start(machine, number, endpoint, *more, within=(), backend="static", restarts=0, **environ):
    """The launcher of a machine of two."""
    options = ["--nproc", "1", "--nnodes", "2", "--rdzv-backend", backend, "--rdzv-endpoint", endpoint]
    options += ["--node-rank", str(number)] if backend == "static" else ["--local-addr", "127.0.0.1"]
    options += ["--max-restarts", str(restarts), *more]
    with (machine.folder / f"output-{number}").open("w") as output:
        return subprocess.Popen(
            [*within, sys.executable, "-m", "accelcore", "run", *options, "train.py"],
            cwd=machine.folder,
            env={**machine.environ, "MACHINE": str(number), **environ},
            stdout=output,
            stderr=output,
        )


def finish(machine, launchers):
    """What each rank wrote, and what each launcher; all must have succeeded."""
    codes = []
    try:
        codes = [launcher.wait(150) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    said = [Path(machine.folder, f"output-{number}").read_text() for number in range(2)]
    assert codes == [0, 0], "\n".join(said)
    return [Path(machine.folder, f"rank-{rank}").read_text() for rank in range(2)]


@pytest.mark.full  # the rendezvous is torch's; test_run.py restarts ranks on one machine
def test_two_machines_train_together_and_restart_together(machine):
    """By c10d, which numbers them as it likes."""
    machine.write("train.py", TRAIN)
    endpoint = f"127.0.0.1:{forks.free_port()}"
    launchers = [start(machine, number, endpoint, backend="c10d", restarts=1) for number in (1, 0)]
    wrote = finish(machine, launchers)
    assert sorted(text[0] for text in wrote) == ["0", "1"]
    assert [text[1:] for text in wrote] == [" 0 2 3.0"] * 2


def test_machines_that_cannot_meet_are_told_why(machine, launch):
    machine.write("train.py", TRAIN)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        options = ["--nproc", 1, "--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
        done = launch(*options, "--local-addr", "127.0.0.1", "--rdzv-conf", "is_host=1", "train.py")
    assert done.returncode == 1
    assert "accelcore: the machines of the job could not meet" in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def two_networks():
    """How to run a command in each of two networks that a cable joins; skips where this user may make none."""
    names = [f"accelcore-{os.getpid()}-{number}" for number in range(2)]
    commands = [
        *(f"ip netns add {name}" for name in names),
        f"ip link add veth0 netns {names[0]} type veth peer name veth1 netns {names[1]}",
        *(f"ip -n {name} addr add 10.77.0.{number + 1}/24 dev veth{number}" for number, name in enumerate(names)),
        *(f"ip -n {name} link set {link} up" for n, name in enumerate(names) for link in ("lo", f"veth{n}")),
    ]  # fmt: skip
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` to make network namespaces with")
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"network namespaces cannot be made here: {command}: {done.stderr.strip()}")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@pytest.mark.full
def test_two_machines_with_networks_of_their_own_train_together(machine):
    machine.write("train.py", TRAIN)
    machine.write("killed", "")
    with two_networks() as networks:
        launchers = [
            start(
                machine,
                number,
                "10.77.0.1:29400",
                within=networks[number],
                GLOO_SOCKET_IFNAME=f"veth{number}",
            )
            for number in (1, 0)
        ]
        assert finish(machine, launchers) == ["0 0 2 3.0", "1 0 2 3.0"]
