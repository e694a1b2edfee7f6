"""Errors of accelcore, its logger, and suggestions of similar words.

Every error that a user can cause derives from `AccelError`. Every message says what happened, why, what is available
instead, and what to do, in this order.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "AccelError", "AmpError", "BackendUnavailableError", "CheckpointError", "ConfigurationError", "DistributedError",
    "PluginError", "RecordingError", "TrainingError", "UnknownBackendError", "UnsupportedError",
]  # fmt: skip

logger = logging.getLogger("accelcore")
"""For warnings and notes of every part."""


def notice(message: str, *values: object) -> None:
    """Log what a user should know of a run without a fault: INFO, or a warning where Python would show nothing else."""
    logger.log(logging.INFO if logger.hasHandlers() else logging.WARNING, message, *values)


class Once:
    """Log of one trainer in a job: rank 0 alone writes it, and each warning once."""

    def __init__(self, rank: int) -> None:
        self.is_written, self._written = rank == 0, set[str]()

    def warn(self, message: str, *values: object) -> None:
        if self.is_written and message not in self._written:
            self._written.add(message)
            logger.warning(message, *values)


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


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most similar to an unknown one, or None.

    Both begin with the same letter, or one contains the other: between other short words, common letters mean nothing.
    """
    lower = {name.lower(): name for name in known}
    word = word.lower()
    alike = get_close_matches(word, [name for name in lower if name[:1] == word[:1]], n=1)
    within = [name for name in lower if min(len(name), len(word)) > 3 and (name in word or word in name)]
    return next((lower[name] for name in (*alike, *get_close_matches(word, within, n=1, cutoff=0.3))), None)


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a remedy for an unknown word: the most similar known one, if there is one, and what else to do."""
    near = nearest(word, known := list(known))
    if near is None:
        return otherwise
    close = [near, *get_close_matches(word, [name for name in known if name[:1] == word[:1] and name != near], 2, 0.8)]
    return f"did you mean {' or '.join(map(repr, close))}?" + (f" Else {otherwise}" if otherwise else "")


def check_names(what: str, given: Iterable[str], known: Collection[str], words: Mapping[str, str]) -> None:
    """Raise ConfigurationError for the first of the given names that is not known.

    `words`: known names, or sentences on what to do, by words of other libraries.
    """
    for name in given:
        if name not in known:
            meant, otherwise = words.get(name, ""), "remove it, or use an available name"
            is_sentence = " " in meant
            remedy = meant if is_sentence else did_you_mean(meant or name, known, otherwise)
            raise ConfigurationError(f"{what} {name!r}", available=", ".join(known), remedy=remedy)


class Hinted:
    """Base of classes with hints: what to write instead of an attribute that objects of other libraries have."""

    _hints: ClassVar[Mapping[str, str]] = {}

    if not TYPE_CHECKING:  # for a type checker, the class would have every attribute

        def __getattr__(self, name: str) -> Any:
            if name not in self._hints:
                return object.__getattribute__(self, name)  # raises, also what a property has raised
            message = f"{type(self).__name__!r} object has no attribute {name!r}: {self._hints[name]}"
            raise AttributeError(message, name=name, obj=self)


class Settings:
    """Base of classes whose constructors raise ConfigurationError for a setting of an unknown name."""

    def __new__(cls, *_: object, **given: object) -> Self:
        parameters = inspect.signature(cls.__init__).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            check_names(f"{cls.__name__} has no setting", given, [name for name in parameters if name != "self"], {})
        return super().__new__(cls)
