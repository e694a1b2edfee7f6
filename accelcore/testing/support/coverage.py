"""Choice of an operator's samples by the arguments that they give, and arguments that no sample of torch gives."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator
from functools import partial
from itertools import combinations, islice, permutations, product
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from accelcore.testing.support.layouts import WHOLE, mapped, tensors
from accelcore.testing.support.samples import has_gradients, samples
from accelcore.testing.support.values import repeated

_NO_CLASS = 255
_MOST_PAIRS = 16  # of an operator
_REDUCTIONS = ("none", "sum", "mean")
_UNDEFINED = (("topk", 4),)  # a switch without which results are in any order
_NO_OPTIONS = ("dtype", "inplace", "check_errors", "size_average", "reduce")
"""Parameters that a sample of its own shows, that only change where a result is written, or that are deprecated."""


def arguments_of(sample: Any) -> Any:
    """Return a sample's arguments: the ones by position, the ones by name."""
    return (sample.input, *sample.args), sample.kwargs


def of_other_options(info: Any, dtype: torch.dtype, every: list[Any], chosen: list[Any]) -> Iterator[Any]:
    """Yield the arguments of each sample with a kind of value of an argument that no sample before it has.

    Args:
        info: the operator's OpInfo.
        dtype: of the samples. In fp32 those are added that torch has for results alone.
        every: its samples.
        chosen: those that are compared already.
    """
    seen = {option for sample in chosen for option in _options(arguments_of(sample))}
    more = _not_differentiable(info, dtype) if dtype == torch.float32 else []
    largest_first = sorted(map(arguments_of, every + more), key=_how_small)
    for number, arguments in enumerate(largest_first):
        if not _options(arguments) <= seen or not (chosen or number):  # the first may have no options
            seen |= _options(arguments)
            yield arguments


def _how_small(arguments: Any) -> int:
    """Return more for arguments with a tensor of few elements or dimensions, on which few options have an effect."""
    given = tensors(arguments)
    matrices = [each.dim() > 1 for each in given]
    return -min([4, *(each.numel() for each in given)]) - any(matrices[:1]) - all(matrices)


def joined(info: Any, dtype: torch.dtype, every: list[Any]) -> Iterator[Any]:
    """Yield arguments that no sample has: an option of which all have the default, and pairs of options."""
    pool = [arguments_of(sample) for sample in every + _not_differentiable(info, dtype)]
    changed = list(_of_defaults(info, pool))
    yield from changed
    yield from _pairs_of(pool + changed)


def _not_differentiable(info: Any, dtype: torch.dtype) -> list[Any]:
    """Return the samples that torch has for results alone, with gradients; none if all of its samples are those."""
    if not has_gradients(info, dtype):
        return []
    found = samples(info, dtype, differentiable=False)
    for leaf in tensors([arguments_of(sample) for sample in found]):
        if leaf.is_floating_point() and leaf.is_leaf:
            leaf.requires_grad_()
    return found


def with_indices_that_occur(options: list[Any], most: int) -> Iterator[Any]:
    """Yield arguments with indices that come again, and with one of them as `padding_idx` or a similar option.

    Then with an option beyond all sizes that every second index is: what is to be ignored may be no class. There are at
    most `most` of each.
    """
    keys = {key for _, named in options for key, value in named.items() if _is_index(key) and isinstance(value, int)}
    again = (each for each in map(repeated, options if keys else ()) if each is not None)
    for given, named in islice(again, most):
        whole = next(each for each in tensors((given, named)) if each.dtype in WHOLE)
        yield given, {**named, **dict.fromkeys(keys, int(whole.reshape(-1)[:2][-1]))}
    for given, named in options[:most] if keys else ():
        yield mapped(partial(_every_second, _NO_CLASS), (given, {**named, **dict.fromkeys(keys, _NO_CLASS)}))


