"""Hooks of an optimizer, without what torch's own cost in every step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

__all__ = ["StepHooks"]

Closure = Callable[[], Any] | None


class StepHooks(torch.optim.Optimizer):
    """Calls hooks where `step` asks it to, and lets a step be skipped.

    Attributes:
        skips: whether `step` is called to do nothing.
    """

    skips = False

    def forget_hooks(self) -> None:
        """Have no hooks."""
        self._before: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._after: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """What torch wraps `step` in, to run hooks and to label profiles; not here, where `step` runs the hooks itself.

        The label alone takes a fifth of the time of a small step.
        """
        return func

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        handle = RemovableHandle(self._before)
        self._before[handle.id] = hook
        return handle

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        handle = RemovableHandle(self._after)
        self._after[handle.id] = hook
        return handle

    def call_before(self, closure: Closure) -> None:
        """Call the hooks that come before a step."""
        for hook in list(self._before.values()) if self._before else ():
            hook(self, *_arguments(self, closure))

    def call_after(self, closure: Closure) -> None:
        """Call the hooks that come after a step."""
        for hook in list(self._after.values()) if self._after else ():
            hook(self, *_arguments(self, closure))

    def call_before_load(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Call the hooks that come before a state is loaded; the state to load, which they may have changed."""
        state_dict = state_dict.copy()  # as torch does: what the caller holds stays as it is
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def call_after_load(self) -> None:
        """Call the hooks that come after a state was loaded."""
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def skip(self) -> None:
        """What a scaler does with a step that overflowed: update nothing, as a step that a schedule can see."""
        self.skips = True
        try:
            self.step()
        finally:
            self.skips = False


def _arguments(optimizer: torch.optim.Optimizer, closure: Closure) -> tuple[Any, ...]:
    """What torch gives a hook beside the optimizer: the arguments of `step`."""
    return ((optimizer,) if closure is None else (optimizer, closure)), {}
