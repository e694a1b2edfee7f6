"""A DistributedSampler that draws the same order in each epoch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, argument, last_name

_ACCELERATE = re.compile(r"^\s*(from|import) accelerate\b", re.MULTILINE)
_CLASSES = ("torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler")


def _check(script: Script) -> Iterator[Mark]:
    # Whoever gets the sampler, or its loader, may call it; in a script that trains no epochs, another module does.
    loops: list[ast.For | ast.While] = [*script.all(ast.For), *script.all(ast.While)]
    prepares = _ACCELERATE.search(script.text) is not None and ".prepare(" in script.text  # its loader does so
    if "set_epoch" in script.text or prepares or not any(map(_trains_epochs, loops)):
        return
    samplers = [call for call, _ in script.calls(lambda name: name in _CLASSES) if _shuffles(call)]
    evaluates = [call for call in samplers if _evaluates(script, call)]
    for call in samplers:
        if call not in evaluates and not _has_own_data(script, call) and not _is_given_to_base(script, call):
            yield Mark(
                call,
                "Nothing in this script calls set_epoch: each epoch has the same order, and each rank the same share.",
                "Call sampler.set_epoch(epoch) before each epoch; trainer.batches(loader) does.",
            )


def _trains_epochs(loop: ast.For | ast.While) -> bool:
    """Return whether a loop is over epochs, with training in it or in what it calls."""
    inner = [node for part in loop.body for node in ast.walk(part) if isinstance(node, ast.For)]
    if isinstance(loop, ast.While):  # until a number of steps, by rounds over a loader
        return any(_calls_backward(node) and "loader" in ast.unparse(node.iter).lower() for node in inner)
    if "epoch" in ast.unparse(loop.target).lower():
        return any(isinstance(node, ast.Call) for node in ast.walk(loop))
    repeats = isinstance(loop.iter, ast.Call) and last_name(loop.iter.func) == "range"
    return repeats and any(map(_calls_backward, inner))


def _calls_backward(loop: ast.For) -> bool:
    return any(isinstance(node, ast.Call) and last_name(node.func) == "backward" for node in ast.walk(loop))


def _has_own_data(script: Script, call: ast.Call) -> bool:
    """Return whether each epoch makes a dataset of its own, by its number or in an order of its own."""
    data = argument(call, "dataset", 0)
    loops = [above for above in script.names.ancestors(call) if isinstance(above, ast.For)]
    made = [line for loop in loops for line in ast.walk(loop) if isinstance(line, ast.Assign)]
    reasons = {ast.unparse(loop.target) for loop in loops} | {"shuffle=True"}
    return isinstance(data, ast.Name) and any(
        [ast.unparse(target) for target in line.targets] == [data.id]
        and reasons & {ast.unparse(node) for node in ast.walk(line.value)}
        for line in made
    )


def _is_given_to_base(script: Script, call: ast.Call) -> bool:
    """Return whether a method returns the sampler, so that a base class of another file may call `set_epoch`."""
    above = [*script.names.ancestors(call)]
    made = [ast.unparse(target) for node in above if isinstance(node, ast.Assign) for target in node.targets]
    method = next((node for node in above if isinstance(node, ast.FunctionDef)), None)
    bases = [last_name(base) for node in above if isinstance(node, ast.ClassDef) for base in node.bases]
    answers = [node.value for node in ast.walk(method) if isinstance(node, ast.Return)] if method else []
    returned = {ast.unparse(part) for value in answers if value for part in getattr(value, "elts", [value])}
    own = {node.name for node in script.all(ast.ClassDef)}
    return not returned.isdisjoint(made) and not own.issuperset(bases)


def _shuffles(call: ast.Call) -> bool:
    shuffle = argument(call, "shuffle", 3)
    return shuffle is None or (isinstance(shuffle, ast.Constant) and shuffle.value is True)


def _evaluates(script: Script, call: ast.Call) -> bool:
    """Return whether a sampler is for evaluation, by the names around it."""
    statement = next(above for above in script.names.ancestors(call) if isinstance(above, ast.stmt))
    text = ast.unparse(statement).lower() if isinstance(statement, ast.Assign | ast.Expr) else last_name(call.func)
    return any(word in text for word in ("val", "test", "eval"))


RULE = Rule(
    code="ACC309",
    name="set-epoch",
    about="A `DistributedSampler` shuffles by its seed and its epoch. If nothing calls `set_epoch`, all epochs have "
    "the same order. Only scripts that contain the loop over epochs are looked at, and only the script itself.",
    check=_check,
    found="""
        import torch
        from torch.utils.data.distributed import DistributedSampler

        def main(data, train):
            sampler = DistributedSampler(data)
            loader = torch.utils.data.DataLoader(data, sampler=sampler)
            for epoch in range(3):
                train(loader)
    """,
    clean="""
        import torch
        from torch.utils.data.distributed import DistributedSampler

        def main(data, train):
            sampler = DistributedSampler(data)
            loader = torch.utils.data.DataLoader(data, sampler=sampler)
            for epoch in range(3):
                sampler.set_epoch(epoch)
                train(loader)
    """,
)
