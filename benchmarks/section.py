"""A section of a page that is drawn from a benchmark's results, between two markers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["RefusedError", "Results", "Section", "grid", "ran_on", "verdict"]

_ROOT = Path(__file__).resolve().parents[1]

Results = Mapping[str, Any]


class RefusedError(ValueError):
    """A file, or a page, that cannot be used."""


@dataclass(frozen=True)
class Section:
    """What belongs to one benchmark.

    Attributes:
        benchmark: its name.
        module: which draws it, by `python -m`.
        body: the text of its results.
        draw: makes the plot of its results beside the page; None where there is none.
    """

    benchmark: str
    module: str
    body: Callable[[Results], str]
    draw: Callable[[Results, Path], None] | None = None

    @property
    def begin(self) -> str:
        return f"<!-- {self.benchmark}: begin -->"

    @property
    def end(self) -> str:
        return f"<!-- {self.benchmark}: end -->"

    @property
    def nothing(self) -> str:
        """What the section says where there are no results."""
        return f"No results yet: `python -m benchmarks {self.benchmark}` makes them."

    @property
    def plot(self) -> str:
        return f"{self.benchmark}.svg"

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Write the section, or check it.

        Returns:
            0 written, or as it should be; 1 with --check where the page is not what would be written; 2 where the
            results are those of a quick run, or of another benchmark.
        """
        parser = argparse.ArgumentParser(prog=f"python -m {self.module}")
        parser.add_argument("--results", type=Path, default=_ROOT / f"benchmarks/results/{self.benchmark}.json")
        parser.add_argument("--page", type=Path, default=_ROOT / "docs/measurements.md", help="the page to write")
        parser.add_argument("--check", action="store_true", help="write nothing: only say whether the page is right")
        options = parser.parse_args(arguments)
        try:
            results = self._load(options.results)
            before = options.page.read_text(encoding="utf-8")
            after = self._page(before, results)
        except RefusedError as error:
            print(error, file=sys.stderr)
            return 2
        if options.check:
            if before != after:
                print(f"{options.page} is not what its results say: python -m {self.module}", file=sys.stderr)
            return int(before != after)
        if results is not None and self.draw is not None:
            self.draw(results, options.page.with_name(self.plot))
        options.page.write_text(after, encoding="utf-8")
        print(f"{options.page}: {self.nothing if results is None else results['date']}")
        return 0

    def _load(self, path: Path) -> Results | None:
        if not path.exists():
            return None
        try:
            results: Results = json.loads(path.read_text(encoding="utf-8"))
            kind, quick = results["benchmark"], results["quick"]
        except (ValueError, KeyError, TypeError) as error:
            raise RefusedError(f"{path} holds no results of a benchmark") from error
        if kind != self.benchmark or quick:
            raise RefusedError(f"{path} holds {'quick ' if quick else ''}results of {kind}, and is not shown")
        return results

    def _page(self, before: str, results: Results | None) -> str:
        head, begin, rest = before.partition(self.begin)
        _, end, tail = rest.partition(self.end)
        if not begin or not end:
            raise RefusedError(f"the page lacks {self.begin} or {self.end}")
        return f"{head}{begin}\n\n{self.nothing if results is None else self.body(results)}\n\n{end}{tail}"


def ran_on(results: Results) -> str:
    """When, on what machine and with which versions."""
    machine = f"{results['machine']['cpu']}, {results['machine']['cores']} cores, {results['machine']['system']}"
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return f"{results['date']}, {machine}, {versions}"


def grid(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, ["---"] * len(headings), *lines))


def verdict(goals: Sequence[Mapping[str, Any]]) -> str:
    """How many goals were met, and which were not."""
    missed = "; ".join(goal["what"] for goal in goals if not goal["met"])
    met = f"{sum(goal['met'] for goal in goals)} of {len(goals)} goals met."
    return f"{met} Missed: {missed}." if missed else met
