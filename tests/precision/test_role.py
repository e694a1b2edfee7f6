from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from accelcore.devices import Capabilities
from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.precision.role import TorchPrecision

A, B = torch.linspace(-1, 1, 12).view(3, 4), torch.linspace(0, 2, 8).view(4, 2)


@pytest.fixture
def tf32():
    """The role's default, on a device that declares TF32."""
    return TorchPrecision("cpu", Capabilities(fast_fp32="tf32"), "AutocastCPU")


@pytest.fixture(autouse=True)
def _setting():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("table", ["torch", "O1"])
def test_a_decorated_function_runs_in_a_context_of_its_own(accel, table):
    @accel.autocast("bf16", table=table)
    def products(depth):
        """Its docstring."""
        inner = products(depth - 1) if depth else []
        return [(A @ B).dtype, *inner, (A @ B).dtype]

    @accel.autocast(enabled=False)
    def exact():
        return (A @ B).dtype

    assert products(2) == [torch.bfloat16] * 6
    assert (products.__name__, products.__doc__) == ("products", "Its docstring.")
    assert (A @ B).dtype is torch.float32
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(products, [1] * 8)) == [[torch.bfloat16] * 4] * 8
    with accel.autocast("bf16", table=table):
        assert [products(0), [exact()], (A @ B).dtype] == [[torch.bfloat16] * 2, [torch.float32], torch.bfloat16]
    assert accel.autocast("best")(lambda: 3)() == 3


def test_a_decorated_function_that_raises_leaves_its_context(accel):
    @accel.autocast()
    def fails():
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert (A @ B).dtype is torch.float32


async def _coroutine():
    pass


@pytest.mark.parametrize("function", [lambda: (yield), _coroutine])
def test_generators_and_coroutines_are_not_decorated(accel, function):
    with pytest.raises(ConfigurationError, match="inside of it"):
        accel.autocast()(function)


def test_a_device_without_autocast_refuses_every_dtype(tf32):
    for dtype in (None, torch.bfloat16):
        with pytest.raises(UnsupportedError, match="autocast to") as caught:
            tf32.autocast(dtype)
        assert caught.value.available == "none"
    with tf32.autocast(enabled=False):
        assert (A @ B).dtype is torch.float32


@pytest.mark.parametrize("table", ["o1", "O2", "Torch", "", "nonsense"])
def test_a_table_that_is_not_declared_is_refused(accel, table):
    for use in (
        lambda: accel.autocast(table=table),
        lambda: accel.autocast(table=table, enabled=False),
        lambda: accel.precision.table(table),
    ):
        with pytest.raises(UnsupportedError, match=f"no autocast table '{table}'") as caught:
            use()
        assert caught.value.available == "torch, O1"


def test_the_table_holds_the_operators_that_autocast_intercepts(accel):
    table = accel.precision.table()
    assert {"aten::mm", "aten::bmm", "aten::linear", "aten::conv2d"} <= table
    # relu runs in whatever dtype it is given: no autocast intercepts it.
    assert not any(name.split(".")[0] == "aten::relu" for name in table)
    assert accel.precision.table("torch") == table


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
def test_exact_fp32_holds_in_the_context_and_the_users_setting_comes_back(accel, before):
    torch.set_float32_matmul_precision(before)
    with accel.precision.fp32("ieee"):
        assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == before
    with pytest.raises(KeyError), accel.precision.fp32("ieee"):
        raise KeyError
    assert torch.get_float32_matmul_precision() == before


def test_asking_for_a_mode_changes_nothing_before_it_is_entered(tf32):
    context = tf32.fp32("fast")
    assert torch.get_float32_matmul_precision() == "highest"
    with context:
        assert torch.get_float32_matmul_precision() == "high"
        with tf32.fp32("ieee"):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("mode", ["fast", "tf32", "", "IEEE", None, True])
def test_a_mode_that_the_device_has_not_is_refused(mode):
    with pytest.raises(UnsupportedError, match="fp32=") as caught:
        TorchPrecision("cpu", Capabilities(), "AutocastCPU").fp32(mode)
    assert caught.value.available == "ieee"
    assert torch.get_float32_matmul_precision() == "highest"
