"""Program that `accelcore run` becomes if it starts ranks: torch's elastic launcher.

It replaces the launcher's traceback and table by one sentence on the rank that failed first.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import NoReturn

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from accelcore.jobs.missing_ranks import LOST
from accelcore.util.child_process import signal_name

_LONGEST = 300  # characters of the first line of an error


_REMEDIES: dict[int, str] = {
    signal.SIGKILL: "check whether memory ran out",
    signal.SIGABRT: "read the last lines above. If they are of gloo or NCCL, ranks were in different collectives: they "
    "reached different batches or calls. Let every rank train on each batch of trainer.batches(loader), without "
    "`continue` or `break` on some ranks, and call save, resume and evaluate on all ranks",
}


def main() -> None:
    """Run torch's launcher on the arguments of `torch.distributed.run`."""
    arguments = run.parse_args(sys.argv[1:])
    if arguments.max_restarts == 0:  # with restarts, torch says in a line what each of them is for
        for name in ("multiprocessing.api", "agent.server.api"):
            logging.getLogger(f"torch.distributed.elastic.{name}").addFilter(_is_news)
    try:
        run.run(arguments)
    except ChildFailedError as error:
        _end(*first_failure(error.failures))
    except SignalException as error:
        interrupted = error.sigval == signal.SIGINT
        _end("interrupted" if interrupted else f"the job was ended by {error.sigval.name}", 128 + error.sigval)
    except RendezvousError as error:
        _end(
            f"the machines of the job could not meet\n  why: {error.__cause__ or error}\n"
            "  what to do: start as many machines as --nnodes says, all with the same --rdzv-endpoint or --master-addr "
            "and a port that is free there",
            1,
        )


def first_failure(failures: dict[int, ProcessFailure]) -> tuple[str, int]:
    """Return a message on the rank that failed first, and the job's exit code: that rank's, or 128 and the signal."""
    rank = min(failures, key=lambda rank: _order(failures[rank]))
    failure = failures[rank]
    code = max(failure.exitcode, 1)  # a rank that was slow to end may have been ended by the launcher
    if text := _lost(failure):
        return text, code
    if isinstance(failure.message, dict):
        message = str(failure.message["message"]).partition("\n")[0][:_LONGEST]  # the rank has written all of it
        return f"rank {rank} failed first, with exit code {code}: {message}", code
    if failure.exitcode < 0:
        remedy = _REMEDIES.get(-failure.exitcode)
        hint = f"\n  what to do: {remedy}" if remedy else ""
        return f"rank {rank} failed first, by {signal_name(-failure.exitcode)}{hint}", 128 - failure.exitcode
    reason = next(filter(None, map(_lost, failures.values())), "\n  what to do: see its output above").partition("\n")
    return f"rank {rank} failed first, with exit code {code}\n{reason[2]}", code


def _order(failure: ProcessFailure) -> tuple[int, float]:
    """Sort ranks that failed by themselves first, then ranks that lost another rank, then ranks that were ended."""
    if isinstance(failure.message, dict):
        # A rank that waits in a call knows more than one that has ended. The file's own time: torch's is whole seconds.
        lost = _lost(failure)
        if LOST.search(str(failure.message["message"])):  # it was ended before it could name the other rank
            return 2, os.stat(failure.error_file).st_mtime
        return bool(lost) + ("has ended its part" in lost), os.stat(failure.error_file).st_mtime
    return 3 * (failure.exitcode == -signal.SIGTERM), failure.timestamp


def _lost(failure: ProcessFailure) -> str:
    """Return the message of a rank that lost another one, which it names; "" for any other failure."""
    message = str(failure.message["message"]) if isinstance(failure.message, dict) else ""
    return message.removeprefix("DistributedError: ") if message.startswith("DistributedError: ") else ""


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for the log lines that the last sentence repeats."""
    return not str(record.msg).startswith(("Sending process", "failed (exitcode", "Received %s death signal"))


def _end(text: str, code: int) -> NoReturn:
    sys.stderr.write(f"accelcore: {text}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
