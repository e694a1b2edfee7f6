"""Settings that can change numbers: environment, versions, options, modules and optimizers."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.devices.plugins import find
from accelcore.known_faults import TORCH_FAULTS, KnownFault
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.parity.collector import Watched
from accelcore.training.trainer import Trainer
from accelcore.util.text import repr_of

_VARIABLES = re.compile(r"(ACCEL|MKL|OMP|PYTORCH|TORCH)_\w+|\w*(DETERMINISTIC|FP32|PRECISION|WORKSPACE)\w*")
"""Variables of torch and ours, and those of vendors that change the arithmetic; others may be secrets."""
_PER_RUN = re.compile(r"TORCHELASTIC_\w+|ACCEL_EMULATE\w*|ACCEL_DEVICE|TORCH_DEVICE_BACKEND_AUTOLOAD")
_ARITHMETIC = (
    "device", "kind", "torch", "processor", "threads", "fp32", "ranks", "compiled", "autocast",
    "trainer precision", "trainer loss_scale", "trainer fp32", "trainer parallel", "trainer compile", "trainer flat",
)  # fmt: skip
"""Settings under which equal inputs give equal bits on a deterministic device."""
_KERNELS = (" fused", " foreach", " route", " tensor")  # ends of names of settings that choose an optimizer's kernel
_BY_CLASS = ("weight", "clip")  # the user's functions, whose texts say nothing
_OF_TRAINING = re.compile(
    r"optimizer \d+ group \d+ \w+|trainer (accumulate|clip|clip_norm|on_nonfinite|schedule_by|scheduler|total_steps"
    r"|warmup|weight)"
)
"""Settings of what is trained, not of how it is computed: two runs that differ in them are two trainings."""
_NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:e[-+]?\d+)?")


@dataclass(frozen=True)
class Difference:
    """A setting that differs between the recording and the replay.

    Attributes:
        name: of the setting, such as `"torch"` or `"module blocks.0.norm"`.
        recorded: its recorded value.
        replayed: its value in the replay.
    """

    name: str
    recorded: str
    replayed: str


def settings_of(
    models: Sequence[Watched], optimizers: Sequence[Optimizer], trainers: Sequence[Trainer], world_size: int
) -> dict[str, str]:
    """Return the settings of this process and of what it trains, as texts by name."""
    device = models[0].device
    found = {
        "device": device.type if device.type == "cpu" else torch.get_device_module(device).get_device_name(device),
        "kind": device.type,
        "processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "accelcore": version("accelcore"),
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
        "ranks": str(world_size),
        "fp32": _fp32(),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "compiled": str(any(watched.compiled for watched in models)),
        "autocast": ", ".join(dict.fromkeys(watched.autocast for watched in models)),
    }
    found |= _known_bugs(TORCH_FAULTS)
    found |= {
        f"variable {name}": value
        for name, value in os.environ.items()
        if _VARIABLES.fullmatch(name) and not _PER_RUN.fullmatch(name)
    }
    for number, optimizer in enumerate(optimizers):
        found[f"optimizer {number}"] = type(optimizer).__name__
        if isinstance(optimizer, RoutedOptimizer):
            found[f"optimizer {number} route"] = f"{optimizer.name} by {optimizer.route}"
        for group, options in enumerate(optimizer.param_groups):
            for name, value in options.items():
                if name not in ("params", "capturable", "param_names"):
                    setting = f"optimizer {number} group {group} {name}"
                    if isinstance(value, Tensor):
                        found[f"{setting} tensor"], value = "True", value.tolist()
                    found[setting] = repr_of(value)[:200]
    for trainer in trainers:
        backend = trainer.backend
        found["backend"] = backend.name + (", emulated" if backend.emulated else "")
        plugin = find(backend.name)
        found |= _known_bugs(() if plugin is None else plugin.faults)
        for table in sorted(backend.capabilities.autocast_tables):
            operators = "\n".join(sorted(backend.precision.table(table)))
            found[f"autocast table {table}"] = blake2b(operators.encode(), digest_size=6).hexdigest()
        for name, value in trainer.options.items():
            if name not in ("observers", "loss"):
                is_plain = value is None or name not in _BY_CLASS
                found[f"trainer {name}"] = repr_of(value)[:200] if is_plain else type(value).__name__
        scheduler = trainer.scheduler
        found["trainer scheduler"] = type(scheduler).__name__
        found["trainer total_steps"] = repr(None if scheduler is None else trainer.total_steps)
    for watched in models:
        for name, module in watched.model.named_modules():
            text = f"{type(module).__name__}({module.extra_repr()})"
            found[f"module {watched.full(name) or '(the model itself)'}"] = text
    return found


def differences(recorded: Mapping[str, str], replayed: Mapping[str, str]) -> tuple[Difference, ...]:
    """Return the settings that differ."""
    names = dict.fromkeys((*recorded, *replayed))
    pairs = ((name, recorded.get(name, "none"), replayed.get(name, "none")) for name in names)
    return tuple(Difference(*each) for each in pairs if not _is_same(*each))


def arithmetic(found: Sequence[Difference]) -> tuple[str, ...]:
    """Return the names of differing settings under which equal inputs may give other bits."""
    return tuple(each.name for each in found if each.name in _ARITHMETIC or each.name.endswith(_KERNELS))


def of_training(found: Sequence[Difference]) -> tuple[str, ...]:
    """Return the names of differing settings by which the two runs are two trainings, whatever their numbers are.

    Another class of optimizer or module does not count: it may compute the same, by other settings.
    """
    return tuple(each.name for each in found if _is_of_training(each))


def _is_of_training(each: Difference) -> bool:
    if each.name.startswith("module "):
        kinds = [text.partition("(")[0] for text in (each.recorded, each.replayed)]
        return kinds[0] == kinds[1]
    of_training = _OF_TRAINING.fullmatch(each.name) and not each.name.endswith(_KERNELS)
    return bool(of_training) and "none" not in (each.recorded, each.replayed)


def _is_same(name: str, one: str, other: str) -> bool:
    """Return whether two values are the same. Numbers of what is trained may be rounded: a tensor holds fp32."""
    if one == other or not _OF_TRAINING.fullmatch(name) or _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
        return one == other
    numbers = (map(float, _NUMBER.findall(text)) for text in (one, other))
    return all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(*numbers, strict=True))


def _known_bugs(faults: Iterable[KnownFault]) -> dict[str, str]:
    return {f"known bug of {fault.kernel}": "present" for fault in faults if fault.applies}


def _fp32() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set by the newer of torch's two ways, and one cannot read the other's
        return str(getattr(torch.backends, "fp32_precision", "unknown"))
