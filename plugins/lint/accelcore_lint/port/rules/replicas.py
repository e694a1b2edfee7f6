"""Devices of replicas and barriers: `DistributedDataParallel(model, device_ids=[rank])`."""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

from accelcore_lint.port.device_names import index_source
from accelcore_lint.port.device_sources import device_source
from accelcore_lint.port.facts import Facts
from accelcore_lint.port.place import UnplacedError
from accelcore_lint.port.rule import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.syntax import argument, text_of

_DDP = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
_DATA_PARALLEL = (
    "torch.nn.DataParallel",
    "torch.nn.parallel.DataParallel",
    "torch.nn.parallel.data_parallel.DataParallel",
)
_ONE_EACH = "DataParallel drives several devices from one process: start one for each, and use DistributedDataParallel"
_DEVICES = ("device_ids", "output_device")


def _decide(node: cst.Call, facts: Facts) -> Rewrite | Left | None:
    if facts.name(node.func) in _DATA_PARALLEL:
        return Left(_ONE_EACH, inner=True)
    given = [arg for arg in node.args if arg.keyword is not None and arg.keyword.value in _DEVICES]
    if facts.name(node.func) not in (*_DDP, "torch.distributed.barrier"):
        is_known = text_of(node.func).endswith("DataParallel")  # by its name, and not torch's
        if not any(is_known or isinstance(arg.value, (cst.List, cst.Tuple)) for arg in given):
            return None
        if text_of(node.func).split(".")[-1] == "DataParallel":
            return Left(_ONE_EACH, inner=True)
        return Left("device_ids of a wrapper that is not known: None where there is no accelerator", inner=True)
    ids = argument(node, "device_ids")
    models = [arg for arg in node.args if arg.keyword is None or arg.keyword.value == "module"]
    if facts.name(node.func) not in _DDP:
        return _where_there_is_one(facts, node, given) if isinstance(ids, (cst.List, cst.Tuple)) else None
    if isinstance(ids, cst.IfExp) or (ids is not None and text_of(ids) == "None"):
        return None
    starred = any(arg.star for arg in node.args)
    if starred and isinstance(ids, (cst.List, cst.Tuple)):
        return _where_there_is_one(facts, node, given)
    if starred and ids is None:
        return (
            Left("starred arguments that may hold the devices of DistributedDataParallel")
            if len(node.args) > 1
            else None
        )
    if not starred and len(models) != 1:
        return Left("the devices of DistributedDataParallel, given by position") if len(node.args) > 1 else None
    if ids is None:
        return None
    if starred or not isinstance(ids, (cst.List, cst.Tuple)) or len(ids.elements) != 1:
        return Left("device_ids that may not be one device: None where there is no accelerator")
    index = ids.elements[0].value
    is_apart = facts.place.is_apart(node) and (facts.is_local_rank(index) or facts.is_from_elsewhere(index))
    if facts.level is Level.TORCH or facts.is_library or is_apart:
        return _where_there_is_one(facts, node, given)
    try:
        return _of_backend(facts, node, given, index)
    except UnplacedError:
        return _where_there_is_one(facts, node, given)


def _of_backend(facts: Facts, node: cst.Call, given: list[cst.Arg], index: cst.BaseExpression) -> Rewrite | Left:
    source = device_source(facts, node, index)
    own = text_of(index) in ("device", "args.device") or not (isinstance(index, cst.Integer) or facts.chooses_by(index))
    if not own and isinstance(source, Left) and isinstance(index, cst.Integer):
        return source
    if not own and (isinstance(source, Left) or not facts.is_own(index)):
        # The script chooses a device by this index elsewhere, and the model is there.
        return _where_there_is_one(facts, node, given)
    if _needs_wrapper(facts, node) or facts.place.is_apart(node) or any(map(_has_comment, given)):
        device = facts.place.device(node)
        return _replaced(node, given, f'[{device}] if {device}.type != "cpu" else None', facts)
    gone = [position for position, arg in enumerate(node.args) if arg in given]
    func = cst.parse_expression(f"{facts.place.backend(node)}.replicate")

    def build(updated: cst.Call) -> cst.Call:
        return updated.with_changes(func=func, args=_without(updated.args, gone))

    return Rewrite(build, [node.func, *given])


