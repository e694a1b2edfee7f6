"""Fixtures that every test may use."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import accelcore
from accelcore.jobs.launchers import JOB_VARIABLES

sys.path.insert(0, str(Path(__file__).parent))  # also for the forks, which import it by its name
forks = importlib.import_module("forks")
fork, fork_ranks = forks.fork, forks.fork_ranks

# No deadline, because a shared machine stalls; no chance, because a test passes or fails for a reason. Half as many
# examples as hypothesis would try: without chance, every run tries the same.
settings.register_profile("tests", settings.get_profile("ci"), max_examples=50)
settings.load_profile("tests")

_OURS = ("ACCEL_DEVICE", "ACCEL_PROBE_TIMEOUT")
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees what the shell it was started from says to accelcore."""
    for variable in (*_OURS, *JOB_VARIABLES):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def accel() -> accelcore.Backend:
    """The CPU backend, as `select("cpu")` makes it; to find it takes longer than most tests, which do not ask how."""
    from accelcore_cpu.backend import create  # here: the process that gives tests to others needs no torch

    return create()


@pytest.fixture(scope="session")
def run_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a script in a Python of its own; keywords are added to its environment. It must succeed."""

    def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=tmp_path_factory.mktemp("run"),
            env={**os.environ, **environment},
        )
        assert result.returncode == 0, result.stderr
        return result

    return run


class _ModulesOnly:
    """Finds modules on a path, and no distributions."""

    def __init__(self, path: list[str]) -> None:
        self._path = path

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, self._path if path is None else path, target)


@pytest.fixture
def nothing_installed() -> Iterator[None]:
    """Hide every installed distribution, and so every plugin; modules can be imported as before."""
    path, finder = sys.path, _ModulesOnly(list(sys.path))
    sys.path = []
    sys.meta_path.append(finder)
    importlib.invalidate_caches()
    yield
    sys.path = path
    sys.meta_path.remove(finder)
    importlib.invalidate_caches()


class Fakes:
    """Distributions made for one test; importlib.metadata finds them as if pip had installed them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.modules: dict[str, str] = {}

    def install(
        self,
        code: str,
        *,
        backends: Sequence[str] = (),
        extensions: Sequence[str] = (),
        emulators: Sequence[str] = (),
        distribution: str | None = None,
        value: str | None = None,
        keywords: str = "",
    ) -> str:
        """Install a module with this code as the plugin of these names; returns the module's name.

        A module's name is never used twice, because modules and what plugins answered live as long as the process.
        """
        module = f"fake_plugin_{next(_numbers)}"
        distribution = distribution or module.replace("_", "-")
        site = self._folder / module
        metadata = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (site / f"{module}.py").write_text(textwrap.dedent(code), encoding="utf-8")
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\nKeywords: {keywords}\n"
        )
        lines = []
        groups = {"backends": backends, "extensions": extensions, "emulators": emulators}
        for group, names in groups.items():
            lines += [f"[accelcore.{group}]", *(f"{name} = {value or module}" for name in names)]
        (metadata / "entry_points.txt").write_text("\n".join(lines))
        self.modules[module] = str(site)
        sys.path.insert(0, str(site))
        importlib.invalidate_caches()
        return module

    def backend(self, name: str, *, before: str = "", create: str = "", after: str = "", **probe: object) -> str:
        """Install a backend that works: the CPU's under another name. Keywords are fields of its probe.

        `before` is code at the module's top, `create` code at the start of its `accelcore_create_backend`, `after`
        code at the module's end.
        """
        fields = {"available": True, "count": 1, "reason": "", "remedy": ""} | probe
        code = f"""
            import dataclasses

            from accelcore import Probe, hookimpl

            @hookimpl
            def accelcore_probe():
                return Probe({name!r}, **{fields!r})

            @hookimpl
            def accelcore_create_backend(name, index):
                {create or "pass"}
                from accelcore_cpu.backend import create

                return dataclasses.replace(create(), name=name, index=index)
        """
        parts = (before, code, after)
        return self.install("\n".join(textwrap.dedent(part) for part in parts), backends=[name])


@pytest.fixture
def import_from(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Return a function that puts a folder on `sys.path` for this test; modules imported from there are forgotten."""
    folders: list[str] = []

    def add(folder: Path) -> None:
        folders.append(f"{folder}{os.sep}")
        monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()

    yield add
    for name, module in list(sys.modules.items()):
        if folders and (getattr(module, "__file__", None) or "").startswith(tuple(folders)):
            del sys.modules[name]


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Fakes]:
    """Install plugins for this test. One that hangs does so on a `threading.Event` that it calls RELEASE."""
    made = Fakes(tmp_path / "site")
    yield made
    for name, site in made.modules.items():
        if site in sys.path:
            sys.path.remove(site)
        module = sys.modules.pop(name, None)
        if hasattr(module, "RELEASE"):
            module.RELEASE.set()
    importlib.invalidate_caches()
