"""Parts of a training loop that the script repeats beside accelcore's trainer, which does them itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.kinds import is_scaler
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.rules.divided_loss import divides
from accelcore_lint.script import Script, argument, last_name

_SCHEDULERS = "torch.optim.lr_scheduler."
_NOTHING = "This does nothing, or raises an error: after trainer(batch) the gradients are used and cleared."


def _check(script: Script) -> Iterator[Mark]:
    if "accelcore" not in script.text:
        return
    for made in script.all(ast.Call):
        assigned = script.names.parents.get(made)
        if isinstance(assigned, ast.Assign) and isinstance(made.func, ast.Attribute) and made.func.attr == "trainer":
            model, optimizer = (argument(made, *of) for of in (("model", 0), ("optimizer", 1)))
            if isinstance(model, ast.Name | ast.Attribute) and isinstance(optimizer, ast.Name | ast.Attribute):
                trainer = ast.unparse(assigned.targets[0])
                yield from _in_loops(script, trainer, ast.unparse(model), ast.unparse(optimizer))
                yield from _in_place_of(script, trainer, ast.unparse(optimizer))
                yield from _over_range(script, trainer)
                yield from _scaled(script, trainer, argument(made, "loss"))
                yield from _unknown_scheduler(script, made, trainer, ast.unparse(optimizer))
                yield from _counted(script, made, trainer)
                yield from _by_epoch(script, made, trainer)


def _in_loops(script: Script, trainer: str, model: str, optimizer: str) -> Iterator[Mark]:
    instead = {
        f"{optimizer}.zero_grad": (_NOTHING, "Remove it: each window begins without gradients."),
        f"{model}.zero_grad": (_NOTHING, "Remove it: each window begins without gradients."),
        f"{optimizer}.step": (_NOTHING, f"Remove it; after {trainer}.backward(loss), call {trainer}.update()."),
    }
    marked = set()
    for loop in (*script.all(ast.For), *script.all(ast.While)):
        calls = [node for node in ast.walk(loop) if isinstance(node, ast.Call)]
        if not any(ast.unparse(call.func) in (trainer, f"{trainer}.backward") for call in calls):
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


def _in_place_of(script: Script, trainer: str, optimizer: str) -> Iterator[Mark]:
    """Find loops over the trainer's batches that train without calling the trainer."""
    for loop in script.all(ast.For):
        calls = {
            call: ast.unparse(call.func)
            for statement in loop.body
            for call in ast.walk(statement)
            if isinstance(call, ast.Call)
        }
        reads = any(
            isinstance(node, ast.Call) and ast.unparse(node.func) == f"{trainer}.batches"
            for node in ast.walk(loop.iter)
        )
        if not reads or f"{optimizer}.step" not in calls.values():
            continue
        if {trainer, f"{trainer}.backward", f"{trainer}.update"} & set(calls.values()):
            continue
        why = "The trainer makes no step: the gradients are neither averaged over ranks, scaled nor clipped."
        for call, name in calls.items():
            if name == f"{optimizer}.step":
                yield Mark(call, why, f"Write {trainer}.update().")
            elif name.endswith(".backward") and isinstance(call.func, ast.Attribute):
                yield Mark(call, why, f"Write {trainer}.backward({ast.unparse(call.func.value)}).")


def _over_range(script: Script, trainer: str) -> Iterator[Mark]:
    """Find loops over `range(epochs)` that start again after a resume, and do not look at the trainer's position."""
    for loop in script.all(ast.For) if f"{trainer}.resume(" in script.text else ():
        text, call = ast.unparse(loop), loop.iter
        looks = any(f"{trainer}.{word}" in text for word in ("epoch", "steps", "resume"))
        if looks or f"{trainer}.batches(" not in text:
            continue
        if isinstance(call, ast.Call) and last_name(call.func) == "range" and len(call.args) == 1:
            yield Mark(
                call,
                "After a resume this trains as many epochs again: it does not know those that are done.",
                f"Write for {ast.unparse(loop.target)} in {trainer}.epochs({ast.unparse(call.args[0])}).",
            )


