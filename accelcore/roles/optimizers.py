"""Optimizers: a name in the script, the fastest correct implementation on this device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from accelcore.errors import ConfigurationError, UnsupportedError

__all__ = ["Choice", "Optimizers", "Request"]

Parameters = Iterable[Any]
Factory = Callable[..., Optimizer]


@dataclass(frozen=True)
class Request:
    """What was asked of the registry, as a route's `supports` sees it.

    Attributes:
        name: the optimizer's name, lower case.
        options: hyperparameters as given (with `lr` where one was given).
        parameters: every parameter of every group; empty where the registry is only asked to explain.
        groups: what each parameter group says in place of `options`.
    """

    name: str
    options: dict[str, Any]
    parameters: tuple[torch.Tensor, ...] = ()
    groups: tuple[dict[str, Any], ...] = ()

    def values(self, option: str, default: Any) -> list[Any]:
        """The values that `option` has, over all groups."""
        common = self.options.get(option, default)
        return [group.get(option, common) for group in self.groups] or [common]


@dataclass(frozen=True)
class Choice:
    """One route to an optimizer, and whether it would be taken.

    Attributes:
        route: the route's name, such as `"fused"` or `"loop"`.
        chosen: whether `create` would take it.
        reason: why not, where it would not.
    """

    route: str
    chosen: bool
    reason: str = ""


@dataclass(frozen=True)
class _Route:
    name: str
    factory: Factory
    priority: int
    supports: Callable[[Request], str | None]


class Optimizers:
    """The registry of one backend: optimizer name -> routes, best first.

    A route is one implementation: torch's fused kernel, a vendor's class, a compiled formula. The backend registers
    its own, extensions may add more, and `create` takes the one of highest priority that supports the request.
    """

    def __init__(self) -> None:
        self._routes: dict[str, list[_Route]] = {}

    def register(
        self,
        name: str,
        route: str,
        factory: Factory,
        *,
        priority: int = 0,
        supports: Callable[[Request], str | None] = lambda request: None,
    ) -> None:
        """Add a route.

        Args:
            name: the optimizer, in any letter case: `"adamw"`.
            route: this implementation's name among those of `name`.
            factory: called as `factory(params, **options)`; returns a `torch.optim.Optimizer` without state.
            priority: the highest that supports a request is taken; torch's plain loops have 0, its kernels 10.
            supports: given the request, None where this route can serve it, else the reason why it cannot.

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
        routes.append(_Route(route, factory, priority, supports))
        routes.sort(key=lambda entry: -entry.priority)

    def names(self) -> tuple[str, ...]:
        """The optimizers that `create` knows here, sorted."""
        return tuple(sorted(self._routes))

    def explain(self, name: str, **options: Any) -> tuple[Choice, ...]:
        """Every route to `name`, best first, with the one `create` would take for these options, and why not others."""
        return self._explain(Request(name.lower(), options), "auto")

    def create(
        self,
        name: str,
        params: Parameters,
        *,
        lr: float | torch.Tensor | None = None,
        route: str = "auto",
        **options: Any,
    ) -> Optimizer:
        """Create an optimizer. No state is allocated before its first step, except by torch's Adagrad.

        Args:
            name: one of `names()`, in any letter case.
            params: parameters, or parameter groups, as for `torch.optim`.
            lr: learning rate; None takes the optimizer's own default.
            route: `"auto"`, or one route by name.
            options: hyperparameters, named as in `torch.optim`.

        Raises:
            UnsupportedError: there is no such optimizer here, or no route supports this request; each says why.
            ConfigurationError: a hyperparameter is unknown or out of range.
        """
        try:
            groups = _listed(params)
        except TypeError as error:
            raise ConfigurationError(
                f"optimizer {name!r} cannot be made of these parameters", why=str(error)
            ) from error
        if lr is not None:
            options["lr"] = lr
        own = tuple({**group, "params": None} if _is_group(group) else {} for group in groups)
        request = Request(name.lower(), options, tuple(_parameters(groups)), own)
        choices = self._explain(request, route)
        chosen = next((choice.route for choice in choices if choice.chosen), None)
        if chosen is None:
            raise UnsupportedError(
                f"optimizer {name!r} cannot be made by route {route!r}",
                why="; ".join(f"{choice.route}: {choice.reason}" for choice in choices),
                available=", ".join(choice.route for choice in choices),
                remedy="change the options named above, or let route='auto' choose",
            )
        factory = next(entry.factory for entry in self._routes[request.name] if entry.name == chosen)
        try:
            return factory(groups, **options)
        except (TypeError, ValueError, KeyError) as error:
            raise ConfigurationError(
                f"optimizer {name!r} (route {chosen!r}) refuses these arguments", why=str(error)
            ) from error

    def _explain(self, request: Request, route: str) -> tuple[Choice, ...]:
        if request.name not in self._routes:
            raise UnsupportedError(
                f"there is no optimizer {request.name!r} here",
                available=", ".join(self.names()),
                remedy="choose one of those, or install a package that registers it",
            )
        choices: list[Choice] = []
        taken = False
        for entry in self._routes[request.name]:
            if route not in ("auto", entry.name):
                choices.append(Choice(entry.name, False, f"route {route!r} was asked for"))
            elif taken:
                choices.append(Choice(entry.name, False, "a better route serves this request"))
            else:
                reason = entry.supports(request)
                taken = reason is None
                choices.append(Choice(entry.name, taken, reason or ""))
        return tuple(choices)


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
            if isinstance(parameter, torch.Tensor):  # what is none the optimizer itself refuses
                yield parameter
