"""Arithmetic in another precision than was promised."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext

import torch

from accelcore import UnsupportedError
from lies.lie import LIES, Lie, declaring, lie, replaced


@lie("TestPrecision.test_autocast_computes_in_its_dtype", says="a product is torch.float32", name="bfloat16")
def claims_bf16_and_computes_fp32(backend):
    return replaced(backend, "precision", autocast=lambda honest, *args, **kwargs: nullcontext())


class _RoundsLate(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result.to(torch.bfloat16) if function.__name__ == "matmul" else result


@lie("TestPrecision.test_autocast_computes_in_its_dtype", says="in more precision than bfloat16", name="bfloat16")
def computes_fp32_and_rounds_afterwards(backend):
    return replaced(backend, "precision", autocast=lambda honest, *args, **kwargs: _RoundsLate())


@lie("TestPrecision.test_autocast_ends", says="changed the dtype of the outer one")
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


@lie("TestPrecision.test_autocast_computes_in_its_dtype", says="unexpected success: autocast", name="float16")
def does_fp16_without_declaring_it(backend):
    return declaring(backend, autocast_dtypes=("bfloat16",))


@lie("TestPrecision.test_fp32_is_put_back", says="was not put back", before="highest")
def fp32_setting_that_stays_after_an_error(backend):
    @contextmanager
    def fp32(honest, mode):
        torch.set_float32_matmul_precision("medium")
        yield

    return replaced(backend, "precision", fp32=fp32)


@lie("TestPrecision.test_fp32_is_put_back", says="torch's setting was not put back", before="medium")
def fp32_setting_that_is_highest_afterwards(backend):
    @contextmanager
    def fp32(honest, mode):
        with honest.fp32(mode):
            yield
        torch.set_float32_matmul_precision("highest")

    return replaced(backend, "precision", fp32=fp32)


@lie("TestPrecision.test_fast_fp32", says="unexpected success: fp32='fast'")
def fast_fp32_that_is_not_declared(backend):
    return declaring(backend, fast_fp32=None)


@lie("TestPrecision.test_fast_fp32", says="fp32='fast' is not available")
def declares_a_fast_fp32_that_it_refuses(backend):
    def fp32(honest, mode):
        if mode == "fast":
            raise UnsupportedError("fp32='fast' is not available here")
        return honest.fp32(mode)

    return declaring(replaced(backend, "precision", fp32=fp32), fast_fp32="tf32")


@lie("TestPrecision.test_autocast_refuses_other_dtypes", says="unexpected success", dtype=torch.float64)
def takes_any_dtype_for_low_precision(backend):
    return replaced(backend, "precision", autocast=lambda honest, dtype=None, **kwargs: nullcontext())


def _under(backend, mode):
    """A backend whose autocast computes some operators itself, by a mode of torch functions."""

    def autocast(honest, *args, **kwargs):
        stack = ExitStack()
        stack.enter_context(honest.autocast(*args, **kwargs))
        stack.enter_context(mode())
        return stack

    return replaced(backend, "precision", autocast=autocast)


def _operators_of_its_own(change):
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            with change(function):
                return function(*args, **(kwargs or {}))

    return lambda backend: _under(backend, Mode)


def _fp32_convolutions(function):
    return torch.autocast("cpu", enabled=False) if function is torch.conv2d else nullcontext()


LIES["convolutions_in_fp32"] = Lie(
    "convolutions_in_fp32", _operators_of_its_own(_fp32_convolutions), "TestPrecision.test_autocast_reaches",
    "it is torch.float32", {"name": "bfloat16", "operator": "convolution"},
)  # fmt: skip


class _InParts(torch.overrides.TorchFunctionMode):
    """A layer norm of few rows at a time: autograd adds up what each part gives to a weight, in bf16."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.nn.functional.layer_norm:
            return function(*args, **(kwargs or {}))
        weight, bias = kwargs["weight"].bfloat16(), kwargs["bias"].bfloat16()
        return torch.cat([function(part.bfloat16(), args[1], weight, bias) for part in args[0].split(8)])


