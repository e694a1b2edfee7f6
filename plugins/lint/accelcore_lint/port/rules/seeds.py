"""Seeds of the device's random numbers."""

from __future__ import annotations

import libcst as cst

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.model import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.removed import removed
from accelcore_lint.port.rules.statements import called
from accelcore_lint.port.tree import text_of

__all__ = ["SEEDS", "TORCH_SEED"]


def _decide(node: cst.SimpleStatementLine, facts: Facts) -> Rewrite | Left | None:
    """Remove a seed of the device that `torch.manual_seed` gives it anyway, or seed through the backend."""
    found = called(node, facts)
    if found is None or found[0] not in ("manual_seed", "manual_seed_all"):
        return None
    call = found[1]
    if len(call.args) != 1 or call.args[0].star:
        return Left("arguments of manual_seed that are not known")
    seed = text_of(call.args[0].value)
    function = facts.function_of(node)
    if any(
        facts.name(other.func) == "torch.manual_seed"
        and other.args
        and text_of(other.args[0].value) == seed
        and facts.function_of(other) is function
        and facts.line(other) < facts.line(call)
        and _runs_before(facts, other, node)
        for other in facts.seeds
    ):
        return Rewrite(removed, node.body)
    if facts.level is Level.TORCH or not facts.is_whole(call.args[0].value) or _seeds_differ(facts, seed):
        return Left("a seed of the device alone: torch.manual_seed(seed) seeds all devices, and the CPU")
    return _seeded(facts, node, seed)


def _decide_torch(node: cst.SimpleStatementLine, facts: Facts) -> Rewrite | None:
    """Seed through the backend where the script seeds torch, with a number that is certainly whole."""
    if facts.level is Level.TORCH or facts.has_engine or len(node.body) != 1 or not isinstance(node.body[0], cst.Expr):
        return None
    call = node.body[0].value
    if not isinstance(call, cst.Call) or facts.name(call.func) != "torch.manual_seed" or len(call.args) != 1:
        return None
    seed = call.args[0].value
    function = facts.function_of(node)
    in_worker = function is not None and "worker" in function.name.value and "main" not in function.name.value
    if in_worker or not facts.is_whole(seed) or _seeds_differ(facts, text_of(seed)):
        return None
    return _seeded(facts, node, text_of(seed))


def _seeded(facts: Facts, node: cst.SimpleStatementLine, seed: str) -> Rewrite:
    new = cst.parse_expression(f"{facts.place.backend(node)}.runtime.seed({seed})")
    return Rewrite(lambda updated: updated.with_changes(body=[cst.Expr(new)]), node.body)


def _runs_before(facts: Facts, other: cst.CSTNode, node: cst.CSTNode) -> bool:
    """Return whether the block of another call is one of the blocks around a node."""
    blocks = [outer for outer in facts.parents(other) if isinstance(outer, (cst.IndentedBlock, cst.Module))]
    return blocks[0] in list(facts.parents(node))


def _seeds_differ(facts: Facts, seed: str) -> bool:
    """Return whether the script seeds Python, NumPy or torch with other numbers, which the backend would overrule."""
    return any(text_of(call.args[0].value) != seed for call in facts.seeds if call.args)


SEEDS = Rule(
    "seed",
    "seeds of the device",
    (cst.SimpleStatementLine,),
    _decide,
    (
        Example(Level.TORCH, "torch.manual_seed(seed)\ntorch.cuda.manual_seed_all(seed)", "torch.manual_seed(seed)"),
        Example(Level.ROLES, "torch.cuda.manual_seed(0)", "accel.runtime.seed(0)"),
    ),
)

TORCH_SEED = Rule(
    "seed of torch",
    "seeds of torch, at level roles",
    (cst.SimpleStatementLine,),
    _decide_torch,
    (Example(Level.ROLES, "torch.manual_seed(1)", "accel.runtime.seed(1)"),),
    optional=True,
)
