"""Conformance of the precision role: low precision that is really low, and fp32 that is really fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, cross_entropy, linear

from accelcore import Backend, UnsupportedError
from accelcore.testing.declared import declared
from accelcore.testing.oracles import eps, error, weights

__all__ = ["TestPrecision"]

LOW = ("float16", "bfloat16")
OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of a row and a column
    "linear": lambda row, column: linear(row, column.t()),
    "batched": lambda row, column: torch.bmm(row[None], column[None]),
    "convolution": lambda row, column: conv2d(row.reshape(1, 2, 1, 1), column.reshape(1, 2, 1, 1)),
}


class TestPrecision:
    """autocast, its tables, and the exactness of fp32 matrix products."""

    @pytest.mark.parametrize("name", LOW)
    def test_autocast_computes_in_its_dtype(self, accel: Backend, name: str) -> None:
        """Under autocast a matrix product rounds its inputs to the dtype, computes in it, and returns it."""
        dtype = getattr(torch, name)
        with declared(name in accel.capabilities.autocast_dtypes, f"autocast to {name}"):
            low = torch.tensor([[1 + eps(dtype) / 4, 1.0]], device=accel.device)
            ones = torch.tensor([[1.0], [-1.0]], device=accel.device)
            with accel.autocast(dtype):
                product = low @ ones
            assert product.dtype == dtype
            # 1 + eps/4 is 1 in this dtype. Products of the fp32 inputs, rounded afterwards, leave eps/4.
            assert product.item() == 0.0, f"the product was computed in more precision than {name} has"

    @pytest.mark.parametrize("operator", sorted(OPERATORS))
    @pytest.mark.parametrize("name", LOW)
    def test_autocast_reaches(self, accel: Backend, name: str, operator: str) -> None:
        """Linear layers, batched products and convolutions round and compute as a matrix product does."""
        dtype = getattr(torch, name)
        with declared(name in accel.capabilities.autocast_dtypes, f"autocast to {name}"):
            row = torch.tensor([[1 + eps(dtype) / 4, 1.0]], device=accel.device)
            with accel.autocast(dtype):
                result = OPERATORS[operator](row, torch.tensor([[1.0], [-1.0]], device=accel.device))
            assert result.dtype == dtype
            assert result.item() == 0.0, f"it was computed in more precision than {name} has"

    @pytest.mark.parametrize("name", LOW)
    def test_autocast_keeps_losses_exact(self, accel: Backend, name: str) -> None:
        """Softmax and loss of fp32 logits stay fp32: they are no operators for low precision."""
        with declared(name in accel.capabilities.autocast_dtypes, f"autocast to {name}"):
            logits, classes = torch.linspace(-4, 4, 60).reshape(6, 10), torch.arange(6)
            with accel.autocast(getattr(torch, name)):
                loss = cross_entropy(logits.to(accel.device), classes.to(accel.device))
            assert error(loss, cross_entropy(logits.double(), classes)) < 1e-5

    @pytest.mark.parametrize("name", LOW)
    def test_autocast_is_accurate(self, accel: Backend, name: str) -> None:
        """A large matrix product under autocast is as exact as the dtype allows, because sums are kept in fp32."""
        dtype = getattr(torch, name)
        with declared(name in accel.capabilities.autocast_dtypes, f"autocast to {name}"):
            generator = torch.Generator().manual_seed(0)
            a, b = torch.randn(32, 512, generator=generator), torch.randn(512, 32, generator=generator)
            with accel.autocast(dtype):
                product = a.to(accel.device) @ b.to(accel.device)
            assert error(product, a.double() @ b.double()) < 4 * eps(dtype)

    @pytest.mark.parametrize("name", LOW)
    def test_autocast_leaves_parameters_alone(self, accel: Backend, name: str) -> None:
        """Parameters and their gradients stay fp32; the loss can be computed in fp32 beside them."""
        dtype = getattr(torch, name)
        with declared(name in accel.capabilities.autocast_dtypes, f"autocast to {name}"):
            layer = torch.nn.Linear(8, 8).to(accel.device)
            before = weights(layer)
            with accel.autocast(dtype):
                output = layer(torch.ones(2, 8, device=accel.device))
                loss = output.float().square().mean()
            loss.backward()
            assert output.dtype == dtype
            assert all(torch.equal(a, b) for a, b in zip(weights(layer), before, strict=True)), "they were rounded"
            gradients = [parameter.grad for parameter in layer.parameters()]
            assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients)

    def test_preferred_dtype_comes_first(self, accel: Backend) -> None:
        """autocast without a dtype takes the first that is declared."""
        names = accel.capabilities.autocast_dtypes
        with declared(bool(names), "autocast"):
            matrix = torch.ones(2, 2, device=accel.device)
            with accel.autocast():
                assert (matrix @ matrix).dtype == getattr(torch, names[0])

    def test_autocast_ends(self, accel: Backend) -> None:
        """`enabled=False` switches an outer autocast off, leaving a region restores it, also after an error."""
        names = accel.capabilities.autocast_dtypes
        with declared(bool(names), "autocast"):
            low, matrix = getattr(torch, (*names, "bfloat16")[0]), torch.ones(2, 2, device=accel.device)
            with accel.autocast(low):
                with accel.autocast(enabled=False):
                    assert (matrix @ matrix).dtype == torch.float32
                with accel.autocast(getattr(torch, names[-1])):
                    assert (matrix @ matrix).dtype == getattr(torch, names[-1])
                assert (matrix @ matrix).dtype == low, "an inner autocast changed the dtype of the outer one"
            with pytest.raises(ZeroDivisionError), accel.autocast(low):
                raise ZeroDivisionError
            assert (matrix @ matrix).dtype == torch.float32

    def test_disabled_autocast_asks_for_nothing(self, accel: Backend) -> None:
        """A script may say `enabled=False` on a device without low precision."""
        matrix = torch.ones(2, 2, device=accel.device)
        with accel.autocast(enabled=False):
            assert (matrix @ matrix).dtype == torch.float32

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
    def test_autocast_refuses_other_dtypes(self, accel: Backend, dtype: torch.dtype) -> None:
        """autocast is for low precision: any dtype that is not declared is refused."""
        with pytest.raises(UnsupportedError):
            accel.autocast(dtype)

    @pytest.mark.parametrize("table", ["torch", "O1"])
    def test_tables(self, accel: Backend, table: str) -> None:
        """A table names the operators that autocast intercepts, matrix products among them."""
        with declared(table in accel.capabilities.autocast_tables, f"the autocast table {table}"):
            operators = accel.precision.table(table)
            if accel.capabilities.autocast_dtypes:
                assert {"aten::mm", "aten::addmm"} <= operators
            assert all("::" in operator for operator in operators)

    def test_unknown_table(self, accel: Backend) -> None:
        """A table that does not exist is refused."""
        with pytest.raises(UnsupportedError):
            accel.precision.table("no such table")
        with pytest.raises(UnsupportedError):
            accel.autocast(table="no such table")

    @pytest.mark.parametrize("mode", ["ieee", "fast"])
    def test_fp32(self, accel: Backend, mode: str) -> None:
        """`fp32="ieee"` gives fp32 products; `"fast"` those of the format that is declared; both restore."""
        with declared(mode == "ieee" or accel.capabilities.fast_fp32 is not None, f"fp32={mode!r}"):
            generator = torch.Generator().manual_seed(0)
            a, b = torch.randn(64, 256, generator=generator), torch.randn(256, 64, generator=generator)
            expected = a.double() @ b.double()
            before = error(a.to(accel.device) @ b.to(accel.device), expected)
            with accel.precision.fp32(mode):
                inside = a.to(accel.device) @ b.to(accel.device)
            assert inside.dtype == torch.float32
            # The formats in use keep 10 bits or more of the fraction.
            assert error(inside, expected) < (1e-6 if mode == "ieee" else 2e-3)
            assert error(a.to(accel.device) @ b.to(accel.device), expected) == before, "the setting was not put back"

    def test_fp32_is_put_back_after_an_error(self, accel: Backend) -> None:
        """The setting is the process's: an error inside must not leave it changed."""
        before = torch.get_float32_matmul_precision()
        with pytest.raises(ZeroDivisionError), accel.precision.fp32("ieee"):
            raise ZeroDivisionError
        assert torch.get_float32_matmul_precision() == before

    def test_unknown_fp32_mode(self, accel: Backend) -> None:
        """A mode that does not exist is refused, when it is asked for and not in the first step."""
        with pytest.raises(UnsupportedError):
            accel.precision.fp32("no such mode")
