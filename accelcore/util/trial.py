"""ACCEL_TRIAL: the request of `accelcore advise` to train for some steps with other options.

Only the child processes of `accelcore advise` have this variable. Its value is a JSON object.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any

from accelcore.errors import ConfigurationError
from accelcore.util.text import is_whole, shown

__all__ = ["VARIABLE", "Trial", "requested_trial"]

VARIABLE = "ACCEL_TRIAL"

_KINDS: Mapping[str, tuple[type, ...]] = {"precision": (str,), "fp32": (str,), "compile": (bool,), "flat": (bool,)}
"""Options of a trainer that a trial may override, with the types of their values."""


@dataclass(frozen=True)
class Trial:
    """Request to train for some steps with other options, and to record what happens.

    Attributes:
        report: file that the record is appended to, as lines of JSON.
        steps: number of windows after which the script ends.
        seed: added to each seed of the script; 0 leaves the random numbers as they are.
        options: the trainer's options to override: `precision`, such as `"bf16"` or `"O2 bfloat16"`; `fp32`; `compile`;
            `flat`.
    """

    report: str
    steps: int
    seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        wrong = ""
        if not (isinstance(self.report, str) and os.path.isabs(self.report)):
            wrong = f"report={self.report!r} is not an absolute path"
        elif not is_whole(self.steps, 1):
            wrong = f"steps={self.steps!r} is not a number of steps"
        elif not is_whole(self.seed) or self.seed >= 2**31:
            wrong = f"seed={self.seed!r} is not a whole number from 0 to 2**31 - 1"
        elif not isinstance(self.options, Mapping):
            wrong = f"options={self.options!r} is not an object"
        else:
            for name, value in self.options.items():
                if name not in _KINDS:
                    wrong = f"{name!r} is not an option that a trial overrides: {', '.join(_KINDS)}"
                elif not isinstance(value, _KINDS[name]):
                    wrong = f"{name}={value!r} is not a {_KINDS[name][0].__name__}"
        if wrong:
            raise _invalid(wrong)

    def as_variable(self) -> str:
        """Return the value of ACCEL_TRIAL that requests this trial."""
        return json.dumps(asdict(self))


def requested_trial() -> Trial | None:
    """Return the trial that ACCEL_TRIAL requests; None if it is unset or empty.

    Raises:
        ConfigurationError: the value is not that of a trial.
    """
    return _parsed(os.environ.get(VARIABLE, ""))


@cache
def _parsed(text: str) -> Trial | None:
    if not text:
        return None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"it is not JSON: {error}") from error
    names = [field.name for field in fields(Trial)]
    if not isinstance(values, dict) or not {"report", "steps"} <= values.keys() <= set(names):
        raise _invalid(f"{shown(text)} is not an object with the names {', '.join(names)}")
    return Trial(**values)


def _invalid(why: str) -> ConfigurationError:
    return ConfigurationError(
        f"{VARIABLE} is invalid", why=why, remedy="unset it: only accelcore advise sets it, for scripts that it starts"
    )
