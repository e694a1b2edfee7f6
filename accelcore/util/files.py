"""Files that are written at once; pages in one HTML file, with tables and plots of curves."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from html import escape
from pathlib import Path

from accelcore.errors import ConfigurationError

_REMEDIES_OF_WRITING = {
    errno.ENOENT: "name another folder: this one cannot be created there, or was removed",
    errno.ENOTDIR: "name another folder: a part of this path is a file",
    errno.EEXIST: "name another folder: this path is a file",
    errno.EACCES: "name a folder that you may write to, or check the permissions of this one",
    errno.EPERM: "name a folder that you may write to, or check the permissions of this one",
    errno.EROFS: "name a folder in a file system that is not mounted read-only",
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space, or raise the quota",
    errno.EFBIG: "raise the limit on the size of a file: ulimit -f",
}

_PAGE = """<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em }}
table {{ border-collapse: collapse }} td, th {{ border-bottom: 1px solid #ddd; padding: .2em .8em; text-align: left }}
tr.best {{ font-weight: bold }} svg {{ max-width: 100%; height: auto }}
.tree {{ font-family: monospace }} .tree div {{ padding: .1em .5em }}
</style>
<h1>{title}</h1>
{body}
</html>
"""
_WIDTH, _HEIGHT, _EDGE, _LEGEND = 640, 240, 56, 170


def write_html(path: Path, title: str, parts: Iterable[str]) -> None:
    """Write a page of parts in HTML; the title is text."""
    page = _PAGE.format(title=escape(title), body="\n".join(filter(None, parts)))
    write_output(path, page.encode())


def table(rows: Iterable[Sequence[object]], *, head: Sequence[str] = (), best: str | None = None) -> str:
    """Return a table whose first column has the names of the rows; `best` is shown bold."""
    lines = [f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>"] if head else []
    for name, *cells in rows:
        shown = "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)
        lines.append(f"<tr{' class=best' if name == best else ''}><th>{escape(str(name))}</th>{shown}</tr>")
    return f"<table>{''.join(lines)}</table>"


def plot(title: str, curves: Mapping[str, Mapping[int, float]], *, logarithmic: bool = False) -> str:
    """Return a plot of curves by step, with its heading; nothing if no value is finite."""

    def scaled(value: float) -> float:
        return math.log10(max(value, 1e-3)) if logarithmic else value

    shown = {
        name: [(step, scaled(value)) for step, value in curve.items() if math.isfinite(value)]
        for name, curve in curves.items()
    }
    steps = [step for curve in shown.values() for step, _ in curve]
    values = [value for curve in shown.values() for _, value in curve]
    if not values:
        return ""
    left, right, low, high = min(steps), max(steps), min(values), max(values)

    def place(step: int, value: float) -> tuple[str, str]:
        x = _EDGE + (step - left) / max(1, right - left) * (_WIDTH - _EDGE - _LEGEND)
        y = _HEIGHT - _EDGE / 2 - (value - low) / ((high - low) or 1.0) * (_HEIGHT - _EDGE)
        return f"{x:.1f}", f"{y:.1f}"

    drawn = []
    for number, (name, curve) in enumerate(shown.items()):
        color = f"hsl({360 * number // len(shown)} 70% 45%)"
        places = [place(*point) for point in curve]
        dashes = ' stroke-dasharray="6 3"' if number % 2 else ""  # two equal curves are seen both
        points = " ".join(map(",".join, places))
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"{dashes}/>')
        drawn += [f'<circle cx="{x}" cy="{y}" r="2" fill="{color}"/>' for x, y in places]
        at = f'x="{_WIDTH - _LEGEND + 12}" y="{16 * number + 16}"'
        drawn.append(f'<text {at} fill="{color}">{escape(name)}</text>')
    power = "10^" if logarithmic else ""
    for value in (low, high):
        drawn.append(f'<text x="0" y="{place(left, value)[1]}">{power}{value:.4g}</text>')
    drawn.append(f'<text x="{_EDGE}" y="{_HEIGHT - 4}">steps {left} to {right}</text>')
    height = max(_HEIGHT, 16 * len(shown) + 16)
    svg = f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" font-size="12">{"".join(drawn)}</svg>'
    return f"<h2>{escape(title.capitalize())}</h2>{svg}"


def remedy_of_writing(error: Exception) -> str:
    """Return what to do about an error of the file system; safetensors tells its number only in the message."""
    told = re.search(r"\(os error (\d+)\)", str(error))
    number = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
    return _REMEDIES_OF_WRITING.get(number or 0, "check the disk, or name another folder")


def user_cache() -> Path:
    """Return accelcore's folder in the user's cache by the XDG rules, which ignore a relative path.

    Raises:
        OSError: the user has no home folder, as in a container with a user number of its own.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (base if base.is_absolute() else Path.home() / ".cache") / "accelcore"
    except RuntimeError as error:
        raise OSError("this user has no home folder: set HOME or XDG_CACHE_HOME") from error


def beside(folder: Path, ending: str) -> Path:
    """Return the path beside `folder` with its name and this ending; "." and ".." have the names of their folders."""
    named = folder if folder.name.strip(".") else folder.resolve()
    return named.with_name(f"{named.name}{ending}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which replaces `path` at the end: a kill leaves an older one or the new one."""
    new = path.with_name(f".{path.name}.incomplete")
    try:
        yield new
        os.replace(new, path)
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file at once, see `replacing`."""
    with replacing(path) as new:
        new.write_bytes(content)


def write_output(path: Path, content: bytes) -> None:
    """Write the file that a user has named, and its folder; raise ConfigurationError if this fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written", why=str(error), remedy=remedy_of_writing(error)
        ) from error
