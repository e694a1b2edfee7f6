"""`RoutedOptimizer`: the one class of optimizer that the registry makes; and the `Route` by which it updates.

A route makes the optimizer that computes the updates, by calling the factory of a kernel or a formula.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from accelcore.errors import ConfigurationError, PluginError, TrainingError, UnsupportedError, did_you_mean
from accelcore.optim.binding import SWITCHES, Entry, FlatGroupBinding, GroupBinding, RunBinding, read_state
from accelcore.optim.engine import (
    OTHER_WORDS,
    Engine,
    Factory,
    Memory,
    Request,
    as_engine,
    check_keys,
    check_members,
    loss_by,
    make_by,
    needs_closure,
    option_names,
)
from accelcore.optim.flat.memory import Run
from accelcore.optim.shards import is_sharded
from accelcore.torch_internals import expect_no_step, has_step_hooks

__all__ = ["RoutedOptimizer"]

_RANGES = "give lr, momentum, eps and weight_decay 0 or more, and each of betas, alpha and rho at least 0 and below 1"
_OF_ROUTE = ("foreach", "fused", "param_names")  # entries of a group that another route, or other tensors, may not have


@dataclass(frozen=True)
class Route:
    """One implementation of an optimizer; see `Optimizers.register`."""

    name: str
    factory: Factory
    priority: int
    memory: Memory
    supports: Callable[[Request], str | None] = field(repr=False)
    scattered: bool = False

    def make(self, request: Request, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make the optimizer that computes the updates.

        Raises:
            ConfigurationError: the factory refuses the arguments.
            PluginError: the factory returned something else.
        """
        known = option_names(self.factory)
        check_keys(groups, known)
        try:
            made = make_by(self.factory, groups, request.options)
        except (TypeError, ValueError, KeyError, IndexError) as error:
            unknown = [name for name in request.options if known and name not in known]
            route = "" if request.route == "auto" else f" by the route {self.name!r}"
            other = "give it other arguments, or parameters that it can train, or choose another optimizer"
            invalid = [_RANGES if str(error).startswith("Invalid") else other]
            remedies = [
                did_you_mean(OTHER_WORDS.get(name, name), known) or f"remove {name!r}, or use an available option"
                for name in unknown
            ] or invalid
            raise ConfigurationError(
                f"optimizer {request.name!r}{route} refuses these arguments",
                why=str(error),
                available=", ".join(known) if unknown else "",
                remedy=" ".join(filter(None, remedies)),
            ) from error
        if not isinstance(made, torch.optim.Optimizer) or (
            hasattr(made, "place_runs") and not isinstance(made, Engine)
        ):
            raise PluginError(
                f"route {self.name!r} of optimizer {request.name!r} made a {type(made).__name__}",
                why="a factory must return a torch.optim.Optimizer, with place_runs an accelcore.optim.engine.Engine",
                remedy="report this to the author of the route, or choose another route",
            )
        return made


