"""Evaluation: batches in evaluation mode, each row once over all ranks, and means over the rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from numbers import Real
from typing import Any, overload

import torch
from torch import Tensor, nn

from accelcore.devices import Roles
from accelcore.errors import ConfigurationError, TrainingError, logger
from accelcore.jobs.collectives import Collectives
from accelcore.jobs.exchange import gather_objects
from accelcore.precision.policy import LOW_PRECISION
from accelcore.training.agreement import wait_for_all
from accelcore.training.data.sharding import Batches, check_loader, rank_0s_rows, share_once
from accelcore.util.containers import rows, tensors
from accelcore.util.text import bound, is_whole, kind_of


class Evaluation(Batches):
    """Batches of `trainer.evaluate(loader)`, to be iterated over once, or averaged by `mean`."""

    _made_by = "trainer.evaluate(loader)"

    def __init__(self, batches: Iterator[Any], length: Callable[[], int], collectives: Collectives) -> None:
        super().__init__(batches, length)
        self._collectives = collectives

    @overload
    def mean(self, function: Callable[[Any], Mapping[str, Any]]) -> dict[str, float]: ...

    @overload
    def mean(self, function: Callable[[Any], Tensor | float]) -> float: ...

    def mean(self, function: Callable[[Any], Any]) -> dict[str, float] | float:
        """Return the mean of `function(batch)` over all rows of all ranks, the same on every rank.

        Example:
            >>> error = trainer.evaluate(loader).mean(lambda batch: model(batch).square())

        Every rank must call this. The host waits for the device once, after the last batch. A warning is logged if
        the first result has shape (n, n) for n rows, as predictions of shape (n, 1) minus targets of shape (n,) have.

        Args:
            function: returns a tensor of values, which all count alike: one for each row, or another number of them,
                such as one for each token; or a scalar, the mean over the rows of the batch; or a dict of these, by
                name. The rows of a batch are dimension 0 of its tensors: for a batch of shape (time, rows, ...),
                return one value for each row.

        Returns:
            A float, or a dict of floats.

        Raises:
            TrainingError: `function` returned neither tensors nor numbers; or a count; or a scalar, and the batch has
                no tensors, or tensors that differ in dimension 0.
            ConfigurationError: there are no rows at all, or they were read before.
        """
        if not callable(function) or bound(function, None) is None:
            name, remedy = getattr(function, "__name__", kind_of(function)), "pass lambda batch: loss(model, batch)"
            raise ConfigurationError(f"mean({name}) is not given a function of the batch alone", remedy=remedy)
        sums: dict[str, list[tuple[Tensor, int]]] = defaultdict(list)
        for batch in self:
            returned = function(batch)
            for name, value in (returned if isinstance(returned, Mapping) else {"": returned}).items():
                # The last batch may have n rows by chance.
                is_first = name not in sums and self._collectives.rank == 0
                if is_first and getattr(value, "shape", ()) == (rows(batch),) * 2 != (1, 1):
                    _warn_of_square(len(value))
                sums[name].append(_total(value, batch))
        own = {}
        for name, pairs in sums.items():
            totals, counts = zip(*pairs, strict=True)
            own[name] = torch.stack(totals).cpu().double().sum().item(), sum(counts)
        found = gather_objects(self._collectives, own, "trainer.evaluate(...).mean()")
        # A rank without batches knows no names.
        of_names = {name: [rank[name] for rank in found if name in rank] for names in found for name in names}
        added = {name: [sum(each) for each in zip(*pairs, strict=True)] for name, pairs in of_names.items()}
        if not any(count for _, count in added.values()):
            raise ConfigurationError("an evaluation of no rows has no mean", remedy="check that there is data")
        means = {name: total / count if count else float("nan") for name, (total, count) in added.items()}
        return means[""] if set(means) == {""} else means


@cache  # logged once
def _warn_of_square(size: int) -> None:
    logger.warning(
        "trainer.evaluate(...).mean() averages a result of shape (n, n) for n = %d rows. If predictions of shape "
        "(n, 1) met targets of shape (n,), use squeeze(1)",
        size,
    )


def _total(value: Any, batch: Any) -> tuple[Tensor, int]:
    """Return the sum of the values for a batch, and their number."""
    is_count = is_whole(value) or (isinstance(value, Tensor) and not (value.dim() or value.is_floating_point()))
    if is_count or not isinstance(value, Tensor | Real):
        values = "return one value for each row, such as predicted == target without .sum(), or a dict of these"
        raise TrainingError(
            f"the function returned {'a whole number' if is_count else kind_of(value)} for a batch, which is neither "
            "values nor their mean",
            remedy="return a tensor, without .numpy()" if type(value).__name__ == "ndarray" else values,
        )
    if not isinstance(value, Tensor):
        value = torch.tensor(float(value), dtype=torch.float64, device="cpu")
    total = (value.float() if value.dtype in LOW_PRECISION else value).detach().sum()
    if value.dim():
        return total, value.numel()
    lengths = {len(tensor) for tensor in tensors(batch) if tensor.dim()}
    if len(lengths) != 1 or 0 in lengths:
        raise TrainingError(
            "the function returned a scalar for a batch whose number of rows is unknown",
            why="a scalar counts as the mean over the rows. This batch has "
            + (f"tensors of {' and '.join(map(str, sorted(lengths)))} rows" if lengths else "no tensor with rows"),
            remedy="return one value for each row: for the mean over rows, loss.expand(rows)",
        )
    return total * (count := lengths.pop()), count


def _together(share: Iterable[Any], job: Collectives, device: torch.device) -> Iterator[Any]:
    """Yield this rank's batches; raise TrainingError on all ranks if only some of them have another batch."""
    end, batches = object(), iter(share)
    while True:
        batch = next(batches, end)
        ends = torch.tensor([batch is end, batch is not end], dtype=torch.int32, device=device)
        if job.all_reduce(ends, "max").tolist() == [1, 1]:
            raise TrainingError(
                "some ranks have one more batch to evaluate on than others",
                why="the ranks call a sharded model together",
                remedy='give all ranks the same number of batches, or choose parallel="zero1"',
            )
        if batch is end:
            return
        yield batch


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of each of its modules afterwards."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        model.train(training[model])  # a subclass may override it; the flags of its submodules are restored below
        for module, before in training.items():
            module.training = before


def evaluate(
    backend: Roles,
    model: nn.Module,
    region: Callable[[], AbstractContextManager[object]],
    loader: Iterable[Any],
    *,
    together: bool,
) -> Evaluation:
    """Return this rank's share of `loader`. See `Trainer.evaluate`.

    `region` makes a context for a forward pass. `together`: whether all ranks must call the model equally often.
    """
    job = backend.collectives

    def shared(draw: Callable[[Any], Any]) -> Any:
        check_loader(loader)
        return loader if job.world_size == 1 else share_once(loader, job.rank, job.world_size, draw)

    def read() -> Iterator[Any]:
        # A rank alone would see its share of the rows only.
        wait_for_all(backend, "trainer.evaluate()")
        with evaluating(model):
            share = shared(partial(rank_0s_rows, collectives=job, device=backend.device))
            for batch in _together(share, job, backend.device) if together else share:
                moved = backend.runtime.to_device(batch)
                with torch.no_grad(), region():  # not around the loader, which may compute too
                    yield moved

    # A progress bar may ask for the length on one rank only, so that no rank may wait for another there.
    return Evaluation(read(), lambda: len(shared(lambda sampler: range(len(sampler)))), job)
