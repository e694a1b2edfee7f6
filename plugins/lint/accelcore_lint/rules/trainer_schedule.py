"""A scheduler that does not fit the updates of accelcore's trainer, which steps it after each of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.kinds import Trainer, is_loader, trainers
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, argument

_SCHEDULERS = "torch.optim.lr_scheduler."
_LENGTHS = {
    "CosineAnnealingLR": ("T_max", 1),
    "OneCycleLR": ("total_steps", 2),
    "LinearLR": ("total_iters", 3),
    "PolynomialLR": ("total_iters", 1),
    "StepLR": ("step_size", 1),
}
"""Arguments that say how long a scheduler is, by its class, and their places."""


def _check(script: Script) -> Iterator[Mark]:
    for trainer in trainers(script):
        keywords = {keyword.arg for keyword in trainer.made.keywords}
        given = argument(trainer.made, "scheduler")
        if None in keywords:
            continue
        yield from _too_long(script, trainer, trainer.made, argument(trainer.made, "total_steps"))
        if given is None:
            yield from _unknown(script, trainer)
        elif "schedule_by" not in keywords:
            yield from _stepped(script, trainer, given)
            made = script.names.value(given) if isinstance(given, ast.Name) else given
            name = script.names.resolve(made.func).removeprefix(_SCHEDULERS) if isinstance(made, ast.Call) else ""
            if isinstance(made, ast.Call) and name in _LENGTHS:
                length = argument(made, *_LENGTHS[name])
                yield from _by_epoch(script, trainer, made, length, name)
                yield from _too_long(script, trainer, made, length)


def _unknown(script: Script, trainer: Trainer) -> Iterator[Mark]:
    """Find a scheduler that the trainer was not given."""
    if f"{trainer.name}.save" not in script.text or "extra=" in script.text:
        return
    for call, _ in script.calls(lambda name: name.startswith(_SCHEDULERS)):
        of = argument(call, "optimizer", 0)
        is_its = of is not None and ast.unparse(of) == trainer.optimizer
        if is_its and _function(script, call) is _function(script, trainer.made):
            yield Mark(
                call,
                "The trainer does not know this scheduler: no checkpoint has its state, and a resumed run starts it "
                "again.",
                'Write accel.trainer(..., scheduler=scheduler), and schedule_by="script" if the script steps it.',
            )


def _stepped(script: Script, trainer: Trainer, given: ast.expr) -> Iterator[Mark]:
    """Find steps of a scheduler that the trainer steps."""
    function = _function(script, trainer.made)
    for call in script.all(ast.Call) if isinstance(given, ast.Name | ast.Attribute) else ():
        if ast.unparse(call.func) == f"{ast.unparse(given)}.step" and _function(script, call) is function:
            yield Mark(
                call,
                "The trainer steps this scheduler after each update, and raises an error if the script does, too.",
                'Remove it, or write accel.trainer(..., schedule_by="script").',
            )


def _by_epoch(script: Script, trainer: Trainer, made: ast.Call, length: ast.expr | None, name: str) -> Iterator[Mark]:
    """Find a scheduler that is as long as the epochs, and that the trainer steps after each update."""
    epochs = [call.args[0] for call in script.all(ast.Call) if ast.unparse(call.func) == f"{trainer.name}.epochs"]
    if name not in ("CosineAnnealingLR", "StepLR") or length is None or len(epochs) != 1:
        return
    numbers = [
        node.value for node in (length, epochs[0]) if isinstance(node, ast.Constant) and isinstance(node.value, int)
    ]
    if ast.unparse(length) == ast.unparse(epochs[0]) or (
        name == "StepLR" and len(numbers) == 2 and numbers[0] <= numbers[1]
    ):
        yield Mark(
            made,
            "The trainer steps it after each update, and this counts epochs: the learning rate changes too early.",
            'Write accel.trainer(..., schedule_by="script"), and scheduler.step() after each epoch.',
        )


def _too_long(script: Script, trainer: Trainer, made: ast.Call, length: ast.expr | None) -> Iterator[Mark]:
    """Find a schedule of all batches, where an update takes several of them, or each rank only has its share."""
    batches = _all_batches(script, trainer, length) if length is not None else argument(made, "steps_per_epoch")
    loader = _measured(script, batches)
    if batches is None or loader is None:
        return
    accumulate, parallel = (argument(trainer.made, option) for option in ("accumulate", "parallel"))
    count = ast.unparse(_value(script, accumulate)) if accumulate is not None else "1"
    data = script.names.value(loader)
    shared = (
        isinstance(data, ast.Call)
        and is_loader(script.names, loader)
        and not {keyword.arg for keyword in data.keywords} & {None, "sampler", "batch_sampler"}
    )
    is_read = f"{trainer.name}.batches({ast.unparse(loader)}" in script.text
    if count != "1" and (is_read or shared):
        why = f"an update takes {count} batches"
    elif is_read and shared and isinstance(parallel, ast.Constant) and parallel.value not in (None, "none"):
        why = "each of several ranks has its share of the batches"
    else:
        return
    is_option = made is trainer.made
    yield Mark(
        length if is_option and length is not None else made,
        f"The schedule counts all batches, and the trainer updates: {why}, so that training ends early in the "
        "schedule.",
        "Leave total_steps= out: in a loop over trainer.epochs(n) the trainer counts its updates."
        if is_option
        else "Give the trainer scheduler=lambda optimizer, updates: ..., which gets the number of updates.",
    )


def _all_batches(script: Script, trainer: Trainer, length: ast.expr) -> ast.expr | None:
    """Return the number of batches of an epoch in a length of epochs times batches; None if it is another length."""
    product = _value(script, length)
    loops = {f"{trainer.name}.epochs", "range"}
    epochs = {
        ast.unparse(_value(script, call.args[0]))
        for call in script.all(ast.Call)
        if ast.unparse(call.func) in loops and len(call.args) == 1
    }
    if isinstance(product, ast.BinOp) and isinstance(product.op, ast.Mult):
        for one, other in ((product.left, product.right), (product.right, product.left)):
            if ast.unparse(_value(script, one)) in epochs and _measured(script, other) is not None:
                return other
    return None


def _measured(script: Script, number: ast.expr | None) -> ast.expr | None:
    """Return `loader` of `len(loader)`; None for any other number."""
    call = _value(script, number) if number is not None else None
    is_length = isinstance(call, ast.Call) and script.names.resolve(call.func) == "len" and len(call.args) == 1
    return call.args[0] if is_length and isinstance(call, ast.Call) else None


def _value(script: Script, node: ast.expr) -> ast.expr:
    """Return what a name of a number stands for, or the expression itself."""
    return (script.names.value(node) or node) if isinstance(node, ast.Name) else node


def _function(script: Script, node: ast.AST) -> ast.AST | None:
    return next(script.inside(node, (ast.FunctionDef, ast.AsyncFunctionDef)), None)


RULE = Rule(
    code="ACC316",
    name="trainer-schedule",
    about="A scheduler that does not fit accelcore's trainer, which steps it after each update. One that counts all "
    "batches, `OneCycleLR(optimizer, 0.1, total_steps=epochs * len(loader))`, does not end if an update takes "
    "several batches (`accumulate=4`), or if each rank has its share of them. One that counts epochs falls too early. "
    "One that the script steps, too, raises an error. One that the trainer was not given is in no checkpoint. "
    "The trainer, its model and its optimizer must have names in the same script.",
    check=_check,
    found="""
        import accelcore
        from torch.optim.lr_scheduler import CosineAnnealingLR

        def main(model, loader, epochs):
            accel = accelcore.select()
            optimizer = accel.optimizers.create("adamw", model.parameters())
            scheduler = CosineAnnealingLR(optimizer, epochs * len(loader))
            trainer = accel.trainer(model, optimizer, accumulate=4, scheduler=scheduler)
            for epoch in trainer.epochs(epochs):
                for batch in trainer.batches(loader):
                    trainer(batch)
    """,
    clean="""
        import accelcore
        from torch.optim.lr_scheduler import CosineAnnealingLR

        def make_scheduler(optimizer, updates):
            return CosineAnnealingLR(optimizer, updates)

        def main(model, loader, epochs):
            accel = accelcore.select()
            optimizer = accel.optimizers.create("adamw", model.parameters())
            trainer = accel.trainer(model, optimizer, accumulate=4, scheduler=make_scheduler)
            for epoch in trainer.epochs(epochs):
                for batch in trainer.batches(loader):
                    trainer(batch)
    """,
)
