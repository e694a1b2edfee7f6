"""Replay a recording: give its weights and random numbers to another run, and name the first place where they part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.checkpoint.store import as_path
from accelcore.errors import ConfigurationError, RecordingError
from accelcore.parity.batch_size import compare_batch_sizes
from accelcore.parity.collector import Watched
from accelcore.parity.compare import compare
from accelcore.parity.record import Record, rank_now, world_size_now
from accelcore.parity.recording import Reader, Writer, ranks_of
from accelcore.parity.result import Result
from accelcore.roles.runtime import set_host_rng_state
from accelcore.util.containers import tensors, with_tensors
from accelcore.util.text import is_whole

__all__ = ["Replay"]

_OTHER_BATCHES = (
    "from step {} on the script's own batches or random numbers are others, and the recorded ones were taken; targets "
    "that are not arguments of the model are the script's own"
)


class Replay(Record):
    """Run a training again beside its recording, and name the first place where the two part.

    It is used as `Record` is::

        with accelcore.Replay("ref") as replay:
            train()
        print(replay.result)

    The training may run on another device, in another precision, compiled or not, with another strategy or number of
    ranks. It begins with the recorded states of the host's random generators and with the recorded weights. If the
    script would have begun with other weights, the result says so. Batches are the script's own, and are compared.

    If device, versions, threads, precision and strategy are those of the recording and no other batches were taken from
    it, every bit is compared. Otherwise
    differences within the expected rounding agree: in units of the coarsest dtype so far in the step, and beside what
    the weights at the start of the step were apart.

    Args:
        folder: the recording.
        model, optimizer: as for `Record`.
        out: folder for the recording of the replay; `FOLDER-replay` beside the recording unless given.
        weights: `"compare"` reports other initial weights as the first difference; `"take"` accepts them.
        batches: `"take"` gives the models the batches of a recording with `batches=True`, and the host's generator
            its recorded state at the start of each step. Use it if the script reads its data in another order.
            Targets that are not arguments of the model are the script's own.
        batch: do not replay; run the first batch whole, and again with so many rows at a time. The result names the
            first module that computes something else for a row in a smaller batch.
        operators: steps in which operators are compared and checked; None for those of the recording.
        checks: whether each operator of these steps is also computed on the host in float64 with the same inputs, which
            tells a wrong operator from one that carries a difference on.
        steps: how many steps to compare; None for all that were recorded.

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
        batches: Literal["compare", "take"] = "compare",
        batch: int | None = None,
        operators: Iterable[int] | None = None,
        checks: bool = True,
        steps: int | None = None,
    ) -> None:
        for name, word in (("weights", weights), ("batches", batches)):
            if word not in ("compare", "take"):
                raise ConfigurationError(f'{name}={word!r} must be "compare" or "take"')
        if batch is not None and not is_whole(batch, 1):
            raise ConfigurationError(f"batch={batch!r} is not a number of rows", remedy="give 1 or more, or None")
        self._reference = as_path(folder)
        ranks = ranks_of(self._reference)
        self._recorded = Reader(ranks.get(rank_now(), ranks[min(ranks)]))
        facts = self._recorded.facts
        if out is not None and as_path(out).resolve() == self._reference.resolve():
            raise ConfigurationError(f"out={str(out)!r} is the recording itself", remedy="give another folder")
        last = max(self._recorded.steps, default=1) if steps is None else steps
        super().__init__(
            self._reference.with_name(f"{self._reference.name}-replay") if out is None else out,
            model=model,
            optimizer=optimizer,
            operators=[step for step in facts["operators"] if step <= last] if operators is None else operators,
            random=facts["random"],
            steps=last,
        )
        self._takes, self._checks, self._batch = weights == "take", checks, batch
        self._takes_batches = batches == "take"
        if self._takes_batches and not facts["batches"]:
            raise ConfigurationError(
                f"{self._reference} has no batches to take",
                remedy="record them: accelcore record --batches, or Record(..., batches=True)",
            )
        self._ranks = len(ranks)
        self._taken: dict[str, Tensor] = {}  # whole batches of this step
        self._has_other_batches = False
        self._other_weights: list[str] = []
        self._notes: list[str] = []
        self.result: Result | None = None

    def _start(self) -> None:
        if not self._is_open:
            generators = self._recorded.facts["generators"]
            set_host_rng_state({name: _generator(name, state) for name, state in generators.items()})
        super()._start()

    def _begin_step(self, watched: Watched, first: bool) -> None:
        if self._takes_batches and not self._taken:
            if self._ranks > world_size_now():
                raise RecordingError(
                    f"the recording has batches of {self._ranks} ranks, and {world_size_now()} would take them",
                    remedy="replay on as many ranks, or on more",
                )
            self._taken = self._recorded.batches(self._collector.step)
            generator = self._taken["generator"]
            if not torch.equal(generator, torch.get_rng_state()):
                self._note_others()
                torch.set_rng_state(generator)
        super()._begin_step(watched, first)

    def _receive(self, watched: Watched, given: tuple[Any, Any]) -> tuple[Any, Any]:
        if self._takes_batches:
            own = enumerate(tensors(given))
            given = with_tensors(
                given,
                [each if each.requires_grad else self._take(self._input_name(watched, n), each) for n, each in own],
            )
        if self._batch is not None and self.result is None:
            self.result = compare_batch_sizes(watched.model, given, self._batch, rank=rank_now())
            self._collector.is_done = True
            self._ended()
        return super()._receive(watched, given)

    def _take(self, name: str, own: Tensor) -> Tensor:
        """Return the recorded value of an input, on the device and in the floating-point dtype of the script's own."""
        recorded = self._taken.get(name)
        fits = recorded is not None and recorded.is_floating_point() == own.is_floating_point()
        if recorded is None or not fits:
            raise RecordingError(
                f"step {self._collector.step} of the recording has no batch for this call of the model",
                why=f"the replay calls the model more often, or with other arguments: {name} is {own.dtype} here",
                remedy="replay the script that was recorded, with as many micro-batches",
            )
        taken = recorded.to(own.device, own.dtype)
        if taken.shape == own.shape and torch.equal(taken, own):
            return own
        self._note_others()
        return taken

    def _note_others(self) -> None:
        if not self._has_other_batches:
            self._has_other_batches = True
            self._notes.append(_OTHER_BATCHES.format(self._collector.step))

    def _end_step(self) -> None:
        self._taken = {}
        super()._end_step()

    def _first_time(self, watched: Watched, writer: Writer) -> None:
        number = self._collector.models.index(watched)
        recorded = self._recorded.weights(number)
        if self._is_divided():
            self._notes.append("the weights are divided among ranks, and the replay begins with its own")
        elif not recorded:
            self._notes.append("the recording has no weights, and the replay begins with its own")
        else:
            state = watched.model.state_dict()
            own = {name: value for name, value in state.items() if isinstance(value, Tensor)}
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
        if not complete or self._writer is None:
            return
        if self._batch is not None:
            self._writer.change(result=asdict(self.result) if self.result else None)
            self._writer.flush()
        else:
            self._writer.change(
                notes=self._notes,
                took_batches=self._has_other_batches,
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
