"""Process groups: `init_process_group("nccl")`, and the option that names the backend."""

from __future__ import annotations

import re
from contextlib import suppress

import libcst as cst

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.options import are_read_in
from accelcore_lint.port.place import DEFAULT, UnplacedError
from accelcore_lint.port.project import OTHERS
from accelcore_lint.port.questions import guard_of
from accelcore_lint.port.rule import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.rules.availability import available
from accelcore_lint.port.rules.device_strings import DECLARED, whole
from accelcore_lint.port.syntax import argument, arguments, text_of
from accelcore_lint.port.vendors import GROUPS

_INIT = ("torch.distributed.init_process_group", "torch.distributed.distributed_c10d.init_process_group")
_SHARDED = ("torch.distributed.fsdp", "torch.distributed.fsdp.fully_sharded_data_parallel")
_BOUND = (*_INIT, *(f"{module}.FullyShardedDataParallel" for module in _SHARDED))
"""Functions with a `device_id`: torch refuses the CPU's, or one with an index."""

_ASKED = "a question for one vendor's process group: ask torch.distributed.is_backend_available for the one in use"
_CHOOSES = re.compile(rf"[\"']({'|'.join(GROUPS)}|gloo)[\"']|\binit_process_group\(")
_GROUP = re.compile(rf"[\"']({'|'.join(GROUPS)}|gloo|mpi)[\"']")
_SHOWS = re.compile(r"(\w+\.)*(print|log|info|debug|warn|warning|write)")
"""Names of functions that show what they get."""


def _is_group(node: cst.CSTNode, facts: Facts) -> bool:
    if isinstance(node, cst.Attribute):
        return facts.name(node) == "torch.distributed.Backend.NCCL"
    return isinstance(node, cst.SimpleString) and str(node.raw_value).lower() in GROUPS


def _decide_init(node: cst.SimpleStatementLine, facts: Facts) -> Rewrite | Left | None:
    """Join the job through the backend, if the script says no more than a launcher or its own ranks do."""
    if (
        facts.level is Level.TORCH
        or facts.place.is_apart(node)
        or len(node.body) != 1
        or not isinstance(node.body[0], cst.Expr)
    ):
        return None
    call = node.body[0].value
    if not isinstance(call, cst.Call) or facts.name(call.func) not in _INIT:
        return None
    given = arguments(call, "backend", "init_method", "timeout", "world_size", "rank")
    if given is None or not _is_group(given["backend"].value if "backend" in given else call, facts):
        return None
    address = given.get("init_method")
    fixed = address is None or isinstance(address.value, cst.SimpleString)
    if not fixed or ("rank" in given) != ("world_size" in given) or "destroy_process_group" in facts.attributes:
        return None
    parts = [
        f"{key}={text_of(given[key].value)}" for key in ("rank", "world_size", "init_method", "timeout") if key in given
    ]
    if address is not None and text_of(address.value).strip("\"'") == "env://":
        parts = [part for part in parts if not part.startswith("init_method")]
    if "rank" in given and not _rank_is_local(facts, given["rank"].value, node):
        return None
    new = cst.parse_expression(f"{facts.place.backend(node)}.join({', '.join(parts)})")
    return Rewrite(lambda updated: updated.with_changes(body=[cst.Expr(new)]), node.body)


def _rank_is_local(facts: Facts, rank: cst.BaseExpression, node: cst.CSTNode) -> bool:
    """Return whether a script's own ranks are all on one host, so that a rank is its number there."""
    function = facts.function_of(node)
    return function is not None and facts.spawned.get(function.name.value) == text_of(rank)


def _decide_name(node: cst.SimpleString | cst.Attribute, facts: Facts) -> Rewrite | Left | None:
    """Replace a backend's name by torch's default for the device."""
    if not _is_group(node, facts):
        return None
    parent = facts.parent(node)
    while isinstance(parent, cst.IfExp):
        parent = facts.parent(parent)
    if isinstance(parent, (cst.Expr, cst.Comparison, cst.ComparisonTarget)):
        return None
    call = facts.parent(parent) if isinstance(parent, cst.Arg) else None
    if isinstance(parent, cst.Arg) and isinstance(call, cst.Call):
        keyword = parent.keyword.value if parent.keyword else None
        name = facts.name(call.func) or ""
        first = call.args[0] is parent and keyword is None
        if (name in _INIT and first) or (name.startswith("torch.distributed.") and keyword == "backend"):
            return _default(facts, node, joins=True)
        options = [text_of(other.value).strip("\"'") for other in call.args if not other.keyword]
        is_option = isinstance(call.func, cst.Attribute) and call.func.attr.value == "add_argument"
        if is_option and keyword == "default" and any("backend" in option for option in options):
            if argument(call, "choices") is not None:
                return Left("the default of an option whose choices are process-group backends")
            return _default(facts, node) if are_read_in(facts, call) else Left(DECLARED)
    is_backend = (
        isinstance(parent, cst.Assign)
        and len(parent.targets) == 1
        and "backend" in text_of(parent.targets[0].target).lower()
    ) or (isinstance(parent, cst.Param) and "backend" in parent.name.value)
    if is_backend and (facts.is_library or facts.has_guard) and facts.is_default(node):
        return _decide_default(node, facts)
    if is_backend:
        return _default(facts, node)
    return Left("a process-group backend's name in a place where it is not certain what it is for")


