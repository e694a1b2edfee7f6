"""The reference has every public name, with what its docstring says, and without noise."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from runpy import run_path

import pytest
from bs4 import BeautifulSoup
from sphinx.ext.autodoc.mock import mock

ROOT = Path(__file__).parents[2]

# What a user, or the author of a backend, imports from. All names in their `__all__` are public; no other file has one.
MODULES = [
    "accelcore",
    "accelcore.apex.amp",
    "accelcore.apex.optimizers",
    "accelcore.apex.parallel",
    "accelcore.checkpoint.export",
    "accelcore.errors",
    "accelcore.devices.hookspecs",
    "accelcore.jobs.launchers",
    "accelcore.optim.engine",
    "accelcore.optim.flat.memory",
    "accelcore.optim.formulas",
    "accelcore.optim.optimizer",
    "accelcore.optim.torch_routes",
    "accelcore.precision",
    "accelcore.jobs.collectives",
    "accelcore.roles",
    "accelcore.roles.compiler",
    "accelcore.optim.registry",
    "accelcore.precision.role",
    "accelcore.roles.runtime",
    "accelcore.scaling.contract",
    "accelcore.scaling.dynamic",
    "accelcore.testing",
    "accelcore_npu_emulator",
    "accelcore_npu_emulator.counters",
    "accelcore_npu_emulator.pytest_plugin",
]


SUITE = re.compile(r"Test[A-Z]")  # its classes are listed, and not each of their tests
TORCHS = {"profile_hook_step"}  # overridden, and not for users


def source(module):
    distribution = ROOT / "plugins/npu_emulator" if module.startswith("accelcore_npu") else ROOT
    path = distribution / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def homes(module):
    """Each public name, and every address at which the module has it or finds it."""
    body = source(module).body
    listed = next(
        ast.literal_eval(line.value)
        for line in body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "__all__"
    )
    found = {name: {f"{module}.{name}"} for name in listed}
    for line in (line for statement in body for line in ast.walk(statement)):
        if isinstance(line, ast.ImportFrom):
            for name in line.names:
                found.get(name.name, set()).add(f"{line.module}.{name.name}")
    return found


@pytest.fixture(scope="module")
def entries(site):
    """Every entry of the reference: its address, its signature, what stands below it."""
    found = {}
    for page in sorted(site.glob("reference*.html")):
        content = BeautifulSoup(page.read_text(), "html.parser")
        for anchor in content.select("[id^=module-]"):
            found[anchor["id"].removeprefix("module-")] = ("", anchor.find_next("p").get_text())
        for term in content.select("dt.sig"):
            for anchor in [term, *term.select("span[id]")]:
                if anchor.get("id"):
                    found[anchor["id"]] = (term.get_text(), term.find_next_sibling("dd").get_text(" ", strip=True))
    for name in (names for module in MODULES for names in homes(module).values()):
        entry = next((found[address] for address in name if address in found), None)
        found |= dict.fromkeys(name, entry) if entry else {}
    return found


def test_only_public_modules_list_their_names():
    paths = (path for path in (ROOT / "accelcore").rglob("*.py") if "\n__all__ = " in path.read_text())
    found = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths}
    assert found - {"accelcore.apex", "accelcore.apex.stand_in.apex"} == {
        one for one in MODULES if not one.startswith("accelcore_")
    }


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_there_and_documented(module, entries):
    for name, addresses in homes(module).items():
        texts = {entries[address][1] for address in addresses & entries.keys()}
        assert texts, f"{module}.{name} is not in the reference"
        assert "" not in texts, f"{module}.{name} is in the reference, and not documented"


@pytest.fixture(scope="module")
def mocked(monkeypatch_module):
    """Import accelcore as sphinx does, without torch."""
    settings = run_path(str(ROOT / "docs" / "conf.py"))
    with mock(settings["autodoc_mock_imports"]):
        yield import_module


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        for folder in (ROOT, ROOT / "plugins/npu_emulator"):
            patch.syspath_prepend(str(folder))
        yield patch


def resolved(address, find):
    """The class at an address, or None."""
    module, _, name = address.rpartition(".")
    try:
        found = getattr(find(module), name, None)
    except (ImportError, ValueError):
        return None
    return found if inspect.isclass(found) and not hasattr(found, "__sphinx_mock__") else None


def methods(kind):
    """The public methods and properties that accelcore defines in a class or in a base of it."""
    for name in dir(kind):
        owner = next((base for base in kind.__mro__ if name in vars(base)), None)
        if name.startswith("_") or name in TORCHS or owner is None or not owner.__module__.startswith("accelcore"):
            continue
        value = vars(owner)[name]
        if inspect.isroutine(value) or isinstance(value, (property, classmethod, staticmethod)):
            yield name


def test_every_public_method_is_there(entries, mocked):
    """Below its class, or below a base of it that is in the reference, too: of a role, its contract."""
    public = {address for module in MODULES for names in homes(module).values() for address in names}
    kinds = {kind for address in public | entries.keys() if (kind := resolved(address, mocked)) is not None}
    shown = {(found.__module__, found.__qualname__) for found in kinds}
    assert {("accelcore.training.trainer", "Trainer"), ("accelcore.jobs.job", "Job")} <= shown
    missing = set()
    for kind in kinds:
        if SUITE.match(kind.__name__):
            continue
        places = {f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__}
        places |= {address for address in public if resolved(address, mocked) in kind.__mro__}
        missing |= {
            f"{kind.__qualname__}.{name}"
            for name in methods(kind)
            if not any(f"{place}.{name}" in entries for place in places)
        }
    assert not missing


def test_the_options_of_a_trainer_have_their_defaults(entries, mocked):
    options = mocked("accelcore.training.options")
    _, text = entries["accelcore.TrainerOptions"]
    words = re.sub(r"\s+", " ", text)
    for name, value in options.complete({}).items():
        if value is not None:
            shown = re.escape(repr(value)).replace("'", '"')
            default = rf"(Default: {shown}|{shown} ?, the default)"
            assert re.search(rf"\b{name} \((?:(?! \([^)]*\) . ).)*{default}", words), name


def test_there_is_no_noise(entries):
    for address, (signature, text) in entries.items():
        assert ".__" not in address.removesuffix(".__version__").removesuffix(".Trainer.__call__"), address
        assert "object at 0x" not in signature, signature
        assert "*args" not in signature, signature
        assert "Alias for field number" not in text, address
        assert "Mock" not in signature, signature
        assert "given: object" not in signature, signature
        assert not re.search(r"= _[A-Z]", signature), f"{address}: a default that is no value"
        assert not re.search(r", ?\) \u2013", text), f"{address}: an attribute needs a line of its own"
        assert not re.search(r"\*\w+: (typing\.)?NoReturn", signature), signature
        assert not re.search(r"\b(Return type|Type)\s*:", text), f"{address}: a colon in the first line tears the text"