def _scaled(script: Script, trainer: str, loss: ast.expr | None) -> Iterator[Mark]:
    """Find a loss that the script scales, in the trainer's loss function or where it calls the trainer's backward."""
    name = last_name(loss) if loss is not None else ""
    places: list[ast.AST] = [function for function in script.functions() if function.name == name]
    places += [loss] if isinstance(loss, ast.Lambda) else []
    places += [call for call in script.all(ast.Call) if ast.unparse(call.func) == f"{trainer}.backward"]
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


def _unknown_scheduler(script: Script, made: ast.Call, trainer: str, optimizer: str) -> Iterator[Mark]:
    keywords = {keyword.arg for keyword in made.keywords}
    if None in keywords or "scheduler" in keywords or f"{trainer}.save" not in script.text or "extra=" in script.text:
        return
    for call, _ in script.calls(lambda name: name.startswith(_SCHEDULERS)):
        of = argument(call, "optimizer", 0)
        if of is not None and ast.unparse(of) == optimizer and _function(script, call) is _function(script, made):
            yield Mark(
                call,
                "The trainer does not know this scheduler: no checkpoint has its state, and a resumed run starts it "
                "again.",
                'Write accel.trainer(..., scheduler=scheduler), and schedule_by="script" if the script steps it.',
            )


def _counted(script: Script, made: ast.Call, trainer: str) -> Iterator[Mark]:
    """Find what the script does about micro-batches that the trainer counts: a divided loss, an update after some."""
    accumulate = argument(made, "accumulate")
    if accumulate is None or ast.unparse(accumulate) == "1":
        return
    count = ast.unparse(accumulate)
    for call in script.all(ast.Call):
        name = ast.unparse(call.func)
        if name == f"{trainer}.backward" and call.args:
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
        elif name == f"{trainer}.update":
            guards = (above.test for above in script.inside(call, ast.If))
            if any(isinstance(part, ast.Mod) for test in guards for part in ast.walk(test)):
                why = f"The trainer counts micro-batches, and updates after every {count} calls."
                yield Mark(call, why, "Call it after each batch.")


def _by_epoch(script: Script, made: ast.Call, trainer: str) -> Iterator[Mark]:
    """Find a scheduler that is as long as the epochs, and that the trainer steps after each update."""
    given = argument(made, "scheduler")
    scheduler = script.names.value(given) if isinstance(given, ast.Name) else given
    keywords = {keyword.arg for keyword in made.keywords}
    if not isinstance(scheduler, ast.Call) or {None, "schedule_by"} & keywords:
        return
    name = script.names.resolve(scheduler.func).removeprefix(_SCHEDULERS)
    length = argument(scheduler, {"CosineAnnealingLR": "T_max", "StepLR": "step_size"}.get(name, ""), 1)
    epochs = [call.args[0] for call in script.all(ast.Call) if ast.unparse(call.func) == f"{trainer}.epochs"]
    if name not in ("CosineAnnealingLR", "StepLR") or length is None or len(epochs) != 1:
        return
    numbers = [
        node.value for node in (length, epochs[0]) if isinstance(node, ast.Constant) and isinstance(node.value, int)
    ]
    if ast.unparse(length) == ast.unparse(epochs[0]) or (
        name == "StepLR" and len(numbers) == 2 and numbers[0] <= numbers[1]
    ):
        yield Mark(
            scheduler,
            "The trainer steps it after each update, and this counts epochs: the learning rate changes too early.",
            'Write accel.trainer(..., schedule_by="script"), and scheduler.step() after each epoch.',
        )


def _function(script: Script, node: ast.AST) -> ast.AST | None:
    return next(script.inside(node, (ast.FunctionDef, ast.AsyncFunctionDef)), None)


RULE = Rule(
    code="ACC315",
    name="beside-trainer",
    about="What accelcore's trainer does itself, and the script does once more beside it: `zero_grad()`, "
    "`optimizer.step()`, `clip_grad_norm_` or `scaler.scale(loss)`. Or `loss.backward()` and `optimizer.step()` "
    "in a loop over its batches that never calls it. Or a scheduler that the trainer was not given, so that its "
    "checkpoints lack it; or one that counts epochs and is stepped after each update. Or a loss that is divided by "
    "`accumulate`, or `trainer.update()` after every few batches only: the trainer counts them. Or a loop "
    "over `range(epochs)` after `trainer.resume(...)`, which trains all epochs again. "
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
