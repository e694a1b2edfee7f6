"""What kind of object a name is: by the class that makes it, or else by the words that everybody uses."""

from __future__ import annotations

import ast
import re

from accelcore_lint.names import Names
from accelcore_lint.script import last_name

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


def is_loss(node: ast.AST) -> bool:
    """Return whether the name of an expression is one of a loss."""
    return bool(_LOSS.search(last_name(node)))
