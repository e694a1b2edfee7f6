"""A command line in a process of its own, on a machine with the fakes that a test installs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import accelcore
from accelcore.cli import main
from accelcore.cli.doctor import diagnosis

# `accelcore run`, in a process that has imported torch: the launcher that it would become runs there, and its ranks
# are forks of it. torch looks for the name of each event through all loaded modules, for more than a second in all.
LAUNCH = """
import atexit, os, runpy, signal, subprocess, sys, threading
from accelcore.cli import main
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

def execve(file, command, environ):
    assert command[1:3] == ["-m", "accelcore.cli.launcher"]
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = command[2:]
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)

class Rank(subprocess.Popen):
    def __init__(self, args, *, env, **options):
        super().__init__(args, env=env, preexec_fn=lambda: become(args[2:], env), **options)

def become(command, environ):
    # As a new Python does it, up to its end.
    os.closerange(3, 1024)  # Popen waits until its pipe is closed
    os.environ.clear()
    os.environ.update(environ)
    atexit._clear()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv, sys.excepthook, code = list(command), sys.__excepthook__, 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120
    os._exit(code)

os.execve = execve
if "REAL_RANKS" not in os.environ:
    subprocess_handler.Popen = Rank
dynamic_rendezvous.get_method_name = lambda: ""
main(["run", *sys.argv[1:]])
"""


class Machine:
    """Where the command line runs: its fakes, its folder and its environment."""

    def __init__(self, fakes: Any, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.fakes = fakes
        self.folder = folder
        self.sites: list[str] = []
        self.variables: dict[str, str] = {}

    @property
    def environ(self) -> dict[str, str]:
        under_test = str(Path(accelcore.__file__).parents[1])  # another checkout may be installed
        path = os.pathsep.join([*self.sites, *self.fakes.modules.values(), under_test])
        return {**os.environ, "PYTHONPATH": path, **self.variables}

    def write(self, name: str, code: str) -> str:
        path = self.folder / name
        path.write_text(code, encoding="utf-8")
        return str(path)

    def module(self, name: str, code: str) -> None:
        """Put a module on the path, before every installed one."""
        site = self.folder / f"site-of-{name}"
        site.mkdir()
        (site / f"{name}.py").write_text(code, encoding="utf-8")
        self.sites.insert(0, str(site))

    def no_torch(self) -> None:
        """Let an empty module be torch, which takes seconds to import. Doctor remembers nothing of it elsewhere."""
        self.module("torch", "")
        self.variables["XDG_CACHE_HOME"] = str(self.folder / "cache")

    def torch_backend(self, code: str, *, distribution: str = "vendor-runtime") -> None:
        """Install a distribution whose `vendor_runtime.autoload`, with this code in it, `import torch` calls."""
        site = self.folder / "vendor-site"
        metadata = site / f"{distribution.replace('-', '_')}-2.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 2.0\n")
        (metadata / "entry_points.txt").write_text("[torch.backends]\nvendor = vendor_runtime:autoload\n")
        (site / "vendor_runtime.py").write_text(f"def autoload():\n    {code}\n")
        self.sites.append(str(site))

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "accelcore", *arguments], cwd=self.folder, env=self.environ, text=True, **options
        )

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "accelcore", *arguments, **options)

    def python(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"capture_output": True, "timeout": 100, "stdin": subprocess.DEVNULL} | options
        return subprocess.run([sys.executable, *arguments], cwd=self.folder, env=self.environ, text=True, **options)

    def doctor(self, *arguments: str) -> tuple[int, dict[str, Any], str]:
        """The exit code, the JSON, and the text of the same diagnosis.

        The command runs in this process; what it asks of plugins it asks of children.
        """
        out, text, err = io.StringIO(), io.StringIO(), io.StringIO()
        with self._patch.context() as patch, contextlib.redirect_stderr(err):
            patch.setattr(sys, "path", [*self.sites, *sys.path])
            patch.chdir(self.folder)
            for name, value in self.variables.items():
                patch.setenv(name, value)
            patch.setattr(diagnosis, "diagnose", cache(diagnosis.diagnose))
            with contextlib.redirect_stdout(out):
                code = main(["doctor", "--json", *arguments])
            with contextlib.redirect_stdout(text):
                assert main(["doctor", *arguments]) == code
        assert "Traceback" not in err.getvalue()
        return code, json.loads(out.getvalue()), text.getvalue()


@pytest.fixture
def launch(machine: Machine, fork: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run `accelcore run` with these arguments, and its launcher and ranks, in forks.

    With REAL_RANKS in the environment, the ranks are processes, as a user's.
    """

    def launch(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(machine.folder)
        done: subprocess.CompletedProcess[str]
        done = fork(machine.write("launch.py", LAUNCH), *arguments, **machine.environ, **environ).finish()
        return done

    return launch


@pytest.fixture
def machine(fakes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for variable in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTHONPATH", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    return Machine(fakes, tmp_path, monkeypatch)
