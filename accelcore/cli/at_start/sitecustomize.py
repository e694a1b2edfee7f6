"""Python imports a module of this name before it runs a script: here it sees to it that an error that ends a rank is
reported, be it in the script's first line or in its syntax. Then the machine's own `sitecustomize` takes its place.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

from accelcore.failure_report import report_failure

__all__ = ["main"]


def main() -> None:
    """Install the report, and leave no trace in what the rank hands on: what it starts is no rank."""
    folder = str(Path(__file__).parent)
    sys.path.remove(folder)
    path = os.environ["PYTHONPATH"].removeprefix(folder).removeprefix(os.pathsep)
    if path:
        os.environ["PYTHONPATH"] = path
    else:
        del os.environ["PYTHONPATH"]
    report_failure("start")
    own = PathFinder.find_spec(__name__, sys.path)
    if own is not None and own.loader is not None:
        module = sys.modules[__name__] = module_from_spec(own)
        own.loader.exec_module(module)


if __name__ == "sitecustomize":
    main()
