"""What kind of object a name is: by the class that makes it, or else by the words that everybody uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from accelcore_lint.names import Names
from accelcore_lint.script import Script, argument, last_name

_SCHEDULERS = "torch.optim.lr_scheduler."
_WRAPPERS = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")

_OPTIMIZER = re.compile(r"(^|_)optim(izer)?s?($|[_A-Z\d])|^opt([_A-Z\d]|$)|_opt$", re.ASCII)
_SCALER = re.compile(r"(^|_)scaler($|_)", re.ASCII)
_SCHEDULER = re.compile(r"(^|_)sched(uler)?($|[_A-Z\d])", re.ASCII)
_LOSS = re.compile(r"loss|err([A-Z_]|$)|cost|objective|nll", re.IGNORECASE | re.ASCII)


def is_optimizer(names: Names, node: ast.AST) -> bool:
    """Return whether an expression is an optimizer."""
    made = names.made_by(node)
    if made.startswith("torch.optim.") and not made.startswith(_SCHEDULERS):
        return True
    return bool(_OPTIMIZER.search(last_name(node)))


def is_scaler(names: Names, node: ast.AST) -> bool:
    """Return whether an expression is a GradScaler."""
    return names.made_by(node).endswith(".GradScaler") or bool(_SCALER.search(last_name(node)))


def is_scheduler(names: Names, node: ast.AST) -> bool:
    """Return whether an expression is a learning rate schedule of torch."""
    made = names.made_by(node)
    return made.startswith(_SCHEDULERS) if made else bool(_SCHEDULER.search(last_name(node)))


def is_wrapper(names: Names, node: ast.AST) -> bool:
    """Return whether an expression is a DistributedDataParallel, made once in this script."""
    return names.made_by(node) in _WRAPPERS


def is_loader(names: Names, node: ast.AST) -> bool:
    """Return whether an expression is a DataLoader of torch, made once in this script."""
    made = names.made_by(node)
    return made.startswith("torch.utils.data.") and made.endswith(".DataLoader")


def is_loss(node: ast.AST) -> bool:
    """Return whether the name of an expression is one of a loss."""
    return bool(_LOSS.search(last_name(node)))


@dataclass(frozen=True)
class Trainer:
    """A trainer of accelcore, with a name, as the script makes it of a model and an optimizer that have names.

    Attributes:
        made: the call that makes it.
        name, model, optimizer: as the script writes them.
    """

    made: ast.Call
    name: str
    model: str
    optimizer: str


def trainers(script: Script) -> Iterator[Trainer]:
    """Yield the trainers of a script."""
    for made in script.all(ast.Call) if "accelcore" in script.text else ():
        assigned = script.names.parents.get(made)
        if isinstance(assigned, ast.Assign) and isinstance(made.func, ast.Attribute) and made.func.attr == "trainer":
            model, optimizer = (argument(made, *of) for of in (("model", 0), ("optimizer", 1)))
            if isinstance(model, ast.Name | ast.Attribute) and isinstance(optimizer, ast.Name | ast.Attribute):
                yield Trainer(made, *map(ast.unparse, (assigned.targets[0], model, optimizer)))
