"""Routes, the implementations of an optimizer, and the choice of one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from accelcore.errors import ConfigurationError, PluginError
from accelcore.optim.engine import Engine, equal_groups, merged, options_of
from accelcore.optim.flat.memory import unfit
from accelcore.optim.formulas import FORMULAS, Formula
from accelcore.util.text import did_you_mean

__all__ = ["ExplainedRoute", "Factory", "Memory", "Request", "Route", "choose", "formula_routes", "name_of"]

Factory = Callable[..., Optimizer]
Memory = Literal["tensors", "any", "flat"]
"""What a route updates: a tensor for each parameter; also 1-D tensors of many parameters; only the latter."""

_GROUPS_AT_ONCE = 64


@dataclass(frozen=True)
class Request:
    """Request of an optimizer, the argument of a route's `supports`.

    Attributes:
        name: the optimizer's name, lower case.
        options: hyperparameters as given, with `lr` if one was given.
        parameters: the parameters of all groups; empty in `explain`.
        groups: the options of each parameter group, which override `options`.
        route: `"auto"`, or the one route that may serve it.
        flat: whether parameters may lie in flat memory.
        sharded: whether shards of parameters are updated, of which other ranks have the rest.
    """

    name: str
    options: dict[str, Any]
    parameters: tuple[torch.Tensor, ...] = ()
    groups: tuple[dict[str, Any], ...] = ()
    route: str = "auto"
    flat: bool = True
    sharded: bool = False

    def values(self, option: str, default: Any) -> list[Any]:
        """Return the value of `option` in each group."""
        common = self.options.get(option, default)
        return [group.get(option, common) for group in self.groups] or [common]


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
    """Routes to an optimizer, best first, which print as a line each."""

    def __repr__(self) -> str:
        return "\n".join(f"{one.route}: {'chosen' if one.chosen else one.reason}" for one in self)


@dataclass(frozen=True)
class Route:
    """One implementation of an optimizer; see `Optimizers.register`."""

    name: str
    factory: Factory
    priority: int
    memory: Memory
    supports: Callable[[Request], str | None] = field(repr=False)
    scattered: bool = False

    def make(self, request: Request, groups: Sequence[dict[str, Any]]) -> Optimizer:
        """Make the optimizer that computes the updates.

        Raises:
            ConfigurationError: the factory refuses the arguments.
            PluginError: the factory returned something else.
        """
        try:
            made = self._made(request, groups)
        except (TypeError, ValueError, KeyError) as error:
            known = _options(self.factory)
            unknown = [name for name in request.options if known and name not in known]
            raise ConfigurationError(
                f"optimizer {request.name!r} (route {self.name!r}) refuses these arguments",
                why=str(error),
                available=", ".join(known) if unknown else "",
                remedy=" ".join(filter(None, (_in_place_of(name, known) for name in unknown))),
            ) from error
        if not isinstance(made, Optimizer) or (hasattr(made, "place_runs") and not isinstance(made, Engine)):
            raise PluginError(
                f"route {self.name!r} of optimizer {request.name!r} made a {type(made).__name__}",
                why="a factory must return a torch.optim.Optimizer, with place_runs an accelcore.optim.engine.Engine",
                remedy="tell its author, or choose another route",
            )
        return made

    def _made(self, request: Request, groups: Sequence[dict[str, Any]]) -> Optimizer:
        """Call the factory with few groups at a time: torch compares each new group with all groups before it.

        Equal groups are one for the factory. The first group is in each call and stays apart: groups with names do not
        mix with others, and a class that takes only one group still refuses a second one.
        """
        members = [id(_unnamed(member)) for group in groups for member in group["params"]]
        if len(groups) < 3 or len(set(members)) < len(members):  # torch reports a duplicate
            return self.factory(groups, **request.options)
        others, firsts = groups[1:], equal_groups(groups[1:])
        unequal = merged(others)
        made = self.factory([groups[0], *unequal[:_GROUPS_AT_ONCE]], **request.options)
        found = [options_of(group) for group in made.param_groups[1:]]
        for start in range(_GROUPS_AT_ONCE, len(unequal), _GROUPS_AT_ONCE):
            first = {**groups[0], "params": groups[0]["params"][:1]}
            more = self.factory([first, *unequal[start : start + _GROUPS_AT_ONCE]], **request.options)
            found += [options_of(group) for group in more.param_groups[1:]]
            for parameter, entry in more.state.items():  # Adagrad's has state from the start
                made.state.setdefault(parameter, entry)
        options = dict(zip(dict.fromkeys(firsts), found, strict=True))
        made.param_groups[1:] = [
            {**group, **options[first], **_params(group)} for first, group in zip(firsts, others, strict=True)
        ]
        return made


def choose(routes: Sequence[Route], request: Request) -> tuple[ExplainedRoute, ...]:
    """Return for each route, best first, whether it is chosen for this request. At most one is."""
    choices: list[ExplainedRoute] = []
    formula, taken = FORMULAS.get(request.name), False
    by_element = formula is None or (formula.by_element and not formula.by_group)
    for route in routes:
        if request.route not in ("auto", route.name):
            choices.append(ExplainedRoute(route.name, False, f"route {request.route!r} was requested"))
        elif taken:
            choices.append(ExplainedRoute(route.name, False, "a better route serves this request"))
        else:
            reason = route.supports(request)
            if reason is None and route.memory == "flat":
                reason = unfit(request.parameters) if request.flat else "it updates flat memory only"
            if reason is None and request.sharded and not (route.memory == "any" and by_element):
                reason = "it needs whole parameters, and this rank has shards"
            taken = reason is None
            choices.append(ExplainedRoute(route.name, taken, reason or ""))
    return _Explanation(choices)


def formula_routes() -> dict[str, list[Route]]:
    """Return the routes of the formulas, which serve every device, by optimizer name."""
    return {name: [_formula_route(name, kind)] for name, kind in FORMULAS.items()}


def name_of(kind: type) -> str | None:
    """Return the registry's name of a class of `torch.optim`; None for any other class, also a derived one."""
    is_torchs = issubclass(kind, torch.optim.Optimizer) and kind.__module__.partition(".")[0] == "torch"
    return kind.__name__.lower() if is_torchs and kind is not torch.optim.Optimizer else None


