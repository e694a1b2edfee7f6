"""Conformance of the precision role: low precision that is really low, and fp32 that is really fp32."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, conv2d, conv_transpose1d, linear

from accelcore import Backend, UnsupportedError
from accelcore.known_faults import SUMS_OF_ROWS
from accelcore.precision.role import TorchPrecision
from accelcore.testing.suite.contexts import ContextTests
from accelcore.testing.suite.op_tables import OpTables
from accelcore.testing.support.declared import FAST_FP32, LOW_PRECISION, MOST_BITS, TABLES, declared
from accelcore.testing.support.oracles import eps, error, weights
from accelcore.testing.support.usable import DeviceTests
from accelcore.torch_features import GET_KERNEL

OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of a row and a column
    "linear": lambda row, column: linear(row, column.t()),
    "batched": lambda row, column: torch.bmm(row[None], column[None]),
    "convolution": lambda row, column: conv2d(row.reshape(1, 2, 1, 1), column.reshape(1, 2, 1, 1)),
}

_OVER_ROWS: dict[str, Callable[[], nn.Module]] = {  # layers of 8 features, and how they begin
    "Linear": lambda: nn.Linear(8, 8),
    "Conv1d": lambda: nn.Sequential(nn.Unflatten(1, (8, 1)), nn.Conv1d(8, 8, 1)),
    "PReLU": lambda: nn.PReLU(8),
    "LayerNorm": lambda: nn.LayerNorm(8),
    "RMSNorm": lambda: nn.RMSNorm(8),
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "BatchNorm1d": lambda: nn.BatchNorm1d(8),
    "Embedding": lambda: nn.Embedding(2, 8),
}


def _convolve(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices as a convolution."""
    return conv2d(a.t()[None, :, None, :], b.t()[:, :, None, None])[0, :, 0, :].t()


def _in_backward(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices in a backward pass."""
    leaf = torch.zeros(a.shape[0], b.shape[1], device=a.device, requires_grad=True)
    return torch.autograd.grad(leaf @ b.t(), leaf, a)[0]


def _in_backward_of_convolution(a: Tensor, b: Tensor) -> Tensor:
    leaf = torch.zeros(1, b.shape[1], 1, a.shape[0], device=a.device, requires_grad=True)
    return torch.autograd.grad(conv2d(leaf, b[:, :, None, None]), leaf, a.t()[None, :, None, :])[0][0, :, 0, :].t()


def _in_recurrence(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices of a product without negative elements as a recurrent layer."""
    zeros = torch.zeros(1, a.shape[0], b.shape[1], device=a.device)
    options = False, 1, 0.0, False, False, False  # no biases, one layer, no dropout, evaluation, one way, time first
    with warnings.catch_warnings():  # cuDNN warns that weights lie apart
        warnings.simplefilter("ignore")
        found: Tensor = torch.rnn_relu(a[None], zeros, [b.t().contiguous(), zeros[0, : b.shape[1]]], *options)[0][0]
    return found


_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a product": torch.mm,
    "a product with a vector": lambda a, b: torch.mv(a, b[:, 0])[:, None].expand(-1, b.shape[1]),
    "a product that is added": lambda a, b: torch.addmm(torch.zeros_like(b), a, b),
    "a convolution": _convolve,
    "a convolution of rows": lambda a, b: conv1d(a.t()[None], b.t()[:, :, None])[0].t(),
    "a transposed convolution": lambda a, b: conv_transpose1d(a.t()[None], b[:, :, None])[0].t(),
    "a batched product": lambda a, b: torch.bmm(a[None], b[None])[0],
    "a batched product that is added": lambda a, b: torch.baddbmm(torch.zeros_like(b), a[None], b[None])[0],
    "a linear layer": lambda a, b: linear(a, b.t()),
    "a recurrent layer": _in_recurrence,
    "backward of a product": _in_backward,
    "backward of a convolution": _in_backward_of_convolution,
}
_ALL_BITS = dict.fromkeys(_PRODUCTS, MOST_BITS)


