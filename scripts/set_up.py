"""Says, before pip begins, what `make train` is about to download, and how large that is."""

from __future__ import annotations

import platform
from importlib.util import find_spec
from pathlib import Path

__all__ = ["main"]

# Of torch 2.13, with what it requires; rounded.
_CPU_BUILD, _CUDA_BUILD = "some 200 MB", "several GB"


def main() -> None:
    """Print it. Looks at this machine only."""
    if find_spec("torch") is not None:
        print("Setting up .venv: torch is in it already; what the example needs beside it is small.")
        return
    cuda = platform.system() == "Linux" and platform.machine() == "x86_64"
    print(
        f"Setting up .venv: pip downloads torch, {_CUDA_BUILD if cuda else _CPU_BUILD} with what it requires, and some "
        "90 MB of other packages,\nfrom pip's index. It does not download again what is in its cache."
    )
    if cuda and not Path("/dev/nvidiactl").exists():
        print(
            f"There is no NVIDIA GPU here: torch's CPU build is enough, {_CPU_BUILD}. To have it, stop this (Ctrl-C) "
            "and run\n  .venv/bin/python -m pip install torch==2.13.0 --index-url INDEX\n"
            "with the INDEX that https://pytorch.org/get-started/locally/ names for it. Another make train keeps it."
        )


if __name__ == "__main__":
    main()
