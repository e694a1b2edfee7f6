"""Parts of a training loop that the script repeats beside accelcore's trainer, which does them itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.kinds import Trainer, is_loader, is_scaler, trainers
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.rules.divided_loss import divides
from accelcore_lint.script import Script, argument, last_name

_NOTHING = "This does nothing, or raises an error: after trainer(batch) the gradients are used and cleared."


def _check(script: Script) -> Iterator[Mark]:
    for trainer in trainers(script):
        yield from _in_loops(script, trainer)
        yield from _in_place_of(script, trainer)
        yield from _over_range(script, trainer.name)
        yield from _over_loader(script, trainer)
        yield from _scaled(script, trainer)
        yield from _counted(script, trainer)


def _in_loops(script: Script, trainer: Trainer) -> Iterator[Mark]:
    name, model, optimizer = trainer.name, trainer.model, trainer.optimizer
    instead = {
        f"{optimizer}.zero_grad": (_NOTHING, "Remove it: each window begins without gradients."),
        f"{model}.zero_grad": (_NOTHING, "Remove it: each window begins without gradients."),
        f"{optimizer}.step": (_NOTHING, f"Remove it; after {name}.backward(loss), call {name}.update()."),
    }
    marked = set()
    for loop in (*script.all(ast.For), *script.all(ast.While)):
        calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
        if not any(ast.unparse(call.func) in (name, f"{name}.backward") for call in calls):
            continue
        for call in calls:
            found = instead.get(ast.unparse(call.func))
            if (
                "clip_grad" in last_name(call.func)
                and call.args
                and ast.unparse(call.args[0]) == f"{model}.parameters()"
            ):
                found = (
                    "This does not clip the gradients of the trainer's update.",
                    "Give accel.trainer() clip_norm=1.0, or a function as clip=.",
                )
            if found is not None and call not in marked:
                marked.add(call)
                yield Mark(call, *found)


def _in_place_of(script: Script, trainer: Trainer) -> Iterator[Mark]:
    """Find loops over the trainer's batches that train without calling the trainer."""
    name, step = trainer.name, f"{trainer.optimizer}.step"
    for loop in script.all(ast.For):
        calls = {
            call: ast.unparse(call.func)
            for statement in loop.body
            for call in ast.walk(statement)
            if isinstance(call, ast.Call)
        }
        reads = any(
            isinstance(node, ast.Call) and ast.unparse(node.func) == f"{name}.batches" for node in ast.walk(loop.iter)
        )
        if not reads or step not in calls.values():
            continue
        if {name, f"{name}.backward", f"{name}.update"} & set(calls.values()):
            continue
        why = "The trainer makes no step: the gradients are neither averaged over ranks, scaled nor clipped."
        for call, called in calls.items():
            if called == step:
                yield Mark(call, why, f"Write {name}.update().")
            elif called.endswith(".backward") and isinstance(call.func, ast.Attribute):
                yield Mark(call, why, f"Write {name}.backward({ast.unparse(call.func.value)}).")


def _over_range(script: Script, trainer: str) -> Iterator[Mark]:
    """Find loops over `range(epochs)` that start again after a resume, and do not look at the trainer's position."""
    for loop in script.all(ast.For) if f"{trainer}.resume(" in script.text else ():
        text, call = ast.unparse(loop), loop.iter
        looks = any(f"{trainer}.{word}" in text for word in ("epoch", "steps", "resume"))
        inner = [node for statement in loop.body for node in ast.walk(statement) if isinstance(node, ast.For)]
        if looks or not (
            f"{trainer}.batches(" in text or any(_calls(each) & {trainer, f"{trainer}.backward"} for each in inner)
        ):
            continue
        if isinstance(call, ast.Call) and last_name(call.func) == "range" and len(call.args) == 1:
            yield Mark(
                call,
                "After a resume this trains as many epochs again: it does not know those that are done.",
                f"Write for {ast.unparse(loop.target)} in {trainer}.epochs({ast.unparse(call.args[0])}).",
            )