def _needs_wrapper(facts: Facts, node: cst.Call) -> bool:
    """Return whether a model must be wrapped also in a job of one rank: for `net.module`, or for names in its state."""
    made = facts.parent(node)
    names = [text_of(target.target) for target in made.targets] if isinstance(made, cst.Assign) else []
    saved = (rf"(?<![\w.]){re.escape(name)}\.(load_)?state_dict\(" for name in names)
    # Without a name it may be a part of a model, whose state has the name of the wrapper in its keys.
    return not names or "wrapper" in facts.uses_of or any(re.search(pattern, facts.code) for pattern in saved)


def _where_there_is_one(facts: Facts, node: cst.Call, given: list[cst.Arg]) -> Rewrite | Left:
    """Keep the devices where there is an accelerator. For models on the CPU, torch wants None."""
    available = f"{facts.torch}.accelerator.is_available()"
    return _replaced(node, given, f"{{}} if {available} else None", facts)


def _replaced(node: cst.Call, given: list[cst.Arg], form: str, facts: Facts) -> Rewrite | Left:
    positions = [position for position, arg in enumerate(node.args) if arg in given]
    if any(isinstance(arg.value, cst.IfExp) for arg in given):
        return Left("device_ids that are chosen by a condition")
    lists = {position: index_source(node.args[position].value) for position in positions}
    if any("cuda" in text or "npu" in text for text in lists.values()) and "{}" in form:
        return Left("device_ids that are read from a vendor's module")
    keep = next(position for position in positions if node.args[position].keyword.value == "device_ids")  # type: ignore[union-attr]
    gone = [position for position in positions if position != keep]

    def build(updated: cst.Call) -> cst.Call:
        value = cst.parse_expression(form.format(lists[keep]) if "{}" in form else form)
        args = [arg.with_changes(value=value) if at == keep else arg for at, arg in enumerate(updated.args)]
        return updated.with_changes(args=_without(args, gone))

    return Rewrite(build, given, facts.needs_torch)


def _has_comment(arg: cst.Arg) -> bool:
    """Return whether a comment stands behind the comma after an argument."""
    return "#" in cst.Module([]).code_for_node(arg.comma) if isinstance(arg.comma, cst.Comma) else False


def _without(args: Sequence[cst.Arg], gone: list[int]) -> list[cst.Arg]:
    """Return arguments without some. A comment behind one of these goes behind the argument before it."""
    kept: list[cst.Arg] = []
    for position, arg in enumerate(args):
        if position not in gone:
            kept.append(arg)
        elif _has_comment(arg) and kept and not _has_comment(kept[-1]):
            kept[-1] = kept[-1].with_changes(comma=arg.comma)
    last = args[-1]
    if _has_comment(kept[-1]):
        return kept
    kept[-1] = kept[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    return kept


REPLICAS = Rule(
    "replicas",
    "`DistributedDataParallel` with `device_ids`",
    (cst.Call,),
    _decide,
    (
        Example(
            Level.TORCH,
            "from torch.nn.parallel import DistributedDataParallel as DDP\nnet = DDP(model, device_ids=[rank])",
            "from torch.nn.parallel import DistributedDataParallel as DDP\n"
            "net = DDP(model, device_ids=[rank] if torch.accelerator.is_available() else None)",
        ),
        Example(
            Level.ROLES,
            "net = torch.nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])",
            "net = accel.replicate(model)",
        ),
        Example(
            Level.ROLES,
            "net = torch.nn.parallel.DistributedDataParallel(module=model, device_ids=[local_rank])",
            "net = accel.replicate(module=model)",
        ),
        Example(
            Level.ROLES,
            "torch.distributed.barrier(device_ids=[local_rank])",
            "torch.distributed.barrier(device_ids=[local_rank] if torch.accelerator.is_available() else None)",
        ),
    ),
)
