"""Result of a comparison: whether two runs agree, and the first place where they diverge."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """A setting that differs between the recording and the replay.

    Attributes:
        name: of the setting, such as `"torch"` or `"module blocks.0.norm"`.
        recorded, replayed: its values.
    """

    name: str
    recorded: str
    replayed: str


@dataclass(frozen=True)
class Result:
    """Whether a replay agrees with its recording, and the first place where they diverge.

    Attributes:
        agrees: whether every event that was compared is the same, up to the rounding that is expected.
        steps: how many steps were compared.
        exact: whether equal bits were asked for: both runs had the same device, versions and settings of arithmetic,
            and the replay took no other batches.
        step, rank: the first that differs, counted from 1 and from 0; None if they agree.
        phase: `"batch"`, `"weights"`, `"random"`, `"forward"`, `"backward"`, `"collective"` or `"update"`;
            `"batch size"` of `Replay(..., batch=)`; None if they agree.
        module: the module's name as in `model.named_modules()`, `""` for the model itself; None if there is none.
        item: the parameter, the buffer, the number of the input or output, or the state of the optimizer.
        operator: the operator, such as `"aten::addmm"`, if operators were recorded in this step or checked.
        is_cause: True if the difference begins here: the operator is wrong for its own inputs, compared with float64 on
            the host, or everything that the item was computed from was seen and agreed. None if that is not known, as
            for a loss, or behind modules that a compiler hides: the difference was only first seen here.
        ratio: the size of the difference in units of the expected rounding; infinite for whole numbers, which are not
            rounded.
        next: what to look at next, in a sentence.
        settings: settings that differ. Differences of the device or of versions are no fault.
        notes: what else to know, such as from which step on rounding hides differences.
    """

    agrees: bool
    steps: int
    exact: bool
    step: int | None = None
    rank: int | None = None
    phase: str | None = None
    module: str | None = None
    item: str | None = None
    operator: str | None = None
    is_cause: bool | None = None
    ratio: float = 0.0
    next: str = ""
    settings: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the result as a dict for JSON, which has no infinite numbers: None instead."""
        return {"schema": 1, **asdict(self), "ratio": self.ratio if math.isfinite(self.ratio) else None}

    @property
    def size(self) -> str:
        """The size of the difference, in words."""
        return f"{self.ratio:.3g} units of rounding" if math.isfinite(self.ratio) else "more than rounding"

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The first difference as a table of names and texts."""
        names = ("step", "rank", "phase", "module", "item", "operator", "size")
        found = {name: getattr(self, name) for name in names}
        found |= {"begins here": "yes" if self.is_cause else "not known: it was first seen here", "next": self.next}
        return [(name, str(value) or "(the model itself)") for name, value in found.items() if value is not None]

    def __str__(self) -> str:
        if self.agrees:
            how = "to the bit" if self.exact else "up to rounding"
            return f"the runs agree {how} in {self.steps} step{'s' * (self.steps != 1)}"
        where = f"step {self.step}, rank {self.rank}, {self.phase}" if self.step is not None else f"{self.phase}"
        module = "" if self.module is None else f", module {self.module or '(the model itself)'}"
        item = f", {self.item}" if self.item else ""
        operator = f", {self.operator}" if self.operator else ""
        kind = "the difference begins here" if self.is_cause else "first seen here"
        return f"the runs diverge at {where}{module}{item}{operator}: {self.size}, {kind}"
