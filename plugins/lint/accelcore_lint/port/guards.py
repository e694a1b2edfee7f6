"""Guards: an `if`, a loop or a decorator, with what it tests, what it runs, and the names that this sets."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import cast

import libcst as cst

from accelcore_lint.port.syntax import argument, text_of
from accelcore_lint.port.uses import STOPS
from accelcore_lint.port.walk import find

Test = cst.FunctionDef | cst.ClassDef
"""What a decorator such as `pytest.mark.skipif` may skip."""

Guard = cst.If | cst.IfExp | cst.For | cst.BaseComp | cst.BooleanOperation | Test
GUARDS = (cst.If, cst.IfExp, cst.For, cst.BaseComp, cst.BooleanOperation)

_OFF = re.compile(r"[\w.]+?(?:\.|\[[\"'])(\w+)(?:[\"']\])? *= *False\b.*", re.DOTALL)
"""A line that turns a flag of the script off, as `config["use_cuda"] = False`."""

_CHOSEN_FLAG = re.compile(r"([\w.]+) *= *(?:True|False|0|1)(?: *#.*)?")

_FOREIGN = re.compile(
    r"\bCUDA[A-Z_]\w+|\bnvcc\b|WITH_CUDA|gpu_hist|(?i:faiss\.\w*gpu|spacy\.\w+_gpu|tensorrt|pycuda|pynvml|nvidia|cupy|triton|flash_attn|bitsandbytes)"
    r"|(Activity|Device|Kind|Type)\w*\.(CUDA|GPU)\b|\bDataListLoader\b|\.gpu\.\w+\("
    r"|[\"'][^\"'\n]*(?:cuda[^\"'\n]*\.(?:so|dll|cu|cpp)\b|\bcu\d{2,3}\b|\bCUDA:\d)|[\"']_cuda[\"']"
    r"|(,|(?<!type)\(|(?<![=!])=)\s*[\"']torch\.[A-Z]\w*Tensor[\"']"
    r"|(?m:^)\s*(from|import)\s[^\n]*((?<!torch)_(gpu|cuda|npu)\b|\bnpu_)|\btorch\.ops\.(cuda|npu)\b|\bnpu-smi\b"
    r"|(?<![\w.])npu_\w+\(|\w(?<!\bto)_npu\("
)
"""Words of a vendor's tools beside torch, which no other device has, and members of an enum such as `Device.CUDA`.
Also imports such as `from nms.nms_gpu import nms_gpu`, and functions that a module `gpu` beside one for the CPU has.
And a type of the CPU's tensors that a function gets by its name: another file has one vendor's as the default. And
names of compiled files and builds, such as `"cu118"`.

PyTorch Geometric's DataListLoader is for its own DataParallel, which knows CUDA only.
"""

_GPU = re.compile(r"[\"']gpu[\"']|[\w.]+\.(CUDA|GPU)")
"""The name by which other packages, such as DALI and Lightning, choose a vendor's device, and members of an enum."""

_EVERYWHERE = re.compile(r"pin_memory|non_blocking|\bfused\b|^\w+ = [\w.]+\.(get_device\(\)|device)$")
_CHOSEN = re.compile(r"torch\.(amp\.)?autocast\(|dict\(fused=True\)$|\{.fused.: True\}$")
_SKIP = re.compile(r"(.*\.)?(skip|skipTest)\(|raise (.*\.)?SkipTest\b")
"""Statements that end a test without a failure."""

_ERRORS = re.compile(r"\b(BaseException|Exception|RuntimeError|AssertionError)\b")
_NEVER_FAILS = re.compile(r"[\w.]+(\.(is_available|device_count|is_bf16_supported)\(\))?")
"""Names, and questions for devices that only count them."""

_NONE = re.compile(r"(?m)(=|\breturn) *(False|None|0|[\"']cpu[\"']|torch\.device\([\"']cpu[\"']\)) *($|#)")
"""A line for a script that found no device."""


_EMPTY = ("None", "{}", "[]", "()", "dict()", "list()")
"""Answers of a function that have nothing in them."""


def body_of(guard: Guard) -> cst.CSTNode:
    """Return what runs if the guard allows it."""
    if isinstance(guard, cst.BooleanOperation):
        return guard.right
    if isinstance(guard, cst.BaseComp):
        return guard.value if isinstance(guard, cst.DictComp) else cast("cst.BaseSimpleComp", guard).elt
    return guard.body


