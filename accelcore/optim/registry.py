"""Registry of optimizers: choose the fastest correct implementation of a name on this device."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from accelcore.errors import ConfigurationError, UnsupportedError, did_you_mean, logger
from accelcore.known_faults import KnownFault
from accelcore.optim.binding import SWITCHES
from accelcore.optim.engine import (
    Engine,
    Factory,
    Memory,
    Request,
    check_members,
    check_numbers,
    listed,
    made_by,
    name_of,
)
from accelcore.optim.flat.memory import unfit
from accelcore.optim.formulas import FORMULAS, Formula
from accelcore.optim.optimizer import Route, RoutedOptimizer

__all__ = ["ExplainedRoute", "Optimizers"]

Parameters = Iterable[Any]


class _OwnDefault:
    def __repr__(self) -> str:
        return "<the optimizer's default>"


_DEFAULT_LR: Any = _OwnDefault()  # None would be a mistake: YAML reads an empty line as None


@dataclass(frozen=True)
class ExplainedRoute:
    """A route to an optimizer, and whether `create` would take it.

    Attributes:
        route: the route's name, such as `"fused"` or `"loop"`.
        chosen: whether `create` would take it.
        reason: if not, why.
    """

    route: str
    chosen: bool
    reason: str = ""


class _Explanation(tuple[ExplainedRoute, ...]):
    """Routes to an optimizer, best first. Those that print next to each other with one reason share a line."""

    def __repr__(self) -> str:
        grouped = groupby(self, lambda one: "chosen" if one.chosen else one.reason)
        return "\n".join(f"{', '.join(one.route for one in routes)}: {reason}" for reason, routes in grouped)


class Optimizers:
    """Registry of one backend: the routes of each optimizer, best first.

    A route is one implementation: torch's fused kernel, a vendor's class, a compiled formula. The backend registers its
    own, as in plugins/cpu/accelcore_cpu/optimizers.py. Extensions add more by the hook `accelcore_register_optimizers`
    (`devices/hookspecs`). `create` takes the route of highest priority that supports the request. The optimizers of
    `accelcore.optim.formulas` are always registered, by a route `"formula"` that runs on every device.
    """

    def __init__(self) -> None:
        self._routes: dict[str, list[Route]] = {name: [_formula_route(name, kind)] for name, kind in FORMULAS.items()}
        self._refused: dict[type[torch.optim.Optimizer], str] = {}

    def register(
        self,
        name: str,
        route: str,
        factory: Factory,
        *,
        priority: int = 0,
        supports: Callable[[Request], str | None] = lambda request: None,
        memory: Memory = "tensors",
        scattered: bool = False,
    ) -> None:
        """Add a route.

        Args:
            name: the optimizer, in any letter case: `"adamw"`.
            route: the name of this implementation.
            factory: called as `factory(params, **options)`; returns a `torch.optim.Optimizer` without state, best an
                `accelcore.optim.engine.Engine`.
            priority: of the routes that support a request, `create` takes the one with the highest. torch's fused
                kernels have 10, its plain loops 0, formulas -20; a backend's own kernels have more, such as 20.
            supports: returns None if this route supports a request, else the reason why not.
            memory: `"tensors"`: it updates a tensor for each parameter. `"any"`: also 1-D tensors that hold many
                parameters, because it treats each element alike, or because `Engine.place_runs` tells it where each
                parameter lies. `"flat"`: it updates such tensors only. A route gets shards of parameters if it treats
                each element alike: `memory` is "any", and `factory` a class without a `place_runs` of its own, or a
                function that wraps one.
            scattered: whether it updates many tensors in one call wherever they are in memory, so that flat memory
                makes it no faster.

        Raises:
            ConfigurationError: `name` already has a route of that name, or one of that priority.
        """
        routes = self._routes.setdefault(name.lower(), [])
        for other in routes:
            if other.name == route or other.priority == priority:
                raise ConfigurationError(
                    f"optimizer {name!r} already has a route {other.name!r} of priority {other.priority}",
                    why=f"with {route!r} of priority {priority} the order of registration would decide",
                )
        routes.append(Route(route, factory, priority, memory, supports, scattered))
        routes.sort(key=lambda entry: -entry.priority)

    def distrust(
        self, name: str, route: str, fault: KnownFault, *, when: Callable[[Request], bool] = lambda request: True
    ) -> None:
        """Refuse a route whose kernel is known to be wrong, in the versions of the fault.

        Args:
            name: the optimizer, in any letter case.
            route: a registered route.
            fault: the fault and its versions.
            when: whether the kernel is wrong for a request; by default for all.

        Raises:
            ConfigurationError: there is no such route.
        """
        routes = self._routes.get(name.lower(), [])
        known = next((known for known in routes if known.name == route), None)
        if known is None:
            available = ", ".join(known.name for known in routes)
            raise ConfigurationError(f"optimizer {name!r} has no route {route!r} to distrust", available=available)
        if fault.applies:
            supports, reason = known.supports, str(fault)
            trusted = replace(known, supports=lambda request: reason if when(request) else supports(request))
            routes[routes.index(known)] = trusted

    def refuse(self, kind: type[torch.optim.Optimizer], why: str) -> None:
        """Have trainers refuse a vendor's optimizers, which a script has made itself, because they would train wrongly.

        Args:
            kind: the class; its subclasses are refused, too.
            why: the reason, which the error gives.
        """
        self._refused[kind] = why

    def refusal(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Return why a trainer refuses an optimizer, or None."""
        return next((why for kind, why in self._refused.items() if isinstance(optimizer, kind)), None)

    def copy(self) -> Optimizers:
        """Return a registry with the same routes. Adding routes to it does not change this one."""
        twin = copy.copy(self)
        twin._routes = {name: list(routes) for name, routes in self._routes.items()}
        twin._refused = dict(self._refused)
        return twin

    def names(self) -> tuple[str, ...]:
        """Return the names of the optimizers, sorted."""
        return tuple(sorted(self._routes))

    def explain(self, name: str | type[torch.optim.Optimizer], **options: Any) -> tuple[ExplainedRoute, ...]:
        """Return every route to `name`, best first, and whether `create` takes it for these options, or why not.

        The tuple prints as a line for each route.
        """
        return self._explain(Request(self._known(name), options))

    def create(
        self,
        name: str | type[torch.optim.Optimizer],
        params: Parameters,
        lr: float | torch.Tensor = _DEFAULT_LR,
        *,
        route: str = "auto",
        **options: Any,
    ) -> RoutedOptimizer:
        """Create an optimizer. No state is allocated before its first step, except by torch's Adagrad.

        The route is chosen for the parameters as they are now, so that an unsupported request is refused here. A
        trainer that casts or moves them, or makes masters, lets the optimizer choose again.

        Example:
            >>> optimizer = accel.optimizers.create("adamw", model.parameters(), lr=1e-3)
            >>> groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": model[2].parameters()}]
            >>> optimizer = accel.optimizers.create("lamb", groups, weight_decay=0.01)

        Args:
            name: one of `names()`, in any letter case; or torch's class of that name.
            params: parameters, or parameter groups, as for `torch.optim`.
            lr: learning rate; without it, the optimizer's default. None is refused.
            route: `"auto"`, or the name of a route.
            options: hyperparameters, named as in `torch.optim`.

        Raises:
            UnsupportedError: the optimizer is unknown, or no route supports the request; the message gives each reason.
            ConfigurationError: a hyperparameter is unknown or out of range, or a parameter is given twice.
        """
        name = self._known(name)
        try:
            groups = listed(params)
        except TypeError as error:
            raise ConfigurationError(
                f"optimizer {name!r} cannot be made of these parameters",
                why=str(error),
                remedy="give model.parameters(), or groups: [{'params': model.parameters(), 'lr': 0.1}]",
            ) from error
        if lr is not _DEFAULT_LR:
            options["lr"] = lr
        check_numbers(options, *groups)
        check_members(groups)
        empty = [str(number) for number, group in enumerate(groups) if not group["params"]]
        if empty:
            logger.warning("parameter group %s is empty: check how its parameters are chosen", " and ".join(empty))
        # Named parameters are pairs, as from model.named_parameters(). The optimizer refuses what is no tensor.
        members = [each[1] if isinstance(each, tuple) else each for group in groups for each in group["params"]]
        parameters = tuple(member for member in members if isinstance(member, torch.Tensor))
        request = Request(name, options, parameters, tuple({**group, "params": None} for group in groups), route)
        return RoutedOptimizer(request, groups, self.choose)

    def fastest(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the same optimizer by its fastest route here, with the groups, options and state of the given one.

        Make schedules for the returned one. An optimizer whose class is not torch's is returned unchanged, with a
        warning in the log.

        Example:
            >>> theirs = torch.optim.AdamW(model.parameters(), lr=1e-3)
            >>> optimizer = accel.optimizers.fastest(theirs)
        """
        if isinstance(optimizer, RoutedOptimizer):
            return optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            remedy = 'for a new one by its fastest route: accel.optimizers.create("adamw", parameters, lr=...)'
            raise ConfigurationError(f"fastest(...) was given {optimizer!r}, not an optimizer", remedy=remedy)
        name = name_of(type(optimizer))
        if name is None or name not in self._routes:
            logger.warning(
                "fastest(...) returns this %s as it is: no other route to it is known here", type(optimizer).__name__
            )
            return optimizer
        groups, options = _request_of(optimizer)
        made = self.create(name, groups, **options)
        if "step" in vars(optimizer):  # a scheduler wraps it
            logger.warning(
                "the optimizer that fastest(...) was given has a scheduler, which does not change the one that it "
                "returns: make the scheduler for the returned one"
            )
        if optimizer.state:
            made.load_state_dict(optimizer.state_dict())
        return made

    def choose(self, request: Request) -> Route:
        """Return the best route that supports a request; raise UnsupportedError if no route does."""
        self._known(request.name)
        choices = self._explain(request)
        for route, choice in zip(self._routes[request.name], choices, strict=True):
            if choice.chosen:
                return route
        by = "for shards of the parameters" if request.sharded else f"by route {request.route!r}"
        remedy = "change the options named above" + ("" if request.route == "auto" else ", or use route='auto'")
        raise UnsupportedError(
            f"optimizer {request.name!r} cannot be made {by}",
            why="; ".join(f"{each.route}: {each.reason}" for each in choices if request.route in ("auto", each.route)),
            remedy='use parallel="zero1", or an optimizer that treats each element alike, such as "adamw"'
            if request.sharded
            else remedy,
        )

    def _known(self, asked: str | type[torch.optim.Optimizer]) -> str:
        """Return the name of an optimizer that has routes here; raise an error for anything else."""
        name = name_of(asked) if isinstance(asked, type) else asked.lower() if isinstance(asked, str) else None
        if name is None:
            given = repr(asked) if isinstance(asked, type) else f"an object of {type(asked).__name__}"
            raise ConfigurationError(
                f"{given} is neither the name of an optimizer nor one of torch's classes",
                remedy='give a name first: create("adamw", model.parameters()); give an optimizer that you have to '
                "accel.trainer as it is, or to accel.optimizers.fastest",
            )
        if name not in self._routes:
            raise UnsupportedError(
                f"there is no optimizer {name if isinstance(asked, type) else asked!r} here",
                available=", ".join(self.names()),
                remedy=did_you_mean(name, self._routes, "choose one of these, or install a package that registers it"),
            )
        return name

    def _explain(self, request: Request) -> tuple[ExplainedRoute, ...]:
        """Return every route, best first, and whether it is chosen for this request. At most one is."""
        names = [route.name for route in self._routes[request.name]]
        switch = next((switch for switch in ("fused", "foreach") if switch in request.options), None)
        if switch is not None:
            raise UnsupportedError(
                f"optimizer {request.name!r} cannot be made with {switch}=",
                why="route= chooses the implementation",
                available=", ".join(names),
                remedy=f"remove {switch}= for the fastest route, or name the route",
            )
        if request.route not in ("auto", *names):
            raise UnsupportedError(
                f"optimizer {request.name!r} has no route {request.route!r} here",
                available=", ".join(names),
                remedy=did_you_mean(str(request.route), names, 'use route="auto", the fastest of them'),
            )
        choices: list[ExplainedRoute] = []
        chosen: str | None = None
        for route in self._routes[request.name]:
            reason: str | None
            if request.route not in ("auto", route.name):
                reason = f"route {request.route!r} was requested"
            elif chosen is not None:
                reason = f"{chosen!r} serves this request, and is usually faster"
            else:
                reason = route.supports(request)
                if reason is None and route.memory == "flat":
                    reason = unfit(request.parameters) if request.flat else "it updates flat memory only"
                if reason is None and request.sharded and not _takes_shards(request.name, route):
                    reason = "it needs whole parameters, and this rank has shards"
                chosen = route.name if reason is None else None
            choices.append(ExplainedRoute(route.name, reason is None, reason or ""))
        return _Explanation(choices)


def _takes_shards(name: str, route: Route) -> bool:
    """Return whether a route may update a shard, because it treats each element alike."""
    formula = FORMULAS.get(name)
    if formula is None:  # torch's or a third party's: the class shows it, a function that makes an optimizer does not
        kind = made_by(route.factory)
        alike = isinstance(kind, type) and getattr(kind, "place_runs", Engine.place_runs) is Engine.place_runs
    else:
        alike = formula.by_element and not formula.by_group
    return route.memory == "any" and alike


def _formula_route(name: str, kind: type[Formula]) -> Route:
    def supports(request: Request) -> str | None:
        for switch in ("capturable", "differentiable"):
            if any(request.values(switch, False)):
                return f"the formula is not {switch}"
        if not kind.by_element and any(parameter.is_complex() for parameter in request.parameters):
            return f"{name} is not defined for complex parameters"
        return None

    return Route("formula", kind, -20, "any" if kind.by_element else "tensors", supports)


def _request_of(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return groups and options with which the registry makes the same optimizer as this one of torch's."""
    takes = inspect.signature(type(optimizer)).parameters  # a class may write more into its groups than its options

    def chosen(options: dict[str, Any]) -> dict[str, Any]:
        left_out = {*SWITCHES, *(optimizer.defaults.keys() - takes.keys())}
        kept = {key: value for key, value in options.items() if key not in left_out}
        return {**kept, "differentiable": True} if options.get("differentiable") else kept

    return [chosen(group) for group in optimizer.param_groups], chosen(optimizer.defaults)
