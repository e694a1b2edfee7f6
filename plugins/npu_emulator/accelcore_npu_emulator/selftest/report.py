"""Report of the self-test."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from accelcore.util.files import replace_file

FORMS = ("forward", "backward", "in place", "out=")
"""Forms in which an operator is used."""

VERDICTS = {
    "values": "shape, dtype, strides, device and every value are the CPU's",
    "random": "the CPU's own values change with the seed: the rest is the CPU's",
    "fallback": "equal, but torch_npu computed at least a part on the CPU, which proves nothing",
    "refused": "the emulator does not know the operator",
    "disagree": "a result differs, or the operator fails",
}
"""Verdicts of a comparison, the worst last."""

_GOAL = 0.98


@dataclass(frozen=True)
class Comparison:
    """Comparison of one operator in one dtype and form."""

    operator: str  # its name as torch's tests spell it, such as `"nn.functional.gelu"`
    dtype: str  # such as `"float32"`
    form: str  # one of `FORMS`
    verdict: str  # one of `VERDICTS`; of several samples, the worst
    reason: str = ""  # the difference or the error


@dataclass
class Report:
    """All comparisons. They concern the emulator, not a real NPU."""

    comparisons: list[Comparison] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)  # operators that the CPU cannot run, which are not counted

    def count(self, verdict: str, form: str | None = None) -> int:
        """Return the number of comparisons with a verdict, in all forms or in one."""
        return sum(one.verdict == verdict and form in (None, one.form) for one in self.comparisons)

    @property
    def share(self) -> float:
        """Share of comparisons by value that agree, 0 to 1."""
        right = self.count("values")
        return right / max(1, right + self.count("refused") + self.count("disagree"))

    @property
    def passed(self) -> bool:
        """Whether the share is at least 98 %."""
        return self.share >= _GOAL

    def __str__(self) -> str:
        lines = ["EMULATED: torch's operators on the emulated NPU against the CPU; no hardware took part"]
        found = Counter((one.operator, one.reason) for one in self.comparisons if one.reason)
        for operator, reason in sorted(found):
            where = [one for one in self.comparisons if (one.operator, one.reason) == (operator, reason)]
            forms = ", ".join(dict.fromkeys(one.form for one in where))
            lines.append(f"  {operator} ({forms}; {', '.join(dict.fromkeys(one.dtype for one in where))}): {reason}")
        lines.append(" ".join([f"{'':10}", *(f"{verdict:>9}" for verdict in VERDICTS)]))
        for form in FORMS:
            lines.append(" ".join([f"{form:10}", *(f"{self.count(verdict, form):9}" for verdict in VERDICTS)]))
        lines += [f"{verdict}: {meaning}" for verdict, meaning in VERDICTS.items()]
        operators = len({one.operator for one in self.comparisons})
        lines.append(f"{operators} operators; of what can be compared by value, {100 * self.share:.1f} % agree")
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Write the report as JSON, atomically."""
        counts = {form: {verdict: self.count(verdict, form) for verdict in VERDICTS} for form in FORMS}
        told = [asdict(one) for one in self.comparisons if one.verdict != "values"]
        content = {
            "emulated": True,
            "share": self.share,
            "counts": counts,
            "comparisons": told,
            "unknown": self.unknown,
        }
        replace_file(path, f"{json.dumps(content, indent=1, sort_keys=True)}\n".encode())
