"""The interface of plugins as a promise: what plugins of this interface version were written against still fits.

`plugins_kept/interface.json` records every public callable that docs/stability.md promises. An entry may gain
parameters with defaults and methods with bodies. It loses nothing while `accelcore.API` stays the same. To record
additions: `python tests/test_plugin_interface.py`. It records nothing that breaks what is there.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from accelcore import Capabilities, Probe
from accelcore.jobs.collectives import Collectives
from accelcore.precision.role import Precision
from accelcore.roles.compiler import Compiler
from accelcore.roles.runtime import Runtime
from accelcore.scaling.contract import LossScaler

RECORD = Path(__file__).parent / "plugins_kept" / "interface.json"
PROMISED = """
    accelcore: Backend Capabilities KnownFault LossScale Probe hookimpl
    accelcore.devices.hookspecs: accelcore_probe accelcore_create_backend accelcore_register_optimizers
    accelcore.devices.hookspecs: accelcore_emulate accelcore_known_faults
    accelcore.precision.role: Precision TorchPrecision
    accelcore.scaling.contract: LossScaler NoScaler StaticScaler described
    accelcore.scaling.dynamic: GradScaler Scalers
    accelcore.optim.registry: Optimizers
    accelcore.optim.engine: Request
    accelcore.optim.engine: Engine
    accelcore.optim.flat.memory: Run Slot
    accelcore.optim.formulas: Formula
    accelcore.optim.torch_routes: register_torch_optimizers
    accelcore.jobs.collectives: Collectives NoCollectives TorchCollectives
    accelcore.jobs.launchers: Launch
    accelcore.roles: from_torch
    accelcore.roles.compiler: Compiled Compiler NoCompiler TorchCompiler
    accelcore.roles.runtime: AcceleratorRuntime Memory Runtime TorchRuntime
    accelcore.roles.runtime: fetch host_rng_state set_host_rng_state
    accelcore.testing.support.declared: declared
"""


def promised():
    for line in PROMISED.strip().splitlines():
        module, _, names = line.strip().partition(": ")
        for name in names.split():
            yield f"{module}.{name}", getattr(import_module(module), name)


def parameters(function):
    """Return name, kind and whether there is a default, of each parameter but `self`."""
    found = inspect.signature(function).parameters.values()
    return [[one.name, one.kind.name, one.default is not one.empty] for one in found if one.name != "self"]


def described(thing):
    if not inspect.isclass(thing):
        return {"call": parameters(thing)}
    methods, attributes = {}, []
    for name in dir(thing):
        value = inspect.getattr_static(thing, name)
        owners = [base for base in thing.__mro__ if name in vars(base)]
        if name.startswith("_") or not owners[0].__module__.startswith("accelcore"):
            continue
        if inspect.isfunction(value):
            methods[name] = parameters(value)
        else:
            attributes.append(name)
    fields = [field.name for field in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
    return {
        "call": parameters(thing.__init__),
        "methods": methods,
        "attributes": sorted({*attributes, *fields}),
        "abstract": sorted(getattr(thing, "__abstractmethods__", ())),
    }


def check_call(recorded, now, what):
    """Require that each call that was right is right, and that each override that was right can be called."""
    by_name = {name: (kind, has_default) for name, kind, has_default in now}
    for name, kind, has_default in recorded:
        assert name in by_name, f"{what} lost {name}="
        assert by_name[name][0] == kind, f"{name} of {what} is given in another way"
        assert by_name[name][1] >= has_default, f"{name} of {what} lost its default"
    positional = [name for name, kind, _ in recorded if kind.startswith("POSITIONAL")]
    assert [name for name, kind, _ in now if kind.startswith("POSITIONAL")][: len(positional)] == positional, what
    added = [one for one in now if one[0] not in {name for name, _, _ in recorded}]
    assert all(has_default or kind.startswith("VAR") for _, kind, has_default in added), f"{what} needs more: {added}"


def check(recorded, now, what):
    check_call(recorded["call"], now["call"], what)
    for name, method in recorded.get("methods", {}).items():
        assert name in now["methods"], f"{what} lost {name}"
        check_call(method, now["methods"][name], f"{what}.{name}")
    assert set(recorded.get("attributes", ())) <= set(now.get("attributes", ())), what
    assert set(now.get("abstract", ())) <= set(recorded.get("abstract", ())), (
        f"{what} has a new method without a default"
    )


KEPT = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def test_the_record_is_complete():
    assert set(KEPT) == {name for name, _ in promised()}


def test_what_the_page_for_authors_documents_is_promised():
    """The classes of the suite are imported with `*` and run; nobody calls their methods."""
    page = (Path(__file__).parents[1] / "docs" / "reference_backends.md").read_text(encoding="utf-8")
    things = [thing for _, thing in promised()]
    documented = re.findall(r"^\.\. auto(?:class|function):: (.+)\.(\w+)$", page, re.MULTILINE)
    assert ("accelcore.roles.torch_device", "from_torch") in documented
    for module, name in documented:
        if module not in ("accelcore.testing", "accelcore_npu_emulator"):
            assert getattr(import_module(module), name) in things, f"{name} is public, and is not in PROMISED"


@pytest.mark.parametrize(
    ("declaration", "said"),
    [(Capabilities, {"autocast_tables", "model_dtypes", "parallel"}), (Probe, {"name", "available", "exclusive"})],
)
def test_a_new_field_means_not_declared(declaration, said):
    """A plugin that does not know a field declares nothing by it; these fields are as old as the interface."""
    assert {field.name for field in dataclasses.fields(declaration) if field.default} == said


@pytest.mark.parametrize(("name", "thing"), list(promised()), ids=lambda one: one if isinstance(one, str) else "")
def test_what_plugins_use_still_fits(name, thing):
    check(KEPT[name], described(thing), name)


ONE = {"call": [["a", "POSITIONAL_OR_KEYWORD", False]], "methods": {"run": []}, "attributes": ["x"], "abstract": []}


@pytest.mark.parametrize(
    "change",
    [
        {"call": []},
        {"call": [["a", "KEYWORD_ONLY", False]]},
        {"call": [["b", "POSITIONAL_OR_KEYWORD", True], *ONE["call"]]},
        {"call": [*ONE["call"], ["b", "KEYWORD_ONLY", False]]},
        {"methods": {}},
        {"methods": {"run": [["b", "KEYWORD_ONLY", False]]}},
        {"attributes": []},
        {"abstract": ["run"]},
    ],
)
def test_a_change_that_breaks_a_plugin_is_noticed(change):
    check(ONE, ONE | {"call": [*ONE["call"], ["b", "KEYWORD_ONLY", True]]}, "it")
    with pytest.raises(AssertionError):
        check(ONE, ONE | change, "it")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.final leaves no mark")
@pytest.mark.parametrize("role", [Precision, LossScaler, Collectives, Compiler, Runtime])
def test_a_role_leaves_at_most_eight_methods_to_its_author(role):
    """What can be computed from these is final, or a function."""
    public = {name: value for name, value in vars(role).items() if not name.startswith("_")}
    methods = {name: getattr(value, "fget", value) for name, value in public.items()}
    left = [name for name, value in methods.items() if callable(value) and not getattr(value, "__final__", False)]
    assert 1 <= len(left) <= 8, left


if __name__ == "__main__":
    for name, thing in promised():
        if name in KEPT:
            check(KEPT[name], described(thing), name)
    RECORD.write_text(json.dumps({name: described(thing) for name, thing in promised()}, indent=1) + "\n", "utf-8")