@lie("TestPrecision.test_gradients_over_many_rows", says="a gradient of LayerNorm over", name="bfloat16", how="torch")
def gradients_that_stand_still(backend):
    return _under(backend, _InParts)


@lie("TestPrecision.test_autocast_is_entered_again", says="autocast goes on behind its context")
def autocast_that_stays_after_an_error(backend):
    errors = []

    class Stays:
        def __enter__(self):
            torch.set_autocast_enabled("cpu", True)

        def __exit__(self, kind, *_):
            errors.extend([kind] if kind else [])
            torch.set_autocast_enabled("cpu", bool(errors))

    return replaced(backend, "precision", autocast=lambda honest, *args, **kwargs: Stays())


def _by_torchs_table(honest, *args, table="torch", **kwargs):
    return honest.autocast(*args, **kwargs)


@lie("TestPrecision.test_o1_dtypes", says="table O1 leaves softmax in torch.bfloat16", treatment="fp32")
def table_o1_that_is_torchs(backend):
    return replaced(backend, "precision", autocast=_by_torchs_table)


@lie("TestPrecision.test_o1_is_whole", says="nobody says what table O1 does with _grid_sampler_2d_cpu_fallback")
def table_o1_that_forgets_the_devices_own(backend):
    return replaced(backend, "precision", treatments=lambda honest: {})


def _of_the_device_alone(honest, dtype=None, *, enabled=True, table="torch"):
    return torch.autocast("cpu", dtype, enabled=enabled)


for _table in ("torch", "O1"):
    LIES[f"table_{_table}_that_refuses_nothing"] = Lie(
        f"table_{_table}_that_refuses_nothing",
        lambda backend: replaced(backend, "precision", autocast=_of_the_device_alone),
        "TestPrecision.test_refuses", "DID NOT RAISE", {"table": _table},
    )  # fmt: skip


