"""Build every distribution as sdist and wheel, check what is in them, and use the wheels in an empty folder.

The wheels are built from the sdists, as an installer would. Run by `tox run -e package`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTIONS = {
    "accelcore": ROOT,
    "accelcore_cpu": ROOT / "plugins/cpu",
    "accelcore_cuda": ROOT / "plugins/cuda",
    "accelcore_npu": ROOT / "plugins/npu",
    "accelcore_npu_emulator": ROOT / "plugins/npu_emulator",
    "accelcore_lint": ROOT / "plugins/lint",
}
USE = """
import accelcore
assert accelcore.__file__.startswith({site!r}), accelcore.__file__
found = accelcore.installed()
assert set(found) == {{"cpu", "cuda", "npu"}}, found
assert found["cpu"].available, found
print("accelcore", accelcore.__version__, "from its wheels finds", *found)
"""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run this Python with the arguments given; a failure ends the program."""
    subprocess.run([sys.executable, *command], check=True, cwd=cwd)  # noqa: S603


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


def main() -> None:
    """Build, check and use; the folder to build in is the only argument."""
    dist = Path(sys.argv[1])
    shutil.rmtree(dist, ignore_errors=True)
    for name, folder in DISTRIBUTIONS.items():
        run("-m", "build", "--no-isolation", "--outdir", dist, folder)
        check(name, folder, dist)
    run("-m", "twine", "check", "--strict", *sorted(dist.iterdir()))
    site = dist / "site"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, *sorted(dist.glob("*.whl")))
    # First on the path, so that the wheels are found before what this environment has installed.
    run("-c", f"import sys; sys.path.insert(0, {str(site)!r})\n" + USE.format(site=str(site)), cwd=site)


if __name__ == "__main__":
    main()
