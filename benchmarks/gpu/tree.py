"""The benchmarks' import path: what is installed, or this tree where nothing is. Free of torch."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

__all__ = ["ROOT", "make_importable"]

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = {"accelcore": ROOT, "accelcore_cpu": ROOT / "plugins/cpu", "accelcore_cuda": ROOT / "plugins/cuda"}


def make_importable(folder: Path, *, backend: str) -> str:
    """Fill a folder that has to be on a child process's PYTHONPATH; says where accelcore comes from.

    The benchmarks are this tree's. Where the plugin of `backend` is installed, so is accelcore, and both are used as
    they are; otherwise the folder also holds the tree's packages, and the metadata that makes plugins of them, as an
    installation would. Links, not copies: nothing is built.
    """
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    if backend in {point.name for point in entry_points(group="accelcore.backends")}:
        return "installed"
    for module, source in _SOURCES.items():
        (folder / module).symlink_to(source / module)
        _write_metadata(folder, source)
    return "this tree"


def _write_metadata(folder: Path, source: Path) -> None:
    import tomllib  # of Python 3.11; with 3.10 accelcore has to be installed

    project = tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"], project["version"]
    made = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    made.mkdir()
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    lines = []
    for group, points in project.get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    (made / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
