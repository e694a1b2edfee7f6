"""Arithmetic in another precision than was promised."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext

import torch

from lies.lie import LIES, Lie, declaring, lie, replaced


@lie("TestPrecision.test_autocast_computes_in_its_dtype", name="bfloat16")
def claims_bf16_and_computes_fp32(backend):
    return replaced(backend, "precision", autocast=lambda honest, *args, **kwargs: nullcontext())


class _RoundsLate(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result.to(torch.bfloat16) if function is torch.Tensor.__matmul__ else result


@lie("TestPrecision.test_autocast_computes_in_its_dtype", name="bfloat16")
def computes_fp32_and_rounds_afterwards(backend):
    return replaced(backend, "precision", autocast=lambda honest, *args, **kwargs: _RoundsLate())


@lie("TestPrecision.test_autocast_ends")
def autocast_that_never_ends(backend):
    def autocast(honest, dtype=None, *, enabled=True, table="torch"):
        context = honest.autocast(dtype, enabled=enabled, table=table)
        return _NeverLeft(context)

    return replaced(backend, "precision", autocast=autocast)


class _NeverLeft:
    def __init__(self, context):
        self._context = context

    def __enter__(self):
        return self._context.__enter__()

    def __exit__(self, *error):
        dtype = torch.get_autocast_dtype("cpu")
        self._context.__exit__(*error)  # what torch counts and caches is none of the lie
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", dtype)


@lie("TestPrecision.test_autocast_computes_in_its_dtype", name="float16")
def does_fp16_without_declaring_it(backend):
    return declaring(backend, autocast_dtypes=("bfloat16",))


@lie("TestPrecision.test_fp32_is_put_back_after_an_error")
def fp32_setting_that_stays_after_an_error(backend):
    @contextmanager
    def fp32(honest, mode):
        torch.set_float32_matmul_precision("medium")
        yield

    return replaced(backend, "precision", fp32=fp32)


@lie("TestPrecision.test_fp32", mode="fast")
def declares_a_fast_fp32_that_it_refuses(backend):
    return declaring(backend, fast_fp32="tf32")


@lie("TestPrecision.test_autocast_refuses_other_dtypes", dtype=torch.float64)
def takes_any_dtype_for_low_precision(backend):
    return replaced(backend, "precision", autocast=lambda honest, dtype=None, **kwargs: nullcontext())


def _operators_of_its_own(change):
    """A backend whose autocast computes some operators itself."""

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            with change(function):
                return function(*args, **(kwargs or {}))

    def autocast(honest, *args, **kwargs):
        stack = ExitStack()
        stack.enter_context(honest.autocast(*args, **kwargs))
        stack.enter_context(Mode())
        return stack

    return lambda backend: replaced(backend, "precision", autocast=autocast)


def _fp32_convolutions(function):
    return torch.autocast("cpu", enabled=False) if function is torch.conv2d else nullcontext()


LIES["convolutions_in_fp32"] = Lie(
    "convolutions_in_fp32", _operators_of_its_own(_fp32_convolutions), "TestPrecision.test_autocast_reaches",
    {"name": "bfloat16", "operator": "convolution"},
)  # fmt: skip
