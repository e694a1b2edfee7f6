"""Contract of an optimizer kernel: the `Engine`, the `Request` that it is made for, and its parameter groups.

`as_engine` is an adapter for an optimizer that has only `step`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from accelcore.errors import ConfigurationError
from accelcore.optim.flat.memory import Run
from accelcore.scaling.contract import step_in_kernel
from accelcore.util.text import kind_of, text_remedy

__all__ = ["Engine", "Factory", "Memory", "Request"]

OTHER_WORDS = {"learning_rate": "lr", "wd": "weight_decay", "decay": "weight_decay", "epsilon": "eps"}
"""Other libraries' words for options of an optimizer."""

_NOT_OPTIONS = ("params", "param_names", "initial_lr")
_GROUPS_AT_ONCE = 64

Factory = Callable[..., Optimizer]
Memory = Literal["tensors", "any", "flat"]
"""Tensors that a route updates, one for each parameter; also 1-D tensors of many parameters; or only the latter."""


class Engine:
    """Contract of an optimizer kernel: `class Lion(Engine, torch.optim.Optimizer)`, registered as a route's factory.

    An engine has the groups and the state of a `torch.optim.Optimizer`. `update` is the one method to write.
    `RoutedOptimizer` handles hooks, schedulers, closures, `state_dict` and memory, and calls the engine.

    Attributes:
        keeps_shapes: whether every tensor of the state, except counters, has the shape of its parameter. A state of
            another shape is then refused when it is loaded.
        counts_on_device: whether `state[p]["step"]` is on the device of `p`, not on the host.
        _step_supports_amp_scaling: torch's name: whether `update` takes `found_inf` and `grad_scale`. If not, both are
            always None.
    """

    keeps_shapes = False
    counts_on_device = False
    _step_supports_amp_scaling = False

    def update(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        """Update, in place, each tensor of `param_groups` that has a `grad`, and its state.

        Args:
            found_inf: a scalar on the device; the update must do nothing if it is 1.0.
            grad_scale: a scalar on the device by which the gradients must be divided first.
        """
        raise NotImplementedError

    def place_runs(self, runs: Sequence[Run]) -> None:
        """Note which parameters each tensor of `param_groups` holds. Called whenever these tensors change."""

    def replaced(self) -> bool:
        """Return whether a parameter may have other memory than in the last update. False saves a check of each."""
        return True

    def state_dtype(self, group: dict[str, Any], value: Tensor) -> torch.dtype:
        """Return the dtype in which the state of a tensor is kept."""
        return value.dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Compute the loss by `closure`, if there is one, then update. Return the loss."""
        loss = loss_by(closure)
        self.update(getattr(self, "found_inf", None), getattr(self, "grad_scale", None))
        return loss


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


class _BySteps(Engine):
    """Engine of an optimizer that has only `step`, called as torch's scaler calls it."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def update(self, found_inf: Tensor | None, grad_scale: Tensor | None) -> None:
        if found_inf is None and grad_scale is None:
            self._optimizer.step()
        else:
            step_in_kernel(self._optimizer, found_inf, grad_scale)


def as_engine(optimizer: Optimizer) -> Engine:
    """Return the engine that an optimizer is, or one that calls its `step`."""
    return optimizer if isinstance(optimizer, Engine) else _BySteps(optimizer)


def made_by(factory: Factory) -> Any:
    """Return the class of a factory's optimizers, as far as the factory shows it; otherwise the function itself."""
    made: Any = inspect.unwrap(factory)
    while isinstance(made, partial):
        made = made.func
    return made


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether `step` must be given a closure, as that of torch's LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def loss_by(closure: Callable[[], Any] | None) -> Any:
    """Return the loss that a closure computes, with gradients enabled."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def name_of(kind: type) -> str | None:
    """Return the registry's name of a class of `torch.optim`; None for any other class, also a derived one."""
    is_torchs = issubclass(kind, torch.optim.Optimizer) and kind.__module__.partition(".")[0] == "torch"
    return kind.__name__.lower() if is_torchs and kind is not torch.optim.Optimizer else None


def option_names(factory: Factory) -> list[str]:
    """Return the names of the options of a factory; empty if its signature does not list them."""
    made = made_by(factory)
    names: dict[str, None] = {}
    for kind in getattr(made, "__mro__", (made,)):  # a class may pass options on to its base
        options = list(inspect.signature(kind).parameters.values())[1:]
        named = [option for option in options if option.kind not in (option.VAR_POSITIONAL, option.VAR_KEYWORD)]
        names.update(dict.fromkeys(option.name for option in named if option.name not in ("fused", "foreach")))
        if options and len(named) == len(options):
            return list(names)
    return []


def listed(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return parameter groups whose parameters are lists, because reading a generator exhausts it."""
    if isinstance(params, torch.nn.Module) and not isinstance(params, torch.nn.ParameterList):
        raise TypeError(f"a {type(params).__name__} is a module")
    groups = list(params)
    if not groups:
        raise TypeError("there are no parameters: the model has none, or a generator was read before")
    if not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    for group in groups:
        if "params" not in group:
            raise TypeError(f"a parameter group has no 'params', only {', '.join(map(repr, group)) or 'nothing'}")
        if isinstance(group["params"], set | frozenset):
            raise TypeError("a set of parameters has no order, and an optimizer's state depends on it")
    members = [group["params"] for group in groups]
    members = [[each] if isinstance(each, torch.Tensor) else list(each) for each in members]
    return [{**group, "params": own} for group, own in zip(groups, members, strict=True)]


def check_numbers(*groups: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for an option that is text, for `betas` of one number, and for no learning rate."""
    for key, value in chain.from_iterable(group.items() for group in groups):
        if key == "betas" and not isinstance(value, list | tuple):
            raise ConfigurationError(
                f"betas={value!r} is {kind_of(value)}, not a tuple of two numbers",
                remedy="give both: betas=(0.9, 0.999); those of a configuration's own list: betas=tuple(config.betas)",
            )
        for number in value if isinstance(value, list | tuple) else (value,):  # betas
            if key != "params" and (remedy := text_remedy(number)):
                raise ConfigurationError(f"{key}={value!r} is not a number", remedy=remedy)
        if key == "lr" and (value is None or isinstance(value, bool | list | tuple)):
            remedy = "give a number, or remove lr for the optimizer's default; several need parameter groups"
            raise ConfigurationError(f"lr={value!r} is not a number", remedy=remedy)


def check_members(
    groups: Iterable[Mapping[str, Any]], names: Mapping[int, str] | None = None, cause: Exception | None = None
) -> None:
    """Raise ConfigurationError if groups have a parameter twice, or a lazy one. `names`: by the parameters' ids.

    Groups hold parameters, or pairs of a name and a parameter.
    """
    found: dict[int, int] = {}
    for number, group in enumerate(groups):
        own = group.get("param_names") or [""] * len(group["params"])
        for each, known in zip(group["params"], own, strict=True):
            name, member = each if isinstance(each, tuple) else (known or (names or {}).get(id(each)), each)
            before = found.get(id(member))
            found[id(member)] = number
            if is_lazy(member):
                raise ConfigurationError(
                    f"a parameter has no shape yet{f': {name!r}' if name else ''}",
                    why="a lazy module, such as nn.LazyLinear, takes it from the first input",
                    remedy="call the model with one batch before the optimizer is made",
                ) from cause
            if before is None or not isinstance(member, Tensor):
                continue
            what = f"the parameter {name!r}" if name else f"a parameter of shape {tuple(member.shape)}"
            where = f"twice in group {number}" if before == number else f"in the groups {before} and {number}"
            raise ConfigurationError(
                f"{what} is {where} of the optimizer",
                why="each step would update it twice; modules that share a weight have one parameter",
                remedy="give each parameter to one group, once"
                + ("" if name else ". To see its name, give pairs, as from model.named_parameters()"),
            ) from cause


def check_keys(groups: Sequence[dict[str, Any]], known: list[str]) -> None:
    """Raise ConfigurationError if a key of a group must be a misspelt option. torch keeps unknown keys for the script.

    A key that extends an option by a word, such as `weight_decay_scale`, or that stands beside the option, is taken.
    """
    for number, group in enumerate(groups):
        for key in (key for key in group if isinstance(key, str) and key not in (*known, "params")):
            apart = [name for name in known if f"{name}_" not in f"{key}_"]
            meant = next(iter(get_close_matches(OTHER_WORDS.get(key, key.lower()), apart, 1, 0.8)), None)
            if meant is not None and meant not in group:
                raise ConfigurationError(
                    f"parameter group {number} has the unknown key {key!r}",
                    remedy=f"did you mean {meant!r}? If the key is the script's own, choose another name",
                )


def make_by(factory: Factory, groups: Sequence[dict[str, Any]], options: dict[str, Any]) -> Optimizer:
    """Call a factory with few groups at a time: torch compares each new group with all groups before it.

    With ten thousand groups in one call this takes minutes.

    Equal groups are one for the factory. The first group is in each call and stays apart: groups with names do not
    mix with others, and a class that takes only one group still refuses a second one.
    """
    members = [id(_unnamed(member)) for group in groups for member in group["params"]]
    if len(groups) < 3 or len(set(members)) < len(members):  # torch reports a duplicate
        return factory(groups, **options)
    others, firsts = groups[1:], equal_groups(groups[1:])
    unequal = merged(others)
    made = factory([groups[0], *unequal[:_GROUPS_AT_ONCE]], **options)
    found = [_options_of(group) for group in made.param_groups[1:]]
    for start in range(_GROUPS_AT_ONCE, len(unequal), _GROUPS_AT_ONCE):
        first = {**groups[0], "params": groups[0]["params"][:1]}
        more = factory([first, *unequal[start : start + _GROUPS_AT_ONCE]], **options)
        found += [_options_of(group) for group in more.param_groups[1:]]
        for parameter, entry in more.state.items():  # Adagrad's has state from the start
            made.state.setdefault(parameter, entry)
    unlike = dict(zip(dict.fromkeys(firsts), found, strict=True))
    made.param_groups[1:] = [
        {**group, **unlike[first], **_params(group)} for first, group in zip(firsts, others, strict=True)
    ]
    return made


def equal_groups(groups: Sequence[dict[str, Any]]) -> list[int]:
    """Return for each parameter group the number of the first group with equal options.

    An update that treats each element alike gives the same result for two such groups as for one of both. Options are
    compared by value if they are numbers, words or tuples of these; others, such as tensors, by identity.
    """
    firsts: dict[frozenset[tuple[str, Any]], int] = {}
    keys = (frozenset((key, _comparable(value)) for key, value in _options_of(group).items()) for group in groups)
    return [firsts.setdefault(key, number) for number, key in enumerate(keys)]


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group."""
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def merged(groups: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the parameter groups; groups with equal options become one."""
    if len(groups) == 1:
        return groups
    members: dict[int, list[dict[str, Any]]] = {}
    for first, group in zip(equal_groups(groups), groups, strict=True):
        members.setdefault(first, []).append(group)
    return [
        {**same[0], "params": list(chain.from_iterable(group["params"] for group in same))} for same in members.values()
    ]


def _comparable(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_comparable, value))
    return value if value is None or isinstance(value, int | float | str) else id(value)


def _params(group: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a group as torch writes them: named ones are pairs."""
    names = [member[0] for member in group["params"] if isinstance(member, tuple)]
    return {"params": [_unnamed(member) for member in group["params"]]} | ({"param_names": names} if names else {})


def _unnamed(member: Any) -> Any:
    return member[1] if isinstance(member, tuple) else member