def has_blocks(body: cst.CSTNode) -> bool:
    """Return whether a branch has further conditions or loops."""
    lines = body.body if isinstance(body, cst.IndentedBlock) else ()
    return not all(isinstance(line, cst.SimpleStatementLine) for line in lines)


def tests_of(node: cst.CSTNode) -> list[cst.BaseExpression]:
    """Return the conditions under which something runs: of an `if`, or the decorators that may skip a test."""
    if isinstance(node, (cst.If, cst.IfExp)):
        return [node.test]
    made = node.decorators if isinstance(node, (cst.FunctionDef, cst.ClassDef)) else ()
    names = (cst.Name, cst.Attribute)
    return [each.decorator for each in made if "skip" in text_of(each) or isinstance(each.decorator, names)]


def names_in(node: cst.CSTNode) -> set[str]:
    """Return all names in a node."""
    return {name.value for name in find(node, cst.Name)}


def last_of(guard: Guard | None) -> cst.BaseSmallStatement | None:
    """Return the last statement that an `if` guards; None if that has a block of its own, or it is no `if`."""
    body: cst.CSTNode | None = guard.body if isinstance(guard, cst.If) else None
    body = body.body[-1] if isinstance(body, cst.IndentedBlock) and body.body else body
    lines = body.body if isinstance(body, (cst.SimpleStatementLine, cst.SimpleStatementSuite)) else ()
    return lines[-1] if lines else None


def end_of(guard: Guard, parent: Callable[[cst.CSTNode], cst.CSTNode | None]) -> cst.CSTNode:
    """Return the node after which it is known what a guard guards: itself, or its block if it returns.

    After `if not torch.cuda.is_available(): return` the rest of the block only runs on the vendor's devices. So
    does the rest of a test after a skip.
    """
    last = last_of(guard)
    returns = last is not None and (isinstance(last, cst.Return) or _SKIP.match(text_of(last)) is not None)
    block = parent(guard)
    is_early = returns and isinstance(guard, cst.If) and guard.orelse is None and "not " in text_of(guard.test)
    return block if is_early and isinstance(block, (cst.IndentedBlock, cst.Module)) else guard


def lacks_answer(guard: Guard | None, function: cst.FunctionDef | None, calls: Iterable[cst.Call]) -> bool:
    """Return whether a function returns nothing, or an empty container, for one answer, and the file uses that."""
    if function is None or not isinstance(guard, cst.If):
        return False
    last, inside = last_of(guard), find(guard.body, cst.Return)
    answers = [each for each in find(function, cst.Return) if not _is_empty(each)]
    truths = all(each.value is not None and text_of(each.value) in ("True", "False") for each in answers)
    lacks = isinstance(last, cst.Return) and _is_empty(last)
    lacks = lacks or (not truths and not set(answers) - set(inside))
    return lacks and bool(answers) and any(text_of(call.func) == function.name.value for call in calls)


def _is_empty(answer: cst.Return) -> bool:
    return answer.value is None or text_of(answer.value) in _EMPTY


def set_in(guard: Guard) -> set[str]:
    """Return the names that what an `if` guards assigns, and that are not set if it does not run."""
    if isinstance(guard, Test | cst.BaseComp | cst.BooleanOperation):
        return set()
    return _assigned(guard.body) - (_assigned(guard.orelse) if guard.orelse is not None else set())


def empty_in(guard: Guard, parent: Callable[[cst.CSTNode], cst.CSTNode | None]) -> set[str]:
    """Return the names to which a choice assigns nothing if its condition is false, as `x = f() if found else None`."""
    holder = parent(guard) if isinstance(guard, cst.IfExp) and text_of(guard.orelse) in _EMPTY else None
    return {text_of(each.target) for each in holder.targets} if isinstance(holder, cst.Assign) else set()


def turned_off(guard: Guard | None, code: str) -> str:
    """Return the flag that an `if` turns off, by the name by which the file asks it elsewhere; "" if none."""
    off = _OFF.fullmatch(text_of(guard.body).strip()) if isinstance(guard, cst.If) and guard.orelse is None else None
    asked = re.findall(rf"\b\w+\.{off[1]}\b(?! *[(.=])", code) if off else []
    return next((name for name in asked if name not in text_of(cst.ensure_type(guard, cst.If).test)), "")


