"""Run torch's samples on both devices and compare the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from accelcore_npu_emulator.selftest.report import VERDICTS, Comparison, Report

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Results in unwritten memory: NaN on the emulator, arbitrary on the CPU.
_UNWRITTEN = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
_TOLERANCE = {"float16": (1e-3, 1e-5), "bfloat16": (1.6e-2, 1e-5)}
_SINGLE = (1e-4, 1e-4)
_WORST_LAST = list(VERDICTS)


def sweep(names: Sequence[str] = (), sample_limit: int = 3, every: int = 1) -> Report:
    """Compare operators by a few samples each.

    `names` are as torch's tests spell them, such as `"nn.functional.gelu"`; all if empty. An `every` of 3 takes every
    third of them.
    """
    import torch_npu  # noqa: F401  registers the device "npu" if torch does not load its backends
    from torch.testing._internal.common_methods_invocations import op_db

    operators = {".".join(filter(None, (info.name, info.variant_test_name))): info for info in op_db}
    unknown = set(names) - set(operators)
    if unknown:
        raise ValueError(f"unknown operators: {', '.join(sorted(unknown))}")
    report = Report()
    for name in list(names or operators)[::every]:
        found = list(_compare(name, operators[name], sample_limit))
        report.comparisons += found
        if not found:
            report.unknown.append(name)
    return report


def _compare(name: str, operator: Any, sample_limit: int) -> Iterator[Comparison]:
    from accelcore_npu_emulator.selftest.forms import available

    for dtype in _dtypes(operator):
        forms = available(operator, dtype)
        samples = _samples(operator, dtype, sample_limit, requires_grad="backward" in forms)
        for form in forms:
            fitting = [sample for sample in samples if form != "in place" or not sample.broadcasts_input]
            verdicts = [found for sample in fitting if (found := _verdict(name, operator, sample, form))]
            if verdicts:
                yield Comparison(name, str(dtype).removeprefix("torch."), form, *max(verdicts, key=_rank))


def _rank(found: tuple[str, str]) -> int:
    return _WORST_LAST.index(found[0])


def _dtypes(operator: Any) -> list[torch.dtype]:
    """Return the floating dtypes of training, or one other dtype if the operator supports none of them."""
    import torch

    supported = operator.supported_dtypes("cpu")
    common = [dtype for dtype in (torch.float32, torch.float16, torch.bfloat16) if dtype in supported]
    others = (torch.int64, torch.bool, torch.complex64, *sorted(supported, key=str))
    return common or [dtype for dtype in others if dtype in supported][:1]


def _samples(operator: Any, dtype: torch.dtype, limit: int, *, requires_grad: bool) -> list[Any]:
    import torch

    torch.manual_seed(0)
    return list(islice(operator.sample_inputs("cpu", dtype, requires_grad=requires_grad), limit))


def _verdict(name: str, operator: Any, sample: Any, form: str) -> tuple[str, str] | None:
    """Return one of `VERDICTS` with its reason; None if the CPU cannot run the sample."""
    from accelcore_npu_emulator.selftest.forms import Watch

    try:
        expected = _seeded(0, operator, sample, form)
    except Exception:  # noqa: BLE001  torch's kernels raise errors of any kind
        return None
    if not expected:
        return None
    watch = Watch()
    try:
        difference = _differs(_watched(watch, operator, sample, form), expected)
        if any(difference):  # some operators differ under a dispatch mode, such as matrix_rank with out=
            difference = _differs(_watched(nullcontext(), operator, sample, form), expected)
    except Exception as error:  # noqa: BLE001  any error is a finding
        reason = " ".join((str(error).strip() or repr(error)).splitlines()[:3])[:200]
        verdict = "refused" if "EMULATED: " in str(error) else "disagree"
        return verdict, f"{type(error).__name__}: {reason}"
    what, values = difference
    random = name in _UNWRITTEN or (
        # The NPU may draw the same numbers as the CPU: same generator, same seed.
        bool(values or watch.draws) and bool(_values_differ(_seeded(1, operator, sample, form), expected))
    )
    if what or (values and not random):
        return "disagree", what or values
    if watch.fallbacks:
        return "fallback", f"on the CPU: {', '.join(sorted(watch.fallbacks))}"
    return ("random" if random else "values"), ""


def _seeded(seed: int, operator: Any, sample: Any, form: str) -> list[Tensor]:
    import torch

    from accelcore_npu_emulator.selftest.forms import evaluate

    set_seed = torch.manual_seed
    set_seed(seed)
    with patch.object(torch, "manual_seed", lambda _: set_seed(seed)):  # some samples set a seed
        return evaluate(operator, sample, form, "cpu")


def _watched(watch: AbstractContextManager[Any], operator: Any, sample: Any, form: str) -> list[Tensor]:
    import torch

    from accelcore_npu_emulator.selftest.forms import evaluate

    with watch:
        found = evaluate(operator, sample, form, "npu")
        torch.npu.synchronize()  # type: ignore[attr-defined]
    return found


def _differs(found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[str, str]:
    """Return the differences in form and in values."""
    what = _form_differs(found, expected)
    return what, "" if what else _values_differ(found, expected)


def _form_differs(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Return the difference in device, shape, dtype, layout or strides; empty if there is none."""
    if len(found) != len(expected):
        return f"{len(found)} tensors instead of {len(expected)}"
    for one, other in zip(found, expected, strict=True):
        if one.device.type != "npu":
            return f"the result is on {one.device}"
        for what, actual, wanted in (
            ("shape", tuple(one.shape), tuple(other.shape)),
            ("dtype", one.dtype, other.dtype),
            ("layout", one.layout, other.layout),
            ("strides", _strides(one), _strides(other)),
        ):
            if actual != wanted:
                return f"the {what} is {actual} instead of {wanted}"
    return ""


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that locate elements: of dimensions with several elements, if the tensor is not empty."""
    import torch

    if tensor.layout != torch.strided or not tensor.numel():
        return ()
    return tuple(stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _values_differ(found: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    import torch

    for one, other in zip(found, expected, strict=True):
        host, right = one.detach().cpu(), other.detach()
        if right.layout == torch.strided and not right.is_complex() and torch.equal(host, right):
            continue
        rtol, atol = _TOLERANCE.get(str(right.dtype).removeprefix("torch."), _SINGLE)
        if right.element_size() == 1 and right.is_floating_point():  # eight-bit floats cannot be compared directly
            host, right = host.float(), right.float()
        try:
            torch.testing.assert_close(host, right, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            return " ".join(str(error).splitlines()[:3])[:200]
    return ""
