"""Seeds of the device's random numbers."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.model import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.removed import removed
from accelcore_lint.port.rules.device_strings import whole
from accelcore_lint.port.rules.statements import called
from accelcore_lint.port.syntax import text_of

_HARMLESS = re.compile(
    r"\s*($|#|[\w.]*(seed(_all)?|cudnn\.\w+|use_deterministic_algorithms|print|info)\b *[(=]|os\.environ\["
    r"|[\w.]+ *= *(torch\.device\([^()]*\)|[\"'][^\"']*[\"']|[\d.]+|True|False|None) *($|#)"
    r"|(if|elif|else|try|except)\b[^(]*:|(if|elif)\b.*\.(is_available|device_count)\(\).*:)"
)
"""Lines that draw no numbers on a device."""

_STATES = {"set_rng_state": 1, "seed": 0}
"""Other functions that the modules of all devices have, with their arguments."""


def _decide(node: cst.SimpleStatementLine, facts: Facts) -> Rewrite | Left | None:
    """Remove a seed of the device that `torch.manual_seed` gives it anyway, or seed the device alone."""
    found = called(node, facts)
    if found is None or found[0] not in ("manual_seed", "manual_seed_all", *_STATES):
        return None
    call = found[1]
    if found[0] in _STATES:
        known = len(call.args) == _STATES[found[0]] and not any(arg.star for arg in call.args)
        return _of_device(facts, node, call, found[0]) if known else None
    if len(call.args) != 1 or call.args[0].star:
        return Left("arguments of manual_seed that are not known")
    seed = text_of(call.args[0].value)
    function = facts.function_of(node)
    fixed = "(" not in seed.removeprefix("int(")  # another call may return another seed
    if fixed and any(
        facts.name(other.func) == "torch.manual_seed"
        and other.args
        and text_of(other.args[0].value) == seed
        and facts.function_of(other) is function
        and ((_runs_before(facts, other, node) and _is_fresh(facts, other, call)) or _seeds_next(facts, node, other))
        for other in facts.seeds
    ):
        return Rewrite(removed, node.body)
    if fixed and _is_repeated(facts, node, seed) and not (found[0] == "manual_seed_all" and _has_several(facts, node)):
        return Rewrite(removed, node.body)
    return _seeded_alone(facts, node, call, found[0])


def _is_repeated(facts: Facts, node: cst.SimpleStatementLine, seed: str) -> bool:
    """Return whether the line before gives the device the same seed, as `manual_seed` does before `manual_seed_all`."""
    block = facts.parent(node)
    lines = list(block.body) if isinstance(block, (cst.IndentedBlock, cst.Module)) else []
    before = lines[lines.index(node) - 1] if node in lines[1:] else None
    found = called(before, facts) if isinstance(before, cst.SimpleStatementLine) else None
    return (
        found is not None and found[0].startswith("manual_seed") and [text_of(arg) for arg in found[1].args] == [seed]
    )


def _has_several(facts: Facts, node: cst.CSTNode) -> bool:
    """Return whether the process may use other devices than the one that is current at a line."""
    is_replicated = bool({"DataParallel", "data_parallel"} & (facts.identifiers | facts.attributes))
    return is_replicated or not facts.place.can_choose(node)


def _seeded_alone(facts: Facts, node: cst.SimpleStatementLine, call: cst.Call, function: str) -> Rewrite | Left:
    """Seed the device, and not the CPU, by the module that torch has for the device."""
    if function == "manual_seed_all" and _has_several(facts, node):
        return Left("a seed of all devices alone: torch.manual_seed(seed) seeds them, and the CPU")
    return _of_device(facts, node, call, "manual_seed")


def _of_device(facts: Facts, node: cst.SimpleStatementLine, call: cst.Call, function: str) -> Rewrite:
    """Call a function of the module that torch has for the device, where there is one."""
    of = "" if facts.level is Level.TORCH else facts.place.device(node)
    test = f'{of}.type != "cpu"' if of else f"{facts.torch}.accelerator.is_available()"
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


def _decide_state(node: cst.Call, facts: Facts) -> Rewrite | None:
    """Read the state of the device's generator where there is a device."""
    if facts.name(node.func) != "torch.cuda.get_rng_state" or node.args or not facts.guards(node):
        return None
    of = "" if facts.level is Level.TORCH else facts.place.device(node)
    return whole(node, f"{facts.torch}.get_device_module({of}).get_rng_state()", facts.needs_torch)


def _runs_before(facts: Facts, other: cst.CSTNode, node: cst.CSTNode) -> bool:
    """Return whether the block of another call is one of the blocks around a node."""
    blocks = [outer for outer in facts.parents(other) if isinstance(outer, (cst.IndentedBlock, cst.Module))]
    return blocks[0] in list(facts.parents(node))


def _is_fresh(facts: Facts, other: cst.CSTNode, call: cst.CSTNode) -> bool:
    """Return whether nothing between two calls can draw numbers on the device, which the later one would take back."""
    first, last = facts.line(other), facts.line(call)
    between = facts.code.splitlines()[first : last - 1]
    return first <= last and all(_HARMLESS.match(line) for line in between)


def _seeds_next(facts: Facts, node: cst.SimpleStatementLine, other: cst.Call) -> bool:
    """Return whether a later call is in the same block, with nothing but seeds and settings of cuDNN in between."""
    block = facts.parent(node)
    lines = list(block.body) if isinstance(block, (cst.IndentedBlock, cst.Module)) else []
    for line in lines[lines.index(node) + 1 :] if node in lines else ():
        if not re.match(r"[\w.]*(seed(_all)?\(|cudnn\.\w+ = )", text_of(line.with_changes(leading_lines=[]))):
            return False
        if other in list(_calls_of(line)):
            return True
    return False


def _calls_of(line: cst.BaseStatement | cst.BaseSmallStatement) -> list[cst.CSTNode]:
    parts = line.body if isinstance(line, cst.SimpleStatementLine) else ()
    return [part.value for part in parts if isinstance(part, cst.Expr)]


SEEDS = Rule(
    "seed",
    "seeds of the device",
    (cst.SimpleStatementLine,),
    _decide,
    (
        Example(Level.TORCH, "torch.manual_seed(seed)\ntorch.cuda.manual_seed_all(seed)", "torch.manual_seed(seed)"),
        Example(
            Level.ROLES,
            "torch.cuda.manual_seed(config.seed)",
            'if accel.device.type != "cpu":\n    torch.get_device_module(accel.device).manual_seed(config.seed)',
        ),
        Example(
            Level.TORCH,
            "torch.cuda.manual_seed_all(seed)\nnumpy.random.seed(seed)\ntorch.manual_seed(seed)",
            "numpy.random.seed(seed)\ntorch.manual_seed(seed)",
        ),
    ),
)

STATES = Rule(
    "random state",
    "the state of the device's generator, where there is a device",
    (cst.Call,),
    _decide_state,
    (
        Example(
            Level.ROLES,
            "if torch.cuda.is_available():\n    state = torch.cuda.get_rng_state()",
            'if accel.device.type != "cpu":\n    state = torch.get_device_module(accel.device).get_rng_state()',
        ),
    ),
)
