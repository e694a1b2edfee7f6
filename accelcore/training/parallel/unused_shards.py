"""Zero gradients for parameters that a rank did not use, in models that `fully_shard` divided.

Ranks reduce the gradients of a group together. If one of them leaves a parameter out, the others wait for it, or add up
what does not belong together. Newer versions of torch fill in zeros themselves (`UNUSED_SHARDS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accelcore.optim.shards import is_sharded
from accelcore.torch_internals import after_backward, pytree
from accelcore.training.hooks import Hooks

__all__ = ["UnusedShards"]


class UnusedShards:
    """Hooks that give unused parameters of sharded modules zeros, right before the gradients of a group are reduced.

    torch reduces a group when the gradients of its inputs are known. It reduces the other groups when the backward pass
    ends. A group that no rank has run stays without gradients.

    Args:
        groups: the sharded modules.
        hooks: receives the hooks.
    """

    def __init__(self, groups: Sequence[nn.Module], hooks: Hooks) -> None:
        self._places = [_places(group, groups) for group in groups]
        self._pending: set[int] = set()
        self._queued = False
        for number, group in enumerate(groups):
            hooks.add(group.register_forward_pre_hook(partial(_note_inputs, self, number), with_kwargs=True))
            # Before and after torch's own hook: it may put its mark on the output, or a function behind it. Ours has to
            # be reached first in backward, to be the first that asks to be called at its end.
            for first in (True, False):
                hooks.add(group.register_forward_hook(partial(_note_outputs, self, number), prepend=first))

    def begin(self) -> None:
        """Begin a backward pass: forget one that raised."""
        self._queued = False

    def enter(self, number: int, gradient: Tensor) -> None:
        """Note that the backward pass reaches a group."""
        if not self._queued:
            self._queued = True
            self._pending = set(range(len(self._places)))
            after_backward(self._end)
        self._pending.add(number)

    def leave(self, number: int, gradient: Tensor) -> None:
        """Fill in the gradients of a group, which torch reduces next."""
        self._pending.discard(number)
        for part, name in self._places[number]:
            parameter = getattr(part, name)
            if not is_sharded(parameter) and parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _end(self) -> None:
        self._queued = False
        for number in tuple(self._pending):
            self.leave(number, torch.empty(0))


def _places(group: nn.Module, groups: Sequence[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Return the modules and names of the parameters that belong to a group and to no group inside it."""
    inside = set(group.modules()) - {group}
    inner = {part for other in groups if other in inside for part in other.modules()}
    return [
        (part, name)
        for part in group.modules()
        if part not in inner
        for name, _ in part.named_parameters(recurse=False)
    ]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _note_inputs(unused: UnusedShards, number: int, module: nn.Module, arguments: Any, options: Any) -> None:
    for tensor in _differentiable((arguments, options)):
        tensor.register_hook(partial(unused.leave, number))  # type: ignore[no-untyped-call]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _note_outputs(unused: UnusedShards, number: int, module: nn.Module, arguments: Any, output: Any) -> None:
    for tensor in _differentiable(output):
        tensor.register_hook(partial(unused.enter, number))  # type: ignore[no-untyped-call]


def _differentiable(tree: Any) -> list[Tensor]:
    if not torch.is_grad_enabled():
        return []
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]
