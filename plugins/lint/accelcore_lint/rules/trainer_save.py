"""Calls of accelcore's trainer that only some ranks make, and a checkpoint that cannot be the best one."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.kinds import trainers
from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, last_name

_COLLECTIVE = ("save", "resume", "batches", "evaluate")


def _check(script: Script) -> Iterator[Mark]:
    for trainer in trainers(script):
        names = {f"{trainer.name}.{method}" for method in _COLLECTIVE}
        for call in script.all(ast.Call):
            name = ast.unparse(call.func)
            if name in names and _on_one_rank(script, call):
                yield Mark(
                    call,
                    "Only one rank comes here: in a job of several ranks the others never do, and it fails.",
                    "Take it out of this condition: the trainer lets one rank write what all need.",
                )
            keywords = {keyword.arg for keyword in call.keywords}
            if name == f"{trainer.name}.save" and "mode" in keywords and not keywords & {None, "best"}:
                yield Mark(
                    call,
                    "There is no metric of which mode= could choose the best: no checkpoint is kept as the best.",
                    "Write best=accuracy, mode=..., or remove mode=.",
                )


def _on_one_rank(script: Script, node: ast.AST) -> bool:
    """Return whether a call is in a branch for the main rank."""
    inner = node
    for outer in script.names.ancestors(node):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return False
        if isinstance(outer, ast.If) and inner in outer.body and any(map(_is_main, _all_of(outer.test))):
            return True
        inner = outer
    return False


def _all_of(test: ast.expr) -> list[ast.expr]:
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def _is_main(test: ast.expr) -> bool:
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq):
        return last_name(test.left) in ("rank", "local_rank") and ast.unparse(test.comparators[0]) == "0"
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return last_name(test.operand) in ("rank", "local_rank")
    return isinstance(test, ast.Attribute) and test.attr == "is_main"


RULE = Rule(
    code="ACC317",
    name="trainer-save",
    about="`save`, `resume`, `evaluate` or `batches` of accelcore's trainer under `if job.is_main:` or "
    "`if rank == 0:`. All ranks must make these calls: one rank alone waits for the others, and the job fails. Or "
    '`trainer.save(folder, mode="max")` without `best=`, which keeps no best checkpoint. '
    "The trainer, its model and its optimizer must have names in the same script.",
    check=_check,
    found="""
        import accelcore

        def main(model, loader, loss):
            accel = accelcore.select()
            job = accel.join()
            optimizer = accel.optimizers.create("adamw", model.parameters())
            trainer = accel.trainer(model, optimizer, loss=loss, parallel="ddp")
            for batch in trainer.batches(loader):
                trainer(batch)
            if job.is_main:
                trainer.save("outputs/run")
    """,
    clean="""
        import accelcore

        def main(model, loader, loss):
            accel = accelcore.select()
            job = accel.join()
            optimizer = accel.optimizers.create("adamw", model.parameters())
            trainer = accel.trainer(model, optimizer, loss=loss, parallel="ddp")
            for batch in trainer.batches(loader):
                trainer(batch)
            path = trainer.save("outputs/run")
            if job.is_main:
                print(path)
    """,
)
