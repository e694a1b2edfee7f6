"""Find the line of the user's script that a thread is at, or that an error came from."""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from traceback import walk_tb
from types import TracebackType

import torch

_WIDTH = 80  # characters of a script's line that a message shows
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_THREAD = re.compile(r".*hread 0x([0-9a-f]+)")
_STANDARD = os.path.dirname(os.__file__)
_INSTALLED = tuple(os.path.join(_STANDARD, folder, "") for folder in ("site-packages", "dist-packages"))
_PACKAGES = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.__file__))
_LIBRARIES = tuple(os.path.join(folder, "") for folder in _PACKAGES)

Place = tuple[str, int, str]  # path, line and name of the function


def line_of_thread(thread: int) -> str:
    """Return where a thread is now, such as `train.py:12 in main (trainer.save(folder))`; "" if that is unknown.

    All frames are read in one call, while no other thread runs Python. A loop over `frame.f_back` lets the thread go
    on between two frames. It then reads frames that have ended, which can crash the process.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)  # at most 100 frames of a thread
        file.seek(0)
        said = file.read().decode("unicode_escape")
    for frames in said.split("\n\n"):
        if (found := _THREAD.match(frames)) and int(found[1], 16) == thread:
            places = filter(None, map(_FRAME.fullmatch, frames.splitlines()))
            return _first_of_script((place[1], int(place[2]), place[3]) for place in places)
    return ""


def line_of_error(traceback: TracebackType | None) -> str:
    """Return the line of the script that a traceback went through last; "" if there is none."""
    frames = reversed(list(walk_tb(traceback)))
    # Python gives no line to an instruction of its own.
    places = ((frame.f_code, line or frame.f_code.co_firstlineno) for frame, line in frames)
    return _first_of_script((code.co_filename, line, code.co_name) for code, line in places)


def _first_of_script(places: Iterable[Place]) -> str:
    """Return the first place outside of libraries. `places` begin with the innermost."""
    for path, line, name in places:
        if not _is_library(path):
            source = ""
            with suppress(Exception):  # what a script has put into the cache of lines
                source = linecache.getline(path, line).strip()[:_WIDTH]
            return f"{os.path.basename(path)}:{line} in {name}" + (f" ({source})" if source else "")
    return ""


def _is_library(path: str) -> bool:
    is_standard = path.startswith(_STANDARD + os.sep) and not path.startswith(_INSTALLED)
    return is_standard or path.startswith((*_LIBRARIES, "<frozen ", "<eval_with_key>"))
