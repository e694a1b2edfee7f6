"""Conformance of autocast in every context: without gradients, in threads, nested, with its cache of cast weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from accelcore import Backend
from accelcore.known_faults import CAST_WITHOUT_GRADIENT
from accelcore.testing.support.declared import TABLES, declared
from accelcore.testing.support.oracles import eps, error

_of_tables = pytest.mark.parametrize("table", TABLES)
_of_dtypes = pytest.mark.parametrize("which", [0, -1], ids=["preferred", "last"])  # of the declared ones


def _in_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


class ContextTests:
    """Autocast in the contexts of a training script."""

    @_of_dtypes
    @_of_tables
    def test_autocast_without_gradients(self, accel: Backend, table: str, which: int) -> None:
        """Autocast computes in low precision also under no_grad and inference_mode, and inside of either order."""
        with _declared(accel, table):
            low, layer, rows = _of(accel, which)
            for guard in (torch.no_grad, torch.inference_mode):
                with guard(), accel.autocast(low, table=table):
                    assert layer(rows).dtype == low, f"under {guard.__name__} autocast does nothing"
                with accel.autocast(low, table=table), guard():
                    assert layer(rows).dtype == low, f"{guard.__name__} ends autocast"
            with accel.autocast(low, table=table), torch.no_grad(), torch.enable_grad():
                output = layer(rows)
            assert output.requires_grad, "autocast under enable_grad has no graph"
            assert layer(rows).dtype == torch.float32, "autocast goes on behind its context"

    @_of_tables
    def test_weights_that_were_cast_without_gradients(self, accel: Backend, table: str) -> None:
        """A weight that autocast cast under no_grad still gets its gradient in the same region."""
        if table == "torch" and CAST_WITHOUT_GRADIENT.applies:
            pytest.skip(f"a known bug of this torch: {CAST_WITHOUT_GRADIENT}")
        with _declared(accel, table):
            low, layer, rows = _of(accel)
            with accel.autocast(low, table=table):
                with torch.no_grad():
                    layer(rows)
                output = layer(rows)
                assert output.requires_grad, "after no_grad a layer has no graph"
                layer(rows)
            output.float().sum().backward()
            assert layer.weight.grad is not None, "a weight that was cast under no_grad has no gradient"
            assert layer.weight.grad.dtype == torch.float32

    @_of_tables
    def test_weights_that_changed(self, accel: Backend, table: str) -> None:
        """Each region casts the weights of its time: an optimizer's step between two regions counts, also by `.data`.

        Weights without gradients, such as averages of others, may also change within a region.
        """
        with _declared(accel, table):
            low, linear, rows = _of(accel)
            context, convolution = accel.autocast(low, table=table), nn.Conv1d(4, 4, 3).to(accel.device)
            for layer in list[Any]((convolution, linear)):
                with pytest.raises(RuntimeError), context:  # a region that an error left keeps no cast, either
                    layer(rows[:1, :1])
                with context:
                    first = layer(rows)
                for factor, how in ((2, "a step"), (4, "a change by .data")):  # which autograd does not count
                    with torch.no_grad():
                        for each in layer.parameters():
                            (each if factor == 2 else each.data).mul_(2)
                    with context:
                        again = layer(rows)
                    same = error(again, factor * first.double()) < 4 * eps(low)
                    assert same, f"after {how} autocast computes with a weight of before"
            with accel.autocast(low, table=table):
                for _ in range(3):
                    layer(rows)
                with accel.autocast(enabled=False):
                    exact = layer(rows)
            assert exact.dtype == torch.float32
            expected = rows.cpu().double() @ layer.weight.detach().cpu().double().T + layer.bias.detach().cpu().double()
            assert error(exact, expected) < 1e-5, "inside enabled=False a weight is the rounded one"
            frozen = layer.weight.detach().clone()
            with accel.autocast(low, table=table):
                first = functional.linear(rows, frozen)
                frozen.mul_(2)
                second = functional.linear(rows, frozen)
            assert torch.equal(second.cpu(), 2 * first.cpu()), "a frozen weight that changed in a region is the old one"

    @_of_tables
    def test_weights_and_their_transposes(self, accel: Backend, table: str) -> None:
        """A square weight and its transpose, which share memory and shape, are two operands in one region."""
        with _declared(accel, table):
            low, layer, rows = _of(accel)
            with accel.autocast(low, table=table):
                products = {"weight": rows @ layer.weight, "transpose": rows @ layer.weight.T}
            exact, weight = rows.cpu().double(), layer.weight.detach().cpu().double()
            for name, operand in (("weight", weight), ("transpose", weight.T)):
                off = error(products[name], exact @ operand)
                assert off < 4 * eps(low), f"the product with the {name} is that with another one"

    @_of_dtypes
    @_of_tables
    def test_autocast_in_threads(self, accel: Backend, table: str, which: int) -> None:
        """A region is its thread's: another thread begins without one, may open its own, and changes no other."""
        with _declared(accel, table):
            low, layer, rows = _of(accel, which)
            outside = _in_thread(lambda: layer(rows).dtype)
            assert outside == torch.float32, "a thread computes in low precision without a region"
            with accel.autocast(low, table=table):
                assert _in_thread(lambda: layer(rows).dtype) == torch.float32, "a region reaches into another thread"

                def own() -> list[torch.dtype]:
                    with accel.autocast(low, table=table):
                        inside = layer(rows).dtype
                    return [inside, layer(rows).dtype]

                assert _in_thread(own) == [low, torch.float32], "a thread's own region does nothing, or goes on"
                assert layer(rows).dtype == low, "another thread ended this thread's region"
            assert _in_thread(own) == [low, torch.float32], "in a thread autocast does nothing, or goes on"

            context = accel.autocast(low, table=table)

            def shared() -> list[torch.dtype]:
                with context:
                    inside = layer(rows).dtype
                return [inside, layer(rows).dtype]

            with context:
                assert _in_thread(shared) == [low, torch.float32], "one context does not serve two threads"
                assert layer(rows).dtype == low, "one context that serves two threads ends in both"
            assert layer(rows).dtype == torch.float32

    @_of_dtypes
    @_of_tables
    def test_autocast_nests(self, accel: Backend, table: str, which: int) -> None:
        """Regions nest in any order: enabled in disabled in enabled, and each ends by itself."""
        with _declared(accel, table):
            low, layer, rows = _of(accel, which)
            on, off = accel.autocast(low, table=table), accel.autocast(enabled=False)
            found = []
            with on:
                found.append(layer(rows).dtype)
                with off:
                    found.append(layer(rows).dtype)
                    with accel.autocast(low, table=table):
                        found.append(layer(rows).dtype)
                        with accel.autocast(enabled=False):
                            found.append(layer(rows).dtype)
                        found.append(layer(rows).dtype)
                    found.append(layer(rows).dtype)
                found.append(layer(rows).dtype)
            found.append(layer(rows).dtype)
            exact = torch.float32
            assert found == [low, exact, low, exact, low, exact, low, exact], "nested regions end in a wrong order"
            with on:
                with on:
                    assert layer(rows).dtype == low
                assert layer(rows).dtype == low, "a context that was entered twice ends when it is left once"
            assert layer(rows).dtype == exact, "a context that was entered twice goes on"
            with on, pytest.raises(ZeroDivisionError), off:
                raise ZeroDivisionError
            assert layer(rows).dtype == exact, "a region that an error left goes on"

    @_of_tables
    def test_weights_in_regions_of_two_dtypes(self, accel: Backend, table: str) -> None:
        """A region of another dtype inside of one casts weights from their own values, and leaves the outer dtype."""
        names = accel.capabilities.autocast_dtypes
        if len(names) < 2:
            pytest.skip("not declared: a second autocast dtype")
        with _declared(accel, table):
            fp16, bf16 = torch.float16, torch.bfloat16
            rows = torch.ones(1, 8, device=accel.device)
            for outer, inner, weight in ((bf16, fp16, 1 + 2.0**-9), (fp16, bf16, 2.0**17)):
                layer = nn.Linear(8, 1).to(accel.device)
                with torch.no_grad():
                    layer.weight.fill_(weight)
                    layer.bias.zero_()
                with accel.autocast(outer, table=table):
                    layer(rows)
                    with accel.autocast(inner, table=table):
                        output = layer(rows)
                    with accel.autocast(enabled=False), accel.autocast(inner, table=table):
                        again = layer(rows)
                    after = layer(rows).dtype
                with accel.autocast(enabled=False):
                    for dtype in (outer, inner):
                        with accel.autocast(dtype, table=table):
                            assert layer(rows).dtype == dtype, f"behind a region of {outer}, one of {dtype} is wrong"
                assert torch.equal(again, output), "a region inside of a disabled one computes something else"
                assert output.dtype == inner, f"in a region of {inner} it computes in {output.dtype}"
                assert output.item() == 8 * weight, f"in a region of {inner} a weight was rounded to {outer} first"
                assert after == outer, f"after a region of {inner} inside of it, one of {outer} computes in {after}"

    @_of_dtypes
    @_of_tables
    def test_autocast_decorates(self, accel: Backend, table: str, which: int) -> None:
        """As a decorator, autocast holds in each call of a function, and ends with it, also by an error."""
        with _declared(accel, table):
            low, layer, rows = _of(accel, which)

            @accel.autocast(low, table=table)
            def run(depth: int) -> list[torch.dtype]:
                if depth > 1:
                    raise ZeroDivisionError
                return [layer(rows).dtype, *(run(depth - 1) if depth else []), layer(rows).dtype]

            assert run(1) == [low] * 4, "in a decorated function autocast does nothing, or ends too early"
            assert layer(rows).dtype == torch.float32, "autocast goes on behind a decorated function"
            with pytest.raises(ZeroDivisionError):
                run(2)
            assert layer(rows).dtype == torch.float32, "autocast goes on behind an error in a decorated function"

    @pytest.mark.parametrize("width", [1023, 1024, 4097])
    @_of_tables
    def test_autocast_of_wide_layers(self, accel: Backend, table: str, width: int) -> None:
        """Wide products under autocast add up every term, forward and backward, to within the dtype's rounding."""
        with _declared(accel, table):
            low, _, _ = _of(accel)
            generator = torch.Generator().manual_seed(3)
            rows, weight = (torch.randn(shape, generator=generator) for shape in ((4, width), (6, width)))
            found = [each.to(accel.device, copy=True).requires_grad_() for each in (rows, weight)]
            exact = [each.double().requires_grad_() for each in (rows, weight)]
            with accel.autocast(low, table=table):
                result = functional.linear(*found)
            expected = functional.linear(*exact)
            for output, leaves in ((result, found), (expected, exact)):
                torch.autograd.backward(output, torch.ones_like(output), inputs=leaves)
            for what, one, other in (("result", result, expected), *_gradients(found, exact)):
                assert error(one, other) < 4 * eps(low), f"the {what} of a layer of width {width} is wrong"

    @pytest.mark.parametrize("mask", ["none", "causal", "hidden", "added"])
    @_of_tables
    def test_autocast_of_attention(self, accel: Backend, table: str, mask: str) -> None:
        """Attention under autocast obeys its mask and scale, forward and backward, over keys of any number."""
        with _declared(accel, table):
            low, _, _ = _of(accel)
            generator = torch.Generator().manual_seed(4)
            for queries, keys in ((5, 5), (33, 17)):
                shapes = ((2, 2, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8))
                given = [torch.randn(shape, generator=generator).to(low).float() for shape in shapes]
                hidden = torch.rand(queries, keys, generator=generator) < 0.7
                hidden[:, 0] = True
                added = torch.randn(queries, keys, generator=generator).to(low).float()
                outputs = []
                for place, dtype in ((accel.device, torch.float32), (torch.device("cpu"), torch.float64)):
                    leaves = [each.to(place, dtype, copy=True).requires_grad_() for each in given]
                    bias = {"hidden": hidden.to(place), "added": added.to(place, dtype)}.get(mask)
                    with accel.autocast(low, table=table, enabled=dtype == torch.float32):
                        output = functional.scaled_dot_product_attention(
                            leaves[0], leaves[1], leaves[2], bias, is_causal=mask == "causal", scale=0.5
                        )
                    torch.autograd.backward(output, torch.ones_like(output))
                    outputs.append((output, leaves))
                (result, found), (expected, exact) = outputs
                for what, one, other in (("result", result, expected), *_gradients(found, exact)):
                    assert error(one, other) < 16 * eps(low), f"the {what} of attention over {keys} keys is wrong"

    @_of_dtypes
    @_of_tables
    def test_autocast_in_backward(self, accel: Backend, table: str, which: int) -> None:
        """Backward outside of the region gives gradients of the parameters' dtype; a checkpoint is computed alike."""
        with _declared(accel, table):
            low, layer, rows = _of(accel, which)
            seen: list[torch.dtype] = []

            def part(x: Tensor) -> Tensor:
                output: Tensor = layer(x)
                seen.append(output.dtype)
                return output

            gradients = []
            for run in (part, lambda x: checkpoint(part, x, use_reentrant=False)):
                layer.zero_grad()
                leaf = rows.clone().requires_grad_()
                with accel.autocast(low, table=table):
                    loss = run(leaf).float().square().mean()
                loss.backward()
                assert leaf.grad is not None
                assert leaf.grad.dtype == layer.weight.grad.dtype == torch.float32
                gradients.append(leaf.grad.clone())
            assert set(seen) == {low}, "a checkpoint is computed again in another dtype"
            assert torch.equal(*gradients), "a checkpoint has another gradient"

    @_of_tables
    def test_dtypes_that_are_given(self, accel: Backend, table: str) -> None:
        """Products of any other dtype are cast to the region's; an operator that is given a dtype returns it."""
        with _declared(accel, table):
            low, _, rows = _of(accel)
            known = accel.capabilities
            told = (torch.float32, low, *[torch.float64] * ("float64" in known.model_dtypes))
            functions: tuple[Any, ...] = (torch.softmax, torch.log_softmax, torch.sum, torch.mean, torch.cumsum)
            with accel.autocast(low, table=table):
                for name in known.autocast_dtypes:
                    found = functional.linear(rows.to(getattr(torch, name)), rows.to(getattr(torch, name))).dtype
                    assert found == low, f"in a region of {low} a product of {name} is {found}"
                for function, given, dtype in product(functions, (rows, rows.to(low)), told):
                    found = function(given, -1, dtype=dtype).dtype
                    assert found == dtype, f"{function.__name__} with dtype={dtype} returns {found} under autocast"

    @_of_tables
    def test_autocast_keeps_tensors(self, accel: Backend, table: str) -> None:
        """Autocast keeps float64, whole numbers and masks, writes into its own tensors, and casts no input."""
        with _declared(accel, table):
            low, _, rows = _of(accel)
            whole = torch.ones(2, 2, device=accel.device, dtype=torch.int64)
            multiplies = _multiplies(whole)
            before, wide = rows.clone(), "float64" in accel.capabilities.model_dtypes
            with accel.autocast(low, table=table):
                assert (whole + whole).dtype == torch.int64, "whole numbers were cast"
                assert not multiplies or (whole @ whole).dtype == torch.int64, "a product of whole numbers was cast"
                assert (rows > 0).dtype == torch.bool
                if wide:
                    assert functional.linear(rows.double(), rows.double()).dtype == torch.float64, "float64 was cast"
                (rows @ rows.T).add_(1)
                assert rows.sum().dtype in (torch.float32, low)
                held = torch.zeros(len(rows), len(rows), device=accel.device)
                held += rows @ rows.T
            assert held.dtype == torch.float32, "a sum in place changed its dtype"
            assert torch.equal(rows, before), "autocast changed an input"


def _multiplies(whole: Tensor) -> bool:
    """Return whether the device has matrix products of whole numbers."""
    try:
        return (whole @ whole).dtype == whole.dtype
    except RuntimeError:
        return False


def _gradients(found: list[Tensor], exact: list[Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    for number, (leaf, other) in enumerate(zip(found, exact, strict=True)):
        assert leaf.grad is not None
        assert other.grad is not None
        yield f"gradient {number}", leaf.grad, other.grad


def _declared(accel: Backend, table: str) -> Any:
    known = accel.capabilities
    return declared(bool(known.autocast_dtypes) and table in known.autocast_tables, f"autocast by table {table}")


def _of(accel: Backend, which: int = 0) -> tuple[torch.dtype, Any, Tensor]:
    low = getattr(torch, (accel.capabilities.autocast_dtypes or ("bfloat16",))[which])
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(8, 8)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return low, layer.to(accel.device), torch.randn(4, 8, generator=generator).to(accel.device)
