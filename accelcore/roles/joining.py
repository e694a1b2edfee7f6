"""Being in a job until the interpreter exits."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any

import torch.distributed as dist

from accelcore.roles.collectives import Collectives

__all__ = ["join"]

logger = logging.getLogger("accelcore")

_PATIENCE = timedelta(minutes=1)
"""How long a rank that is done waits for the others: a rank may have ended in a way that nobody can tell at exit."""


def join(membership: AbstractContextManager[Collectives]) -> Collectives:
    """Enter a job now, and leave it at exit."""
    job = membership.__enter__()
    atexit.register(_leave, membership, job)
    sys.excepthook = partial(_explain, job, sys.excepthook)
    return job


def _explain(
    job: Collectives,
    before: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Show of an error that ends the script which rank was missing, where that is why."""
    explained = job.explain(error)
    if explained is not None:
        explained.__cause__ = error
        kind, error, trace = type(explained), explained, None
    before(kind, error, trace)


def _leave(membership: AbstractContextManager[Collectives], job: Collectives) -> None:
    # Python leaves the error that ends a script here; with it, nobody is waited for.
    failure: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    group = job.cpu_group()
    if failure is None and group is not None:
        try:
            dist.monitored_barrier(group, timeout=_PATIENCE)
        except ValueError:  # not every kind of group can wait for so long and no longer
            pass
        except RuntimeError as error:
            failure = error
    try:
        membership.__exit__(None if failure is None else type(failure), failure, None)
    except BaseException as error:  # noqa: BLE001  # nobody is left to handle it
        if error is not failure:
            logger.warning("the job could not be left in order: %s", error)
