"""Agreement of the ranks of a job: they wait for each other, learn of failures, and compare what they train.

All ranks make these calls. All pass them, or all raise.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version

import torch
import torch.distributed as dist
from torch import Tensor

from accelcore.devices import Roles
from accelcore.errors import AccelError, CheckpointError, DistributedError
from accelcore.jobs.exchange import gather_objects, not_all_came, wait_for_ranks
from accelcore.training.plan import Plan
from accelcore.util.text import first_line, ranks, repr_of

_NOT_COMPARED = ("observers",)
_COMPARED_BY_CLASS = ("loss", "weight", "clip", "scheduler")  # the repr of the user's objects says nothing
_SHOWN = 5
_PATIENCE = 30  # seconds; a rank that goes further than a call is found meanwhile, later at the job's timeout only


def wait_for_all(backend: Roles, call: str) -> None:
    """Wait until every rank makes this call. Raise an error after the timeout, or if a rank has passed it."""
    job = backend.collectives
    group = job.cpu_group()
    if group is None:
        return
    job.count(call)
    wait_for_ranks(job, call, call, seconds=_PATIENCE)
    try:
        dist.monitored_barrier(group, wait_all_ranks=True)
    except ValueError:  # not every kind of group can report the missing ranks
        job.barrier()
    except RuntimeError as error:
        raise not_all_came(call, first_line(error)) from error


@contextmanager
def all_or_none(backend: Roles, what: str, kind: type[AccelError] = CheckpointError) -> Iterator[None]:
    """Run a block on all ranks; if it raises on one of them, the others raise an error of class `kind` after it."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  # raised when all ranks know
        failure = error
    failed = torch.tensor(failure is not None, dtype=torch.int32, device=backend.device)
    backend.collectives.all_reduce(failed, "max")
    if failure is not None:
        raise failure
    if backend.collectives.world_size > 1 and failed.item():  # alone, do not wait for the device
        raise kind(f"another rank could not {what}", why="see that rank's error")


def all_equal(backend: Roles, text: str) -> bool:
    """Check if all ranks give the same text."""
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    both = torch.tensor([digest, -digest], dtype=torch.int64, device=backend.device)
    low, high = backend.collectives.all_reduce(both, "min").tolist()
    return bool(low == -high)


def train_alike(plan: Plan) -> None:
    """Raise DistributedError on every rank if the ranks would train different things; see `describe`."""
    description = describe(plan)
    if all_equal(plan.backend, json.dumps(description)):
        return
    odd, why = differences(gather_objects(plan.backend.collectives, description))
    remedy = "give all ranks the same versions, model, optimizer and options"
    raise DistributedError(f"{odd} of this job would not train what the others train", why=why, remedy=remedy)


def describe(plan: Plan) -> dict[str, str]:
    """Return versions, options, optimizer and model of a plan as text, by name; equal on ranks that train the same."""
    backend, optimizer = plan.backend, plan.optimizer
    found = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "accelcore": version("accelcore"),
        "the backend": backend.name + (", emulated" if backend.emulated else ""),
        "the optimizer": getattr(optimizer, "name", type(optimizer).__name__),
    }
    for name, value in plan.options.items():
        if name not in _NOT_COMPARED:
            by_class = name in _COMPARED_BY_CLASS and value is not None and not isinstance(value, str)
            found[f"the option {name}"] = type(value).__name__ if by_class else repr_of(value)
    for number, group in enumerate(optimizer.param_groups):
        for name, value in sorted(group.items()):
            text = f"{len(value)} tensors" if name == "params" else repr_of(value)
            found[f"{name} in group {number} of the optimizer"] = text
    numbers = {id(member): number for number, members in enumerate(plan.groups()) for member in members}
    for name, parameter in plan.model.named_parameters():
        found[f"the parameter {name}"] = _tensor(parameter) + ("" if parameter.requires_grad else ", frozen")
        found[f"the group of {name}"] = str(numbers.get(id(parameter)))
    return found | {f"the buffer {name}": _tensor(buffer) for name, buffer in plan.model.named_buffers()}


def differences(descriptions: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """Return as text the ranks whose description differs from most others', and the differences."""
    lines: list[str] = []
    odd: set[int] = set()
    for name in dict.fromkeys(name for one in descriptions for name in one):
        values = [one.get(name, "nothing") for one in descriptions]
        if len(set(values)) == 1:
            continue
        usual = Counter(values).most_common(1)[0][0]  # of equally frequent ones, the first
        odd |= {rank for rank, value in enumerate(values) if value != usual}
        where = {value: ranks(rank for rank, one in enumerate(values) if one == value) for value in values}
        lines.append(f"{name} is {', '.join(f'{value} on {which}' for value, which in where.items())}")
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return ranks(odd), "; ".join(lines[:_SHOWN] + more)


@torch.no_grad()
def check_replicas(plan: Plan) -> None:
    """Raise DistributedError on all ranks if a number in a group differs, or the norm of a parameter that all have."""
    job = plan.backend.collectives
    if job.world_size == 1:
        return
    slots = [] if plan.strategy.is_sharded else plan.gradients.slots
    norms = torch._foreach_norm([slot.parameter for slot in slots]) if slots else []
    # Also what some optimizers measure over all parameters, such as Prodigy's distance. A wrapper may have no defaults.
    groups, options = plan.optimizer.param_groups, sorted({"lr", *getattr(plan.optimizer, "defaults", ())})
    numbers = [_number(group.get(name)) for group in groups for name in options]
    values = torch.tensor(numbers, device=plan.backend.device)
    own = torch.cat([values, torch.stack([norm.float() for norm in norms])]) if norms else values
    high, negated = job.all_reduce(torch.stack([own, -own]), "max")
    rounded = max(torch.finfo(each.dtype).eps for each in (own, *norms)) ** 0.5  # devices may round differently
    if not (high + negated > rounded * high.abs()).any():
        return
    names = [f"{name} in group {number} of the optimizer" for number in range(len(groups)) for name in options]
    names += [f"the norm of the parameter {slot.name}" for slot in slots]
    texts = {name: f"{value:.5g}" for name, value in zip(names, own.tolist(), strict=True)}
    odd, why = differences(gather_objects(job, texts))
    raise DistributedError(
        f"the training on {odd} of this job differs from that on the other ranks",
        why=why,
        remedy="change learning rates and weights on all ranks alike: step ReduceLROnPlateau by "
        "trainer.evaluate(loader).mean(...) or job.mean(loss), and load weights before accel.trainer(...), "
        'or on all. An optimizer that measures over all parameters needs parallel="ddp"',
    )


def _number(value: object) -> float:
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return float(value) if is_number else 0.0  # type: ignore[arg-type]  # `is_number` narrows it


def _tensor(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
