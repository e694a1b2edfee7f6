"""Routes: the implementations of an optimizer, and how one of them is chosen."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from accelcore.errors import ConfigurationError, PluginError
from accelcore.optim.engine import Engine
from accelcore.optim.formulas import FORMULAS, Formula
from accelcore.optim.memory import unfit
from accelcore.wording import did_you_mean

__all__ = ["Choice", "Factory", "Memory", "Request", "Route", "choose", "formula_routes", "name_of"]

Factory = Callable[..., Optimizer]
Memory = Literal["tensors", "any", "flat"]
"""What a route can be given: the tensor of each parameter; also 1-D tensors of many parameters; only the latter."""

_FORMULA_PRIORITY = -20


@dataclass(frozen=True)
class Request:
    """What was asked of the registry, as a route's `supports` sees it.

    Attributes:
        name: the optimizer's name, lower case.
        options: hyperparameters as given (with `lr` where one was given).
        parameters: every parameter of every group; empty where the registry is only asked to explain.
        groups: what each parameter group says in place of `options`.
        route: `"auto"`, or the one route that may serve it.
        flat: False where each parameter is a tensor of its own, and has to stay that.
        sharded: whether what is updated are shards, parts of parameters of which other ranks have the rest.
    """

    name: str
    options: dict[str, Any]
    parameters: tuple[torch.Tensor, ...] = ()
    groups: tuple[dict[str, Any], ...] = ()
    route: str = "auto"
    flat: bool = True
    sharded: bool = False

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
class Route:
    """One implementation of an optimizer; see `Optimizers.register`."""

    name: str
    factory: Factory
    priority: int
    memory: Memory
    supports: Callable[[Request], str | None] = field(repr=False)
    scattered: bool = False

    def make(self, request: Request, groups: Iterable[Any]) -> Optimizer:
        """The optimizer that computes the updates.

        Raises:
            ConfigurationError: it refuses its arguments.
            PluginError: the factory made something else.
        """
        try:
            engine = self.factory(groups, **request.options)
        except (TypeError, ValueError, KeyError) as error:
            known = _options(self.factory)
            unknown = [name for name in request.options if known and name not in known]
            raise ConfigurationError(
                f"optimizer {request.name!r} (route {self.name!r}) refuses these arguments",
                why=str(error),
                available=", ".join(known) if unknown else "",
                remedy=" ".join(filter(None, (_in_place_of(name, known) for name in unknown))),
            ) from error
        if not isinstance(engine, Optimizer):
            raise PluginError(
                f"route {self.name!r} of optimizer {request.name!r} made a {type(engine).__name__}",
                why="the factory that a route is registered with has to return a torch.optim.Optimizer",
                remedy="tell its author, or take another route",
            )
        if hasattr(engine, "place_runs") and not isinstance(engine, Engine):
            raise PluginError(
                f"route {self.name!r} of optimizer {request.name!r} made a {type(engine).__name__}, which is no Engine",
                why="only the place_runs of an accelcore.optim.engine.Engine is called",
                remedy="derive it from Engine",
            )
        return engine


def choose(routes: Sequence[Route], request: Request) -> tuple[Choice, ...]:
    """What becomes of each of `routes`, best first, for this request; at most one is chosen."""
    choices: list[Choice] = []
    taken = False
    for route in routes:
        if request.route not in ("auto", route.name):
            choices.append(Choice(route.name, False, f"route {request.route!r} was asked for"))
        elif taken:
            choices.append(Choice(route.name, False, "a better route serves this request"))
        else:
            reason = route.supports(request)
            if reason is None and route.memory == "flat":
                reason = unfit(request.parameters) if request.flat else "it updates flat memory only"
            if reason is None and request.sharded and not _by_element(route, request.name):
                reason = "it looks at each parameter as a whole, and this rank has a part of it"
            taken = reason is None
            choices.append(Choice(route.name, taken, reason or ""))
    return tuple(choices)


def formula_routes() -> dict[str, list[Route]]:
    """By the name of each optimizer that has a formula, its route."""
    return {name: [_formula_route(name, kind)] for name, kind in FORMULAS.items()}


def name_of(kind: type) -> str | None:
    """The registry's name of a class of `torch.optim`; None for any other, also one that is derived from them."""
    is_torchs = issubclass(kind, torch.optim.Optimizer) and kind.__module__.partition(".")[0] == "torch"
    return kind.__name__.lower() if is_torchs and kind is not torch.optim.Optimizer else None


def _options(factory: Factory) -> list[str]:
    """What a factory can be given beside the parameters; empty where it does not say."""
    made: Any = inspect.unwrap(factory)
    while isinstance(made, partial):
        made = made.func
    names: dict[str, None] = {}
    for kind in getattr(made, "__mro__", (made,)):  # a class may pass on what its base takes
        options = list(inspect.signature(kind).parameters.values())[1:]
        named = [option for option in options if option.kind not in (option.VAR_POSITIONAL, option.VAR_KEYWORD)]
        names.update(dict.fromkeys(option.name for option in named if option.name not in ("fused", "foreach")))
        if options and len(named) == len(options):
            return list(names)
    return []


def _in_place_of(name: str, known: list[str]) -> str:
    """What the user may have meant by an option that is not known: also `lr` by `learning_rate`."""
    initials = "".join(word[:1] for word in name.split("_"))
    return f"did you mean {initials!r}?" if initials in known else did_you_mean(name, known)


def _by_element(route: Route, name: str) -> bool:
    """Whether a route treats each element alike, whatever parameter it belongs to."""
    formula = FORMULAS.get(name)
    return route.memory == "any" and (formula is None or (formula.by_element and not formula.by_group))


def _formula_route(name: str, kind: type[Formula]) -> Route:
    def supports(request: Request) -> str | None:
        for switch in ("fused", "foreach"):
            if switch in request.options:
                return f"say route=... instead of {switch}="
        for switch in ("capturable", "differentiable"):
            if any(request.values(switch, False)):
                return f"the formula is not {switch}"
        if not kind.by_element and any(parameter.is_complex() for parameter in request.parameters):
            return f"{name} is not defined for complex parameters"
        return None

    return Route("formula", kind, _FORMULA_PRIORITY, "any" if kind.by_element else "tensors", supports)
