"""In what the ranks of a job differ, and which of them is the odd one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from accelcore.wording import ranks

__all__ = ["Differences"]

_SHOWN = 5
_ABSENT = "nothing"


class Differences:
    """What the ranks of a job say of themselves, compared.

    What most of them say is taken for right, and what rank 0 says where opinion is divided.

    Args:
        said: what each rank says, by name, in the order of the ranks.
    """

    def __init__(self, said: Sequence[Mapping[str, str]]) -> None:
        self._lines: list[str] = []
        odd: set[int] = set()
        for name in dict.fromkeys(name for one in said for name in one):
            values = [one.get(name, _ABSENT) for one in said]
            if len(set(values)) == 1:
                continue
            usual = Counter(values).most_common(1)[0][0]  # of several, that which comes first
            odd |= {rank for rank, value in enumerate(values) if value != usual}
            places = (
                f"{value} on {ranks(rank for rank, one in enumerate(values) if one == value)}"
                for value in dict.fromkeys(values)
            )
            self._lines.append(f"{name} is {', '.join(places)}")
        self.odd = ranks(odd)

    def __str__(self) -> str:
        more = len(self._lines) - _SHOWN
        return "; ".join([*self._lines[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])