def _bits_kept(device: torch.device) -> dict[str, int]:
    """Return how many fraction bits of its fp32 factors each kind of product keeps, up to `MOST_BITS`.

    Row k is 1 + 2**-k and 1 in turn, and is multiplied by 1 and -1 in turn: the result is 32 * 2**-k, or 0 if
    the format has fewer than k bits. Whichever way the device adds it up, fp32 holds every sum exactly.
    """
    exponents = torch.arange(1, 65).clamp(max=MOST_BITS).float()
    rows = torch.ones(64, 64)
    rows[:, ::2] += (2.0**-exponents)[:, None]
    signs = torch.tensor([1.0, -1.0]).repeat(32)[:, None].expand(64, 64).contiguous()
    right, bits = (32 * 2.0**-exponents)[:, None], {}
    for name, multiply in _PRODUCTS.items():
        kept = (multiply(rows.to(device), signs.to(device)).cpu() == right).all(1)[:MOST_BITS].tolist()
        bits[name] = (*kept, False).index(False)
    return bits


def _which_differ(bits: dict[str, int], right: dict[str, int]) -> str:
    differ = (f"{name} kept {kept} bits, not {right[name]}" for name, kept in bits.items() if kept != right[name])
    return ", ".join(differ)


@contextmanager
def _torchs_setting(value: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class TestPrecision(OpTables, ContextTests, DeviceTests):
    """Autocast, its tables, and the exactness of fp32 matrix products."""

    @pytest.mark.parametrize("name", LOW_PRECISION)
    def test_autocast_computes_in_its_dtype(self, accel: Backend, name: str) -> None:
        """Under autocast a matrix product rounds its inputs to the dtype, computes in it, and returns it."""
        dtype = getattr(torch, name)
        with declared(name in accel.capabilities.autocast_dtypes, f"autocast to {name}"):
            low = torch.tensor([[1 + eps(dtype) / 4, 1.0]], device=accel.device)
            ones = torch.tensor([[1.0], [-1.0]], device=accel.device)
            with accel.autocast(dtype):
                product = low @ ones
            assert product.dtype == dtype, f"under autocast to {name} a product is {product.dtype}"
            # 1 + eps/4 is 1 in this dtype. Products of the fp32 inputs, rounded afterwards, leave eps/4.
            assert product.item() == 0.0, f"the product was computed in more precision than {name} has"

    @pytest.mark.parametrize("operator", sorted(OPERATORS))
    @pytest.mark.parametrize("name", LOW_PRECISION)
    def test_autocast_reaches(self, accel: Backend, name: str, operator: str) -> None:
        """Linear layers, batched products and convolutions round and compute like a matrix product."""
        dtype = getattr(torch, name)
        with declared(name in accel.capabilities.autocast_dtypes, f"autocast to {name}"):
            row = torch.tensor([[1 + eps(dtype) / 4, 1.0]], device=accel.device)
            with accel.autocast(dtype):
                result = OPERATORS[operator](row, torch.tensor([[1.0], [-1.0]], device=accel.device))
            assert result.dtype == dtype, f"under autocast to {name} it is {result.dtype}"
            assert result.item() == 0.0, f"it was computed in more precision than {name} has"

    @pytest.mark.parametrize("name", LOW_PRECISION)
    def test_autocast_is_accurate(self, accel: Backend, name: str) -> None:
        """A large matrix product under autocast is as exact as the dtype allows, because sums are kept in fp32."""
        dtype = getattr(torch, name)
        with declared(name in accel.capabilities.autocast_dtypes, f"autocast to {name}"):
            generator = torch.Generator().manual_seed(0)
            a, b = torch.randn(32, 512, generator=generator), torch.randn(512, 32, generator=generator)
            with accel.autocast(dtype):
                product = a.to(accel.device) @ b.to(accel.device)
            assert error(product, a.double() @ b.double()) < 4 * eps(dtype)

    @pytest.mark.parametrize("name", LOW_PRECISION)
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

    @pytest.mark.parametrize("how", [*TABLES, "model"])
    @pytest.mark.parametrize("name", LOW_PRECISION)
    def test_gradients_over_many_rows(self, accel: Backend, name: str, how: str) -> None:
        """Gradients of weights and biases are sums over 4,096 rows that low precision does not stop: of each layer.

        Under autocast, by each of its tables, and in a model in low precision.
        """
        known, low = accel.capabilities, getattr(torch, name)
        is_model = how == "model"
        dtypes = known.model_dtypes if is_model else known.autocast_dtypes
        if name not in dtypes or how not in (*known.autocast_tables, "model"):
            pytest.skip(f"not declared: {how} in {name}")
        if _sums_as_torch_on_the_host(accel) and (how != "O1" or not GET_KERNEL.present):
            pytest.skip(f"a known bug of this torch: {SUMS_OF_ROWS}")
        if is_model:
            accel.precision.prepare(low)
        noise = torch.randn(4096, 8, generator=torch.Generator().manual_seed(6))
        rows = (torch.linspace(-1, 1, 8) + noise / 4).to(low)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            layers = {kind: make() for kind, make in _OVER_ROWS.items()}
        for kind, layer in layers.items():
            given = (rows[:, 0] > -1).long() if kind == "Embedding" else rows
            layer = layer.to(accel.device, low if is_model else torch.float32)
            exact = copy.deepcopy(layer).cpu().double()
            with nullcontext() if is_model else accel.autocast(low, table=how), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Mismatch dtype")  # torch says that it has no fused rms_norm
                output = layer(given.to(accel.device))
            expected = exact(given.double() if given.is_floating_point() else given)
            for each in (output.float(), expected):
                ((each + 2).square().sum() / 64).backward()  # of each feature, all terms have one sign
            for one, other in zip(layer.parameters(), exact.parameters(), strict=True):
                assert one.grad is not None
                assert other.grad is not None
                off = error(one.grad, other.grad)
                assert off < 8 * eps(low), f"a gradient of {kind} over 4,096 rows is off by {off:.0%}"

    def test_preferred_dtype_comes_first(self, accel: Backend) -> None:
        """Autocast without a dtype takes the first declared one."""
        names = accel.capabilities.autocast_dtypes
        with declared(bool(names), "autocast"):
            matrix = torch.ones(2, 2, device=accel.device)
            with accel.autocast():
                assert (matrix @ matrix).dtype == getattr(torch, names[0])

    def test_autocast_is_entered_again(self, accel: Backend) -> None:
        """One context serves many steps: it can be entered again, also after an error."""
        with declared(bool(accel.capabilities.autocast_dtypes), "autocast"):
            matrix, context = torch.ones(2, 2, device=accel.device), accel.precision.autocast()
            with pytest.raises(ZeroDivisionError), context:
                raise ZeroDivisionError
            try:
                for _ in range(2):
                    with context:
                        product = matrix @ matrix
            except (AttributeError, RuntimeError) as error:
                raise AssertionError(
                    "what autocast returns can be entered once only: return an object with __enter__ and __exit__, "
                    "not one that @contextmanager makes"
                ) from error
            assert product.dtype == getattr(torch, accel.capabilities.autocast_dtypes[0])
            assert (matrix @ matrix).dtype == torch.float32, "autocast goes on behind its context"

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
        """`enabled=False` works on a device without low precision."""
        matrix = torch.ones(2, 2, device=accel.device)
        with accel.autocast(enabled=False):
            assert (matrix @ matrix).dtype == torch.float32

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
    def test_autocast_refuses_other_dtypes(self, accel: Backend, dtype: torch.dtype) -> None:
        """Autocast refuses any dtype that is not declared."""
        with declared(False, f"autocast to {dtype}"):
            accel.autocast(dtype)

    def test_ieee_fp32(self, accel: Backend) -> None:
        """Under `fp32="ieee"` products of every kind, also in backward, keep all bits, whatever was set outside."""
        with _torchs_setting("medium"), accel.precision.fp32("ieee"):
            bits = _bits_kept(accel.device)
        assert not (fewer := _which_differ(bits, _ALL_BITS)), fewer

    def test_fp32_is_accurate(self, accel: Backend) -> None:
        """Large fp32 products are as exact as fp32 allows, also in `fp32="fast"` if that is declared exact."""
        generator = torch.Generator().manual_seed(0)
        a, b = torch.randn(64, 256, generator=generator), torch.randn(256, 64, generator=generator)
        for mode in ("ieee", "fast") if accel.capabilities.fast_fp32 == "fp32" else ("ieee",):
            with accel.precision.fp32(mode):
                product = a.to(accel.device) @ b.to(accel.device)
            assert product.dtype == torch.float32
            found = error(product, a.double() @ b.double())
            assert found < 2e-6, f"a product of fp32={mode!r} is off by {found:.0e}"

    def test_fast_fp32(self, accel: Backend) -> None:
        """Under `fp32="fast"` the factors of a product keep as many bits as the declared format has."""
        declared_format = accel.capabilities.fast_fp32
        with declared(declared_format is not None, "fp32='fast'"), accel.precision.fp32("fast"):
            every = _bits_kept(accel.device)
        assert declared_format is not None
        bits = every["a product"]
        if accel.emulated and bits == MOST_BITS:
            pytest.skip(f"an emulated device multiplies as its host does: only a real one shows {declared_format}")
        least, most = FAST_FP32[declared_format]
        assert least <= bits <= most, f"{declared_format} keeps {least} to {most} bits, and a product kept {bits}"
        fewer = [f"{name} kept {kept}" for name, kept in every.items() if kept < least]
        assert not fewer, f"{declared_format} keeps {least} bits or more, and {', '.join(fewer)}"

    def test_fp32_modes_nest(self, accel: Backend) -> None:
        """Leaving a mode, also by an error, restores the outer one for products of every kind."""
        with declared(accel.capabilities.fast_fp32 is not None, "fp32='fast'"):
            outside = _bits_kept(accel.device)
            with accel.precision.fp32("fast"):
                fast = _bits_kept(accel.device)
                with accel.precision.fp32("ieee"):
                    exact = _bits_kept(accel.device)
                again = _bits_kept(accel.device)
                with pytest.raises(ZeroDivisionError), accel.precision.fp32("ieee"):
                    raise ZeroDivisionError
                after = _bits_kept(accel.device)
            behind = _bits_kept(accel.device)
            with pytest.raises(ZeroDivisionError), accel.precision.fp32("fast"):
                raise ZeroDivisionError
            last = _bits_kept(accel.device)
        if accel.emulated and fast == exact:
            pytest.skip("an emulated device multiplies as its host does in every mode")
        for where, bits, right in (
            ("within fast fp32, ieee is not exact", exact, _ALL_BITS),
            ("the setting was not put back after ieee", again, fast),
            ("the setting was not put back after an error in ieee", after, fast),
            ("the setting was not put back after fast", behind, outside),
            ("the setting was not put back after an error in fast", last, outside),
        ):
            assert not (differ := _which_differ(bits, right)), f"{where}: {differ}"

    @pytest.mark.parametrize("before", ["medium", "highest"])
    def test_fp32_is_put_back(self, accel: Backend, before: str) -> None:
        """torch's own setting, which is the process's, is restored, also after an error."""
        with _torchs_setting(before):
            with accel.precision.fp32("ieee"):
                pass
            assert torch.get_float32_matmul_precision() == before, "torch's setting was not put back"
            with pytest.raises(ZeroDivisionError), accel.precision.fp32("ieee"):
                raise ZeroDivisionError
            assert torch.get_float32_matmul_precision() == before, "it was not put back after an error"

    def test_unknown_fp32_mode(self, accel: Backend) -> None:
        """A mode that does not exist is refused at once."""
        with pytest.raises(UnsupportedError):
            accel.precision.fp32("no such mode")


def _sums_as_torch_on_the_host(accel: Backend) -> bool:
    """Return whether the host computes for a backend by torch's own kernels, which it cannot or does not replace."""
    is_replaced = GET_KERNEL.present and type(accel.precision) is not TorchPrecision
    return accel.device.type == "cpu" and SUMS_OF_ROWS.applies and not is_replaced
