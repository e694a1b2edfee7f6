"""Training steps as captured graphs: the device's work is recorded once and launched whole from then on.

A captured graph runs on the very memory that it was recorded with. So batches are copied into tensors of its own,
gradients that are summed over several graphs are kept and set to zero in place, and what the host would decide at each
step (the learning rate) becomes a tensor. Whatever else a graph would have baked in is watched, and recorded anew when
it changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.errors import TrainingError, UnsupportedError
from accelcore.roles.runtime import Runtime
from accelcore.torch_internals import pytree
from accelcore.training.gradients import Gradients

__all__ = ["CapturedStep", "check_capturable"]

ForwardBackward = Callable[[Any], tuple[Tensor, Any]]

WARM_UP = 3
"""Windows that are trained eagerly first: libraries allocate their workspaces, and optimizers their state."""

_LIMIT = 16  # kinds of batch; the graph of each holds the memory of a whole step


@dataclass
class _Graph:
    inputs: list[Tensor]
    loss: Tensor
    aux: Any
    replay: Callable[[], None]


class CapturedStep:
    """The device's part of a training step, eager while it warms up, then captured.

    A batch of another kind is trained on eagerly once, too, so that what libraries choose and compile for it is there
    when it is captured. A step that cannot be captured, or a batch of a 17th kind, is a TrainingError.

    Args:
        runtime: captures.
        optimizer: one that `check_capturable` passes.
        gradients: of what it trains.
        sums: whether a window has several micro-batches, whose graphs add to the same gradients.
    """

    def __init__(self, runtime: Runtime, optimizer: Optimizer, gradients: Gradients, *, sums: bool) -> None:
        self._runtime, self._optimizer, self._gradients, self._sums = runtime, optimizer, gradients, sums
        self._graphs: dict[Any, _Graph] = {}
        self._kinds: set[Any] = set()  # of batch, that were trained on eagerly
        self._options: list[Any] = []
        self._baked: tuple[Any, ...] = ()
        self._warm, self._windows = False, 0
        self._received: set[str] = set()  # parameters that received a gradient while warming up
        self._prepare()

    def __call__(
        self, batch: Any, forward_backward: ForwardBackward, close: Callable[[], None], *, first: bool, last: bool
    ) -> tuple[Tensor, Any]:
        """Train on one micro-batch, the window's first, last, both or neither.

        Args:
            forward_backward: given a batch, trains on it and returns the loss and what came beside it.
            close: updates the parameters and clears the gradients.

        Returns:
            The loss, detached, and what came beside it.
        """
        if first and not self._warm and self._windows >= WARM_UP:
            self._warm = True
            if self._sums:  # memory that every graph adds to
                self._hold_gradients()
        leaves, structure = _flatten(batch)
        key = (last, structure, tuple(map(_kind, leaves)), self._hyperparameters())
        try:
            graph = self._graphs.get(key)
        except TypeError as error:
            raise TrainingError(
                "a batch holds what is no tensor and cannot be compared",
                why=f"a graph bakes such values in, and is told from others by them: {error}",
                remedy="put tensors, numbers and strings into the batch, or leave graph=True out",
            ) from error
        if graph is None:

            def work(batch: Any) -> tuple[Tensor, Any]:
                return self._work(batch, forward_backward, close if last else None)

            if not self._warm or key not in self._kinds:
                self._admit(key)
                self._windows += last
                with self._runtime.side_stream():  # where captures run: nothing of autograd's may hang on another
                    return work(batch)
            graph = self._graphs[key] = self._capture(batch, work)
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        for static, given in zip(graph.inputs, tensors, strict=True):
            static.copy_(given, non_blocking=True)
        graph.replay()
        return graph.loss.clone(), graph.aux

    def forget(self) -> None:
        """Drop every graph, because the memory they were captured with is no longer the training's."""
        self._graphs.clear()
        self._kinds.clear()
        self._warm, self._windows = False, 0
        self._received.clear()
        self._gradients.held = []
        self._prepare()

    def _hold_gradients(self) -> None:
        """Allocate the gradients that every graph adds to; a parameter that never received one keeps None."""
        parameters = [slot.parameter for slot in self._gradients.slots if slot.name in self._received]
        self._gradients.held = [torch.zeros_like(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, self._gradients.held, strict=True):
            parameter.grad = gradient

    def _admit(self, key: Any) -> None:
        if key not in self._kinds and len(self._kinds) >= _LIMIT:
            raise TrainingError(
                f"this is the {_LIMIT + 1}th kind of batch, and each is a graph of its own",
                why="a graph is captured for one shape of batch and one setting of the optimizer",
                remedy="give all batches one shape (drop_last=True, padding), or leave graph=True out",
            )
        self._kinds.add(key)

    def _work(
        self, batch: Any, forward_backward: ForwardBackward, close: Callable[[], None] | None
    ) -> tuple[Tensor, Any]:
        loss, aux = forward_backward(batch)
        received = set(self._gradients.state())
        late = received - self._received
        if self._warm and late:
            raise TrainingError(
                f"{len(late)} parameters received their first gradient after {WARM_UP} windows",
                why="the optimizer's state for them would be made anew by each launch of the graph",
                remedy="use the same parameters in each step, or leave graph=True out",
            )
        self._received |= received
        if close is not None:
            close()
        return loss.detach(), aux

    def _hyperparameters(self) -> tuple[Any, ...]:
        """What a graph bakes in of the optimizer's options. A tensor counts as itself, whatever is written into it."""
        options = [value for group in self._optimizer.param_groups for value in group.values()]
        if len(options) != len(self._options) or not all(map(is_, options, self._options)):
            self._options = options
            self._baked = tuple(option for option in options if isinstance(option, (bool, int, float, tuple, Tensor)))
        return self._baked

    def _capture(self, batch: Any, work: ForwardBackward) -> _Graph:
        steps = [entry["step"] for entry in _engine(self._optimizer).state.values() if "step" in entry]
        if any(not isinstance(step, Tensor) or step.device != self._runtime.device for step in steps):
            raise _counts_on_the_host(_engine(self._optimizer))
        leaves, structure = pytree.tree_flatten(batch)
        inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        static_batch = pytree.tree_unflatten(inputs, structure)
        try:
            (loss, aux), replay = self._runtime.capture(lambda: work(static_batch))
        except TrainingError:
            raise
        except RuntimeError as error:
            # Ending a broken capture raises once more, which would hide what broke it.
            cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            raise TrainingError(
                "the training step cannot be captured as a graph",
                why=str(cause).strip().split("\n", 1)[0],
                remedy="leave out of model and loss what the host must wait for (item(), print, shapes that depend on "
                "values), or leave graph=True out; and start the process anew, because a capture that broke may leave "
                "the device's random generator unusable",
            ) from cause
        return _Graph([leaf for leaf in inputs if isinstance(leaf, Tensor)], loss, aux, replay)

    def _prepare(self) -> None:
        for group in self._optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
            if not isinstance(group["lr"], Tensor):  # a schedule writes into it, and so into the graph
                group["lr"] = torch.tensor(group["lr"], device=self._runtime.device)


def check_capturable(optimizer: Optimizer) -> None:
    """Raise UnsupportedError for an optimizer that cannot be captured.

    It has to keep its step count on the device, as torch's do with `capturable`, and others that have an attribute
    `counts_on_device` and say so; or each replay would be the same step again. So with its learning rate, which a graph
    cannot wait for.
    """
    engine = _engine(optimizer)
    counts_on_device = getattr(engine, "counts_on_device", False) or isinstance(engine, torch.optim.SGD)
    if not counts_on_device and not all("capturable" in group for group in engine.param_groups):
        raise _counts_on_the_host(engine)
    if _reads_on_the_host(engine):
        raise UnsupportedError(
            f"this {type(engine).__name__} cannot be captured in a graph",
            why="it reads its learning rate on the host, and a graph cannot wait for that",
            remedy="take route 'fused' or 'foreach' where there is one (SGD: 'fused', without dampening), or adamw",
        )


def _engine(optimizer: Optimizer) -> Optimizer:
    """What computes the updates."""
    engine: Optimizer = getattr(optimizer, "engine", optimizer)
    return engine


def _counts_on_the_host(optimizer: Optimizer) -> UnsupportedError:
    return UnsupportedError(
        f"{type(optimizer).__name__} cannot be captured in a graph",
        why="it counts its steps on the host, and each replay would be the same step again",
        remedy="take one of torch's with capturable, such as adamw by route 'fused' or 'foreach'",
    )


def _reads_on_the_host(optimizer: Optimizer) -> bool:
    """Whether a route of torch's gives its kernels the learning rate as a number, which is a tensor here."""
    groups = optimizer.param_groups
    if getattr(optimizer, "counts_on_device", False):
        return False
    if isinstance(optimizer, torch.optim.SGD):
        return not all(group["fused"] for group in groups)
    if isinstance(optimizer, torch.optim.RMSprop | torch.optim.Adadelta):
        return any(group["foreach"] is False for group in groups)
    return isinstance(optimizer, torch.optim.Rprop)


def _flatten(batch: Any) -> tuple[list[Any], Any]:
    """A batch's leaves, and what tells its structure from others."""
    # What a DataLoader yields most: a graph's launch is so short that to traverse a tree in Python would delay it.
    if type(batch) in (tuple, list) and set(map(type, batch)) == {Tensor}:
        return list(batch), (type(batch), len(batch))
    leaves, structure = pytree.tree_flatten(batch)
    return leaves, str(structure)


def _kind(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