def _options(factory: Factory) -> list[str]:
    """Return the names of the options of a factory; empty if its signature does not list them."""
    made: Any = inspect.unwrap(factory)
    while isinstance(made, partial):
        made = made.func
    names: dict[str, None] = {}
    for kind in getattr(made, "__mro__", (made,)):  # a class may pass options on to its base
        options = list(inspect.signature(kind).parameters.values())[1:]
        named = [option for option in options if option.kind not in (option.VAR_POSITIONAL, option.VAR_KEYWORD)]
        names.update(dict.fromkeys(option.name for option in named if option.name not in ("fused", "foreach")))
        if options and len(named) == len(options):
            return list(names)
    return []


def _params(group: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a group as torch writes them: named ones are pairs."""
    names = [member[0] for member in group["params"] if isinstance(member, tuple)]
    return {"params": [_unnamed(member) for member in group["params"]]} | ({"param_names": names} if names else {})


def _unnamed(member: Any) -> Any:
    return member[1] if isinstance(member, tuple) else member


def _in_place_of(name: str, known: list[str]) -> str:
    """Return a hint for an unknown option, such as `lr` for `learning_rate`, or `weight_decay` for `wd`."""
    meant = next((option for option in known if _initials(name) == option or _initials(option) == name), None)
    return f"did you mean {meant!r}?" if meant else did_you_mean(name, known)


def _initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def _formula_route(name: str, kind: type[Formula]) -> Route:
    def supports(request: Request) -> str | None:
        for switch in ("capturable", "differentiable"):
            if any(request.values(switch, False)):
                return f"the formula is not {switch}"
        if not kind.by_element and any(parameter.is_complex() for parameter in request.parameters):
            return f"{name} is not defined for complex parameters"
        return None

    return Route("formula", kind, -20, "any" if kind.by_element else "tensors", supports)
