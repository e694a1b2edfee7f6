"""Captured training steps: the device's work is recorded once as a graph, and launched as a whole from then on.

A graph runs on the memory that it was captured with. Therefore batches are copied into tensors of the graph, gradients
that several graphs add to keep their memory, and the learning rate becomes a tensor. If another value that a graph has
baked in changes, a new graph is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from accelcore.errors import TrainingError, UnsupportedError
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.roles.runtime import Runtime
from accelcore.torch_internals import pytree
from accelcore.training.gradients import Gradients
from accelcore.util.text import first_line

ForwardBackward = Callable[[Any], tuple[Tensor, Any]]

WARM_UP = 3
"""Number of eager windows before the first capture: libraries allocate workspaces, and optimizers their state."""

_KIND = attrgetter("shape", "dtype", "device")  # takes no Python frame
_LIMIT = 16  # kinds of batch; the graph of each holds the memory of a whole step


@dataclass
class _Graph:
    inputs: list[Tensor]
    loss: Tensor
    aux: Any
    replay: Callable[[], None]


class CapturedStep:
    """The device's part of a training step: eager while it warms up, then captured.

    The first batch of each kind is eager, too, so that libraries choose and compile kernels for it before the capture.
    `sums`: whether a window has several micro-batches, whose graphs add to the same gradients.
    """

    def __init__(self, runtime: Runtime, optimizer: Optimizer, gradients: Gradients, *, sums: bool) -> None:
        self._runtime, self._optimizer, self._gradients, self._sums = runtime, optimizer, gradients, sums
        self._options: list[Any] = []
        self._baked: tuple[Any, ...] = ()
        self._warm, self._windows = False, 0
        self.forget()

    def __call__(
        self, batch: Any, forward_backward: ForwardBackward, close: Callable[[], None], *, first: bool, last: bool
    ) -> tuple[Tensor, Any]:
        """Train on a micro-batch, which may be the `first` or `last` of its window, as `forward_backward` does."""
        if first and not self._warm and self._windows >= WARM_UP:
            self._warm = True
            if self._sums:
                self._hold()
        leaves, structure = _flatten(batch)
        key = (last, structure, _kinds(leaves), self._hyperparameters())
        graph = self._graphs.get(key)
        if graph is None:

            def work(batch: Any) -> tuple[Tensor, Any]:
                result = forward_backward(batch)
                self._check_received()
                if last:
                    close()
                return result

            if not self._warm or key not in self._kinds:
                return self._train_eagerly(batch, key, work, last=last)
            graph = self._graphs[key] = self._capture(batch, work)
        # One call for all: the host is what a short graph waits for.
        if graph.inputs:
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            torch._foreach_copy_(graph.inputs, tensors, non_blocking=True)
        graph.replay()
        return graph.loss.clone(), graph.aux

    def _train_eagerly(self, batch: Any, key: Any, work: ForwardBackward, *, last: bool) -> tuple[Tensor, Any]:
        if key not in self._kinds and len(self._kinds) >= _LIMIT:
            remedy = "give all batches one shape (drop_last=True, padding), or remove graph=True"
            raise TrainingError(f"this is the {_LIMIT + 1}th kind of batch, and each kind needs a graph", remedy=remedy)
        self._kinds.add(key)
        self._windows += last
        with self._runtime.side_stream():  # captures run there, and autograd must not depend on other streams
            return work(batch)

    def forget(self) -> None:
        """Drop all graphs, because the training has other memory now."""
        self._graphs: dict[Any, _Graph] = {}
        self._kinds: set[Any] = set()  # of batches that were trained on eagerly
        self._received: set[str] = set()  # parameters that received a gradient while warming up
        self._warm, self._windows = False, 0
        self._gradients.held = []
        for group in self._optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
            if not isinstance(group["lr"], Tensor):  # a schedule writes into the tensor, and so into the graph
                group["lr"] = torch.tensor(group["lr"], device=self._runtime.device)

    def _hold(self) -> None:
        """Allocate the gradients that every graph adds to. A parameter that never received one keeps None."""
        parameters = [slot.parameter for slot in self._gradients.slots if slot.name in self._received]
        self._gradients.held = [torch.zeros_like(parameter) for parameter in parameters]
        for parameter, gradient in zip(parameters, self._gradients.held, strict=True):
            parameter.grad = gradient

    def _check_received(self) -> None:
        received = set(self._gradients.state())
        late = received - self._received
        if self._warm and late:
            raise TrainingError(
                f"{len(late)} parameters received their first gradient after {WARM_UP} windows",
                remedy="use the same parameters in each step, or remove graph=True",
            )
        self._received |= received

    def _hyperparameters(self) -> tuple[Any, ...]:
        """Return the optimizer's options that a graph bakes in. A tensor is compared by identity, not by its value."""
        options = [value for group in self._optimizer.param_groups for value in group.values()]
        if len(options) != len(self._options) or not all(map(is_, options, self._options)):
            self._options = options
            self._baked = tuple(option for option in options if isinstance(option, (bool, int, float, tuple, Tensor)))
        return self._baked

    def _capture(self, batch: Any, work: ForwardBackward) -> _Graph:
        updater = _updater(self._optimizer)
        steps = [entry["step"] for entry in updater.state.values() if "step" in entry]
        if any(not isinstance(step, Tensor) or step.device != self._runtime.device for step in steps):
            raise _counts_on_host(updater)
        leaves, structure = pytree.tree_flatten(batch)
        inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        static_batch = pytree.tree_unflatten(inputs, structure)
        try:
            # One graph runs at a time, and losses are copied: all graphs can share the memory of activations.
            earlier = next((graph.replay for graph in self._graphs.values()), None)
            (loss, aux), replay = self._runtime.capture(lambda: work(static_batch), beside=earlier)
        except TrainingError:
            raise
        except RuntimeError as error:
            # Ending a broken capture raises again, which would hide the first error.
            cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
            raise TrainingError(
                "the training step cannot be captured as a graph",
                why=first_line(cause),
                remedy="remove from model and loss what makes the host wait: item(), print, shapes that depend on "
                "values. Keep no loss or output of an earlier call with its graph: detach() it. Or remove graph=True. "
                "Start a new process: after a broken capture the device's random generator may be unusable",
            ) from cause
        return _Graph([leaf for leaf in inputs if isinstance(leaf, Tensor)], loss, aux, replay)


