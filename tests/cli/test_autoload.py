"""What a runtime that `import torch` loads, and that raises, does to `select()`.

That the variable which the error names helps is in test_run.py.
"""

from __future__ import annotations

import json

import pytest

SELECT = """
import json

import accelcore

def error_of(device):
    try:
        return accelcore.select(device).name
    except accelcore.AccelError as error:
        root = error
        while root.__cause__ is not None:
            root = root.__cause__
        return [type(error).__name__, str(error), repr(root)]

print(json.dumps([error_of(device) for device in ("cpu", "cpu", None)]))
"""


@pytest.mark.parametrize("code", ["raise ImportError('libacl.so: cannot open')", "raise SystemExit('libacl.so')"])
def test_select_blames_the_runtime_that_keeps_torch_from_being_imported_however_often_it_is_asked(machine, code):
    machine.torch_backend(code)
    if "SystemExit" in code:  # torch lets it pass, so that a stand-in, which is quicker to import, does as torch
        machine.module("torch", "import vendor_runtime; vendor_runtime.autoload()")
    done = machine.python("-c", SELECT)
    assert done.returncode == 0, done.stderr
    named, again, auto = json.loads(done.stdout)
    kind, message, root = named
    assert kind == "BackendUnavailableError"
    assert "torch cannot be imported" in message
    assert "libacl.so" in message
    assert "accelcore-cpu" not in message
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in message
    assert "libacl.so" in root, "it is raised from the runtime's own error"
    assert again == named
    assert "libacl.so" in auto[1]
    assert "vendor = vendor_runtime:autoload (vendor-runtime 2.0)" in message
    assert "uninstall vendor-runtime" in message


@pytest.mark.full  # above, the second question comes after an import that failed, too
def test_select_blames_the_runtime_also_if_the_script_has_tried_to_import_torch_before(machine):
    """The second import of torch in a process fails with an error of its own, which names no runtime."""
    machine.torch_backend("raise ImportError('libacl.so: cannot open')")
    before = "try:\n    import torch\nexcept RuntimeError:\n    pass\n"
    named, again, _ = json.loads(machine.python("-c", before + SELECT).stdout)
    assert named[0] == "BackendUnavailableError"
    for words in ("vendor = vendor_runtime:autoload", "TORCH_DEVICE_BACKEND_AUTOLOAD=0", "uninstall vendor-runtime"):
        assert words in named[1]
    assert again == named


def test_select_says_that_torch_itself_cannot_be_imported(machine):
    machine.module("torch", "raise ImportError('libtorch.so: undefined symbol')")
    named, again, _ = json.loads(machine.python("-c", SELECT).stdout)
    assert named[0] == "BackendUnavailableError"
    assert "libtorch.so: undefined symbol" in named[1]
    assert "repair the installation of torch" in named[1]
    assert again == named
