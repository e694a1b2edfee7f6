"""The program that `accelcore run` starts where a vendor's package could only fail: Python on the script, without it.

A library that looks for the package is told that it is not installed, where importing it would take the script down.
Forks are told so too; what is started anew, such as workers by `spawn`, is not.
"""

from __future__ import annotations

import os
import runpy
import sys

__all__ = ["main"]


def main() -> None:
    """The arguments are the packages, separated by commas, and what follows `python`."""
    packages, *sys.argv = sys.argv[1:]
    sys.modules.update(dict.fromkeys(packages.split(",")))  # type: ignore[arg-type]  # None, which ends every import
    module = sys.argv[0] == "-m"
    if module:
        del sys.argv[0]
    script = sys.argv[0]
    if not getattr(sys.flags, "safe_path", False):  # Python has put the folder of this program there
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(script))
    if module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
