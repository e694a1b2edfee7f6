"""Build every distribution as sdist and wheel, check what is in them, and use the wheels in an empty environment.

The wheels are built from the sdists, as an installer would. They are built again from a copy of the sources, beside a
module that an earlier build has left, and must be the same to the byte. Run by `tox run -e package`, and before a
release (docs/releasing.md).
"""

from __future__ import annotations

import filecmp
import multiprocessing
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

from setuptools import build_meta

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = {
    "accelcore": ROOT,
    "accelcore_cpu": ROOT / "plugins/cpu",
    "accelcore_cuda": ROOT / "plugins/cuda",
    "accelcore_npu": ROOT / "plugins/npu",
    "accelcore_npu_emulator": ROOT / "plugins/npu_emulator",
    "accelcore_lint": ROOT / "plugins/lint",
}
_EPOCH = "1577836800"  # 2020; a release has the time of its commit
USE = """
import accelcore
assert accelcore.__file__.startswith({site!r}), accelcore.__file__
found = accelcore.installed()
assert set(found) == {{"cpu", "cuda", "npu"}}, found
assert found["cpu"].available, found
print("accelcore", accelcore.__version__, "from its wheels finds", *found)
"""


def run(*command: str | Path) -> None:
    """Run this Python with the arguments given; a failure ends the program."""
    subprocess.run([sys.executable, *command], check=True)  # noqa: S603


def build(what: str, folder: Path, target: Path) -> None:
    """Build a "sdist" or a "wheel" as an installer's process does, in a fork that need not import setuptools."""
    process = multiprocessing.get_context("fork").Process(target=_build, args=(what, folder, target.absolute()))
    process.start()
    process.join()
    require(process.exitcode == 0, f"no {what} can be built of {folder}")


def _build(what: str, folder: Path, target: Path) -> None:
    os.chdir(folder)
    getattr(build_meta, f"build_{what}")(str(target))


def require(condition: bool, what: str) -> None:
    """End the program, saying what is wrong, unless the condition holds."""
    if not condition:
        sys.exit(f"package check failed: {what}")


def check(name: str, folder: Path, dist: Path) -> None:
    """One wheel and one sdist, with all that belongs in them and nothing else."""
    wheels, sdists = list(dist.glob(f"{name}-*.whl")), list(dist.glob(f"{name}-*.tar.gz"))
    require(len(wheels) == len(sdists) == 1, f"{name} has {len(wheels)} wheels and {len(sdists)} sdists")
    inside = set(zipfile.ZipFile(wheels[0]).namelist())
    own = (name, wheels[0].name.removesuffix("-py3-none-any.whl") + ".dist-info")
    foreign = {entry for entry in inside if entry.split("/")[0] not in own}
    require(not foreign, f"the wheel of {name} also holds {sorted(foreign)[:3]}")
    sources = (path for path in (folder / name).rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    missing = {path.relative_to(folder).as_posix() for path in sources} - inside
    require(not missing, f"the wheel of {name} lacks {sorted(missing)[:3]}")
    require(f"{name}/py.typed" in inside, f"the wheel of {name} has no py.typed")
    require(any(entry.endswith("licenses/LICENSE") for entry in inside), f"the wheel of {name} has no LICENSE")
    with tarfile.open(sdists[0]) as archive:
        require(any(entry.endswith("/LICENSE") for entry in archive.getnames()), f"the sdist of {name} has no LICENSE")


def build_again(name: str, folder: Path, dist: Path, scratch: Path) -> None:
    """Build a wheel from a copy of the sources, with other times and an older build beside them, and compare it."""
    copy = scratch / "sources"
    ignored = shutil.ignore_patterns(".*", "build", "dist", "outputs", "plugins", "*.egg-info", "__pycache__")
    shutil.copytree(folder, copy, ignore=ignored, copy_function=shutil.copy)
    deleted = copy / "build" / "lib" / name / "deleted.py"  # since then, by a `git pull`
    deleted.parent.mkdir(parents=True)
    deleted.touch()
    build("wheel", copy, scratch)
    shutil.rmtree(copy)
    (again,) = scratch.glob("*.whl")
    require(filecmp.cmp(again, dist / again.name, shallow=False), f"{again.name} differs if it is built twice")
    again.unlink()


def use(dist: Path) -> None:
    """Install all wheels by name, with no index, into an empty environment, and find the backends."""
    folder = dist / "venv"
    venv.create(folder)
    python = folder / "bin" / "python"
    install = ["--python", python, "install", "--quiet", "--no-deps", "--no-index", "--find-links", dist]
    run("-m", "pip", *install, *(name.replace("_", "-") for name in DISTRIBUTIONS))
    # What accelcore requires, such as pluggy, is this environment's.
    borrowed = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    program = USE.format(site=str(folder.resolve()))
    subprocess.run([python, "-c", program], check=True, cwd=folder, env=borrowed)  # noqa: S603


def main() -> None:
    """Build, check and use; the folder to build in is the only argument."""
    dist = Path(sys.argv[1])
    shutil.rmtree(dist, ignore_errors=True)
    os.environ.setdefault("SOURCE_DATE_EPOCH", _EPOCH)
    for name, folder in DISTRIBUTIONS.items():
        build("sdist", folder, dist)
        (sdist,) = dist.glob(f"{name}-*.tar.gz")
        with tempfile.TemporaryDirectory() as scratch:
            shutil.unpack_archive(sdist, scratch)
            build("wheel", Path(scratch, sdist.name.removesuffix(".tar.gz")), dist)
        check(name, folder, dist)
        with tempfile.TemporaryDirectory() as scratch:
            build_again(name, folder, dist, Path(scratch))
    run("-m", "twine", "check", "--strict", *sorted(dist.iterdir()))
    use(dist)


if __name__ == "__main__":
    main()
