"""A trial of `accelcore advise`: other options for a script's trainers, a record of their steps, and an early end."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Mapping
from itertools import count
from time import perf_counter
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from accelcore.devices.request import TrialRequest, requested_trial
from accelcore.errors import logger
from accelcore.precision.policy import Policy
from accelcore.training.observers import Observer
from accelcore.util.containers import bytes_of, tensors

_BATCHES = 8  # first batches of which the record has checksums

_numbers = count()


def with_trial(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a trainer's options, overridden and with an observer that records if this process is a trial."""
    trial = requested_trial()
    if trial is None:
        return options
    if trial.seed:
        torch.manual_seed((torch.initial_seed() + trial.seed) % 2**63)
        random.seed(torch.initial_seed())
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(torch.initial_seed() % 2**32)
    changed = dict(trial.options)
    if "precision" in changed:
        name, _, dtype = changed["precision"].partition(" ")
        changed |= {"precision": Policy.preset(name, dtype=dtype or None), "loss_scale": None}
    overridden = [f"{name}={options[name]!r}" for name in changed if options.get(name) is not None]
    logger.warning(
        "accelcore advise: a trial of %d steps with %s%s; it resumes and saves no checkpoint, and writes no log",
        trial.steps,
        ", ".join(f"{name}={value!r}" for name, value in trial.options.items()) or "the script's own options",
        f", instead of {', '.join(overridden)}" if overridden else "",
    )
    return {**options, **changed, "observers": [*options.get("observers", ()), _Recorder(trial, overridden)]}


class _Recorder(Observer):
    """Write a line of JSON for the trainer, for each of its first batches, for each step, and for the end.

    It waits for the device after each step, and ends the script by SystemExit.
    """

    measures_norm = False

    def __init__(self, trial: TrialRequest, overridden: list[str]) -> None:
        self._trial, self._overridden, self._number = trial, overridden, next(_numbers)
        self._losses: list[Tensor] = []
        self._overflow: Tensor | None = None
        self._batches = self._steps = 0
        self._since: float | None = None

    def begin(self, trainer: Any) -> None:
        self._trainer, self._runtime = trainer, trainer.backend.runtime
        trainer.state.writes, trainer.state.starts_at = False, 0
        self._writes = trainer.backend.collectives.rank == 0
        backend, compiled = trainer.backend, trainer.compiled
        self._write(
            name=type(trainer.model).__name__,
            device=backend.name,
            emulated=backend.emulated,
            autocast=list(backend.capabilities.autocast_dtypes),
            model_dtypes=list(backend.capabilities.model_dtypes),
            fast_fp32=backend.capabilities.fast_fp32,
            compilers=list(backend.capabilities.compilers),
            overridden=self._overridden,
            compiled=compiled is not None,
            torch=torch.__version__,
            eager="" if compiled is None else compiled.reason,
        )

    def batch(self, batch: Any) -> None:
        if self._batches < _BATCHES:
            self._batches += 1
            checksums = [crc32(bytes_of(each.cpu()).numpy().tobytes()) for each in tensors(batch)]
            self._write(batch=self._batches, checksums=checksums)

    def loss(self, loss: Tensor) -> None:
        self._losses.append(loss)

    def overflow(self, found: Tensor) -> None:
        self._overflow = found

    def step(self, steps: int) -> None:
        self._runtime.synchronize()
        now = perf_counter()
        loss = torch.stack(self._losses).mean(dtype=torch.float64).item() if self._losses else math.nan
        self._steps += 1  # not `steps`: a script may resume from a checkpoint that must exist
        self._write(
            step=self._steps,
            loss=loss if math.isfinite(loss) else None,
            seconds=None if self._since is None else now - self._since,
            overflow=self._overflow is not None and bool(self._overflow),
        )
        self._losses, self._overflow = [], None
        if self._steps >= self._trial.steps:
            self._write(done=self._steps, memory=self._runtime.memory().peak)
            sys.exit(0)
        self._since = perf_counter()

    def _write(self, **values: Any) -> None:
        if self._writes:
            with open(self._trial.report, "a", encoding="utf-8") as file:
                file.write(json.dumps({"trainer": self._number, **values}) + "\n")
