"""What the objects of moves such as `x.cuda()` are: torch's, or of a class of the project with its own `cuda`."""

from __future__ import annotations

import re
from typing import cast

import libcst as cst

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.own_classes import has_silent_to, own_moves, returns_something, takes_arguments
from accelcore_lint.port.syntax import text_of
from accelcore_lint.port.vendors import DEVICES

_MAKES = re.compile(
    r"torch\.(nn\.(\w+\.)*([A-Z]\w*|functional\.\w+)|autograd\.Variable|tensor|as_tensor|from_numpy|(zeros|ones|rand|randn|empty|full)(_like)?"
    r"|arange|linspace|eye|randint|randperm|stack|cat|(Float|Long|Int|Byte|Bool|Double|Half|Short)?Tensor)$"
)
"""Functions and classes of torch that return a tensor or a module."""

_TAKES = re.compile(r"torch\.(autograd\.Variable|nn\.functional\.\w+)$")
"""Functions whose first argument is a tensor."""

_TENSORS = (
    *("float", "long", "int", "half", "double", "bool", "view", "reshape", "contiguous", "unsqueeze", "squeeze"),
    *("clone", "detach", "to", "cpu"),
)
"""Methods of tensors that return one."""

_WITH_MODULES = re.compile(
    r"\w*(torch|transformers)\w*|mm\w+|timm|monai|dgl\w*|diffusers|accelerate|peft|apex|kornia|fairseq|detectron2|clip"
    r"|open_clip|pretrainedmodels|ultralytics|lpips|speechbrain|espnet2?|pyro|skorch|ignite|lightning|fastai|catalyst"
    r"|spconv|MinkowskiEngine|einops|mamba_ssm|flash_attn|segment_anything|nflows|tinycudann|encoding|allennlp|flair"
    r"|deepspeed|learn2learn|higher"
)
"""Packages whose classes are modules, tensors or batches of torch, which have `to`."""

_OF_MODULES = (
    *("parameters", "named_parameters", "state_dict", "load_state_dict", "modules", "named_modules", "children"),
    *("eval", "zero_grad", "requires_grad_", "register_forward_hook", "forward", "size", "shape", "backward"),
    *_TENSORS,
)
"""Methods and attributes of modules and tensors."""


