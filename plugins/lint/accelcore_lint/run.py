"""Lint many files, in several processes if they are many."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from accelcore_lint.files import Problem, decode, read
from accelcore_lint.finding import Finding
from accelcore_lint.lint import check
from accelcore_lint.notebook import Notebook

_MANY = 100  # fewer files are linted before another process has started
_CHUNK = 16


@dataclass
class Result:
    """What was found in a file, or why it was not linted.

    Attributes:
        problem: the reason, if it was not linted; else ''.
    """

    path: str
    findings: list[Finding] = field(default_factory=list)
    problem: str = ""


def lint_files(paths: Sequence[Path]) -> Iterator[Result]:
    """Yield the result of each file, in the order of the paths."""
    workers = min(_cores(), len(paths) // _MANY + 1)
    if workers == 1:
        yield from map(_lint_file, paths)
        return
    # Not forked: whoever calls this may have threads.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_lint_file, paths, chunksize=_CHUNK)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _lint_file(path: Path) -> Result:
    try:
        data = read(path)
    except Problem as problem:
        return Result(str(path), problem=str(problem))
    return lint_data(data, str(path))


def lint_data(data: bytes, path: str) -> Result:
    """Lint the bytes of a script, or of a notebook if the name ends like one."""
    try:
        if path.endswith(".ipynb"):
            notebook = Notebook.parse(data)
            return Result(path, [notebook.place(finding) for finding in _check(notebook.text, path)])
        return Result(path, _check(decode(data), path))
    except Problem as problem:
        return Result(path, problem=str(problem))


def _check(text: str, path: str) -> list[Finding]:
    try:
        return check(text.removeprefix("\ufeff"), path)
    except SyntaxError as error:
        version = ".".join(map(str, sys.version_info[:2]))
        raise Problem(f"line {error.lineno}: {error.msg} (read as Python {version})") from error
    except ValueError as error:  # a null byte, before Python 3.12
        raise Problem(str(error)) from error
    except RecursionError as error:
        raise Problem("it is nested too deeply") from error
