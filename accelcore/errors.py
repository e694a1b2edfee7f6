"""Errors of accelcore, and its logger.

Every error that a user can cause derives from `AccelError`. Every message says what happened, why, what is available
instead, and what to do, in this order.
"""

from __future__ import annotations

import logging
from functools import partial

__all__ = [
    "AccelError", "AmpError", "BackendUnavailableError", "CheckpointError", "ConfigurationError", "DistributedError",
    "PluginError", "RecordingError", "TrainingError", "UnknownBackendError", "UnsupportedError",
]  # fmt: skip

logger = logging.getLogger("accelcore")
"""For warnings and notes of every part."""


def notice(message: str, *values: object) -> None:
    """Log what a user should know of a run without a fault: INFO, or a warning where Python would show nothing else."""
    logger.log(logging.INFO if logger.hasHandlers() else logging.WARNING, message, *values)


class AccelError(Exception):
    """Base of all errors that accelcore raises on purpose.

    Args:
        what: what happened, with the wrong value.
        why: the reason, if it is known.
        available: the alternatives.
        remedy: what to do; by default, to choose one of the alternatives.
    """

    def __init__(self, what: str, *, why: str = "", available: str = "", remedy: str = "") -> None:
        self.what, self.why, self.available = what, why, available
        are_many = any(between in available for between in (",", ";", " or "))
        self.remedy = remedy or ("choose one of these" if are_many else f"choose {available}" if available else "")
        parts = [what]
        for label, text in (("why", why), ("available", available), ("what to do", self.remedy)):
            if text:
                parts.append(f"  {label}: {text}")
        super().__init__("\n".join(parts))

    def __reduce__(self) -> tuple[object, ...]:
        # Errors are pickled between processes, such as loader workers; the default would lose the keywords.
        told = {"why": self.why, "available": self.available, "remedy": self.remedy}
        return (partial(type(self), self.what, **told), ())


class ConfigurationError(AccelError, ValueError):
    """An argument or an environment variable has an invalid value."""


class AmpError(ConfigurationError, RuntimeError):
    """`accelcore.apex.amp` refuses an argument or a call. It is a RuntimeError, too, as apex raises."""


class UnknownBackendError(AccelError, LookupError):
    """No installed plugin has the requested backend."""


class BackendUnavailableError(AccelError, RuntimeError):
    """The backend is installed but cannot be used here: no hardware, no such index, no driver."""


class PluginError(AccelError, RuntimeError):
    """A plugin is broken: it cannot be loaded, breaks the contract, or shares its name with another."""


class UnsupportedError(AccelError, NotImplementedError):
    """A requested capability is not declared by the backend."""


class DistributedError(AccelError, RuntimeError):
    """The process group cannot be formed or used."""


class TrainingError(AccelError, RuntimeError):
    """A training step cannot be done, such as with a loss that is not a scalar, or with calls out of order."""


class CheckpointError(AccelError, RuntimeError):
    """A checkpoint is damaged, does not fit this training, or would contain values of an unsupported type."""


class RecordingError(AccelError, RuntimeError):
    """A recording of a run is damaged, is not a recording, or does not fit the run that is compared with it."""
