"""The one error family of accelcore.

Every error that a user can cause derives from `AccelError`, and every message answers four questions in the
same order: what happened, why, what is available instead, what to do.
"""

from __future__ import annotations

__all__ = [
    "AccelError",
    "AmpError",
    "BackendUnavailableError",
    "CheckpointError",
    "ConfigurationError",
    "DistributedError",
    "PluginError",
    "TrainingError",
    "UnknownBackendError",
    "UnsupportedError",
]


class AccelError(Exception):
    """Base of all errors that accelcore raises on purpose.

    Args:
        what: what happened, with the offending value.
        why: the reason, where one is known.
        available: what could be had instead.
        remedy: what the user can do now.
    """

    def __init__(self, what: str, *, why: str = "", available: str = "", remedy: str = "") -> None:
        self.what = what
        self.why = why
        self.available = available
        self.remedy = remedy
        parts = [what]
        for label, text in (("why", why), ("available", available), ("what to do", remedy)):
            if text:
                parts.append(f"  {label}: {text}")
        super().__init__("\n".join(parts))

    def __reduce__(self) -> tuple[object, ...]:
        # An error crosses process borders (loader workers, spawned ranks); the default would lose the keywords.
        return (_rebuild, (type(self), self.what, self.why, self.available, self.remedy))


def _rebuild(kind: type[AccelError], what: str, why: str, available: str, remedy: str) -> AccelError:
    return kind(what, why=why, available=available, remedy=remedy)


class ConfigurationError(AccelError, ValueError):
    """An argument or an environment variable has a value that it cannot have."""


class AmpError(ConfigurationError, RuntimeError):
    """An argument or a call of `accelcore.apex.amp` that is refused; what apex raises as a RuntimeError."""


class UnknownBackendError(AccelError, LookupError):
    """No installed plugin offers the backend that was asked for."""


class BackendUnavailableError(AccelError, RuntimeError):
    """The backend is installed but cannot be used here: no hardware, no such index, no driver."""


class PluginError(AccelError, RuntimeError):
    """A plugin is broken: it cannot be loaded, breaks the contract, or shares its name with another."""


class UnsupportedError(AccelError, NotImplementedError):
    """A backend was asked for a capability that it does not declare."""


class DistributedError(AccelError, RuntimeError):
    """The process group cannot be formed or used as asked.

    Attributes:
        failed: the ranks whose own failures are why; their errors say more.
    """

    failed: tuple[int, ...] = ()


class TrainingError(AccelError, RuntimeError):
    """A training step cannot be done: a loss that is no scalar, calls out of order."""


class CheckpointError(AccelError, RuntimeError):
    """A checkpoint is damaged, does not fit this training, or holds what a checkpoint cannot hold."""
