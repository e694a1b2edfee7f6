"""Optimizers: a name in the script, the fastest correct implementation on this device."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.known_faults import KnownFault
from accelcore.optim.optimizer import RoutedOptimizer
from accelcore.optim.route import Choice, Factory, Memory, Request, Route, choose, formula_routes, name_of
from accelcore.optim.slot_state import SWITCHES
from accelcore.wording import did_you_mean

__all__ = ["Choice", "Factory", "Memory", "Optimizers", "Request"]

Parameters = Iterable[Any]

logger = logging.getLogger("accelcore")


class Optimizers:
    """The registry of one backend: optimizer name -> routes, best first.

    A route is one implementation: torch's fused kernel, a vendor's class, a compiled formula. The backend registers
    its own, extensions may add more, and `create` takes the one of highest priority that supports the request. The
    optimizers of `accelcore.optim.formulas` are there from the start, by a route `"formula"` that runs on every device.
    """

    def __init__(self) -> None:
        self._routes: dict[str, list[Route]] = formula_routes()

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
            route: this implementation's name among those of `name`.
            factory: called as `factory(params, **options)`; returns a `torch.optim.Optimizer` without state.
            priority: the highest that supports a request is taken; torch's plain loops have 0, its kernels 10.
            supports: given the request, None where this route can serve it, else the reason why it cannot.
            memory: what the factory can be given as parameters. `"tensors"`: each as it is. `"any"`: it treats each
                element alike, so that a 1-D tensor may stand for many parameters. `"flat"`: such tensors only; where it
                has to tell the parameters apart, the class has a method `place_runs(runs)`.
            scattered: whether it updates many tensors at once wherever they lie, so that a trainer which may choose
                does not lay them flat first.

        Raises:
            ConfigurationError: `name` already has a route of that name, or one of that priority.
        """
        routes = self._routes.setdefault(name.lower(), [])
        for other in routes:
            if other.name == route or other.priority == priority:
                raise ConfigurationError(
                    f"optimizer {name!r} already has a route {other.name!r} of priority {other.priority}",
                    why=f"{route!r} of priority {priority} would make the choice depend on the order of registration",
                )
        routes.append(Route(route, factory, priority, memory, supports, scattered))
        routes.sort(key=lambda entry: -entry.priority)

    def distrust(
        self, name: str, route: str, fault: KnownFault, *, when: Callable[[Request], bool] = lambda request: True
    ) -> None:
        """Refuse a route, in the versions of the fault: its kernel is known to be wrong.

        Args:
            name: the optimizer, in any letter case.
            route: its route, which has to be registered.
            fault: what is wrong, and in which versions; in others nothing is refused.
            when: whether the kernel is wrong for a request. By default it is for every one.

        Raises:
            ConfigurationError: there is no such route.
        """
        routes = self._routes.get(name.lower(), [])
        for place, known in enumerate(routes):
            if known.name == route:
                if fault.applies:
                    routes[place] = replace(known, supports=_unless(when, str(fault), known.supports))
                return
        raise ConfigurationError(
            f"optimizer {name!r} has no route {route!r} to be distrusted",
            available=", ".join(known.name for known in routes),
        )

    def copy(self) -> Optimizers:
        """A registry with the same routes, to which more can be added without changing this one."""
        twin = copy.copy(self)
        twin._routes = {name: list(routes) for name, routes in self._routes.items()}
        return twin

    def take_over(self, other: Optimizers) -> None:
        """Have another registry's routes from now on, and none of these: for what was made here, and then moved.

        An optimizer that exists takes one of them when it is bound again.
        """
        self._routes = other.copy()._routes

    def names(self) -> tuple[str, ...]:
        """The optimizers that `create` knows here, sorted."""
        return tuple(sorted(self._routes))

    def explain(self, name: str | type[torch.optim.Optimizer], **options: Any) -> tuple[Choice, ...]:
        """Every route to `name`, best first, with the one `create` would take for these options, and why not others."""
        return self._explain(Request(_name(name), options))

    def create(
        self,
        name: str | type[torch.optim.Optimizer],
        params: Parameters,
        *,
        lr: float | torch.Tensor | None = None,
        route: str = "auto",
        **options: Any,
    ) -> RoutedOptimizer:
        """Create an optimizer. No state is allocated before its first step, except by torch's Adagrad.

        The route is taken for the parameters as they are now, so that what no route supports is refused here; and once
        more for what is trained in the end, if that is something else.

        Args:
            name: one of `names()`, in any letter case; or the class of torch's that goes by it.
            params: parameters, or parameter groups, as for `torch.optim`.
            lr: learning rate; None takes the optimizer's own default.
            route: `"auto"`, or one route by name.
            options: hyperparameters, named as in `torch.optim`.

        Raises:
            UnsupportedError: there is no such optimizer here, or no route supports this request; each says why.
            ConfigurationError: a hyperparameter is unknown or out of range.
        """
        name = _name(name)
        try:
            groups = _listed(params)
        except TypeError as error:
            raise ConfigurationError(
                f"optimizer {name!r} cannot be made of these parameters", why=str(error)
            ) from error
        if lr is not None:
            options["lr"] = lr
        overrides = tuple({**group, "params": None} if _is_group(group) else {} for group in groups)
        request = Request(name, options, tuple(_parameters(groups)), overrides, route)
        return RoutedOptimizer(request, groups, self._choose)

    def fastest(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The same optimizer by its fastest route here: for one that somebody else's factory has made.

        It takes over groups, options and state. Make schedules from what is returned. One whose class is not torch's
        own is returned as it is, and the log says so.
        """
        if isinstance(optimizer, RoutedOptimizer):
            return optimizer
        name = name_of(type(optimizer))
        if name is None or name not in self._routes:
            logger.warning("%s goes on as it is: no other route to it is known here", type(optimizer).__name__)
            return optimizer
        groups, options = _request_of(optimizer)
        made = self.create(name, groups, **options)
        if optimizer.state:
            made.load_state_dict(optimizer.state_dict())
        return made

    def _choose(self, request: Request) -> Route:
        choices = self._explain(request)
        chosen = next((choice.route for choice in choices if choice.chosen), None)
        if chosen is None:
            _refuse_switches(request, [choice.route for choice in choices])
            raise UnsupportedError(
                f"optimizer {request.name!r} cannot be made by route {request.route!r}",
                why="; ".join(f"{choice.route}: {choice.reason}" for choice in choices),
                available=", ".join(choice.route for choice in choices),
                remedy="change the options named above"
                + ("" if request.route == "auto" else ", or let route='auto' choose"),
            )
        return next(route for route in self._routes[request.name] if route.name == chosen)

    def _explain(self, request: Request) -> tuple[Choice, ...]:
        if request.name not in self._routes:
            raise UnsupportedError(
                f"there is no optimizer {request.name!r} here",
                available=", ".join(self.names()),
                remedy=did_you_mean(
                    request.name, self._routes, "choose one of those, or install a package that registers it"
                ),
            )
        return choose(self._routes[request.name], request)


def _request_of(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The groups and options with which the like of an optimizer of torch's is made."""
    takes = inspect.signature(type(optimizer)).parameters  # a class may write more into its groups than it takes

    def chosen(options: dict[str, Any]) -> dict[str, Any]:
        left_out = {*SWITCHES, *(optimizer.defaults.keys() - takes.keys())}
        kept = {key: value for key, value in options.items() if key not in left_out}
        return {**kept, "differentiable": True} if options.get("differentiable") else kept

    return [chosen(group) for group in optimizer.param_groups], chosen(optimizer.defaults)


def _refuse_switches(request: Request, routes: list[str]) -> None:
    """Say once, and not of each route, that routes are chosen by name and not by torch's switches."""
    switch = next((switch for switch in ("fused", "foreach") if switch in request.options), None)
    if switch is not None:
        asks = f"; route={switch!r} asks for torch's" if switch in routes else ""
        raise UnsupportedError(
            f"optimizer {request.name!r} cannot be made with {switch}=",
            why="which implementation is taken is chosen by route=",
            available=", ".join(routes),
            remedy=f"leave {switch}= out: the fastest route is taken anyhow{asks}",
        )


def _name(asked: str | type[torch.optim.Optimizer]) -> str:
    name = name_of(asked) if isinstance(asked, type) else asked.lower() if isinstance(asked, str) else None
    if name is None:
        raise ConfigurationError(
            f"{asked!r} is neither the name of an optimizer nor a class of torch's",
            remedy='give a name, such as "adamw"; an optimizer of another\'s making goes to accel.trainer as it is',
        )
    return name


def _unless(
    wrong: Callable[[Request], bool], reason: str, supports: Callable[[Request], str | None]
) -> Callable[[Request], str | None]:
    return lambda request: reason if wrong(request) else supports(request)


def _listed(params: Parameters) -> list[Any]:
    """The parameters or groups as lists, because looking at a generator would use it up."""
    return [{**group, "params": _members(group["params"])} if _is_group(group) else group for group in params]


def _members(params: Any) -> list[Any]:
    if isinstance(params, set | frozenset):
        raise TypeError("a set of parameters has no order, and an optimizer's state goes by their order")
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _is_group(group: Any) -> bool:
    return isinstance(group, dict) and "params" in group


def _parameters(groups: list[Any]) -> Iterable[torch.Tensor]:
    for group in groups:
        for member in group["params"] if _is_group(group) else (group,):
            # Named parameters come as pairs, as model.named_parameters() yields them.
            parameter = member[1] if isinstance(member, tuple) and len(member) == 2 else member
            if isinstance(parameter, torch.Tensor):  # the optimizer itself refuses anything else
                yield parameter
