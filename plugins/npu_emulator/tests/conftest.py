"""Ranks and processes on an emulated NPU.

Importing torch_npu takes seconds, so ranks are forked from a server that has imported it: of `tests/forks.py`.
"""

import os
import subprocess
import sys
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path

import pytest
from accelcore_npu_emulator import environment

sys.path.insert(0, str(Path(__file__).parent))  # where ranks find their jobs, by names that any process can import
from emulated_session import (  # noqa: F401  # pytest finds them here
    INSTALLED,
    clean_environment,
    forks,
    pytest_configure,
    pytest_report_header,
)

fork, servers = forks.fork, forks.servers
rank_process = import_module("emulated_rank")

if INSTALLED:
    from accelcore_npu_emulator.pytest_plugin import emulated_npu
else:

    @pytest.fixture
    def emulated_npu():
        pytest.skip("torch_npu is not installed")


class Rank:
    """How one process of a job ended: its result, or its error's text, and its exit code."""

    def __init__(self, result=None, error="", code=None):
        self.result, self.error, self.code = result, error, code


@pytest.fixture(scope="session")
def outcome(tmp_path_factory):
    """Run function(*arguments) in `ranks` processes at once; how each of them ended, within `patience` seconds."""
    if not INSTALLED:
        pytest.skip("torch_npu is not installed")

    def run(function, *arguments, ranks=1, patience=200, **variables):
        job = {"WORLD_SIZE": str(ranks), "ACCEL_EMULATED_DEVICES": str(max(ranks, 2)), "OMP_NUM_THREADS": "1"}
        job |= {"MASTER_FILE": str(tmp_path_factory.mktemp("job") / "store")} | variables
        outcomes = [Rank() for _ in range(ranks)]
        processes, pipes = [], {}
        try:
            for rank in range(ranks):
                ours, theirs = servers.Pipe()
                pipes[ours] = rank
                process = servers.Process(
                    target=rank_process.main, args=(theirs, function, job | {"RANK": str(rank)}, arguments)
                )
                processes.append(process)
                process.start()
                theirs.close()
            while pipes:
                ready = wait(pipes, timeout=patience)
                assert ready, f"ranks {sorted(pipes.values())} hang"
                for pipe in ready:
                    told = outcomes[pipes.pop(pipe)]
                    try:
                        told.result, told.error = pipe.recv()
                    except EOFError:
                        told.error = "ended without a word"
            for told, process in zip(outcomes, processes, strict=True):
                process.join(200)
                told.code = process.exitcode
        finally:
            for process in processes:
                process.kill()
                process.join()
        return outcomes

    return run


@pytest.fixture(scope="session")
def results(outcome):
    """As `outcome`, where every rank has to succeed: their results."""

    def run(function, *arguments, **how):
        outcomes = outcome(function, *arguments, **how)
        failed = [f"rank {rank}: {o.error or o.code}" for rank, o in enumerate(outcomes) if o.error or o.code]
        assert not failed, "\n".join(failed)
        return [o.result for o in outcomes]

    return run


@pytest.fixture(scope="session")
def emulated_process():
    """Run a command that knows of the emulator by its environment alone."""
    if not INSTALLED:
        pytest.skip("torch_npu is not installed")

    def run(*command, **variables):
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("ACCEL_", "ASCEND_", "LD_"))}
        environ |= environment() | {"OMP_NUM_THREADS": "1"} | variables
        return subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, timeout=400)

    return run