def _decide_default(node: cst.SimpleString | cst.Attribute, facts: Facts) -> Rewrite | Left:
    """Replace the default of a parameter, which is set on import, unless its function knows some backends only."""
    function = next((outer for outer in facts.parents(node) if isinstance(outer, cst.FunctionDef)), None)
    if function is None or len(_GROUP.findall(text_of(function))) > 1:
        return Left(DEFAULT)
    device = facts.place.device(node).removeprefix("(").removesuffix(")")
    return _named(node, f"{facts.torch}.distributed.get_default_backend_for_device({device})", facts)


def _decide_question(node: cst.Call, facts: Facts) -> Left | None:
    """Ask for the backend that is used instead of "nccl" where that is chosen by it. A report keeps its question."""
    if facts.name(node.func) != "torch.distributed.is_nccl_available" or node.args:
        return None
    if any(map(_shows, facts.parents(node))):
        return None
    guard = guard_of(node, facts)
    if guard is None or not _CHOOSES.search(text_of(guard)):
        return Left(_ASKED, node.children)
    source = f"{facts.torch}.distributed.is_backend_available({_default_name(facts, node)})"
    return Left(_ASKED, node.children, retry=whole(node, source, facts.needs_torch), some=True)


def _shows(outer: cst.CSTNode) -> bool:
    return isinstance(outer, cst.Call) and _SHOWS.fullmatch(text_of(outer.func)) is not None


def _decide_id(node: cst.Arg, facts: Facts) -> Rewrite | None:
    """Give a process group or FSDP no `device_id` on the CPU, which they refuse."""
    call = facts.parent(node)
    if not isinstance(call, cst.Call) or facts.name(call.func) not in _BOUND:
        return None
    if node.keyword is None or node.keyword.value != "device_id" or isinstance(node.value, cst.IfExp):
        return None
    given = (text_of(node.value), *map(text_of, facts.values(node.value)))
    if "None" in given or any(map(OTHERS.search, given)) or facts.guards(node):
        return None
    is_current = facts.is_current(node.value)
    index = f"{facts.torch}.accelerator.current_device_index()" if is_current else "None"
    choice = cst.ensure_type(cst.parse_expression(f"{index} if {available(facts, node)} else None"), cst.IfExp)

    def build(updated: cst.Arg) -> cst.Arg:
        return updated.with_changes(value=choice if is_current else choice.with_changes(body=updated.value))

    return Rewrite(build, [node.value] if is_current else [], facts.needs_torch)


def _default(facts: Facts, node: cst.SimpleString | cst.Attribute, *, joins: bool = False) -> Rewrite:
    return _named(node, _default_name(facts, node, joins=joins), facts)


def _named(node: cst.SimpleString | cst.Attribute, source: str, facts: Facts) -> Rewrite:
    return Rewrite(whole(node, source).build, node.children, facts.needs_torch)


def _default_name(facts: Facts, node: cst.CSTNode, *, joins: bool = False) -> str:
    """Return the source of torch's default backend for the device, for the process that `joins` or for another one."""
    # The kind of device is the same in all processes. Without a check, no process uses a device by this question.
    device = f'{facts.torch}.accelerator.current_accelerator() or "cpu"'
    if joins or not ((facts.forking or "fork" in facts.uses_of) and facts.place.is_apart(node)):
        with suppress(UnplacedError):
            device = facts.place.device(node)
    return f"{facts.torch}.distributed.get_default_backend_for_device({device})"


PROCESS_GROUP = Rule(
    "process group",
    "joining a job",
    (cst.SimpleStatementLine,),
    _decide_init,
    (Example(Level.ROLES, 'torch.distributed.init_process_group("nccl", init_method="env://")', "accel.join()"),),
)

DEVICE_IDS = Rule(
    "device id",
    "`device_id` of a process group, and of FSDP",
    (cst.Arg,),
    _decide_id,
    (
        Example(
            Level.ROLES,
            "torch.distributed.init_process_group(device_id=torch.device('cuda', local_rank))",
            'torch.distributed.init_process_group(device_id=accel.device if accel.device.type != "cpu" else None)',
        ),
    ),
)

BACKEND_NAMES = Rule(
    "backend name",
    "names of process-group backends",
    (cst.SimpleString, cst.Attribute, cst.Call),
    lambda node, facts: (_decide_question if isinstance(node, cst.Call) else _decide_name)(node, facts),
    (
        Example(
            Level.ROLES,
            'backend = "nccl" if torch.distributed.is_nccl_available() else "gloo"',
            "backend = torch.distributed.get_default_backend_for_device(accel.device) if "
            "torch.distributed.is_backend_available("
            'torch.distributed.get_default_backend_for_device(accel.device)) else "gloo"',
        ),
        Example(
            Level.TORCH,
            'torch.distributed.init_process_group("nccl", rank=rank, world_size=n)',
            "torch.distributed.init_process_group("
            "torch.distributed.get_default_backend_for_device(device), rank=rank, world_size=n)",
        ),
        Example(
            Level.ROLES,
            'parser.add_argument("--backend", default="nccl")\nargs = parser.parse_args()',
            'parser.add_argument("--backend", default=torch.distributed.get_default_backend_for_device(accel.device))\n'
            "args = parser.parse_args()",
        ),
    ),
)
