"""Places of tensors among an operator's arguments and results, from its schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

# These take indices that may stay on the host, or copy from it.
_TAKES_HOST_TENSORS = frozenset({"_foreach_copy_", "index", "index_put", "index_put_", "_index_put_impl_"})
# torch tags its own random operators; these are torch_npu's.
_RANDOM = frozenset({"_npu_dropout", "_dropout_with_byte_mask"})
_WAITING_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
# torch tags a part of this one alone.
_WAITING = frozenset({"aten::repeat_interleave.self_Tensor"})
_TENSOR = ("Tensor", "Optional[Tensor]")
_TENSORS = ("List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]")


class Signature:
    """Places of tensors among an operator's arguments and results, and its other properties."""

    def __init__(self, operator: torch._ops.OpOverload) -> None:
        schema = operator._schema
        arguments = list(schema.arguments)
        self.name = str(operator._name)
        self.base = schema.name.split("::")[1]
        # Arguments by position, then those by keyword alone. `out` arguments are a kind of their own.
        positional = [a for a in arguments if not a.kwarg_only]
        keyword = [a for a in arguments if a.kwarg_only and not a.is_out]
        self.tensors = tuple(i for i, a in enumerate(positional) if str(a.type) in _TENSOR)
        self.lists = tuple(i for i, a in enumerate(positional) if str(a.type) in _TENSORS)
        self.keyword_tensors = tuple(a.name for a in keyword if str(a.type) in _TENSOR)
        self.keyword_lists = tuple(a.name for a in keyword if str(a.type) in _TENSORS)
        self.outs = tuple(a.name for a in arguments if a.is_out)
        self.written = tuple(a.name for a in arguments if _writes(a))
        self._positions = {a.name: i for i, a in enumerate(positional)}
        names = {a.name for a in arguments}
        self.has_device = "device" in names
        self.has_generator = "generator" in names
        tagged = torch.Tag.nondeterministic_seeded in operator.tags
        self.random = self.has_generator or tagged or self.base in _RANDOM
        # For each result, the name of the written argument that it is, or None when it is new.
        self.aliases = tuple(_written_argument(result, arguments) for result in schema.returns)
        self.is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        self.waits = _waits(operator)
        self.waits_for_masks_only = self.base == "index"
        self.takes_host_tensors = self.base in _TAKES_HOST_TENSORS

    def argument(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the argument `name` of one call, or None if it is missing."""
        position = self._positions.get(name)
        if position is not None and position < len(args):
            return args[position]
        return kwargs.get(name)

    def replace(self, name: str, value: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Replace the argument `name`."""
        position = self._positions.get(name)
        if position is not None and position < len(args):
            args[position] = value
        else:
            kwargs[name] = value


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _written_argument(result: Any, arguments: list[Any]) -> str | None:
    if not _writes(result):
        return None
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.before_set & result.alias_info.before_set:
            return str(argument.name)
    return None


def _waits(operator: torch._ops.OpOverload) -> bool:
    if str(operator._name) in _WAITING:
        return True
    overloads = operator.overloadpacket
    # torch tags the functional overload of an operator and not always its `out` overload.
    names = overloads.overloads() if any(a.is_out for a in operator._schema.arguments) else [operator._overloadname]
    return any(tag in getattr(overloads, name).tags for name in names for tag in _WAITING_TAGS)