class _SoftmaxByFunction(torch.overrides.TorchFunctionMode):
    """What a mode of torch functions can do for O1, which checkpointing does not restore."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        exact = function is torch.nn.functional.softmax and torch.is_autocast_enabled("cpu")
        return function(*(arg.float() if exact and torch.is_tensor(arg) else arg for arg in args), **(kwargs or {}))


def _by_functions(honest, *args, table="torch", **kwargs):
    stack = ExitStack()
    stack.enter_context(honest.autocast(*args, **kwargs))
    stack.enter_context(_SoftmaxByFunction())
    return stack


LIES["o1_by_torch_functions"] = Lie(
    "o1_by_torch_functions", lambda backend: replaced(backend, "precision", autocast=_by_functions),
    "TestPrecision.test_o1_is_computed_anew", "'torch.bfloat16'], the last computed anew", {"use_reentrant": True},
)  # fmt: skip


class _RoundsFp32(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        rounds = function in (torch.exp, torch.nn.functional.mse_loss) and result.dtype == torch.float32
        return result.bfloat16().float() if rounds else result


@lie("TestPrecision.test_o1_dtypes", says="table O1 does not compute exp in fp32", treatment="fp32")
def table_o1_that_only_looks_like_fp32(backend):
    return _under(backend, _RoundsFp32)


@lie("TestPrecision.test_torchs_fp32", says="under autocast mse_loss loses digits")
def table_torch_that_only_looks_like_fp32(backend):
    return _under(backend, _RoundsFp32)


class _LossInFp16(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        low = torch.get_autocast_dtype("cpu") == torch.float16 and function is torch.nn.functional.mse_loss
        return result.half() if low else result


@lie("TestPrecision.test_torchs_fp32", says="under autocast mse_loss loses digits in float16")
def table_torch_of_bf16_alone(backend):
    return _under(backend, _LossInFp16)


class _Detached(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result.detach().requires_grad_() if function is torch.nn.functional.softmax else result


@lie("TestPrecision.test_o1_dtypes", says="no gradient comes through softmax", treatment="fp32")
def table_o1_that_loses_gradients(backend):
    return _under(backend, _Detached)


class _Everywhere:
    """O1 for whoever says autocast, once it was asked for: as where its kernels never look whose region it is."""

    def __init__(self, honest, args, kwargs):
        self._context = honest.autocast(*args, **{**kwargs, "table": "O1"})

    def __enter__(self):
        return self._context.__enter__()

    def __exit__(self, *error):
        return self._context.__exit__(*error)


@lie("TestPrecision.test_o1_ends", says="goes by O1 within one of O1")
def table_torch_that_is_o1(backend):
    return replaced(backend, "precision", autocast=lambda honest, *args, **kwargs: _Everywhere(honest, args, kwargs))


@lie("TestPrecision.test_tables", says="and intercepts", table="torch")
def table_that_names_too_much(backend):
    return replaced(backend, "precision", table=lambda honest, name="torch": honest.table(name) | {"aten::relu"})


@lie("TestPrecision.test_tables", says="and intercepts", table="torch")
def table_that_names_too_little(backend):
    return replaced(backend, "precision", table=lambda honest, name="torch": frozenset({"aten::mm", "aten::addmm"}))


@lie("TestPrecision.test_fast_fp32", says="tf32 keeps 10 to 10 bits, and a product kept 16")
def fast_fp32_that_changes_nothing(backend):
    @contextmanager
    def fp32(honest, mode):
        yield

    return declaring(replaced(backend, "precision", fp32=fp32), fast_fp32="tf32")


class _Rounds(torch.overrides.TorchFunctionMode):
    """Matrix products of factors that keep some bits of their fraction, as hardware with a fast fp32 computes them."""

    def __init__(self, bits):
        super().__init__()
        self._bits = bits

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.mm:
            return function(*args, **(kwargs or {}))
        low = -1 << (23 - self._bits())
        return function(*((factor.view(torch.int32) & low).view(torch.float32) for factor in args))


class _Widened(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result.float() if result.__class__ is torch.Tensor and result.dtype is torch.bfloat16 else result


def fast_by_rounding(backend, bits, *, puts_back=True, declared="tf32"):
    """A backend whose products in `fast` keep so many bits, those in `ieee` all of them."""
    modes = []

    @contextmanager
    def fp32(honest, mode):
        before = list(modes)
        modes.append(mode)
        try:
            with honest.fp32("ieee"), _Rounds(lambda: bits if modes[-1] == "fast" else 23):
                yield
        finally:
            if puts_back:
                modes[:] = before

    return declaring(replaced(backend, "precision", fp32=fp32), fast_fp32=declared)


@lie("TestPrecision.test_fast_fp32", says="fp32 keeps 16 to 16 bits, and a product kept 7")
def fast_fp32_that_is_called_exact(backend):
    return fast_by_rounding(backend, 7, declared="fp32")


@lie("TestPrecision.test_fp32_is_accurate", says="a product of fp32='fast' is off by")
def fast_fp32_that_adds_up_in_low_precision(backend):
    @contextmanager
    def fp32(honest, mode):
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "fast"), _Widened():
            yield

    return replaced(backend, "precision", fp32=fp32)


@lie("TestPrecision.test_fast_fp32", says="tf32 keeps 10 to 10 bits, and a product kept 7")
def fast_fp32_that_is_bf16(backend):
    return fast_by_rounding(backend, 7)


@lie("TestPrecision.test_fp32_modes_nest", says="was not put back after ieee: a product kept 16 bits, not 10")
def fast_fp32_that_ieee_ends(backend):
    return fast_by_rounding(backend, 10, puts_back=False)


@lie("TestPrecision.test_fp32_modes_nest", says="ieee is not exact: a convolution kept 7 bits, not 16")
def fast_convolutions_that_nothing_ends(backend):
    fast = []

    class Rounds(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if fast and function is torch.conv2d:
                args = [each.bfloat16().float() for each in args]
            return function(*args, **(kwargs or {}))

    @contextmanager
    def fp32(honest, mode):
        fast.extend([mode] if mode == "fast" else [])
        with honest.fp32("ieee"), Rounds():
            yield

    return declaring(replaced(backend, "precision", fp32=fp32), fast_fp32="bf16")