def is_of_stranger(moved: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether an object is of a class of another package that may define `cuda` and no `to`.

    Nothing else is assigned to its name, and the file uses it neither as a module nor as a tensor.
    """
    again = tuple(f"{text_of(moved)}.{method}(" for method in DEVICES)
    values = [moved] if isinstance(moved, cst.Call) else facts.values(moved)
    values = [value for value in values if not text_of(value).startswith(again)]
    if not values or not all(_is_made_by_stranger(value, facts) for value in values):
        return False
    name = re.escape(text_of(moved))
    if re.search(rf"(?<![\w.]){name}\.({'|'.join(_OF_MODULES)})\b", facts.code):
        return False
    return re.search(rf"(?<!\w)(DataParallel|DistributedDataParallel|DDP|Sequential)\(\s*{name}\b", facts.code) is None


def _is_made_by_stranger(value: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether a value is an object that a class of another package makes, which no file of the project is."""
    module, _, name = ((isinstance(value, cst.Call) and facts.name(value.func)) or "").rpartition(".")
    first = module.split(".")[0]
    known = not facts.known.modules or first in facts.known.modules or _WITH_MODULES.fullmatch(first)
    return bool(first) and name[:1].isupper() and not known


def is_own(moved: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether an object may be of a class of the project that defines `cuda` itself."""
    names = [moved, *facts.values(moved)]
    names = [name.func if isinstance(name, cst.Call) else name for name in names]
    return any(text_of(name).split(".")[-1] in facts.known.own_moves for name in names)


def loses_value(move: cst.Call, facts: Facts) -> bool:
    """Return whether the value of a move is used whose object may have a `to` of the project's that returns nothing."""
    moved = cst.ensure_type(move.func, cst.Attribute).value
    names = [name.func if isinstance(name, cst.Call) else name for name in (moved, *facts.values(moved))]
    silent = facts.known.silent_to | own_moves([facts.code], has_silent_to)
    return _is_used(move, facts) and any(text_of(name).split(".")[-1] in silent for name in names)


def is_torchs(move: cst.Call, facts: Facts) -> bool:
    """Return whether what is moved is certainly a tensor or a module, and not of a class that defines `cuda`."""
    moved = cst.ensure_type(move.func, cst.Attribute).value
    takes = facts.known.moves_take or takes_arguments(facts.code)
    returns = facts.known.moves_return or returns_something(facts.code)
    if (move.args and not takes) or (not returns and _is_used(move, facts)):
        return True
    return is_of_torch(moved, facts) or _becomes_operand(move, moved, facts)


def _becomes_operand(move: cst.Call, moved: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether a function of torch that takes tensors only gets what is moved, in the function around it.

    Nothing else is assigned to a name between the two: `x = x.cuda()`, `y = Variable(x)`.
    """
    function = facts.function_of(move)
    given = [call for call in facts.calls if call.args and _TAKES.match(facts.name(call.func) or "")]
    if any(call.args[0].value is move for call in given):
        return True
    name = text_of(moved)
    values = [value for value in facts.values(moved) if facts.function_of(value) is function]
    same = re.compile(rf"(Variable\()?{re.escape(name)}\.({'|'.join(DEVICES)}|to)\([^()]*\)\)?")
    return all(same.fullmatch(text_of(value)) for value in values) and any(
        text_of(call.args[0].value) == name and facts.function_of(call) is function for call in given
    )


def _is_used(move: cst.Call, facts: Facts) -> bool:
    """Return whether the value of a move is assigned, or is an operand: a method without `return` has none."""
    inner, outer = cast("cst.CSTNode", move), facts.parent(move)
    while isinstance(outer, (cst.Tuple, cst.Element)):
        inner, outer = outer, facts.parent(outer)
    return isinstance(outer, (cst.Assign, cst.Arg, cst.Attribute, cst.BinaryOperation, cst.Subscript)) and not (
        isinstance(outer, cst.Subscript) and inner is not outer.value
    )


def is_of_torch(node: cst.BaseExpression, facts: Facts, depth: int = 3, *, modules: bool = True) -> bool:
    """Return whether an expression is certainly a tensor of torch, or, if `modules`, one of its modules."""
    if isinstance(node, cst.Call):
        func = node.func
        if isinstance(func, cst.Attribute):  # what a method of a tensor returns, and has a `cuda`, is a tensor
            plain = modules and func.attr.value in _TENSORS
            if is_of_torch(func.value, facts, depth, modules=plain):
                return True
        is_module = modules and text_of(func).split(".")[-1] in facts.known.torch_modules
        return is_module or _MAKES.match(facts.name(func) or "") is not None
    if isinstance(node, cst.Name):
        others = " ".join(map("".join, re.findall(r"\bfor ([^\n]*?) in\b|\bas ([^\n:]*)", facts.code)))
        if re.search(rf"\b{node.value}\b", others):
            return False
        if depth and (last := _last_value(node, facts)) is not None:
            return is_of_torch(last, facts, depth - 1, modules=modules)
        if facts.is_given(node.value, node):
            return False
    again = tuple(f"{text_of(node)}.{method}(" for method in (*DEVICES, "to"))
    values = [value for value in facts.values(node) if not text_of(value).startswith(again)]
    return (
        bool(values) and bool(depth) and all(is_of_torch(value, facts, depth - 1, modules=modules) for value in values)
    )


def _last_value(node: cst.Name, facts: Facts) -> cst.BaseExpression | None:
    """Return what a statement above a name has assigned to it, if that is certainly the last one that did."""
    above = [value for value in facts.values(node) if facts.line(value) < facts.line(node)]
    last, around = max(above, key=facts.line, default=None), list(facts.parents(node))
    if last is None:
        return None
    block = next(each for each in facts.parents(last) if isinstance(each, (cst.IndentedBlock, cst.Module)))
    between = around[: around.index(block)] if block in around else [block]
    ends = (cst.For, cst.While, cst.With, cst.Try, cst.FunctionDef, cst.Lambda, cst.CompFor, cst.IndentedBlock)
    return None if any(isinstance(each, ends) for each in between) else last
