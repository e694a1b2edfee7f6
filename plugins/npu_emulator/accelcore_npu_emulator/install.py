"""Command `python -m accelcore_npu_emulator.install`: let pip put torch-npu into the user's cache."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from accelcore.errors import AccelError, BackendUnavailableError, ConfigurationError
from accelcore_npu_emulator.wheel import INSTALL, cache, fitting, place, within


def install(options: Sequence[str] = ()) -> Path:
    """Let pip install the torch-npu that fits torch into the cache, or do nothing if it is there; return the folder.

    An interrupted installation leaves no folder; the next one starts again. `options` are further ones of pip.
    """
    wanted = fitting()
    folder, scratch = place(), cache() / ".installing-torch-npu"
    with open(cache() / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if within(folder) is None:
            _report(f"pip gets torch-npu {wanted}, 44 MB to download and 147 MB on disk, for emulated runs only")
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir(mode=0o700)
            try:
                _run_pip(wanted, scratch, options)
                shutil.rmtree(folder, ignore_errors=True)  # somebody deleted a part of it
                scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    _report(f"torch-npu {wanted} is in {folder}")
    return folder


def _run_pip(wanted: str, folder: Path, options: Sequence[str]) -> None:
    if PathFinder.find_spec("pip") is None:
        raise ConfigurationError(
            "torch-npu cannot be installed without pip",
            why=f"{sys.executable} has no pip",
            remedy=f"python -m ensurepip, then {INSTALL}",
        )
    # Without dependencies: a second torch in that folder would hide the first.
    settings = ["--no-deps", "--no-compile", "--only-binary", ":all:", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *settings, "--target", str(folder), *options]
    code = subprocess.run([*command, f"torch-npu=={wanted}"], check=False).returncode  # noqa: S603
    if code or within(folder) is None:
        raise BackendUnavailableError(
            f"pip could not install torch-npu {wanted}",
            why=f"it ended with exit code {code}; its output is above",
            remedy="check pip's package index and the network; "
            f"with the wheel in a folder: {INSTALL} --no-index --find-links FOLDER",
        )


def _report(text: str) -> None:
    sys.stderr.write(f"accelcore-npu-emulator: {text}\n")


if __name__ == "__main__":
    try:
        install(sys.argv[1:])
    except AccelError as error:
        sys.exit(f"accelcore-npu-emulator: {error}")
