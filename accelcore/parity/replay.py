"""Replay a recording: give its weights and random numbers to another run, and name where the two first diverge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from accelcore.checkpoint.folders import as_path
from accelcore.errors import ConfigurationError, RecordingError, notice
from accelcore.layerwise import ROUNDING, LayerDifference, compare_batch_sizes
from accelcore.parity.collector import Watched
from accelcore.parity.compare import Result, compare
from accelcore.parity.record import Record, rank_and_size
from accelcore.parity.recording import Reader, ranks_of
from accelcore.roles.runtime import set_host_rng_state
from accelcore.training.trainer import Trainer
from accelcore.util.containers import tensors, with_tensors
from accelcore.util.files import beside
from accelcore.util.text import is_whole

_OTHER_BATCHES = (
    "from step {} on the script's own batches or random numbers are others, and the recorded ones were taken; targets "
    "that are not arguments of the model are the script's own"
)


class Replay(Record):
    """Run a training again beside its recording, and name the first place where the two diverge.

    It is used as `Record` is:

    >>> with accelcore.Record("ref"):
    ...     train()
    >>> with accelcore.Replay("ref") as replay:
    ...     train()
    >>> replay.result.agrees
    True

    The training may run on another device, in another precision, compiled or not, with another strategy or number of
    ranks. It begins with the recorded states of the host's random generators and with the recorded weights. If device,
    versions, threads, precision and strategy are the recorded ones, and no other batches were taken, every bit is
    compared. Otherwise differences within the expected rounding agree: in units of the coarsest dtype so far in the
    step, times how far the weights are apart at its start. Runs never agree if a setting of
    the training differs, such as the weight decay.

    The trainers of a replay save no checkpoint. `trainer.resume` loads the checkpoint from which the recorded run
    began; if it began without one, none.

    Args:
        folder: the recording.
        model: the model to compare, as for `Record`.
        optimizer: the optimizer whose steps are compared, as for `Record`.
        out: folder for the recording of the replay; `FOLDER-replay` beside the recording unless given.
        weights: `"compare"` reports other initial weights as the first difference; `"take"` accepts them.
        batches: `"take"` gives the models the batches of a recording with `batches=True`, and the host's generator
            its recorded state at the start of each step. Use it if the script reads its data in another order.
            Targets that are not arguments of the model are the script's own.
        batch: do not replay; run the first batch whole, and again with so many rows at a time. The result names the
            first module that computes something else for a row in a smaller batch.
        operators: steps in which operators are compared. Each is also computed on the host, in float64 and from the
            same inputs. This tells a wrong operator from one that only passes a difference on. None: those recorded.
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
        steps: int | None = None,
    ) -> None:
        for name, word in (("weights", weights), ("batches", batches)):
            if word not in ("compare", "take"):
                raise ConfigurationError(f"{name}={word!r} is unknown", remedy='give "compare" or "take"')
        if batch is not None and not is_whole(batch, 1):
            raise ConfigurationError(f"batch={batch!r} is not a number of rows", remedy="give 1 or more, or None")
        self._reference = as_path(folder)
        ranks = ranks_of(self._reference)
        self._recorded = Reader(ranks.get(rank_and_size()[0], ranks[min(ranks)]))
        facts = self._recorded.facts
        if out is not None and as_path(out).resolve() == self._reference.resolve():
            raise ConfigurationError(f"out={str(out)!r} is the recording itself", remedy="give another folder")
        last = max(self._recorded.steps, default=1) if steps is None else steps
        super().__init__(
            beside(self._reference, "-replay") if out is None else out,
            model=model,
            optimizer=optimizer,
            operators=[step for step in facts["operators"] if step <= last] if operators is None else operators,
            random=facts["random"],
            steps=last,
        )
        self._checks, self._batch = True, batch
        self._takes_weights, self._takes_batches = weights == "take", batches == "take"
        if self._takes_batches and not facts["batches"]:
            raise ConfigurationError(
                f"{self._reference} has no batches to take",
                remedy="record them: accelcore record --batches, or Record(..., batches=True)",
            )
        self._ranks = len(ranks)
        self._taken: dict[str, Tensor] = {}  # whole batches of this step
        self._has_other_batches = False
        self._of_batch: Result | None = None
        self._other_weights: list[str] = []
        self._notes: list[str] = []
        self.result: Result | None = None

    def _start(self) -> None:
        if not self._is_open:
            set_host_rng_state(self._recorded.kept("generators"))
        super()._start()

    def begin(self, trainer: Trainer) -> None:
        super().begin(trainer)
        began = self._recorded.facts["began"]
        if trainer.backend.collectives.rank == 0 and len(self._trainers) == 1:
            resumes = f"resumes at step {began}, where the recorded run began" if began else "does not resume"
            notice("a replay saves no checkpoint, and %s", resumes)
        trainer.state.writes, trainer.state.starts_at = False, began

    def _begin_step(self, watched: Watched, first: bool) -> None:
        if self._takes_batches and not self._taken:
            if self._ranks > (size := rank_and_size()[1]):
                raise RecordingError(
                    f"the recording has batches of {self._ranks} ranks, and {size} would take them",
                    remedy="replay on as many ranks, or on more",
                )
            self._taken = self._recorded.kept(f"batches-{self._collector.step:08d}")
            generator = self._taken["generator"]
            if not torch.equal(generator, torch.get_rng_state()):
                self._note_others()
                torch.set_rng_state(generator)
        if first:
            self._load(watched)
        super()._begin_step(watched, first)

    def _receive(self, watched: Watched, given: tuple[Any, Any]) -> tuple[Any, Any]:
        if self._takes_batches:
            call = f"{watched.number}.{watched.calls}"
            own = enumerate(tensors(given))
            taken = [each if each.requires_grad else self._take(f"{call}.{n}", each) for n, each in own]
            given = with_tensors(given, taken)
        if self._batch is not None and self._of_batch is None:
            self._of_batch = _of_batch(compare_batch_sizes(watched.model, given, self._batch))
            self._collector.is_done = True
            self._step_ended(0, is_last=True)
        return super()._receive(watched, given)

    def _take(self, name: str, own: Tensor) -> Tensor:
        """Return the recorded value of an input, on the device and in the floating-point dtype of the script's own."""
        recorded = self._taken.get(name)
        if recorded is None or recorded.is_floating_point() != own.is_floating_point():
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

    def _load(self, watched: Watched) -> None:
        own, path = self._weights(watched), self._recorded.path(f"weights-{watched.number}")
        if not own or not path.is_file():
            why = "the recording has no weights" if own else "the weights are divided among ranks"
            self._notes.append(f"{why}, and the replay begins with its own")
            return
        recorded = self._recorded.kept(f"weights-{watched.number}")
        here, there = ({f"{name} {tuple(value.shape)}" for name, value in each.items()} for each in (own, recorded))
        if here != there:
            raise RecordingError(
                "the model is not the one that was recorded",
                why=f"only recorded: {', '.join(sorted(there - here)[:5]) or 'none'}; "
                f"only here: {', '.join(sorted(here - there)[:5]) or 'none'}",
                remedy="replay the script that was recorded, with the same model",
            )
        # A model in low precision may give its state in fp32.
        held = {name: each.dtype for name, each in (*watched.model.named_parameters(), *watched.model.named_buffers())}
        others = [
            name for name, value in own.items()
            if not _is_same(value.detach().cpu().to(held.get(name, value.dtype)), recorded[name])
        ]  # fmt: skip
        self._other_weights += [watched.full(name) for name in others]
        trainers = [each for each in self._trainers if each.model is watched.model]
        if others and trainers:  # it has masters, or shards
            trainers[0].load(path)
        elif others:
            watched.model.load_state_dict(recorded, strict=False)  # extra state that is no tensor is not recorded

    def close(self, *, complete: bool = True) -> None:
        if not self._is_open:
            return
        super().close(complete=complete)
        if complete and self._writer is not None:
            self._writer.write(
                notes=self._notes,
                took_batches=self._has_other_batches,
                other_weights=[] if self._takes_weights else self._other_weights,
                checked=self._collector.operators.checked,
                result=self._of_batch and asdict(self._of_batch),
            )
            self.result = compare(self._reference, self._folder, rank=rank_and_size()[0])


def _is_same(own: Tensor, recorded: Tensor) -> bool:
    """Return whether two weights are the same in the coarser of their dtypes."""
    return torch.equal(own.to(recorded.dtype), recorded) or torch.equal(recorded.to(own.dtype), own)


def _of_batch(layers: Sequence[LayerDifference]) -> Result:
    """Return the result of a batch that was run whole and in parts."""
    first = next((each for each in layers if not each.equal), None)
    if first is None:
        return Result(agrees=True, steps=1, exact=True, notes=("each row gives the same bits in a smaller batch",))
    far = next((each for each in layers if each.ratio > ROUNDING), None)
    place = f"{far.computed_by or 'the model itself'}, {far.place}: {far.ratio:.3g} units" if far else "none"
    return Result(
        agrees=False, steps=1, exact=True, step=1, rank=rank_and_size()[0], phase="batch size",
        module=first.computed_by, item=first.place, is_cause=True, ratio=first.ratio,
        next="a kernel chooses its order of sums by the size of the batch, or the module mixes rows",
        notes=(f"the first module that is apart by more than {ROUNDING:g} units of rounding: {place}",),
    )  # fmt: skip