def flag_in(guard: Guard | None) -> str:
    """Return the flag that is all that an `if` sets, as `use_cuda = 1` and otherwise `use_cuda = 0`; "" if none."""
    last = guard.orelse if isinstance(guard, cst.If) else None
    if not isinstance(guard, cst.If) or not isinstance(last, cst.Else):
        return ""
    found = [_CHOSEN_FLAG.fullmatch(text_of(branch.body)) for branch in (guard, last)]
    names = {each[1] if each else "" for each in found}
    return names.pop() if len(names) == 1 else ""


def is_truth(node: cst.CSTNode) -> bool:
    """Return whether a choice only says whether its condition holds: `True if cuda else False`."""
    return isinstance(node, cst.IfExp) and {text_of(node.body), text_of(node.orelse)} in ({"True", "False"}, {"1", "0"})


def _assigned(node: cst.CSTNode) -> set[str]:
    made = (each.target for each in find(node, cst.AssignTarget))
    return {text_of(target) for target in made if isinstance(target, (cst.Name, cst.Attribute))}


def is_foreign(test: cst.BaseExpression, guard: Guard, extensions: Collection[str]) -> bool:
    """Return whether a condition decides about a vendor's tools beside torch, such as compiled `extensions`."""
    body = body_of(guard)
    other = guard.orelse if isinstance(guard, cst.If | cst.IfExp) else None
    parts = [test, body, *([other] if other is not None else [])]
    named = isinstance(body, cst.BaseExpression) and _GPU.fullmatch(text_of(body))
    used = any(names_in(part) & set(extensions) or _FOREIGN.search(text_of(part)) for part in parts)
    return bool(named) or used


def is_portable(node: cst.CSTNode, is_whole: Callable[[cst.BaseExpression], bool]) -> bool:
    """Return whether an `if` only guards what every accelerator has: copies, autocast, fused steps, numbers."""
    if isinstance(node, cst.IfExp):
        return (is_whole(node.body) and is_whole(node.orelse)) or _CHOSEN.match(text_of(node.body)) is not None
    if not isinstance(node, cst.If):
        return False
    lines = node.body.body if isinstance(node.body, cst.IndentedBlock) else ()
    return bool(lines) and all(_EVERYWHERE.search(text_of(line)) for line in lines)


def is_further(index: cst.BaseExpression | None) -> bool:
    """Return whether an index is a number that a host with one device does not have."""
    return isinstance(index, cst.Integer) and text_of(index) != "0"


def is_below_any(node: cst.CSTNode, parents: Callable[[cst.CSTNode], Iterator[cst.CSTNode]]) -> bool:
    """Return whether a node only runs where there is a device, by a condition that does not ask how many."""
    inner = node
    for outer in parents(node):
        if isinstance(outer, cst.FunctionDef):
            return False
        if isinstance(outer, (cst.If, cst.IfExp)) and inner is not outer.test and outer.orelse is not None:
            test = text_of(outer.test)
            if "cuda.is_available(" in test and "device_count" not in test:
                return True
        inner = outer
    return False


def passes_on(node: cst.CSTNode) -> bool:
    """Return whether a node is a call such as `pytest.mark.skipif(condition)` or `range(number)`."""
    return isinstance(node, cst.Call) and ("skip" in (name := text_of(node.func)) or name == "range")


def forks_cudas(node: cst.CSTNode, parents: Callable[[cst.CSTNode], Iterator[cst.CSTNode]]) -> bool:
    """Return whether a node is one of the devices of `torch.random.fork_rng`, which takes them for CUDA's."""
    calls = (outer for outer in parents(node) if isinstance(outer, cst.Call))
    return any(
        text_of(call.func).split(".")[-1] == "fork_rng" and argument(call, "device_type") is None for call in calls
    )


def is_tried(node: cst.CSTNode, parents: Callable[[cst.CSTNode], Iterator[cst.CSTNode]]) -> bool:
    """Return whether a `try` asks by a use of the device whether there is one, and takes the CPU if it fails."""
    if _NEVER_FAILS.fullmatch(text_of(node)):
        return False
    inner = node
    for outer in parents(node):
        if isinstance(outer, cst.Try) and inner is outer.body:
            return any(map(_takes_cpu, outer.handlers))
        inner = outer
    return False


def _takes_cpu(handler: cst.ExceptHandler) -> bool:
    is_broad = handler.type is None or _ERRORS.search(text_of(handler.type)) is not None
    body = text_of(handler.body)
    return is_broad and _NONE.search(body) is not None and not (STOPS.search(body) or "memory" in body)