class RoutedOptimizer(torch.optim.Optimizer):
    """Optimizer by name. It chooses its route for what it trains. Made by `accel.optimizers.create`.

    In a loop without a trainer it updates the parameters in its groups. A trainer binds it, after the model was moved,
    cast, laid flat or given fp32 masters. `param_groups` always holds the model's own parameters; `state` and
    `state_dict` have torch's keys and the parameters' shapes, whatever the memory layout. Schedulers and hooks work as
    with torch's.

    State has the dtype of the route: moments of a bf16 parameter, or of its fp32 master, are fp32, also after
    `load_state_dict`, which torch's own would round.

    It cannot be copied or pickled: copy its `state_dict`.

    Attributes:
        binding: what it updates. Each `bind` makes another one, so that a trainer detects that another has bound it.
        needs_closure: whether `step` must be given a closure.
        implementation: the `torch.optim.Optimizer` that computes the updates; its groups hold what is updated.
        grad_scale: divisor of the gradients in the next step, a float32 scalar on the device; or None. torch's scalers
            set it and `found_inf` if the route's kernel supports both (`_step_supports_amp_scaling`).
        found_inf: 1.0 if the next step is to be skipped, a float32 scalar on the device; or None.
    """

    grad_scale: Tensor | None  # no value here: torch's GradScaler reads it with a default of 1
    found_inf: Tensor | None
    binding: RunBinding | GroupBinding

    def __init__(self, request: Request, groups: Sequence[dict[str, Any]], choose: Callable[[Request], Route]) -> None:
        self._request, self._choose, self._no_grad = request, choose, torch.no_grad()
        self._take_route(request, groups)
        # torch's check of a new group compares it with all others: the implementation did this already.
        super().__init__(self.implementation.param_groups[:1], self.implementation.defaults)
        self.param_groups.extend(self.implementation.param_groups[1:])
        self._bind_groups({})

    @property
    def name(self) -> str:
        """The optimizer's name in the registry."""
        return self._request.name

    @property
    def route(self) -> str:
        """The name of its route."""
        return self._route.name

    @property
    def keeps_shapes(self) -> bool:
        """Whether every tensor of its state, except counters, must have the shape of its parameter."""
        return self._route.memory != "tensors" or getattr(self.implementation, "keeps_shapes", False)

    @property
    def bound(self) -> Sequence[Run] | None:
        """The runs to which a trainer has bound it, as they are divided now; None without a trainer."""
        return self.binding.runs if isinstance(self.binding, RunBinding) else None

    def route_for(self, dtypes: Iterable[torch.dtype], *, flat: bool, sharded: bool = False) -> Route:
        """Return the route for these dtypes; raise UnsupportedError if no route serves them.

        `flat`: whether the parameters may lie in flat memory. `sharded`: whether they are shards.
        """
        request = replace(self._request, groups=_without_params(self.param_groups), flat=flat, sharded=sharded)
        device = next((member.device for group in self.param_groups for member in group["params"]), None)
        stand_ins = tuple(torch.empty(0, dtype=dtype, device=device) for dtype in dtypes)
        return self._choose(replace(request, parameters=stand_ins))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return bool(getattr(self.implementation, "_step_supports_amp_scaling", False))

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of each parameter, with torch's keys."""
        state = self.binding.state
        return state if isinstance(state, defaultdict) else defaultdict(dict, state)

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        # torch's constructor sets an empty state, but the implementation may have one already.
        if hasattr(self, "binding"):
            raise TrainingError("the state of this optimizer is a view", remedy="use load_state_dict")

    def bind(self, runs: Sequence[Run]) -> None:
        """Update these runs from now on, with the state of each parameter. The caller sets the gradients before a step.

        Args:
            runs: of every parameter that is trained; each belongs to one group. All or none are flat memory.

        Raises:
            UnsupportedError: no route supports them.
        """
        entries, flat = dict(self.state), all(run.memory is not None for run in runs)
        if flat and self.route_for((run.value.dtype for run in runs), flat=True).memory == "tensors":
            runs = list(chain.from_iterable(run.by_slot() for run in runs))
        members = [[run.value for run in runs if run.group == number] for number in range(len(self.param_groups))]
        sharded = any(is_sharded(slot.parameter) for run in runs for slot in run.slots)
        self._choose_for(members, flat=flat, sharded=sharded)
        self.binding = RunBinding(self.implementation, runs, self.param_groups, entries)

    def replace(self, replacements: Mapping[Tensor, Tensor], entries: dict[Tensor, Entry]) -> None:
        """Replace parameters by others with this state, before it is bound to them."""
        kept = {parameter: entry for parameter, entry in self.state.items() if parameter not in replacements}
        for group in self.param_groups:
            group["params"] = [replacements.get(parameter, parameter) for parameter in group["params"]]
        self.implementation.state.clear()
        self._bind_groups(kept | entries)

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Call `step` by torch's wrapper only if there are hooks or a profiler: it costs a fifth of a small step."""
        watched = torch.optim.Optimizer.profile_hook_step(func)

        @wraps(func)
        def step(self: RoutedOptimizer, *args: Any, **kwargs: Any) -> Any:
            return (watched if has_step_hooks(self) else func)(self, *args, **kwargs)

        return step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None if self.needs_closure else loss_by(closure)
        # Nothing to choose or to prepare in most steps: the first loads a state, a trainer's collect their gradients.
        if isinstance(self.binding, GroupBinding) and self.binding.is_outdated(self.param_groups):
            self._choose_again(dict(self.state))
        self.binding.prepare(self.param_groups)
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if self.needs_closure:
            if closure is None:
                raise TrainingError(
                    f"{self.name} needs a closure, because it computes the loss several times in a step",
                    remedy="call step(closure), where closure() clears the gradients, calls backward and returns "
                    "the loss",
                )
            return self.implementation.step(closure)
        if self.binding.on_leaves:
            with self._no_grad:
                self._update(found_inf, grad_scale)
        else:  # a context may cost more than the kernel of a small update
            self._update(found_inf, grad_scale)
        self.binding.increment_versions()
        return loss

    def skip(self) -> None:
        """Update nothing in a step that overflowed, but let schedulers see that `step` was called."""
        expect_no_step(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as in torch. With a trainer, call `trainer.refresh()` after it."""
        try:
            super().add_param_group(param_group)
        except ValueError as error:
            check_members([*self.param_groups, param_group], cause=error)
            raise
        if hasattr(self, "binding") and self.bound is None:
            self._choose_again(dict(self.state))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state and hyperparameters of this class, or of the same optimizer of torch, torch_npu or apex.

        The state is kept as this optimizer keeps it, whatever its precision was.

        Raises:
            ValueError: it has other groups, or other parameters in them; nothing was changed.
        """
        state_dict = state_dict.copy()  # as torch does: hooks must not change the caller's
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        entries = read_state(state_dict, self.param_groups, shaped=self.keeps_shapes)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", "step", *SWITCHES)})
        if isinstance(self.binding, RunBinding):
            self.binding.load_state(entries)
        else:
            self._choose_again(entries)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "a RoutedOptimizer cannot be copied or pickled",
            why="it refers to the routes of this process's device",
            remedy="save or copy its state_dict(), and load that into a new optimizer",
        )

    def _take_route(self, request: Request, groups: Sequence[dict[str, Any]]) -> None:
        self._route = self._choose(request)
        self.implementation = self._route.make(request, groups)  # calls the factory that the route was registered with
        self._update = as_engine(self.implementation).update  # its own, or one that calls its `step`
        self.needs_closure = needs_closure(self.implementation)

    def _bind_groups(self, entries: dict[Tensor, Entry]) -> None:
        """Update the parameters in the groups, with this state."""
        given = self.implementation, self.param_groups, entries
        self.binding = FlatGroupBinding(self.name, *given) if self._route.memory == "flat" else GroupBinding(*given)

    def _choose_for(self, members: Sequence[list[Tensor]], *, flat: bool = True, sharded: bool = False) -> None:
        """Choose the route for these tensors, a list for each group, and for the groups' options as they are now."""
        groups = [
            {**{key: value for key, value in group.items() if key not in _OF_ROUTE}, "params": tensors}
            for group, tensors in zip(self.param_groups, members, strict=True)
        ]
        request = replace(self._request, parameters=tuple(chain.from_iterable(members)), groups=_without_params(groups))
        self._take_route(replace(request, flat=flat, sharded=sharded), groups)
        for group, own_group in zip(self.param_groups, self.implementation.param_groups, strict=True):
            group.update({key: value for key, value in own_group.items() if key != "params"})

    def _choose_again(self, entries: dict[Tensor, Entry]) -> None:
        """Choose the route for the parameters in the groups as they are now, with this state."""
        self._choose_for([group["params"] for group in self.param_groups])
        self._bind_groups(entries)


def _without_params(groups: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    return tuple({**group, "params": None} for group in groups)
