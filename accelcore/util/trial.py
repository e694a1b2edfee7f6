"""ACCEL_TRIAL: the request of `accelcore advise` to train for some steps with other options.

Only the child processes of `accelcore advise` have this variable. Its value is a JSON object.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from accelcore.errors import ConfigurationError
from accelcore.util.text import is_whole, shown

VARIABLE = "ACCEL_TRIAL"


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
        options, known = self.options, {"precision", "fp32", "compile", "flat"}
        valid = {
            "report": isinstance(self.report, str) and self.report,
            "steps": is_whole(self.steps, 1),
            "seed": is_whole(self.seed),
            "options": isinstance(options, Mapping)
            and options.keys() <= known
            and isinstance(options.get("precision", ""), str),
        }
        if wrong := [f"{name} is {getattr(self, name)!r}" for name, value in valid.items() if not value]:
            raise ValueError("; ".join(wrong))

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
    try:
        return Trial(**json.loads(text)) if text else None
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError(
            f"{VARIABLE}={shown(text)} is not a trial",
            why=str(error),
            remedy="unset it: only accelcore advise sets it, for scripts that it starts",
        ) from error