def convolutions(name: str, dtype: torch.dtype) -> Iterator[Any]:
    """Yield arguments of a convolution with all combinations of its options; none if the operator is another one."""
    if (found := re.fullmatch(r"nn\.functional\.conv(_transpose)?([123])d", name)) is None:
        return
    back, count = bool(found[1]), int(found[2])
    images, *kernels = ((2, 4, 7, 6, 5), (8, 4, 3, 2, 2), (4, 8, 3, 2, 2))
    values = {"stride": (2, 3, 1), "padding": (1, 2, 0), "dilation": (2, 1, 2), "output_padding": (1, 0, 0)}
    choices = [(1, 2, 4), *[(False, True)] * (len(values) if back else len(values) - 1)]
    generator = torch.Generator().manual_seed(4)
    for number, (groups, *switches) in enumerate(product(*choices)):
        options = {key: value[:count] for (key, value), on in zip(values.items(), switches, strict=False) if on}
        kernel = list(kernels[back][: 2 + count])
        kernel[1] //= groups
        shapes = (images[: 2 + count], kernel, *([(8,)] if number % 3 else []))
        given = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
        yield tuple(given), {**options, "groups": groups}
    # As many channels and points as a kernel has tiles; and a product of matrices, of every second point.
    for size, stride, groups in ((3, 1, 1), (5, 1, 33), (7, 2, 1), (1, 2, 1)):
        shapes = ((1, 33, *(19, 17, 3)[:count]), (33, 33 // groups, *[size] * min(count, 2), *[1] * (count - 2)), (33,))
        given = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
        yield tuple(given), {"stride": stride, "padding": (size // 2, size // 2, 0)[:count], "groups": groups}


def _every_second(number: int, value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dtype not in WHOLE:
        return value
    flat = value.reshape(-1).clone()
    flat[1::2] = number
    return flat.reshape(value.shape)


def _is_index(key: str) -> bool:
    return key.endswith(("_idx", "_index"))


def _kind(value: Any) -> Any:
    """Return what kind of value it is: equal for values between which a kernel is not likely to decide."""
    if value is None or isinstance(value, bool | str | torch.dtype):
        return value
    if isinstance(value, int):
        return max(-2, min(2, value)), "int"
    if isinstance(value, float):
        size = abs(value)
        return math.copysign(1, value), "float", size if size in (0, 1, 2, math.inf) else size > 1
    if isinstance(value, tuple | list) and not tensors(value):
        kinds = [_kind(each) for each in value[:4]]
        return "several", len({*kinds}) == 1, *kinds
    return type(value)


def _options(arguments: Any) -> set[tuple[Any, ...]]:
    (_, *given), named = arguments
    options = (*enumerate(given), *named.items())
    shapes = [each.shape for each in tensors(arguments) if each.dim()]
    unequal = bool(shapes) and len({*shapes}) > 1  # a switch or a word may matter for some shapes alone
    sizes = (unequal, len(shapes[0]) if shapes else 0)
    words = {
        (key, value, unequal and sizes if isinstance(value, bool) else sizes)
        for key, value in options
        if value is None or isinstance(value, bool | str)
    }
    masks = {(key, value.dim(), unequal) for key, value in options if _is_mask(value)}
    beside_words = {  # such as the weights of a loss that is averaged
        (key, word, value, sizes)
        for key, given in named.items()
        for word, value in named.items()
        if isinstance(given, Tensor) and isinstance(value, str)
    }
    return {(key, _kind(value)) for key, value in options} | words | masks | beside_words


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bool


def _pairs_of(pool: list[Any]) -> Iterator[Any]:
    """Yield arguments with two options of the same shapes that no other arguments have together."""
    alike: dict[str, dict[str, tuple[Any, dict[str, Any], dict[str, Any]]]] = {}
    done = set[Any]()
    for given, named in pool:
        shapes = [tuple(each.shape) if isinstance(each, Tensor) else _kind(each) for each in given]
        kinds = {key: _kind(value) for key, value in named.items()}
        options = [(key, kind, _shape(named[key])) for key, kind in kinds.items()]
        alike.setdefault(repr(shapes), {}).setdefault(repr(options), (given, named, kinds))
        done |= {frozenset(pair) for pair in combinations(kinds.items(), 2)}
    count = 0
    groups = [list(each.values()) for each in alike.values()]
    for group in sorted(groups, key=lambda each: -len({key for _, named, _ in each for key in named})):
        for (given, one, kinds), (_, other, others) in permutations(group, 2):
            if any(_shape(one[key]) != _shape(other[key]) for key in one.keys() & other.keys()):
                continue  # each has a tensor that belongs to its other options
            for key in (key for key, kind in others.items() if key not in kinds or kinds[key] != kind):
                pairs = {frozenset([(key, others[key]), each]) for each in kinds.items() if each[0] != key}
                if new := pairs - done:
                    done |= new
                    count += 1
                    yield given, {**one, key: other[key]}
                    if count == _MOST_PAIRS:
                        return


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else None


def _of_defaults(info: Any, pool: list[Any]) -> Iterator[Any]:
    """Yield the sample with most options with another value for each switch and number of which all have the same."""
    if not pool:
        return
    known = {key for _, named in pool for key in named}
    given, named = max(pool, key=lambda each: (len(each[1]), len(tensors(each[1])), len(each[0])))
    for place, value in enumerate(given):
        same = isinstance(value, bool) and all(value is each[place] for each, _ in pool if len(each) > place)
        if same and (info.name, place) not in _UNDEFINED:
            yield (*given[:place], not value, *given[place + 1 :]), named
    for key, default, kind in _defaults(info, len(given)):
        if key not in known and key not in _NO_OPTIONS:
            for value in _others(key, default, kind):
                yield given, {**named, key: value}


def _defaults(info: Any, count: int) -> Iterator[tuple[str, Any, str]]:
    """Yield name, default and type of the parameters behind the first `count`; of all overloads of an operator."""
    for owner, name in ((info, "op"), (torch, info.name)):  # some samples have a function around the operator
        try:
            parameters = list(inspect.signature(attrgetter(name)(owner)).parameters.values())
        except (AttributeError, TypeError, ValueError):
            continue
        if all(each.kind != each.VAR_KEYWORD for each in parameters):
            break
    else:
        packet = getattr(torch.ops.aten, (info.aten_name or info.name).rpartition(".")[2], None)
        for overload in packet.overloads() if packet is not None else ():
            for argument in getattr(packet, overload)._schema.arguments[count:]:
                if argument.has_default_value() and not argument.is_out:
                    yield argument.name, argument.default_value, str(argument.type)
        return
    for parameter in parameters[count:]:
        if parameter.default is not parameter.empty:
            yield parameter.name, parameter.default, str(parameter.annotation)


def _others(key: str, default: Any, kind: str) -> list[Any]:
    if _is_index(key):
        return [0]
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, float) or (default is None and ("float" in kind or "number" in kind)):
        return [0.3 + 0.5 * (default or 0.0)]
    return [each for each in _REDUCTIONS if each != default] if default in _REDUCTIONS else []
