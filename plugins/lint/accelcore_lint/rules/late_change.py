"""Changes of a model after its optimizer was made, where the optimizer keeps the old parameters or state."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from accelcore_lint.names import Function
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, last_name
from accelcore_lint.vendors import DEVICES

_SHARDS = ("torch.distributed.fsdp.fully_shard", "torch.distributed._composable.fsdp.fully_shard")
_WRAPS = ("torch.distributed.fsdp.FullyShardedDataParallel", "torch.distributed.fsdp.FSDP")
_STATE_AT_ONCE = "torch.optim.Adagrad"  # the other classes make their state in the first step

_NAMES = re.compile(r"[A-Za-z_][\w.]*")


def _check(script: Script) -> Iterator[Mark]:
    for body in (script.tree, *script.functions()):
        yield from _in_body(script, body)


def _in_body(script: Script, body: ast.Module | Function) -> Iterator[Mark]:
    """Follow the statements of one block, in order: a branch may not be taken."""
    optimizers: dict[str, tuple[str, str]] = {}  # the name of the optimizer -> its class, and the model
    states: dict[str, int] = {}  # the name of the optimizer -> the statement that made its state, or loaded one
    loaded: set[str] = set()
    places: dict[str, tuple[str, int]] = {}  # the model -> where it was moved, and in which statement
    for number, statement in enumerate(body.body):
        value = getattr(statement, "value", None)
        if not isinstance(statement, ast.Assign | ast.Expr) or not isinstance(value, ast.Call):
            _moved(statement, None, number, places)
            continue
        name = script.names.resolve(value.func)
        model = _optimized(value)
        if isinstance(statement, ast.Assign) and model and name.startswith("torch.optim."):
            made = ast.unparse(statement.targets[0])
            optimizers[made], states[made] = (name, model), number
            continue
        if last_name(value.func) == "load_state_dict" and isinstance(value.func, ast.Attribute):
            loaded.add(owner := ast.unparse(value.func.value))
            states[owner] = number
        for optimizer, (kind, trained) in optimizers.items():
            place, since = places.get(trained, ("", number))
            if place != _place(value) or since > states[optimizer]:
                yield from _late(value, name, trained, kind=kind, optimizer=optimizer, loaded=optimizer in loaded)
        _moved(statement, value, number, places)


def _place(call: ast.Call) -> str:
    """Return the source of where a call moves something, `to(device)`; "" if it moves nothing."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    given = [*map(ast.unparse, call.args), *(f"{each.arg}={ast.unparse(each.value)}" for each in call.keywords)]
    return f"{method}({', '.join(given)})" if method in {"to", "cpu", *DEVICES} else ""


def _moved(statement: ast.stmt, call: ast.Call | None, number: int, places: dict[str, tuple[str, int]]) -> None:
    """Note where a statement moves models, and forget what it may change: a branch, a name of a device."""
    parts = list(ast.walk(statement))
    stored = [each for each in parts if isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Store)]
    changed = {ast.unparse(each) for each in stored}
    target = ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
    place = _place(call) if call is not None else ""
    if call is not None and isinstance(call.func, ast.Attribute) and place:
        owner = ast.unparse(call.func.value)
        moved, since = target or owner, places.get(owner, ("", number))
        places[moved] = since if since[0] == place and moved == owner else (place, number)
        changed.discard(moved)
    else:
        calls = [each for each in parts if isinstance(each, ast.Call) and _place(each)]
        changed |= {ast.unparse(each.func.value) for each in calls if isinstance(each.func, ast.Attribute)}
    for model, (where, _) in list(places.items()):
        if model in changed or changed & set(_NAMES.findall(where)):
            del places[model]


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
