"""Installing torch-npu where only emulated processes find it. A stand-in for the wheel makes it quick to see."""

import os
import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from zipfile import ZipFile

import pytest
from accelcore_npu_emulator import bootstrap, build, wheel
from accelcore_npu_emulator.install import install

from accelcore.errors import BackendUnavailableError, ConfigurationError

INFO = "torch_npu-2.13.0.dist-info"
FILES = {
    "torch_npu/__init__.py": "def _autoload():\n    raise ImportError('libascendcl.so is not there')\n",
    "torch_npu/include/acl.h": "",
    f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\nRequires-Dist: torch==2.13.0.*\n",
    f"{INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{INFO}/entry_points.txt": "[torch.backends]\ntorch_npu = torch_npu:_autoload\n",
}
RECORD = "".join(f"{name},,\n" for name in (*FILES, f"{INFO}/RECORD"))

with_pip = pytest.mark.skipif(
    find_spec("torch_npu") is not None, reason="the same without torch_npu, as in `tox run -e tests`"
)


class Installed:
    def __init__(self, version):
        self.version = version


@pytest.fixture
def versions(monkeypatch, tmp_path):
    """The versions of torch and torch-npu that seem to be installed, and an empty cache."""
    found = {"torch": "2.13.0+cpu"}

    def distribution(name):
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return Installed(found[name])

    monkeypatch.setattr(wheel, "distribution", distribution)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return found


@pytest.fixture
def options(tmp_path, monkeypatch):
    """pip's options that name a folder with the wheel."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    folder = tmp_path / "wheels"
    folder.mkdir()
    with ZipFile(folder / "torch_npu-2.13.0-py3-none-any.whl", "w") as file:
        for name, text in {**FILES, f"{INFO}/RECORD": RECORD}.items():
            file.writestr(name, text)
    return ["--quiet", "--no-index", "--find-links", str(folder)]


@with_pip
def test_it_is_installed_once_and_only_emulated_processes_find_it(versions, options, monkeypatch, capfd):
    with pytest.raises(BackendUnavailableError, match="torch-npu") as raised:
        wheel.torch_npu()
    assert raised.value.remedy == "python -m accelcore_npu_emulator.install"
    killed = wheel.cache() / ".installing-torch-npu"  # what an installation leaves that is killed
    killed.mkdir()
    (killed / "half").touch()
    (wheel.place() / "torch_npu").mkdir(parents=True)  # and what is left if a user deletes a part

    folder = install(options)
    assert not (folder / "half").exists()
    assert "44 MB" in capfd.readouterr().err
    assert wheel.torch_npu().version == "2.13.0"
    assert install(["--no-such-option"]) == folder, "there is nothing left for pip to do"
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, ".lock"}
    assert folder.stat().st_mode & 0o77 == 0

    monkeypatch.setattr(build, "libraries", lambda: folder)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    variables = bootstrap.environment()
    assert variables["PYTHONPATH"] == f"/mine{os.pathsep}{folder}"
    where = [sys.executable, "-c", "import importlib.util as u; print(u.find_spec('torch_npu').origin)"]
    found = subprocess.run(where, env=os.environ | variables, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(folder / "torch_npu" / "__init__.py")

    versions["torch-npu"] = "2.13.0"  # as in a process that has the folder on its path
    assert bootstrap.environment()["PYTHONPATH"] == "/mine"


@with_pip
def test_pip_that_fails_leaves_nothing_and_the_next_attempt_succeeds(versions, options, tmp_path, capfd):
    with pytest.raises(BackendUnavailableError, match="exit code 1") as raised:
        install(["--quiet", "--no-index", "--find-links", str(tmp_path)])
    assert "--find-links" in raised.value.remedy
    assert [path.name for path in wheel.cache().iterdir()] == [".lock"]
    assert install(options).is_dir()


def test_no_pip(versions, monkeypatch):
    monkeypatch.setattr("accelcore_npu_emulator.install.PathFinder.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="no pip") as raised:
        install()
    assert "ensurepip" in raised.value.remedy


def test_versions_that_do_not_fit_are_refused_before_anything_is_installed(versions, options):
    versions["torch"] = "2.13.1"
    for call in (wheel.torch_npu, lambda: install(options)):
        with pytest.raises(BackendUnavailableError, match=r"torch 2\.13\.1 is installed") as raised:
            call()
        assert raised.value.available == ", ".join(
            f"torch {torch} with torch-npu {torch_npu}" for torch, torch_npu in wheel.RELEASES.items()
        )
        assert "pip install torch==" in raised.value.remedy
    del versions["torch"]
    with pytest.raises(BackendUnavailableError, match="torch is not installed"):
        install(options)
    versions |= {"torch": "2.13.0", "torch-npu": "2.12.0"}
    with pytest.raises(BackendUnavailableError, match=r"torch-npu 2\.13\.0, and 2\.12\.0 is installed"):
        wheel.torch_npu()


@pytest.mark.parametrize(("torch", "torch_npu"), wheel.RELEASES.items())
@pytest.mark.parametrize("build", ["", "+cpu", "+cu130"])
def test_each_torch_has_its_torch_npu(versions, torch, torch_npu, build):
    versions["torch"] = torch + build
    assert wheel.fitting() == torch_npu
    assert torch_npu in wheel.place().name
    with pytest.raises(BackendUnavailableError, match=re.escape(f"torch-npu {torch_npu}, which fits torch {torch}")):
        wheel.torch_npu()
    versions["torch-npu"] = f"{torch}.post1"  # another release that is built for the same torch
    assert wheel.torch_npu().version == f"{torch}.post1"
