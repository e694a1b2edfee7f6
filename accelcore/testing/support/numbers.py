"""Operators that take each element alone, on numbers of every size: subnormal ones, halves, ends, infinities, NaN."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from accelcore.testing.support.bulk import lengthened
from accelcore.testing.support.coverage import arguments_of, of_other_options
from accelcore.testing.support.found import Found, is_refusal
from accelcore.testing.support.layouts import mapped, memory_of, placed, tensors, wide
from accelcore.testing.support.rounding import Rounding
from accelcore.testing.support.samples import NOT_UNIQUE, ROUGH, has_gradients, needs_lapack, samples

_FEW = 12  # elements, by which it is tried whether each is taken alone
_FORMS: tuple[Callable[[Tensor], Tensor], ...] = (lambda each: each.flip(0), lambda each: each[: _FEW // 2])
_MOST_TRIED = 4  # arguments of an operator that takes several elements at once
_COUNTS = (300, 40, 20)  # numbers of one operand, of each of two and of three
_RUNS = 6  # with rounding errors by chance
_UNITS = {torch.float32: 8, torch.bfloat16: 2, torch.float16: 2}  # rounding errors of inputs and result
_NEAR_END = 8  # part of the largest number: kernels multiply by small factors on the way
_FLUSHED = 128  # times the smallest normal number: a factor of a larger result is above it
_USUAL = (2.0**-6, 2.0**6)  # operands that the formula of a gradient may square in any precision

_KEEPS_SIGNS = (
    *("neg", "abs", "sqrt", "ceil", "floor", "trunc", "round", "mul", "copysign", "positive", "fmod", "frac"),
    *("sin", "tan", "asin", "atan", "sinh", "asinh", "tanh", "atanh", "erf", "expm1", "log1p"),
)
"""Operators of which the sign of a zero is defined."""

_STEPS = ("floor", "ceil", "trunc", "round", "frac", "sign", "sgn", "heaviside", "fmod", "frexp", "copysign")
"""Operators without rounding errors that have steps."""

_ABSOLUTE = ("erf", "nn.functional.gelu")
"""Operators whose kernels are as precise as a number around 1, or as their operand, also if the result is smaller."""
_ABSOLUTE_UNITS = 2.0**-20

_BY_DTYPE = ("nextafter", "nan_to_num", "float_power", "fake_quantize", "cauchy", "double", "long", "int", "short")
"""Operators of which the result in float64 is another number, or is rounded to whole numbers."""

_IMPRECISE = (
    # Kernels lose digits of large numbers, or take a step for each whole number.
    *("polynomial", "airy", "bessel", "polygamma", "mvlgamma"),
    *("round.decimals_3", "ldexp", "sinc", "isclose"),  # multiplied on the way, as in the next line
    *("kl_div", "poisson_nll_loss", "binary_cross_entropy_with_logits"),
)
_OF_TWO_FACTORS = ("igamma", "igammac")  # as above
_ON_THE_WAY = ("lerp", "atan2")  # a difference overflows, a reciprocal is flushed to 0
_COUNTS_UP, _LEAST = ("gamma", "zeta"), -100.0  # kernels take a step for each whole number below 0


def compare_numbers(
    found: Found, device: torch.device, name: str, info: Any, dtypes: Sequence[torch.dtype], most: int
) -> bool:
    """Compare an operator with float64 on the CPU, each element by its own size; False if it takes several at once.

    Args:
        found: where the findings go.
        device: where to run it.
        name, info: the operator and its OpInfo.
        dtypes: of its operands.
        most: how many forms of its arguments to take.
    """
    excluded = name in (*NOT_UNIQUE, *ROUGH, *_OF_TWO_FACTORS) or info.name.startswith(_BY_DTYPE) or needs_lapack(info)
    known = info.supported_dtypes("cpu")
    if excluded or any(each in name for each in _IMPRECISE) or torch.float32 not in known:
        return False
    every = samples(info, torch.float32)
    pool = [*of_other_options(info, torch.float32, every, []), *map(arguments_of, every)]
    chosen = list(islice(_of_elements(info, pool), most))
    for dtype in dtypes:
        for arguments in chosen if dtype in known and dtype in _UNITS else ():
            least = _LEAST if any(each in name for each in _COUNTS_UP) else -math.inf
            given = _with_numbers(arguments, dtype, least, name in _ON_THE_WAY)
            where = f"{name}, {str(dtype).removeprefix('torch.')}, of numbers of every size"
            if not found.leaves_out(where):
                _Numbers(found, where, info, dtype, given).compare(device)
    return bool(chosen)


def _of_elements(info: Any, pool: list[Any]) -> Iterator[Any]:
    """Yield arguments as vectors, one of each form, of which each element gives one element of the result."""
    done, failed = set[str](), 0
    for arguments in sorted(pool, key=_order):
        strided = all(each.layout == torch.strided for each in tensors(arguments))
        few = lengthened(arguments, _FEW) if strided else None
        if few is None or not 0 < len(_operands(few)) <= len(_COUNTS):
            continue
        (_, *others), named = few
        form = repr([each for each in (*others, *named.items()) if not isinstance(each, Tensor)])
        if form in done:
            continue
        if _takes_each_alone(info, few):
            done.add(form)
            yield few
        elif (failed := failed + 1) == _MOST_TRIED:
            return


def _order(arguments: Any) -> tuple[bool, int]:
    """Return less for arguments with a result for each element, and with more operands that have elements."""
    return arguments[1].get("reduction", "none") != "none", -len(_operands(arguments))


def _operands(arguments: Any) -> list[Tensor]:
    return [each for each in tensors(arguments) if each.is_floating_point() and each.dim()]


def _takes_each_alone(info: Any, arguments: Any) -> bool:
    exact = mapped(lambda each: each.detach() if isinstance(each, Tensor) else each, wide(arguments, torch.float32))
    try:
        given, options = exact
        results = tensors(info.op(*given, **options))
        if not results or not all(map(_is_vector, results)) or any(shared for shared, _ in memory_of(results, exact)):
            return False
        for form in _FORMS:
            given, options = mapped(partial(_changed, form), exact)
            others = tensors(info.op(*given, **options))
            if not all(_alike(form(one), other) for one, other in zip(results, others, strict=True)):
                return False
    except Exception:  # noqa: BLE001  torch's kernels raise errors of any kind
        return False
    return True


def _is_vector(result: Tensor) -> bool:
    return result.shape == (_FEW,) and result.layout == torch.strided and not result.is_complex()


def _changed(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    return change(value).clone() if isinstance(value, Tensor) and value.dim() else value


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), 1e-12, equal_nan=True)


def _with_numbers(arguments: Any, dtype: torch.dtype, least: float, no_ends: bool) -> Any:
    """Return the arguments with numbers of every size as operands: all pairs of two, all triples of three."""
    operands = _operands(arguments)
    several = [each for each in _numbers(dtype, _COUNTS[len(operands) - 1]) if not each < least]
    if no_ends or len(operands) == len(_COUNTS):  # of which a kernel may multiply or divide two first
        several = [each for each in several if not _has_extreme_square(each, dtype)]
    axes = torch.meshgrid(*[torch.tensor(several, dtype=torch.float64).to(dtype)] * len(operands), indexing="ij")
    axis_of, count = dict(zip(map(id, operands), axes, strict=True)), axes[0].numel()

    def change(value: Any) -> Any:
        if id(value) in axis_of:
            return axis_of[id(value)].reshape(-1).clone().requires_grad_(value.requires_grad)
        if not isinstance(value, Tensor):
            return value
        if value.dim():
            return value.detach().repeat(-(-count // _FEW))[:count]
        return value.detach().to(dtype) if value.is_floating_point() else value

    return mapped(change, arguments)


def _has_extreme_square(number: float, dtype: torch.dtype) -> bool:
    """Return whether the square of a finite number is too large or too small for a dtype."""
    limits = torch.finfo(dtype)
    return math.isfinite(number) and number != 0 and not limits.tiny < number * number < limits.max


@lru_cache(maxsize=16)
def _numbers(dtype: torch.dtype, count: int) -> list[float]:
    """Return about that many numbers of a dtype, in an order by chance: first the ends of its ranges, then any."""
    limits = torch.finfo(dtype)
    least, eps = limits.smallest_normal * limits.eps, limits.eps
    chosen = [0.0, math.inf, 1.0, limits.max, limits.tiny, least, 0.5, 2.5, 3.0, 20.0, 1 / eps + 1, eps, 1 + eps]
    chosen += [limits.tiny - least, 1 - eps / 2, 1.5, 6.0, limits.max / 2, 2 / eps + 2, 0.5 / eps + 0.5, 88.0, 1e-3]
    half = count // 2
    generator = torch.Generator().manual_seed(13)
    steps = torch.rand(max(0, half - len(chosen)), generator=generator, dtype=torch.float64)
    smallest, largest = math.log2(least), math.log2(limits.max)
    of_any_size = (2.0 ** (steps * (largest - smallest) + smallest)).tolist()
    usual = torch.linspace(-17, 17, 70, dtype=torch.float64).tolist() if of_any_size else []
    found = [*chosen[:half], *of_any_size]
    both = [math.nan, *found, *(-each for each in found), *usual]
    return [both[place] for place in torch.randperm(len(both), generator=generator).tolist()]


class _Numbers:
    """One operator on numbers of every size in one dtype.

    Args:
        found: where the findings go.
        where: the operator and the dtype, in words.
        info, dtype: the operator's OpInfo, and the dtype.
        given: the arguments.
    """

    def __init__(self, found: Found, where: str, info: Any, dtype: torch.dtype, given: Any) -> None:
        self._found, self._where, self._info, self._dtype, self._given = found, where, info, dtype, given
        self._exact, self._graph = wide(given, dtype), has_gradients(info, dtype)
        self._sizes = [each.detach().double().abs() for each in _operands(given)]

    def compare(self, device: torch.device) -> None:
        """Note what a device computes otherwise; nothing if the numbers do not fit on the CPU either."""
        host = torch.device("cpu")
        try:
            right = self._results(placed(self._exact, host, "", graph=self._graph))
        except Exception:  # noqa: BLE001  torch's kernels raise errors of any kind
            return
        try:
            results = self._results(placed(self._given, device, "", graph=self._graph))
        except Exception as error:  # noqa: BLE001  a device raises errors of any kind
            finding = f"{self._where}: {type(error).__name__}: {error}"
            self._found.refused.append(finding) if is_refusal(error) else self._found.note(finding, self._given)
            return
        if results.keys() != right.keys():
            self._found.note(f"{self._where}: {', '.join(results)} instead of {', '.join(right)}", self._given)
            return
        for part, value in results.items():
            self._found.compared += 1
            kind = self._dtype if right[part].dtype == torch.float64 else right[part].dtype
            if value.dtype != kind:
                self._found.note(f"{self._where}: {part} is {value.dtype} instead of {kind}", self._given)
                continue
            wrong = self._wrong(part, value.cpu(), right[part], moved=False)
            if bool(wrong.any()) and bool((wrong := self._wrong(part, value.cpu(), right[part], moved=True)).any()):
                numbers = wrong & ~value.cpu().isnan()  # which say more than NaN
                place = int((numbers if bool(numbers.any()) else wrong).nonzero()[0])
                operands = ", ".join(f"{each[place].item():.6g}" for each in _operands(self._given))
                self._found.note(
                    f"{self._where}: {part} is wrong in {int(wrong.sum())} of {wrong.numel()} elements: "
                    f"{value[place].item():.6g} instead of {right[part][place].item():.6g} of {operands}",
                    self._given,
                )

    def _results(self, arguments: Any) -> dict[str, Tensor]:
        """Return the results, and the gradients of their sum."""
        given, options = arguments
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = tensors(self._info.op(*given, **options))
        found = {f"result {number}": each.detach() for number, each in enumerate(results)}
        leaves = [each for each in tensors(arguments) if each.requires_grad]
        roots = [each for each in results if each.requires_grad]
        if leaves and roots:
            grads = torch.autograd.grad(roots, leaves, list(map(torch.ones_like, roots)), allow_unused=True)
            found |= {f"the gradient {number}": each for number, each in enumerate(grads) if each is not None}
        return found

    @cached_property
    def _moved(self) -> list[dict[str, Tensor]]:
        """The results when rounding errors had moved each number, and then only those on the way."""
        made = []
        for seed in range(2 * _RUNS):
            rounding = Rounding(self._dtype, seed, watch=seed >= _RUNS)
            inputs = rounding.inputs(self._exact) if seed < _RUNS else self._exact
            arguments = placed(inputs, torch.device("cpu"), "", graph=self._graph)
            with rounding:
                made.append(self._results(arguments))
        return made

    def _wrong(self, part: str, value: Tensor, right: Tensor, *, moved: bool) -> Tensor:
        """Return which elements are further from the right ones than by rounding, or of another sign or kind."""
        if not right.dtype.is_floating_point:
            return value != right
        limits, units, gradient = torch.finfo(self._dtype), _UNITS[self._dtype], part.startswith("the gradient")
        value, size, spread = value.double(), right.abs(), torch.zeros_like(right)
        is_open = torch.zeros_like(right, dtype=torch.bool)
        if gradient:
            is_open |= ~right.isfinite()
            for operand in self._sizes:
                outside = (operand < _USUAL[0]) | (operand > _USUAL[1])
                is_open |= (operand != 0) & operand.isfinite() & outside
        if moved and (gradient or self._info.name not in _STEPS):
            for number, results in enumerate(self._moved):
                spread = torch.maximum(spread, (results[part] - right).abs().nan_to_num(0.0, 0.0, 0.0))
                if number >= _RUNS:  # what overflows on the way, or is no number then
                    is_open |= results[part].isfinite() != right.isfinite()
                    is_open |= results[part].isnan() != right.isnan()
        # Below the normal numbers of 8 bits of exponent a device may flush to 0, also what a small result is made of.
        of_half = 1.0 if gradient else limits.eps
        least = limits.smallest_normal * (of_half if self._dtype == torch.float16 else _FLUSHED)
        allowed = units * (limits.eps * size + spread) + least
        if self._info.name in _ABSOLUTE:
            allowed += _ABSOLUTE_UNITS * self._sizes[0].clamp(min=1)
        largest = limits.max * (1 + limits.eps / 4)  # what is beyond is rounded to infinity
        same = (value - right).abs() <= allowed
        near_end = (size >= limits.max / _NEAR_END) & (size <= largest + spread * units)
        same |= near_end & (value.sign() == right.sign()) & (value.abs() >= limits.max)
        same = torch.where(size > largest, value == right.sign() * math.inf, same)
        same = torch.where(right.isnan(), value.isnan(), same)
        if self._info.name in _KEEPS_SIGNS and not gradient:
            same &= (right != 0) | (value.signbit() == right.signbit())
        return ~(same | is_open)