def check_capturable(optimizer: Optimizer) -> None:
    """Raise UnsupportedError for an optimizer that cannot be captured.

    Step count and learning rate must stay on the device, or each replay would repeat the same step. torch's optimizers
    do this with `capturable`. Others declare it by an attribute `counts_on_device`.
    """
    updater = _updater(optimizer)
    if type(optimizer).zero_grad is not Optimizer.zero_grad:
        raise UnsupportedError(
            f"{type(optimizer).__name__} cannot be captured in a graph",
            why="it has a zero_grad of its own, and a graph keeps gradients where they are",
            remedy="remove graph=True, or choose an optimizer of torch with capturable",
        )
    if getattr(updater, "counts_on_device", False):
        return
    groups = updater.param_groups
    if isinstance(updater, torch.optim.SGD):
        reads_lr = not all(group["fused"] for group in groups)
    elif not all("capturable" in group for group in groups):
        raise _counts_on_host(updater)
    elif isinstance(updater, torch.optim.RMSprop | torch.optim.Adadelta):
        reads_lr = any(group["foreach"] is False for group in groups)
    else:
        reads_lr = isinstance(updater, torch.optim.Rprop)
    if reads_lr:
        raise UnsupportedError(
            f"this {type(updater).__name__} cannot be captured in a graph",
            why="it reads its learning rate on the host, and a graph cannot wait for that",
            remedy="choose route 'fused' or 'foreach' if it has one (SGD: 'fused', without dampening), or adamw",
        )


def _updater(optimizer: Optimizer) -> Optimizer:
    return optimizer.implementation if isinstance(optimizer, RoutedOptimizer) else optimizer


def _counts_on_host(optimizer: Optimizer) -> UnsupportedError:
    return UnsupportedError(
        f"{type(optimizer).__name__} cannot be captured in a graph",
        why="it counts its steps on the host, and each replay would be the same step again",
        remedy="choose an optimizer of torch with capturable, such as adamw by route 'fused' or 'foreach'",
    )


def _flatten(batch: Any) -> tuple[list[Any], Any]:
    """Return a batch's leaves, and a key for its structure."""
    # The usual batch of a DataLoader. A launch is so short that walking a tree in Python would delay it.
    if type(batch) in (tuple, list) and set(map(type, batch)) == {Tensor}:
        return list(batch), (type(batch), len(batch))
    leaves, structure = pytree.tree_flatten(batch)
    return leaves, str(structure)


def _kinds(leaves: list[Any]) -> tuple[Any, ...]:
    """Return what a graph has to have in common with a batch: of tensors what they are, and all other values."""
    return tuple([_KIND(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
