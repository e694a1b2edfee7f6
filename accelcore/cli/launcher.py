"""The program that `accelcore run` becomes where it starts ranks: torch's elastic launcher, with other last words.

torch's own end in the launcher's traceback and a table. Here the rank that failed has the word, and then one sentence
says which it was, and how it ended.
"""

from __future__ import annotations

import logging
import sys
from typing import NoReturn

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError

from accelcore.cli import rendezvous
from accelcore.cli.failed_ranks import Failure, said_of
from accelcore.failure_report import FailureReport

__all__ = ["main"]


def main() -> None:
    """The arguments are those of `torch.distributed.run`."""
    rendezvous.register()
    arguments = run.parse_args(sys.argv[1:])  # type: ignore[no-untyped-call]
    if arguments.max_restarts == 0:  # with restarts, torch says in a line what each of them is for
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_is_news)
    try:
        run.run(arguments)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _end(*said_of(_failures(error)))
    except SignalException as error:
        _end(f"accelcore: the job was ended by {error.sigval.name}", 128 + error.sigval)
    except RendezvousError as error:
        cause = error.__cause__ or error
        _end(
            f"accelcore: the machines of the job could not meet\n  why: {cause}\n"
            "  what to do: start as many machines as --nnodes says, each with a --node-rank of its own, counted from "
            "0, and all with the same --rdzv HOST:PORT, the name or address at which they reach machine 0 and a port "
            "that is free there",
            1,
        )


def _failures(error: ChildFailedError) -> dict[int, Failure]:
    return {
        rank: Failure(failure.exitcode, failure.timestamp, FailureReport.read(failure.error_file_data))
        for rank, failure in error.failures.items()
    }


def _is_news(record: logging.LogRecord) -> bool:
    """Whether the launcher would not say it anyhow, in the end."""
    return not str(record.msg).startswith(("Sending process", "failed (exitcode"))


def _end(text: str, code: int) -> NoReturn:
    sys.stderr.write(f"{text}\n")
    sys.exit(code)


if __name__ == "__main__":
    main()
