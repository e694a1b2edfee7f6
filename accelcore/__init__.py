"""accelcore: write a PyTorch training script once, run it at full speed on every device.

A first line::

    import accelcore

    accel = accelcore.select()        # ACCEL_DEVICE, or the best device that works here

Importing this package imports neither torch nor a plugin: names are resolved on first use. The command line is in
`accelcore.cli`. docs/architecture.md says which file answers which question.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelcore.backend import Backend
    from accelcore.devices import Capabilities, Probe
    from accelcore.devices.hookspecs import API, hookimpl
    from accelcore.devices.select import installed, select
    from accelcore.errors import (
        AccelError,
        AmpError,
        BackendUnavailableError,
        CheckpointError,
        ConfigurationError,
        DistributedError,
        PluginError,
        RecordingError,
        TrainingError,
        UnknownBackendError,
        UnsupportedError,
    )
    from accelcore.known_faults import KnownFault
    from accelcore.layerwise import compare_logprobs
    from accelcore.parity.record import Record
    from accelcore.parity.replay import Replay
    from accelcore.precision.policy import Policy
    from accelcore.scaling.dynamic import LossScale
    from accelcore.training.data.sharding import ShardedStream
    from accelcore.training.monitoring.log import Log
    from accelcore.training.monitoring.progress import Progress
    from accelcore.training.observers import Observer
    from accelcore.training.options import FSDP, Recompute, TrainerOptions
    from accelcore.training.saving.together import Together
    from accelcore.training.trainer import Trainer

    __version__: str

__all__ = [
    "API", "FSDP", "AccelError", "AmpError", "Backend", "BackendUnavailableError", "Capabilities", "CheckpointError",
    "ConfigurationError", "DistributedError", "KnownFault", "Log", "LossScale", "Observer", "PluginError", "Policy",
    "Probe", "Progress", "Recompute", "Record", "RecordingError", "Replay", "ShardedStream", "Together", "Trainer",
    "TrainerOptions", "TrainingError", "UnknownBackendError", "UnsupportedError", "__version__", "compare_logprobs",
    "hookimpl", "installed", "select",
]  # fmt: skip

_HOMES = {
    "backend": ("Backend",),
    "devices": ("Capabilities", "Probe"),
    "devices.hookspecs": ("API", "hookimpl"),
    "devices.select": ("installed", "select"),
    "known_faults": ("KnownFault",),
    "layerwise": ("compare_logprobs",),
    "parity.record": ("Record",),
    "parity.replay": ("Replay",),
    "precision.policy": ("Policy",),
    "scaling.dynamic": ("LossScale",),
    "training.data.sharding": ("ShardedStream",),
    "training.monitoring.log": ("Log",),
    "training.monitoring.progress": ("Progress",),
    "training.observers": ("Observer",),
    "training.options": ("FSDP", "Recompute", "TrainerOptions"),
    "training.saving.together": ("Together",),
    "training.trainer": ("Trainer",),
}
"""Names by module; all others are in `errors`."""

_OF_A_BACKEND = ("Accelerator", "distributed", "join", "trainer")


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("accelcore")
    if name not in __all__:
        hint = ": write accel = accelcore.select(), then accel.trainer(...), accel.join() or accel.distributed()"
        message = f"module {__name__!r} has no attribute {name!r}{hint if name in _OF_A_BACKEND else ''}"
        raise AttributeError(message, name=name, obj=import_module(__name__))
    home = next((home for home, names in _HOMES.items() if name in names), "errors")
    value = getattr(import_module(f"accelcore.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
