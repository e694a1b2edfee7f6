"""Scripts in processes of their own, without the seconds that each would take to import torch.

They are forked from a server that has imported torch and run none of it: a pool of threads that exists would be lost
in the fork, and waited for. What forks share and processes do not (the seed of hashes, what an import does, how an
interpreter ends) is for the tests that start real ones: of the command line, of launchers in docs, of the backend that
`accelcore new-backend` writes.

Where torch_npu is installed, `import torch` loads it, and it touches no device.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import re
import runpy
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import count
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

# Read when torch is loaded, here and in all that tests start. Tests run side by side: a thread for each core would be
# too many, and one that spins while it waits takes the core that another test needs.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What scripts import, some of it when they first need it; nothing here starts a thread.
_PRELOADED = [
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.profiler", "safetensors.torch", "pytest"),
    "matplotlib.figure",  # of the examples and the pages; one that is not installed is passed over
    *("accelcore.devices.select", "accelcore.training.trainer", "accelcore_cpu.backend"),
    *("scipy.linalg", "scipy.optimize", "scipy.sparse", "scipy.stats"),  # what scikit-learn needs, in the examples
]
if find_spec("torch_npu") is not None:
    _PRELOADED += ["accelcore_npu.backend", "accelcore_npu_emulator.kernels"]

# Ports for the stores of jobs. Below those that the kernel gives out: it could give one that is free here to another
# job's connection before rank 0 binds it. Processes of the tests begin at different places.
_PORTS = count(53 * os.getpid())

servers = multiprocessing.get_context("forkserver")
servers.set_forkserver_preload(_PRELOADED)


def share() -> tuple[str, bytes | None]:
    """Start the server; return what `join` needs in other processes, which then start none."""
    forkserver.ensure_running()
    server: Any = forkserver._forkserver
    return server._forkserver_address, getattr(server, "_forkserver_authkey", None)  # a key: of Python 3.14


def join(address: str, key: bytes | None) -> None:
    """Use the server that another process has started. It ends with that process."""
    server: Any = forkserver._forkserver
    server._forkserver_address, server._forkserver_authkey = address, key
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = resource_tracker.ensure_running


class Fork:
    """A script that runs in a fork of the server."""

    def __init__(self, process: ForkServerProcess, command: list[str], folder: Path) -> None:
        self.process = process
        self._command = command
        self._folder = folder

    def finish(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Wait for its end: exit code (negative: the signal that ended it), and what it wrote."""
        self.process.join(timeout)
        out, err = ((self._folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
        if self.process.exitcode is None:
            self.kill()
            raise subprocess.TimeoutExpired(self._command, timeout, out, err)
        out = re.sub(r"^\[Gloo\] Rank .*\n", "", out, flags=re.MULTILINE)  # torch 2.8 to 2.10 write this to stdout
        return subprocess.CompletedProcess(self._command, self.process.exitcode, out, err)

    def kill(self) -> None:
        """End it, if it has not ended."""
        self.process.kill()
        self.process.join()


def start(command: Sequence[object], environ: Mapping[str, str], folder: Path) -> Fork:
    """Run `python -W error::UserWarning COMMAND...` in a fork.

    Args:
        command: a script and its arguments, or "-m", a module and its arguments.
        environ: all of its environment. What a library reads when it is loaded (OMP_NUM_THREADS) is the server's.
        folder: an empty folder, for its output.
    """
    words = list(map(str, command))
    process = servers.Process(target=_main, args=(words, dict(environ), os.getcwd(), folder))
    for name in ("stdout", "stderr"):
        (folder / name).touch()
    process.start()
    return Fork(process, words, folder)


def places(size: int) -> list[dict[str, str]]:
    """What torchrun leaves in the environment of each rank of a job on this host."""
    job = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = ({"RANK": rank, "LOCAL_RANK": rank, **job} for rank in range(size))
    return [{name: str(value) for name, value in rank.items()} for rank in ranks]


def free_port() -> int:
    """A port of this host that nothing listens at."""
    for number in _PORTS:
        port = 12_000 + number % 20_000
        with socket.socket() as listener, suppress(OSError):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store
            listener.bind(("127.0.0.1", port))
            return port
    raise AssertionError("the count has no end")


@pytest.fixture(scope="session")
def fork(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Fork]]:
    """Start `python COMMAND...` as a fork that has imported torch; keywords are added to its environment.

    The command is a script, or "-m" and a module, and arguments. `.finish()` waits for its end.
    """
    started = []

    def begin(*command: object, **environment: str) -> Fork:
        started.append(start(command, {**os.environ, **environment}, tmp_path_factory.mktemp("fork")))
        return started[-1]

    yield begin
    for one in started:
        one.kill()


@pytest.fixture(scope="session")
def fork_ranks(fork: Callable[..., Fork]) -> Callable[..., list[Fork]]:
    """As `fork`, every rank of a job of `size`, with the environment that torchrun leaves."""

    def begin(*command: object, size: int = 2, **environment: str) -> list[Fork]:
        return [fork(*command, **environment, **place) for place in places(size)]

    return begin


def in_place_of_subprocess(fork: Callable[..., Fork]) -> SimpleNamespace:
    """What takes the place of `subprocess` in a module that starts `python ... -m MODULE...`: there they are forks."""

    class Popen:
        def __init__(
            self, command: list[str], *, env: Mapping[str, str], stdout: IO[Any] | int, stderr: IO[Any], **_: object
        ) -> None:
            assert command[0] == sys.executable
            self._fork = fork(*command[command.index("-m") :], **env)
            self._files = [None if isinstance(file, int) else os.dup(file.fileno()) for file in (stdout, stderr)]
            self.pid, self.kill = self._fork.process.pid, self._fork.kill

        def wait(self, timeout: float | None = None) -> int:
            self._fork.process.join(timeout)
            if self._fork.process.exitcode is None:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            ended = self._fork.finish()
            for file, text in zip(self._files, (ended.stdout, ended.stderr), strict=True):
                if file is not None:
                    os.write(file, text.encode())
                    os.close(file)
            self._files = [None, None]
            return ended.returncode

    return SimpleNamespace(Popen=Popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)


def _main(command: list[str], environ: dict[str, str], cwd: str, folder: Path) -> None:
    assert "torch" in sys.modules, "the server has not imported what it should"
    for stream, name in ((sys.stdout, "stdout"), (sys.stderr, "stderr")):
        with (folder / name).open("wb") as file:
            os.dup2(file.fileno(), stream.fileno())
    faulthandler.enable()  # a crash shows where it was
    os.setsid()  # what it starts can be ended with it
    gc.freeze()  # what the server has imported is no garbage, and to look at it is to copy it
    multiprocessing.set_start_method(None, force=True)  # for the script's own processes: torch's default, not ours
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(cwd)
    warnings.filterwarnings("error", category=UserWarning)
    # torch 2.7 raises this at its own SequentialLR.
    warnings.filterwarnings("ignore", "The epoch parameter in .scheduler.step", UserWarning)
    # torch 2.11 raises this whenever its profiler starts.
    warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
