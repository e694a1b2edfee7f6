"""Sources of tests as modules and as files of a project."""

import sys
import types
from unittest import mock


def imported(source, name="module", **modules):
    """The module that a source defines, where a choice of a device is an error, as when others import it."""
    accelcore = types.ModuleType("accelcore")
    accelcore.select = mock.Mock(side_effect=AssertionError("a device was chosen on import"))
    module = types.ModuleType(name)
    with mock.patch.dict(sys.modules, {"accelcore": accelcore, **modules}):
        exec(compile(source, name, "exec"), module.__dict__)
    return module


def written(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "setup.py").touch()
    return [folder / name for name in files]


def left_by_rules(outcome):
    """What is left of a file, but for the lines that set a variable of one vendor."""
    return [note for note in outcome.left if note.rule != "tool"]
