"""Seeds of the device's random numbers."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.compiled import is_function
from accelcore_lint.port.facts import Facts
from accelcore_lint.port.removed import removed, removed_suite
from accelcore_lint.port.rule import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.rules.device_calls import called
from accelcore_lint.port.syntax import text_of
from accelcore_lint.port.walk import find

_HARMLESS = re.compile(
    r"\s*($|#|[\w.]*(seed(_all)?|cudnn\.\w+|use_deterministic_algorithms|set_device|print|info)\b *[(=]|os\.environ\["
    r"|[\w.]+ *= *(torch\.device\([^()]*\)|[\"'][^\"']*[\"']|[\d.]+|True|False|None) *($|#)"
    r"|(if|elif|else|try|except)\b[^(]*:\s*($|#)|(if|elif)\b.*\.(is_available|device_count)\(\).*:\s*($|#))"
)
"""Lines that draw no numbers on a device, and heads of blocks."""

_HEAD = re.compile(r"\s*(if|elif|else)\b([^(:]|\.(is_available|device_count)\(\))*:(?=\s*[^\s#])")
"""What stands before the statement in `if test: statement`."""

_CHOICE = re.compile(r"\s*[\w.]+ *= *[^#]*\btorch\.device\(")
_CALLED = re.compile(r"([\w.]*\w)\(")
_ASKED = {"torch.device", "torch.cuda.is_available", "torch.cuda.device_count", "str", "int"}
"""Functions that a choice of a device may call."""

DRAWS_AGAIN = (
    "the state of one vendor's random numbers, by which this function draws the same again: keep that of the CPU, too"
)
_STATE_OF_CPU = re.compile(r"(?<!cuda\.)(?<!npu\.)\bget_rng_state\(")

_STATES = {"set_rng_state": 1, "seed": 0}
"""Other functions that the modules of all devices have, with their arguments."""

Line = cst.SimpleStatementLine | cst.SimpleStatementSuite
"""A line, or what follows the colon in `if test: statement`."""


def _decide(node: Line, facts: Facts) -> Rewrite | Left | None:
    """Remove a seed of the device that `torch.manual_seed` gives it anyway, or seed the device alone."""
    if isinstance(node, cst.SimpleStatementSuite):
        return Rewrite(removed_suite, node.body) if _repeats(node, facts) else None
    if len(node.body) > 1:
        return _decide_line(node, facts)
    found = called(node, facts)
    if found is None or found[0] not in ("manual_seed", "manual_seed_all", *_STATES):
        return None
    call = found[1]
    if found[0] in _STATES:
        if draws_again(node, facts):
            return Left(DRAWS_AGAIN)
        known = len(call.args) == _STATES[found[0]] and not any(arg.star for arg in call.args)
        return _of_device(facts, node, call, found[0]) if known else None
    if len(call.args) != 1 or call.args[0].star:
        return Left("arguments of manual_seed that are not known")
    return Rewrite(removed, node.body) if _repeats(node, facts) else _seeded_alone(facts, node, call, found[0])


def draws_again(node: cst.CSTNode, facts: Facts) -> bool:
    """Return whether a `torch.autograd.Function` draws the same numbers twice, and would not do so on the CPU."""
    around = (outer for outer in facts.parents(node) if isinstance(outer, cst.ClassDef))
    is_left = not facts.guards(node) and _STATE_OF_CPU.search(facts.code) is None
    return is_left and any(map(is_function, around))


def _repeats(node: Line, facts: Facts) -> bool:
    """Return whether a line seeds the device as `torch.manual_seed` does beside it."""
    function, call = called(node, facts) or ("", None)
    if call is None or function not in ("manual_seed", "manual_seed_all") or len(call.args) != 1:
        return False
    seed = text_of(call.args[0].value)
    fixed = "(" not in seed.removeprefix("int(")  # another call may return another seed
    return fixed and any(
        bool(other.args)
        and text_of(other.args[0].value) == seed
        and facts.function_of(other) is facts.function_of(node)
        and _runs_with(facts, other, node)
        and _is_fresh(facts, other, call)
        for other in facts.seeds
    )


def _decide_line(node: cst.SimpleStatementLine, facts: Facts) -> Rewrite | None:
    """Remove the seeds of the device from a line of several statements that also calls `torch.manual_seed`."""
    calls = [part.value if isinstance(part, cst.Expr) else None for part in node.body]
    seeds = [(call, text_of(call.args[0].value)) for call in facts.seeds if call in calls and len(call.args) == 1]
    texts = {seed for _, seed in seeds if "(" not in seed}
    gone = [
        at
        for at, call in enumerate(calls)
        if isinstance(call, cst.Call)
        and (facts.name(call.func) or "").startswith("torch.cuda.")
        and (facts.name(call.func) or "").endswith((".manual_seed", ".manual_seed_all"))
        and len(call.args) == 1
        and text_of(call.args[0].value) in texts
    ]
    if not gone or not all(_HARMLESS.match(text_of(part)) for part in node.body):
        return None

    def build(updated: cst.SimpleStatementLine) -> cst.BaseStatement:
        kept = [part for at, part in enumerate(updated.body) if at not in gone]
        return updated.with_changes(body=[*kept[:-1], kept[-1].with_changes(semicolon=cst.MaybeSentinel.DEFAULT)])

    return Rewrite(build, [node.body[at] for at in gone])


def _has_several(facts: Facts, node: cst.CSTNode) -> bool:
    """Return whether the process may use other devices than the one that is current at a line."""
    is_replicated = bool({"DataParallel", "data_parallel"} & (facts.identifiers | facts.attributes))
    return is_replicated or not facts.place.can_choose(node)


def _seeded_alone(facts: Facts, node: cst.SimpleStatementLine, call: cst.Call, function: str) -> Rewrite | Left:
    """Seed the device, and not the CPU, by the module that torch has for the device."""
    if function == "manual_seed_all" and _has_several(facts, node):
        return Left("a seed of all devices: torch.manual_seed(seed) seeds them, and the CPU")
    return _of_device(facts, node, call, "manual_seed")


def _of_device(facts: Facts, node: cst.SimpleStatementLine, call: cst.Call, function: str) -> Rewrite:
    """Call a function of the module that torch has for the device, where there is one."""
    of = "" if facts.level is Level.TORCH else facts.place.device(node)
    test = f'{of}.type != "cpu"' if of else f"{facts.torch}.accelerator.is_available()"
    facts.place.check_question(node)
    of = "" if facts.guards(node) else of  # a question that stays may be true where the backend's device is the CPU
    func = cst.parse_expression(f"{facts.torch}.get_device_module({of}).{function}")

    def build(updated: cst.SimpleStatementLine) -> cst.BaseStatement:
        seeds = cst.Expr(
            cst.ensure_type(cst.ensure_type(updated.body[0], cst.Expr).value, cst.Call).with_changes(func=func)
        )
        if facts.guards(node):
            return updated.with_changes(body=[seeds])
        inner = updated.with_changes(body=[seeds], leading_lines=[])
        return cst.If(cst.parse_expression(test), cst.IndentedBlock([inner]), leading_lines=updated.leading_lines)

    return Rewrite(build, [call.func], facts.needs_torch)


def _runs_with(facts: Facts, other: cst.CSTNode, node: cst.CSTNode) -> bool:
    """Return whether the block of another call is one of the blocks around a node: it runs whenever the node does."""
    blocks = [outer for outer in facts.parents(other) if isinstance(outer, (cst.IndentedBlock, cst.Module))]
    return blocks[0] in list(facts.parents(node))


def _is_fresh(facts: Facts, other: cst.CSTNode, call: cst.CSTNode) -> bool:
    """Return whether nothing between two calls, in either order, can draw numbers on the device."""
    first, last = sorted((facts.line(other), facts.line(call)))
    lines = facts.code.splitlines()
    statements = find(facts.module, cst.BaseStatement)  # type: ignore[type-abstract]  # it only asks isinstance
    between = (each for each in statements if first < facts.line(each) < last)
    # Of a block, the head: its statements are asked apart. Any other statement may be written over several lines.
    texts = (
        text_of(each.with_changes(leading_lines=[]))
        if isinstance(each, cst.SimpleStatementLine)
        else lines[facts.line(each) - 1]
        for each in between
    )
    parts = (part for text in texts for part in _HEAD.sub("", text, count=1).split(";"))
    return all(_HARMLESS.match(part) or _chooses_device(part) for part in parts)


def _chooses_device(line: str) -> bool:
    """Return whether a statement assigns a choice of a device, and does nothing else."""
    return _CHOICE.match(line) is not None and set(_CALLED.findall(line)) <= _ASKED


SEEDS = Rule(
    "seed",
    "seeds of the device",
    (cst.SimpleStatementLine, cst.SimpleStatementSuite),
    _decide,
    (
        Example(Level.TORCH, "torch.manual_seed(seed)\ntorch.cuda.manual_seed_all(seed)", "torch.manual_seed(seed)"),
        Example(
            Level.ROLES,
            "torch.manual_seed(n)\nif args.cuda or args.mixed: torch.cuda.manual_seed(n)",
            "torch.manual_seed(n)",
        ),
        Example(
            Level.TORCH,
            "torch.random.manual_seed(seed)\ntorch.cuda.manual_seed_all(seed)",
            "torch.random.manual_seed(seed)",
        ),
        Example(
            Level.ROLES,
            "torch.cuda.manual_seed(config.seed)",
            'if accel.device.type != "cpu":\n    torch.get_device_module(accel.device).manual_seed(config.seed)',
        ),
    ),
)
