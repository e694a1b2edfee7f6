"""ACCEL_TRIAL: the request of `accelcore advise` to train for some steps with other options.

Only `accelcore advise` sets this variable, for the processes of a trial. Its value is a JSON object.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

VARIABLE = "ACCEL_TRIAL"


@dataclass(frozen=True)
class Trial:
    """Request to train for some steps with other options, and to record what happens."""

    report: str  # file that the record is appended to, as lines of JSON
    steps: int  # number of windows after which the script ends
    seed: int = 0  # added to each seed of the script; 0 leaves the random numbers as they are
    # the trainer's options to override: `precision`, such as `"bf16"` or `"O2 bfloat16"`; `fp32`; `compile`; `flat`
    options: Mapping[str, Any] = field(default_factory=dict)


def requested_trial() -> Trial | None:
    """Return the trial that ACCEL_TRIAL requests; None if it is unset or empty."""
    return _parsed(os.environ.get(VARIABLE, ""))


@cache
def _parsed(text: str) -> Trial | None:
    return Trial(**json.loads(text)) if text else None
