"""Changes of a model after its optimizer was made, where the optimizer keeps the old parameters or state."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.names import Function
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, last_name
from accelcore_lint.vendors import DEVICES

_SHARDS = ("torch.distributed.fsdp.fully_shard", "torch.distributed._composable.fsdp.fully_shard")
_WRAPS = ("torch.distributed.fsdp.FullyShardedDataParallel", "torch.distributed.fsdp.FSDP")
_STATE_AT_ONCE = "torch.optim.Adagrad"  # the other classes make their state in the first step


def _check(script: Script) -> Iterator[Mark]:
    for body in (script.tree, *script.functions()):
        yield from _in_body(script, body)


def _in_body(script: Script, body: ast.Module | Function) -> Iterator[Mark]:
    """Follow the statements of one block, in order: a branch may not be taken."""
    optimizers: dict[str, tuple[str, str]] = {}  # the name of the optimizer -> its class, and the model
    loaded: set[str] = set()
    for statement in body.body:
        value = getattr(statement, "value", None)
        if not isinstance(statement, ast.Assign | ast.Expr) or not isinstance(value, ast.Call):
            continue
        name = script.names.resolve(value.func)
        model = _optimized(value)
        if isinstance(statement, ast.Assign) and model and name.startswith("torch.optim."):
            optimizers[ast.unparse(statement.targets[0])] = (name, model)
            continue
        if last_name(value.func) == "load_state_dict" and isinstance(value.func, ast.Attribute):
            loaded.add(ast.unparse(value.func.value))
        for optimizer, (kind, trained) in optimizers.items():
            yield from _late(value, name, trained, kind=kind, optimizer=optimizer, loaded=optimizer in loaded)


def _late(call: ast.Call, name: str, model: str, *, kind: str, optimizer: str, loaded: bool) -> Iterator[Mark]:
    before = f"Do it before {optimizer} is made; accel.trainer() keeps the order."
    if name in (*_SHARDS, *_WRAPS) and call.args and ast.unparse(call.args[0]) == model:
        yield Mark(call, f"{optimizer} was made before, and holds parameters that are not trained any more.", before)
        return
    method = call.func
    if not isinstance(method, ast.Attribute) or ast.unparse(method.value) != model:
        return
    if method.attr in {"to", *DEVICES} and (kind == _STATE_AT_ONCE or loaded):
        state = "loaded" if loaded else "made"
        yield Mark(call, f"The state of {optimizer} was {state} before, and stays on the device where it is.", before)


def _optimized(call: ast.Call) -> str:
    """Return the model whose parameters are the first argument of a call, or ''."""
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Call) and last_name(first.func) == "parameters" and isinstance(first.func, ast.Attribute):
        return ast.unparse(first.func.value)
    return ""


RULE = Rule(
    code="ACC308",
    name="late-change",
    about="A model that is sharded after its optimizer was made: the optimizer holds the old parameters, and moves "
    "no weight, without an error. A move to the device after Adagrad was made, or after an optimizer loaded its "
    "state, leaves that state behind. Where a move does no harm, as with most optimizers of torch before the first "
    "step, nothing is found.",
    check=_check,
    found="""
        import torch
        from torch.distributed.fsdp import fully_shard

        def main(model):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            fully_shard(model)
            return optimizer
    """,
    clean="""
        import torch

        def main(model, device):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            model.to(device)
            return optimizer
    """,
)
