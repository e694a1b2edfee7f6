"""Which operators draw random numbers, and when: by what torch's dispatcher says of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = ["draws", "given", "name_of", "of_a_device"]

# Arguments that say how likely something is dropped, or kept; and whether it is dropped at all.
_DROPPED, _KEPT = ("dropout", "dropout_p", "dropout_prob"), ("keep_prob",)
_TRAINED = ("train", "training")


def of_a_device(dispatch_key: str) -> Iterator[OpOverload]:
    """The operators that may draw, of torch or anybody, with a kernel of their own at a dispatch key."""
    for name in torch._C._dispatch_get_registrations_for_dispatch_key(dispatch_key):
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        # A kernel may be registered for what nobody has declared, and nobody can call.
        overloads = getattr(getattr(torch.ops, namespace), packet, None)
        operator = getattr(overloads, overload or "default", None)
        if operator is not None and _may_draw(operator):
            yield operator


def _may_draw(operator: OpOverload) -> bool:
    schema = operator._schema
    if not any("Tensor" in str(result.type) for result in schema.returns):
        return False  # it chooses between kernels
    return torch.Tag.nondeterministic_seeded in operator.tags or any(
        argument.name in (*_DROPPED, *_KEPT) or "Generator" in str(argument.type) for argument in schema.arguments
    )


def draws(operator: OpOverload, arguments: Sequence[Any], options: Mapping[str, Any]) -> bool:
    """Whether a call of an operator that may draw does: where it drops by chance, only with a chance to."""
    values = given(operator, arguments, options)
    chances = [value > 0 for name, value in values.items() if name in _DROPPED]
    chances += [value < 1 for name, value in values.items() if name in _KEPT]
    trained = all(values.get(name) is not False for name in _TRAINED)
    return trained and (any(chances) if chances else True)


def given(operator: OpOverload, arguments: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all its arguments, by name and in order: those that are given, or their defaults."""
    schema = operator._schema.arguments
    by_name = {argument.name: value for argument, value in zip(schema, arguments, strict=False)}
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    values = {**defaults, **by_name, **options}
    return {argument.name: values[argument.name] for argument in schema}


def name_of(operator: OpOverload) -> str:
    """Its whole name, such as `"aten::normal_"`."""
    return str(operator.name())  # type: ignore[no-untyped-call]
