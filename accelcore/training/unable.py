"""Why a trainer cannot go on."""

from __future__ import annotations

from accelcore.errors import DistributedError, TrainingError

__all__ = ["half_restored", "half_updated", "other_job", "parted"]


def parted(error: BaseException) -> TrainingError:
    """A step failed on this rank of a job, and need not have failed on the others."""
    return _unable(
        "a step failed on this rank of a job",
        f"{_shown(error)}; the other ranks may have gone on without it",
        "end the job, and resume it from a checkpoint; a launcher can do so by itself: accelcore run --max-restarts 3",
        error,
    )


def half_updated(error: BaseException) -> TrainingError:
    """Return the error of a trainer whose optimizer raised within its step."""
    return _unable(
        "its optimizer raised within a step, and may have updated a part of the parameters",
        _shown(error),
        "make model, optimizer and trainer again, and resume from a checkpoint; in a job, on all ranks",
        error,
    )


def half_restored(error: BaseException) -> TrainingError:
    """A checkpoint was restored in part, and that could not be undone."""
    return _unable(
        "a checkpoint was restored in part, and that could not be undone",
        _shown(error),
        "make model, optimizer and trainer anew, and resume; in a job, on all ranks",
        error,
    )


def other_job(made_for: int, now: int) -> DistributedError:
    """The job has another number of ranks than the one that the trainer was made in."""
    return DistributedError(
        f"this trainer was made in a job of {made_for}, and the job now has {now} ranks",
        remedy="make the trainer, and use it, inside one `with accel.distributed():`",
    )


def _unable(what: str, why: str, remedy: str, cause: BaseException) -> TrainingError:
    unable = TrainingError(f"this trainer cannot go on: {what}", why=why, remedy=remedy)
    unable.__cause__ = cause
    return unable


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
