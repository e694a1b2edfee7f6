"""The one class of optimizer that the registry makes, whichever route computes the update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from accelcore.errors import TrainingError
from accelcore.optim.binding import Binding
from accelcore.optim.copies import Copied
from accelcore.optim.formulas import FORMULAS, Formula
from accelcore.optim.groups import alike
from accelcore.optim.hooks import StepHooks
from accelcore.optim.memory import FlatMemory, lay_flat
from accelcore.optim.route import Request, Route
from accelcore.optim.runs import Run, Slot
from accelcore.optim.saved import read_options, read_state
from accelcore.optim.shards import is_sharded
from accelcore.optim.slot_state import Entry, pour
from accelcore.optim.stepping import given, loss_by, needs_closure, step_scaled

__all__ = ["Optimizer"]


class Optimizer(StepHooks, Copied):
    """An optimizer by name, bound late: it takes its route when it knows what it trains.

    That is at its first step, or when a trainer binds it, after the model was moved, cast, laid flat or given fp32
    masters. `param_groups` always holds the model's own parameters; `state` and `state_dict` have torch's keys and the
    parameters' shapes, however the memory under them is laid out. Schedulers and hooks work as with torch's.

    State has the dtype that the route keeps it in: moments of a bf16 parameter, or of its fp32 master, are fp32, also
    after `load_state_dict`, which torch's own would round.

    Made by `accel.optimizers.create`. A copy is unbound and has the state. To pickle it, pickle its `state_dict`.

    Attributes:
        name: the optimizer's name in the registry.
        route: the name of the route it took.
        binding: what it is bound to; None where it updates the parameters in its groups as they are. Each `bind` makes
            another, so that who bound it can tell whether anybody else has since.
        needs_closure: whether `step` has to be given a closure.
        engine: the `torch.optim.Optimizer` that computes the updates; its groups hold what is trained.
        grad_scale, found_inf: float32 scalars on the device, or None: what the next step divides the gradients by, and
            1.0 where it is to be skipped. For a route whose kernel can do that (`_step_supports_amp_scaling`); torch's
            scalers set them.
    """

    grad_scale: Tensor | None
    found_inf: Tensor | None
    binding: Binding | None
    _memories: list[FlatMemory]
    _unbound: defaultdict[Tensor, Any]
    _waiting: dict[Tensor, Entry]

    def __init__(self, request: Request, groups: Iterable[Any], choose: Callable[[Request], Route]) -> None:
        self._request, self._choose = request, choose
        self.forget_hooks()
        self._take_route(request, groups)
        super().__init__(self.engine.param_groups, self.engine.defaults)
        self._share_groups()

    @property
    def name(self) -> str:
        """The optimizer's name in the registry."""
        return self._request.name

    @property
    def route(self) -> str:
        """The name of the route it took."""
        return self._route.name

    @property
    def takes_flat(self) -> bool:
        """Whether its route can update many parameters as one piece of memory."""
        return self._route.memory != "tensors"

    @property
    def keeps_shapes(self) -> bool:
        """Whether every tensor of its state, but the counts, has the shape of its parameter. Kernels may rely on it."""
        return self.takes_flat or isinstance(self.engine, Formula)

    @property
    def together(self) -> Sequence[int]:
        """For each group, the number of the first that it may be updated with, as one: those with equal options."""
        formula = FORMULAS.get(self.name)
        return range(len(self.param_groups)) if formula is None or formula.by_group else alike(self.param_groups)

    def route_for(self, dtypes: Iterable[torch.dtype], *, flat: bool, sharded: bool = False) -> Route:
        """The route that it would take for these dtypes, which `flat` allows to lie in flat memory.

        Args:
            sharded: whether it updates shards of parameters.

        Raises:
            UnsupportedError: no route supports it.
        """
        request = replace(self._request, groups=_options_of(self.param_groups), flat=flat, sharded=sharded)
        return self._choose(replace(request, parameters=tuple(torch.empty(0, dtype=dtype) for dtype in dtypes)))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return bool(getattr(self.engine, "_step_supports_amp_scaling", False))

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of each parameter, under torch's keys."""
        if self.binding is not None:
            return defaultdict(dict, self.binding.state())
        return defaultdict(dict, self._unbound | self._waiting) if self._waiting else self._unbound

    @state.setter
    def state(self, value: defaultdict[Tensor, Any]) -> None:
        # torch's constructor sets it to nothing, when the route's own may already hold something.
        if hasattr(self, "param_groups"):
            raise TrainingError("the state of this optimizer is a view", remedy="restore one by load_state_dict")

    def bind(self, runs: Sequence[Run], *, in_part: bool = False) -> None:
        """Train these from now on, each parameter's state with it. Who binds sets the gradients before each step.

        Args:
            runs: of every parameter that is trained; each belongs to one group. All are stretches of flat memory, or
                none is.
            in_part: whether other processes update a part of them, so that there may be no gradient in a step.

        Raises:
            UnsupportedError: no route supports what it is to train.
        """
        entries, flat = dict(self.state), all(run.memory is not None for run in runs)
        if flat and self.route_for((run.value.dtype for run in runs), flat=True).memory == "tensors":
            runs = list(chain.from_iterable(run.by_slot() for run in runs))
        groups: list[dict[str, Any]] = []
        for number, group in enumerate(self.param_groups):
            options = {key: value for key, value in group.items() if key not in ("foreach", "fused", "param_names")}
            groups.append({**options, "params": [run.value for run in runs if run.group == number]})
        trained = tuple(run.value for run in runs)
        sharded = any(is_sharded(slot.parameter) for run in runs for slot in run.slots)
        request = replace(self._request, parameters=trained, groups=_options_of(groups), flat=flat, sharded=sharded)
        self._take_route(request, groups)
        for group, engine_group in zip(self.param_groups, self.engine.param_groups, strict=True):
            group.update({key: engine_group[key] for key in ("foreach", "fused") if key in engine_group})
        self.binding = Binding(self.engine, runs, self.param_groups, entries)
        self._on_leaves = any(run.value.requires_grad for run in runs)
        self._needs_gradients = not in_part

    def replace(self, replacements: Mapping[Tensor, Tensor], entries: dict[Tensor, Entry]) -> None:
        """Have other parameters in place of some, until it is bound to them.

        Args:
            replacements: for each of its parameters that is replaced, the one that is trained in its place.
            entries: the state of the replacements.
        """
        self._waiting = {p: entry for p, entry in self.state.items() if p not in replacements} | entries
        self._unbound = defaultdict(dict)
        self.binding, self._memories = None, []
        for group in self.param_groups:
            group["params"] = [replacements.get(parameter, parameter) for parameter in group["params"]]

    @property
    def bound(self) -> Sequence[Run] | None:
        """What it was bound to, as it is divided now; None where it goes by itself."""
        return None if self.binding is None or self._memories else self.binding.runs

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        if self.skips:
            return None
        self.call_before(closure)
        loss = None if self.needs_closure else loss_by(closure)
        if self.binding is None or self._memories:
            self._prepare_alone()
        if self.binding is not None:
            self.binding.follow(self.param_groups)
            self.binding.present()
            if self._needs_gradients and all(run.value.grad is None for run in self.binding.runs):
                raise TrainingError(
                    "no gradient was given to this optimizer, which a trainer has bound",
                    why="the trainer gathers them, where it lays parameters flat or trains masters",
                    remedy="call trainer.backward(loss) and trainer.update(), or make an optimizer without a trainer",
                )
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if self.needs_closure:
            loss = self.engine.step(given(closure, self.name))
        elif self._update is None:
            step_scaled(self.engine, found_inf, grad_scale)
        elif self._on_leaves:
            with torch.no_grad():
                self._update(found_inf, grad_scale)
        else:  # a context costs more than the kernel of a small update
            self._update(found_inf, grad_scale)
        self.call_after(closure)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if len(self.param_groups) > len(self.engine.param_groups) and self.binding is None:
            self._start_anew(dict(self.state))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of this class, and its hyperparameters.

        Also one of the class of the same name in torch, torch_npu or apex. It is kept as this optimizer keeps state,
        whatever its precision was.

        Raises:
            ValueError: it has other groups, or other parameters in them; nothing was changed.
        """
        state_dict = self.call_before_load(state_dict)
        entries = read_state(state_dict, self.param_groups, shaped=self.keeps_shapes)
        read_options(state_dict, self.param_groups)
        if self.binding is None or self._memories:
            self._start_anew(entries)
        else:
            self.binding.load(entries)
        self.call_after_load()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "request": self._request,
            "choose": self._choose,
            "defaults": self.defaults,
            "param_groups": self.param_groups,
            "entries": dict(self.state),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"defaults": state["defaults"], "param_groups": state["param_groups"]})
        self._request, self._choose = state["request"], state["choose"]
        self.forget_hooks()
        self._start_anew(state["entries"])

    def _take_route(self, request: Request, groups: Iterable[Any]) -> None:
        self._route = self._choose(request)
        self.engine = self._route.make(request, groups)
        self._update: Callable[[Tensor | None, Tensor | None], None] | None = getattr(self.engine, "update", None)
        self.needs_closure = needs_closure(self.engine)
        self.binding, self._memories = None, []
        self._on_leaves, self._needs_gradients = True, False
        self._unbound, self._waiting = self.engine.state, {}

    def _share_groups(self) -> None:
        """Unbound, the engine's groups are these very dicts, so that a change of an option needs no copy."""
        self._known_layouts = self._layouts()
        self.engine.param_groups[:] = self.param_groups

    def _start_anew(self, entries: dict[Tensor, Entry]) -> None:
        """Be unbound, with this state: of the parameters as they are."""
        groups = [{key: v for key, v in g.items() if key not in ("foreach", "fused")} for g in self.param_groups]
        tensors = tuple(chain.from_iterable(group["params"] for group in groups))
        self._take_route(replace(self._request, parameters=tensors, groups=_options_of(groups)), groups)
        for group, engine_group in zip(self.param_groups, self.engine.param_groups, strict=True):
            group.update({key: value for key, value in engine_group.items() if key != "params"})
        self._share_groups()
        self._waiting = entries  # as it is until the first step: a trainer may yet make masters that are more exact

    def _prepare_alone(self) -> None:
        """In a loop of one's own: see that the route is still the one for these parameters, and their memory right."""
        replaced = getattr(self.engine, "replaced", None)  # of those that look at addresses themselves
        if (replaced is None or replaced()) and self._known_layouts != self._layouts():
            self._start_anew(dict(self.state))
        if self._route.memory == "flat":
            if not self._memories:
                memories = lay_flat(self._slots(), self.together)
                self.bind(list(chain.from_iterable(each.runs(each.values, each.gradients) for each in memories)))
                self._memories, self._needs_gradients = memories, False
            for memory in self._memories:
                memory.follow()
                memory.gather()
        elif self._waiting:
            pour(self._waiting, [Run([slot], slot.parameter) for slot in self._slots()], self.engine)
            self._waiting = {}

    def _slots(self) -> list[Slot]:
        return [
            Slot(str(number), number, parameter, parameter)
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
        ]

    def _layouts(self) -> list[tuple[Any, ...]]:
        return [(p.dtype, p.device, p.stride()) for group in self.param_groups for p in group["params"]]


def _options_of(groups: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    return tuple({**group, "params": None} for group in groups)
