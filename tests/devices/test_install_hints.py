"""What a message says about installing what is missing."""

from __future__ import annotations

import re
import sys
from itertools import chain
from pathlib import Path

import pytest

import accelcore
from accelcore.cli import main
from accelcore.errors import BackendUnavailableError, PluginError, UnknownBackendError

ROOT = Path(__file__).parents[2]


def points(project, group):
    """The entry points of a group in a pyproject.toml."""
    section = project.read_text(encoding="utf-8").partition(f'[project.entry-points."{group}"]')[2].partition("\n[")[0]
    return dict(re.findall(r'^(\w+) = "([\w.]+)"$', section, re.MULTILINE))


OWN = points(ROOT / "pyproject.toml", "accelcore.own_backends")
EMULATORS = points(ROOT / "pyproject.toml", "accelcore.own_emulators")
WORDS = points(ROOT / "pyproject.toml", "accelcore.own_words")


def test_the_metadata_of_accelcore_names_every_backend_of_the_repository():
    plugins = [points(project, "accelcore.backends") for project in ROOT.glob("plugins/*/pyproject.toml")]
    assert {name: value for plugin in plugins for name, value in plugin.items()} == OWN != {}


def test_the_metadata_of_accelcore_names_every_emulator_of_the_repository():
    plugins = [points(project, "accelcore.emulators") for project in ROOT.glob("plugins/*/pyproject.toml")]
    assert {name for plugin in plugins for name in plugin} == EMULATORS.keys() != set()
    for module in EMULATORS.values():
        package, _, name = module.partition(".")
        assert (ROOT / "plugins" / package.removeprefix("accelcore_") / package / f"{name}.py").is_file()


def test_the_metadata_of_accelcore_has_the_keywords_of_every_plugin():
    words = {}
    for name in OWN:
        keywords = re.search("^keywords = (.+)$", (ROOT / "plugins" / name / "pyproject.toml").read_text(), re.M)
        words |= dict.fromkeys(set(re.findall(r'"(\w+)"', keywords[1])) - {"pytorch", name}, name) if keywords else {}
    assert words == WORDS != {}


@pytest.fixture
def accelcore_alone(nothing_installed, tmp_path):
    """Install accelcore without a plugin."""
    metadata = tmp_path / "accelcore-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: accelcore\nVersion: 0.1\n")
    groups = {"accelcore.own_backends": OWN, "accelcore.own_words": WORDS, "accelcore.own_emulators": EMULATORS}
    lines = [[f"[{group}]", *(f"{name} = {value}" for name, value in of.items())] for group, of in groups.items()]
    (metadata / "entry_points.txt").write_text("\n".join(chain(*lines)))
    sys.path.append(str(tmp_path))


@pytest.mark.usefixtures("accelcore_alone")
@pytest.mark.parametrize(
    ("device", "remedy"),
    [
        ("npu:1", "install accelcore-npu: pip install ./plugins/npu in a clone of accelcore; or choose another"),
        ("nup", "did you mean 'npu'? Then install accelcore-npu: pip install ./plugins/npu in a clone"),
        ("testin", "install its package (accelcore's own are cpu, cuda, npu; "),
        ("gpu:1", "did you mean 'cuda'? Then install accelcore-cuda: pip install ./plugins/cuda in a clone"),
        ("tpu", "install its package"),  # which is not nearly npu
    ],
)
def test_a_plugin_of_accelcores_own_that_is_not_installed_is_named(device, remedy):
    with pytest.raises(UnknownBackendError) as caught:
        accelcore.select(device)
    assert caught.value.remedy.startswith(remedy)


@pytest.mark.usefixtures("accelcore_alone")
def test_all_steps_to_an_emulator_of_accelcores_own_are_named_at_once(capsys):
    assert main(["run", "--emulate", "npu", "--device", "npu", "train.py"]) == 64
    steps = "pip install ./plugins/npu ./plugins/npu_emulator; then python -m accelcore_npu_emulator.install"
    assert steps in capsys.readouterr().err


@pytest.mark.parametrize(("absent", "emulated"), [(True, True), (True, False), (False, True)])
def test_an_emulation_is_offered_for_a_device_that_the_machine_lacks(fakes, absent, emulated):
    fakes.backend("lacking", available=False, count=0, reason="no card", remedy="buy one", absent=absent)
    if emulated:
        fakes.install("raise SystemExit('it was loaded')", emulators=["lacking"])
    with pytest.raises(BackendUnavailableError) as caught:
        accelcore.select("lacking")
    assert caught.value.remedy.startswith("buy one")
    assert ("accelcore run --emulate lacking train.py" in caught.value.remedy) == (absent and emulated)
    assert accelcore.installed()["lacking"].remedy == caught.value.remedy


def require(fakes, module, requirement):
    (metadata,) = Path(fakes.modules[module]).glob("*.dist-info/METADATA")
    metadata.write_text(f"{metadata.read_text()}Requires-Dist: {requirement}\n")


@pytest.mark.parametrize("fails", ["to load", "to create"])
def test_the_error_of_a_plugin_that_does_not_fit_names_the_versions_and_the_remedy(fakes, fails):
    code = "from accelcore.backend import WasRemoved"
    module = fakes.install(code, backends=["older"]) if fails == "to load" else fakes.backend("older", create=code)
    require(fakes, module, "accelcore>=9")
    with pytest.raises(PluginError, match="WasRemoved") as caught:
        accelcore.select("older")
    assert "requires accelcore>=9, and accelcore" in caught.value.why
    assert "pip install . ./plugins/cpu" in caught.value.remedy
