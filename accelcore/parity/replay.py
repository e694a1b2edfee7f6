"""Replay a recording: give its weights and random numbers to another run, and name the first place where they part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.checkpoint.store import as_path
from accelcore.errors import ConfigurationError, RecordingError
from accelcore.parity.collector import Watched
from accelcore.parity.compare import compare
from accelcore.parity.record import Record, rank_now
from accelcore.parity.recording import Reader, Writer, ranks_of
from accelcore.parity.result import Result
from accelcore.roles.runtime import set_host_rng_state

__all__ = ["Replay"]


class Replay(Record):
    """Run a training again beside its recording, and name the first place where the two part.

    It is used as `Record` is::

        with accelcore.Replay("ref") as replay:
            train()
        print(replay.result)

    The training may run on another device, in another precision, compiled or not, with another strategy or number of
    ranks. It begins with the recorded states of the host's random generators and with the recorded weights. If the
    script would have begun with other weights, the result says so. Batches are the script's own, and are compared.

    If device, versions, threads, precision and strategy are those of the recording, every bit is compared. Otherwise
    differences within the expected rounding agree: in units of the coarsest dtype so far in the step, and beside what
    the weights at the start of the step were apart.

    Args:
        folder: the recording.
        model, optimizer: as for `Record`.
        out: folder for the recording of the replay; `FOLDER-replay` beside the recording unless given.
        weights: `"compare"` reports other initial weights as the first difference; `"take"` accepts them.
        operators: steps in which operators are compared and checked; None for those of the recording.
        checks: whether each operator of these steps is also computed on the host in float64 with the same inputs, which
            tells a wrong operator from one that carries a difference on.
        steps: how many steps to compare; None for all.

    Attributes:
        result: the `Result`, after the context; in a job, of this rank.

    Raises:
        RecordingError: the recording is damaged or missing, or does not fit the model.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        model: nn.Module | Sequence[nn.Module] | None = None,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        out: str | Path | None = None,
        weights: Literal["compare", "take"] = "compare",
        operators: Iterable[int] | None = None,
        checks: bool = True,
        steps: int | None = None,
    ) -> None:
        if weights not in ("compare", "take"):
            raise ConfigurationError(f'weights={weights!r} must be "compare" or "take"')
        self._reference = as_path(folder)
        ranks = ranks_of(self._reference)
        self._recorded = Reader(ranks.get(rank_now(), ranks[min(ranks)]))
        facts = self._recorded.facts
        super().__init__(
            self._reference.with_name(f"{self._reference.name}-replay") if out is None else out,
            model=model,
            optimizer=optimizer,
            operators=facts["operators"] if operators is None else operators,
            random=facts["random"],
            steps=steps,
        )
        self._takes, self._checks = weights == "take", checks
        self._counts = tuple(facts["counts"])
        self._other_weights: list[str] = []
        self.result: Result | None = None

    def _start(self) -> None:
        if not self._is_open:
            generators = self._recorded.facts["generators"]
            set_host_rng_state({name: _generator(name, state) for name, state in generators.items()})
        super()._start()

    def _first_time(self, watched: Watched, writer: Writer) -> None:
        number = self._collector.models.index(watched)
        recorded = self._recorded.weights(number)
        own = {name: value for name, value in watched.model.state_dict().items() if isinstance(value, Tensor)}
        if recorded:
            _check_names(recorded, own)
            for name, value in own.items():
                if not torch.equal(value.detach().cpu().to(recorded[name].dtype), recorded[name]):
                    self._other_weights.append(watched.prefix + name)
            if self._other_weights:
                self._load(watched, number, recorded, own)
        super()._first_time(watched, writer)

    def _load(self, watched: Watched, number: int, recorded: dict[str, Tensor], own: dict[str, Tensor]) -> None:
        trainer = next((each for each in self._trainers if each.model is watched.model), None)
        if trainer is not None:  # it has masters, or shards
            trainer.load(self._recorded.weights_file(number))
        else:
            for name, value in own.items():
                value.copy_(recorded[name])

    def close(self, *, complete: bool = True) -> None:
        if not self._is_open:
            return
        super().close(complete=complete)
        if complete and self._writer is not None:
            self._writer.change(
                other_weights=[] if self._takes else self._other_weights,
                checked=[vars(each) for each in self._collector.operators.checked],
            )
            self._writer.flush()
            self.result = compare(self._reference, self._folder, rank=rank_now())


def _generator(name: str, state: list[float]) -> Tensor:
    """Return the state of a generator of the host."""
    kind = torch.uint8 if name == "torch" else torch.float64 if name.endswith("gauss") else torch.int64
    return torch.tensor(state, dtype=kind)


def _check_names(recorded: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    missing, more = sorted(recorded.keys() - own.keys()), sorted(own.keys() - recorded.keys())
    shapes = [name for name in recorded.keys() & own.keys() if recorded[name].shape != own[name].shape]
    if missing or more or shapes:
        raise RecordingError(
            "the model is not the one that was recorded",
            why=f"only recorded: {', '.join(missing[:5]) or 'none'}; only here: {', '.join(more[:5]) or 'none'}; "
            f"of another shape: {', '.join(sorted(shapes)[:5]) or 'none'}",
            remedy="replay the script that was recorded, with the same model",
        )
