from __future__ import annotations

import ast
import importlib.metadata
import inspect
import json
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import accelcore

STAGES = """
    import json, sys

    stages = {}
    import accelcore
    stages["import"] = sorted(sys.modules)
    accelcore.installed()
    stages["installed"] = sorted(sys.modules)
    for request in ("?", "nowhere", "cpu:7", "nowhere,cpu:7"):
        try:
            accelcore.select(request)
        except accelcore.AccelError:
            pass
        else:
            raise AssertionError(request)
    stages["failed select"] = sorted(sys.modules)
    from accelcore.cli import main

    for wrong in (["export", "nowhere", "x.safetensors"], ["export", ".", "x.pt"], ["precision", "--backend", "cpuu"]):
        assert main(wrong) == 64
    stages["failed commands"] = sorted(sys.modules)
    accelcore.select("cpu")
    stages["select"] = sorted(sys.modules)
    print(json.dumps(stages))
"""


@pytest.fixture(scope="module")
def stages(run_python):
    return {stage: set(modules) for stage, modules in json.loads(run_python(STAGES).stdout).items()}


def test_torch_comes_in_only_when_a_backend_is_created(stages):
    for light in ("import", "installed", "failed select", "failed commands"):
        assert "torch" not in stages[light], light
    assert "torch" in stages["select"]


def test_importing_accelcore_loads_no_plugin_and_no_dependency(stages):
    roots = {name.split(".")[0] for name in stages["import"]}
    assert "accelcore" in roots
    assert not roots & {"torch", "numpy", "pluggy", "safetensors", "accelcore_cpu", "accelcore_cuda", "accelcore_npu"}


def test_installed_loads_entry_modules_only(stages):
    assert "accelcore_cpu" in stages["installed"]
    assert "accelcore_cpu.backend" not in stages["installed"]
    assert "accelcore_cpu.backend" in stages["select"]


@pytest.mark.parametrize("name", sorted(set(accelcore.__all__) - {"API", "__version__"}))
def test_each_public_name_is_there_and_documented(name):
    value = getattr(accelcore, name)
    assert inspect.isclass(value) or callable(value)
    assert (vars(value) if inspect.isclass(value) else {"__doc__": value.__doc__})["__doc__"].strip()


def test_a_star_import_brings_every_public_name():
    names: dict[str, object] = {}
    exec("from accelcore import *", names)
    assert set(accelcore.__all__) <= set(names)
    assert dir(accelcore) == sorted(accelcore.__all__)


def test_every_error_is_public():
    from accelcore import errors

    assert set(errors.__all__) <= set(accelcore.__all__)


@pytest.mark.parametrize("name", ["nonsense", "torch", "_nonsense", "__nonsense__", "selection_"])
def test_an_unknown_attribute_is_an_attribute_error_that_names_it(name):
    with pytest.raises(AttributeError, match=f"'accelcore' .*'{name}'"):
        getattr(accelcore, name)


def test_the_version_is_the_distributions():
    assert accelcore.__version__ == importlib.metadata.version("accelcore")
    assert re.fullmatch(r"\d+\.\d+\.\d+", accelcore.__version__)


# The core names no device. Docstrings and comments are prose, and so is a string with a blank in it (a message); any
# other string, and any name in the code, is an instruction.
_VENDORS = re.compile(
    r"(?<![a-z])(cuda|cudnn|nvidia|nccl|npu|hccl|ascend|cann|gloo|rocm|xpu|mps)(?![a-z])", re.IGNORECASE
)


def _vendor_words(source: str) -> list[str]:
    if not _VENDORS.search(source):  # as in most files, and to parse takes longest
        return []
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    words = []
    for node in ast.walk(tree):
        texts: list[str] = []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            texts = [node.value] if " " not in node.value else []
        elif isinstance(node, ast.Attribute):
            texts = [node.attr]
        elif isinstance(node, ast.Name):
            texts = [node.id]
        elif isinstance(node, ast.arg | ast.keyword):
            texts = [node.arg or ""]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            texts = [node.name]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            texts = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        words += [text for text in texts if _VENDORS.search(text)]
    return words


def test_the_core_names_no_device():
    files = list(Path(accelcore.__file__).parent.rglob("*.py"))
    assert files
    assert {path: words for path in files if (words := _vendor_words(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "x = 'cuda'",
        "x = f'npu:{i}'",
        "x = 'cpu:gloo,cuda:nccl'",
        "torch.cuda.synchronize()",
        "tensor.is_cuda",
        "tensor.npu()",
        "import torch_npu",
        "from torch import cuda",
        "from torch.cuda import amp",
        "f(cuda=1)",
        "def f(npu): pass",
        "def is_npu(): pass",
        "{'hccl': 1}",
    ],
)
def test_the_search_for_device_names_finds(source):
    assert _vendor_words(source)


@pytest.mark.parametrize(
    "source",
    ["'''Such as \"cuda:1\".'''", "# cuda", "raise E('say cuda, or npu')", "x = 'canned'", "def f():\n '''cuda'''"],
)
def test_the_search_for_device_names_lets_prose_pass(source):
    assert _vendor_words(source) == []


def _imported(path: Path, modules: set[str]) -> set[str]:
    """Return what a file imports outside of its functions, also for its annotations only."""
    found: set[str] = set()
    left: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    for node in left:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in names}
        elif not isinstance(node, ast.FunctionDef | ast.Lambda):
            left += ast.iter_child_nodes(node)
    return found & modules


def test_no_file_of_the_core_imports_itself_through_others():
    root = Path(accelcore.__file__).parent
    files = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in root.rglob("*.py")
    }
    graph = {name: _imported(path, set(files)) for name, path in files.items()}
    assert graph["accelcore.backend"] >= {"accelcore.devices", "accelcore.training.trainer"}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files of a cycle