def _over_loader(script: Script, trainer: Trainer) -> Iterator[Mark]:
    """Find loops that train on a DataLoader itself, if the trainer needs its position in the data, or several ranks."""
    name, options = trainer.name, {keyword.arg for keyword in trainer.made.keywords}
    words = ("save", "resume", "batches")
    if not (options & {"accumulate", "parallel"} or any(f"{name}.{word}(" in script.text for word in words)):
        return
    for loop in script.all(ast.For):
        loader = loop.iter
        while isinstance(loader, ast.Call) and last_name(loader.func) in ("enumerate", "tqdm") and loader.args:
            loader = loader.args[0]
        if is_loader(script.names, loader) and _calls(loop) & {name, f"{name}.backward"}:
            yield Mark(
                loader,
                "The trainer does not see where an epoch begins and ends: a short window stays open, checkpoints have "
                "no position in the data, and each rank trains on all data.",
                f"Write {name}.batches({ast.unparse(loader)}).",
            )


def _calls(loop: ast.For) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(loop) if isinstance(node, ast.Call)}


def _scaled(script: Script, trainer: Trainer) -> Iterator[Mark]:
    """Find a loss that the script scales, in the trainer's loss function or where it calls the trainer's backward."""
    loss = argument(trainer.made, "loss")
    name = last_name(loss) if loss is not None else ""
    places: list[ast.AST] = [function for function in script.functions() if function.name == name]
    places += [loss] if isinstance(loss, ast.Lambda) else []
    places += [call for call in script.all(ast.Call) if ast.unparse(call.func) == f"{trainer.name}.backward"]
    for call in (node for place in places for node in ast.walk(place) if isinstance(node, ast.Call)):
        if (
            isinstance(call.func, ast.Attribute)
            and call.func.attr == "scale"
            and is_scaler(script.names, call.func.value)
        ):
            yield Mark(
                call,
                "The trainer does not unscale this loss: the gradients stay multiplied by the scale.",
                'Give it the plain loss; accel.trainer(precision="fp16") has a loss scale of its own.',
            )


def _counted(script: Script, trainer: Trainer) -> Iterator[Mark]:
    """Find what the script does about micro-batches that the trainer counts: a divided loss, an update after some."""
    accumulate = argument(trainer.made, "accumulate")
    if accumulate is None or ast.unparse(accumulate) == "1":
        return
    count = ast.unparse(accumulate)
    for call in script.all(ast.Call):
        name = ast.unparse(call.func)
        if name == f"{trainer.name}.backward" and call.args:
            loss, loop = call.args[0], next(script.inside(call, (ast.For, ast.While)), call)
            stores = [
                node.value
                for node in ast.walk(loop)
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == ast.unparse(loss)
            ]
            for divided in (loss, *stores):
                if isinstance(divided, ast.BinOp) and divides(divided, count):
                    why = "The trainer divides by the number of micro-batches itself: the gradients are too small."
                    yield Mark(divided, why, f"Write {ast.unparse(divided.left)}.")
        elif name == f"{trainer.name}.update":
            guards = (above.test for above in script.inside(call, ast.If))
            if any(isinstance(part, ast.Mod) for test in guards for part in ast.walk(test)):
                why = f"The trainer counts micro-batches, and updates after every {count} calls."
                yield Mark(call, why, "Call it after each batch.")


RULE = Rule(
    code="ACC315",
    name="beside-trainer",
    about="What accelcore's trainer does itself, and the script does once more beside it: `zero_grad()`, "
    "`optimizer.step()`, `clip_grad_norm_` or `scaler.scale(loss)`. Or `loss.backward()` and `optimizer.step()` "
    "in a loop over its batches that never calls it. Or a loss that is divided by `accumulate`, or `trainer.update()` "
    "after every few batches only: the trainer counts them. Or a loop over `range(epochs)` after "
    "`trainer.resume(...)`, which trains all epochs again, or over a DataLoader itself instead of "
    "`trainer.batches(loader)`. "
    "The trainer, its model and its optimizer must have names in the same script.",
    check=_check,
    found="""
        import accelcore
        import torch

        def main(model, loader, loss):
            accel = accelcore.select()
            optimizer = accel.optimizers.create("adamw", model.parameters())
            trainer = accel.trainer(model, optimizer, loss=loss)
            for batch in trainer.batches(loader):
                trainer(batch)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    """,
    clean="""
        import accelcore

        def main(model, loader, loss):
            accel = accelcore.select()
            optimizer = accel.optimizers.create("adamw", model.parameters())
            trainer = accel.trainer(model, optimizer, loss=loss, clip_norm=1.0)
            for batch in trainer.batches(loader):
                trainer(batch)
    """,
)
