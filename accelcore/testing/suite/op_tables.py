"""Conformance of autocast's op tables: each operator in the dtype that the table names, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from accelcore import AccelError, Backend, UnsupportedError
from accelcore.precision import O1
from accelcore.testing.support.declared import TABLES, declared
from accelcore.testing.support.oracles import eps, error

Operator = Callable[[Tensor], Tensor]

_PROBES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of a row and a column
    "mm": torch.mm,
    "addmm": lambda row, column: torch.addmm(torch.ones(1, 1, device=row.device), row, column),
    "bmm": lambda row, column: torch.bmm(row[None], column[None]),
    "linear": lambda row, column: functional.linear(row, column.t()),
    "conv2d": lambda row, column: functional.conv2d(row.reshape(1, 2, 1, 1), column.reshape(1, 2, 1, 1)),
    "conv1d": lambda row, column: functional.conv1d(row.reshape(1, 2, 1), column.reshape(1, 2, 1)),
    "baddbmm": lambda row, column: torch.baddbmm(row[:, :1, None], row[None], column[None]),
    "mv": lambda row, column: torch.mv(row, column[:, 0]),
    "scaled_dot_product_attention": lambda row, column: functional.scaled_dot_product_attention(
        row[None, None], row[None, None], row[None, None]
    ),
    "prod": lambda row, column: row.prod(),
    "mse_loss": lambda row, column: functional.mse_loss(row, row),
    "kl_div": lambda row, column: functional.kl_div(row, row, reduction="sum"),
    "binary_cross_entropy_with_logits": lambda row, column: functional.binary_cross_entropy_with_logits(row, row),
    "relu": lambda row, column: torch.relu(row),
    "mul": lambda row, column: row * row,
    "neg": lambda row, column: -row,
}


def _ones(x: Tensor, *shape: int) -> Tensor:
    return torch.ones(shape, device=x.device, dtype=x.dtype)


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in fp32, or in float64 for the oracle."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _batch(x: Tensor) -> Tensor:
    return x.reshape(1, 2, 2, 4)


# Of a matrix of 4 by 4 that is in O1's low precision, with positive elements.
_LOW: dict[str, Operator] = {
    "mm": lambda x: _wide(x) @ _wide(_ones(x, 4, 3)),
    "mv": lambda x: torch.mv(_wide(x), _wide(_ones(x, 4))),
    "addmv": lambda x: torch.addmv(_wide(x[0]), _wide(x), _wide(_ones(x, 4))),
    "addr": lambda x: torch.addr(x, _wide(x[0]), _wide(x[1])),
    "baddbmm": lambda x: torch.baddbmm(_wide(x[None]), _wide(x[None]), x[None]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", _wide(x), x),
    "tensordot": lambda x: torch.tensordot(_wide(x), x, 1),
    "linear": lambda x: functional.linear(_wide(x), _wide(_ones(x, 3, 4))),
    "conv1d": lambda x: functional.conv1d(_wide(x[None]), _wide(_ones(x, 2, 4, 1))),
    "conv_transpose2d": lambda x: functional.conv_transpose2d(_batch(_wide(x)), _ones(x, 2, 2, 1, 1)),
    "attention": lambda x: functional.scaled_dot_product_attention(_batch(_wide(x)), _batch(x), _batch(x)),
    "gru_cell": lambda x: torch.gru_cell(x, x, _wide(_ones(x, 12, 4)), _ones(x, 12, 4)),
}
_FP32: dict[str, Operator] = {
    "softmax": lambda x: functional.softmax(x, 1),
    "log_softmax": lambda x: functional.log_softmax(x, 1),
    "layer_norm": lambda x: functional.layer_norm(x, (4,)),
    "group_norm": lambda x: functional.group_norm(_batch(x), 2),
    "rms_norm": lambda x: functional.rms_norm(x, (4,)),
    "gelu": functional.gelu,
    "softplus": functional.softplus,
    "exp": torch.exp,
    "log": torch.log,
    "pow": lambda x: x.pow(2),
    "rsqrt": torch.rsqrt,
    "sum": torch.sum,
    "prod": lambda x: x.prod(0),
    "norm": torch.norm,
    "cumsum": lambda x: x.cumsum(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "std": torch.std,
    "var": lambda x: x.var(0),
    "vdot": lambda x: torch.vdot(x[0], x[1]),
    "linalg_vecdot": lambda x: torch.linalg.vecdot(x, x),
    "cosine_similarity": lambda x: functional.cosine_similarity(x, x.flip(0)),
    "upsample_nearest2d": lambda x: functional.interpolate(_batch(x), scale_factor=2.0),
    "upsample_bilinear2d": lambda x: functional.interpolate(_batch(x), scale_factor=2.0, mode="bilinear"),
    "cross_entropy": lambda x: functional.cross_entropy(x, torch.arange(4, device=x.device)),
    "mse_loss": lambda x: functional.mse_loss(x, x.flip(0)),
    "smooth_l1_loss": lambda x: functional.smooth_l1_loss(x, x.flip(0)),
    "binary_cross_entropy_with_logits": lambda x: functional.binary_cross_entropy_with_logits(x, _ones(x, 4, 4)),
}
_LOSSES: dict[str, Operator] = {
    "l1_loss": lambda x: functional.l1_loss(x, x.flip(0)),
    "huber_loss": lambda x: functional.huber_loss(x, x.flip(0)),
    "kl_div": lambda x: functional.kl_div(x, x.flip(0), reduction="batchmean"),
    "nll_loss": lambda x: functional.nll_loss(x, torch.arange(4, device=x.device)),
    "nll_loss of images": lambda x: functional.nll_loss(_batch(x), torch.ones(1, 2, 4, device=x.device).long()),
    "poisson_nll_loss": lambda x: functional.poisson_nll_loss(x, x.flip(0)),
    "gaussian_nll_loss": lambda x: functional.gaussian_nll_loss(x, x.flip(0), x.square()),
    "cosine_embedding_loss": lambda x: functional.cosine_embedding_loss(x, x.flip(0), _ones(x, 4)),
    "hinge_embedding_loss": lambda x: functional.hinge_embedding_loss(x, -_ones(x, 4, 4), margin=3.0),
    "margin_ranking_loss": lambda x: functional.margin_ranking_loss(x, x.flip(0), _ones(x, 4, 4)),
    "multi_margin_loss": lambda x: functional.multi_margin_loss(x, torch.arange(4, device=x.device)),
    "soft_margin_loss": lambda x: functional.soft_margin_loss(x, _ones(x, 4, 4)),
    "triplet_margin_loss": lambda x: functional.triplet_margin_loss(x, x.flip(0), x.flip(1)),
}
_WIDEST: dict[str, Operator] = {
    "cat": lambda x: torch.cat([x, _wide(x)]),
    "cat of several": lambda x: torch.cat([x, x, x, _wide(x).div(3), x]),
    "stack": lambda x: torch.stack([x, _wide(x)]),
    "stack of several": lambda x: torch.stack([x, x, x, _wide(x).div(3), x]),
    "addcmul": lambda x: torch.addcmul(_wide(x), x, x),
    "index_add": lambda x: torch.index_add(x, 0, torch.arange(4, device=x.device), _wide(x)),
    "scatter_add": lambda x: torch.scatter_add(_wide(x), 0, torch.zeros(4, 4, device=x.device).long(), x),
    "bilinear": lambda x: functional.bilinear(x, x, _wide(_ones(x, 2, 4, 4))),
}
_AS_IS: dict[str, Operator] = {
    "relu": torch.relu,
    "mul": lambda x: x * x,
    "tanh": torch.tanh,
    "max_pool2d": lambda x: functional.max_pool2d(_batch(x), 2),
    "reflection_pad2d": lambda x: functional.pad(_batch(x), (1, 1, 1, 1), "reflect"),
    "mean": torch.mean,
}
_CLASSES: dict[str, tuple[Mapping[str, Operator], bool]] = {  # and whether they compute in fp32
    "low precision": (_LOW, False),
    "fp32": (_FP32, True),
    "widest": (_WIDEST, True),
    "as it is": (_AS_IS, False),
}


def _values(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.linspace(0.5, 2.0, 16).reshape(4, 4).to(device, dtype).requires_grad_()


def _backward(result: Tensor) -> None:
    torch.autograd.backward(result, torch.ones_like(result))


class OpTables:
    """Operators that autocast intercepts, and their dtypes under O1, which are the same on every device."""

    @pytest.mark.parametrize("table", TABLES)
    def test_tables(self, accel: Backend, table: str) -> None:
        """A table names the operators that autocast intercepts, and only those."""
        with declared(table in accel.capabilities.autocast_tables, f"the autocast table {table}"):
            operators = accel.precision.table(table)
            assert all("::" in operator for operator in operators), "an operator's name has its namespace"
            names = {operator.split("::")[1].split(".")[0] for operator in operators}
            if accel.capabilities.autocast_dtypes:
                given = torch.ones(1, 2, device=accel.device), torch.ones(2, 1, device=accel.device)
                low = getattr(torch, accel.capabilities.autocast_dtypes[0])
                with accel.autocast(low, table=table):
                    lowered, left = (
                        {name for name, run in _PROBES.items() if run(*[each.to(kind) for each in given]).dtype == low}
                        for kind in (torch.float32, low)
                    )
                listed, found = names & set(_PROBES), lowered | (_PROBES.keys() - left)
                assert listed == found, (
                    f"of {', '.join(_PROBES)} it lists {sorted(listed)}, and intercepts {sorted(found)}"
                )
                assert {"mm", "addmm"} <= lowered, "matrix products are not in low precision"

    def test_unknown_table(self, accel: Backend) -> None:
        """A table that does not exist is refused."""
        with pytest.raises(UnsupportedError):
            accel.precision.table("no such table")
        with pytest.raises(UnsupportedError):
            accel.autocast(table="no such table")

    def test_o1_is_whole(self, accel: Backend) -> None:
        """O1 has a treatment for each operator that torch's autocast intercepts on this device."""
        with declared(_has_o1(accel), "the autocast table O1"):
            with accel.autocast(table="O1"):
                pass  # below, torch's table is asked for, whatever O1 adds
            known = accel.precision.table("torch")
            bases = {operator.split("::")[1].split(".")[0] for operator in known}
            unknown = bases - O1.keys() - accel.precision.treatments().keys()
            assert not unknown, f"nobody says what table O1 does with {', '.join(sorted(unknown))}"

    @pytest.mark.parametrize("treatment", sorted(_CLASSES))
    def test_o1_dtypes(self, accel: Backend, treatment: str) -> None:
        """Under table O1 an operator computes in the dtype of its class, whatever its input; gradients keep theirs."""
        operators, exact = _CLASSES[treatment]
        with declared(_has_o1(accel), "the autocast table O1"):
            low = getattr(torch, (*accel.capabilities.autocast_dtypes, "bfloat16")[0])
            for name, run in operators.items():
                leaf = _values(accel.device, low)
                with accel.autocast(low, table="O1"):
                    result = run(leaf)
                expected_dtype = torch.float32 if exact else low
                assert result.dtype == expected_dtype, f"table O1 leaves {name} in {result.dtype}"
                _backward(result)
                assert leaf.grad is not None, f"under table O1 no gradient comes through {name}"
                assert leaf.grad.dtype == low, f"under table O1 the gradient of {name} is {leaf.grad.dtype}"
                if exact:
                    double = leaf.detach().cpu().double().requires_grad_()
                    expected = run(double)
                    _backward(expected)
                    assert double.grad is not None
                    assert error(result, expected) < 1e-5, f"table O1 does not compute {name} in fp32"
                    assert error(leaf.grad, double.grad) < 2 * eps(low), f"under table O1 {name} has a wrong gradient"

    @pytest.mark.parametrize("table", TABLES)
    def test_fp32_stays_fp32(self, accel: Backend, table: str) -> None:
        """Losses, norms, sums and powers of fp32 numbers are computed in fp32 under autocast, with their gradients."""
        if table not in accel.capabilities.autocast_tables:
            pytest.skip(f"not declared: table {table}")
        kept = {name: run for name, run in (_FP32 | _LOSSES).items() if name != "linalg_vecdot"}  # torch's is a product
        for (name, run), low in product(kept.items(), accel.capabilities.autocast_dtypes):
            leaf = _values(accel.device, torch.float32)
            with accel.autocast(low, table=table):
                result = run(leaf)
            exact = leaf.detach().cpu().double().requires_grad_()
            expected = run(exact)
            for each in (result, expected):
                each.backward(torch.arange(1.0, 1 + each.numel()).sin().reshape(each.shape).to(each))
            assert result.dtype == torch.float32, f"under autocast to {low} {name} of fp32 numbers is {result.dtype}"
            for found, right in ((result, expected), (leaf.grad, exact.grad)):
                assert found is not None
                assert right is not None
                assert error(found, right) < 1e-4, f"under autocast {name} of fp32 numbers loses digits in {low}"

    def test_torchs_fp32(self, accel: Backend) -> None:
        """By torch's table, too, a result that autocast makes fp32 was computed in fp32, whatever the low precision."""
        with declared(bool(accel.capabilities.autocast_dtypes), "autocast"):
            listed = {each.split("::")[1].split(".")[0] for each in accel.precision.table()}
            of_table = {name: _FP32[name] for name in listed & _FP32.keys()}  # others are composed of several operators
            joined = {name: run for name, run in _WIDEST.items() if name.startswith(("cat", "stack"))}
            wide: dict[str, set[bool]] = {}
            for low in accel.capabilities.autocast_dtypes:
                given = _values(accel.device, getattr(torch, low)).detach()
                for name, run in {**of_table, **joined}.items():
                    with accel.autocast(low):
                        result = run(given)
                    found = wide.setdefault(name, set())
                    found.add(result.dtype == torch.float32)
                    is_exact = error(result, run(given.cpu().double())) < 1e-5
                    assert is_exact or found == {False}, f"under autocast {name} loses digits in {low}"
            differs = [name for name, found in wide.items() if len(found) > 1 or (name in joined and False in found)]
            assert not differs, f"autocast does not always make {', '.join(differs)} fp32"

    @pytest.mark.parametrize("table", TABLES)
    def test_refuses(self, accel: Backend, table: str) -> None:
        """Binary cross-entropy of probabilities is refused in low precision, and fp32 otherwise: on every device."""
        known = accel.capabilities
        with declared(bool(known.autocast_dtypes) and table in known.autocast_tables, f"the autocast table {table}"):
            low = getattr(torch, (*accel.capabilities.autocast_dtypes, "bfloat16")[0])
            half = torch.full((2,), 0.5, device=accel.device)
            with accel.autocast(low, table=table):
                with pytest.raises(AccelError, match="binary_cross_entropy_with_logits"):
                    functional.binary_cross_entropy(half.to(low), half)
                loss = functional.binary_cross_entropy(half, half)
            assert loss.dtype == torch.float32
            assert error(loss, torch.tensor(2.0).log()) < 1e-5

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_o1_is_computed_anew(self, accel: Backend, use_reentrant: bool) -> None:
        """Activation checkpointing recomputes under the table of the forward pass."""
        with declared(_has_o1(accel), "the autocast table O1"):
            seen: list[torch.dtype] = []

            def part(x: Tensor) -> Tensor:
                seen.append(functional.softmax(x @ x, 1).dtype)
                return functional.gelu(functional.softmax(x @ x, 1)).square()

            def gradient(run: Operator) -> Tensor:
                leaf = _values(accel.device, torch.float32)
                with accel.autocast(table="O1"):
                    loss = run(leaf).sum()
                _backward(loss)
                assert leaf.grad is not None
                return leaf.grad

            direct = gradient(part)
            again = gradient(lambda leaf: checkpoint(part, leaf, use_reentrant=use_reentrant))
            assert set(seen) == {torch.float32}, f"softmax is {[str(dtype) for dtype in seen]}, the last computed anew"
            assert torch.equal(direct, again), "a checkpointed part has another gradient"

    def test_o1_ends(self, accel: Backend) -> None:
        """O1 ends with its region, and is suspended in an inner region that is disabled or uses torch's table."""
        with declared(_has_o1(accel), "the autocast table O1"):
            kind, names = accel.device.type, accel.capabilities.autocast_dtypes
            low = getattr(torch, (*names, "bfloat16")[0])
            x = _values(accel.device, low).detach()

            def dtypes() -> list[torch.dtype]:
                return [functional.gelu(x).dtype, functional.softmax(x, 1).dtype, torch.linalg.vecdot(x, x).dtype]

            exact = [torch.float32] * 3
            with torch.autocast(kind, low):
                before = dtypes()
            with accel.autocast(low, table="O1"):
                with accel.autocast(low, table="torch"):
                    assert dtypes() == before, "a region by torch's table goes by O1 within one of O1"
                with accel.autocast(enabled=False, table="O1"):
                    assert dtypes() == [low] * 3, "a region that is not enabled casts"
                with accel.autocast(low, table="O1"):
                    assert dtypes() == exact
                assert dtypes() == exact, "an inner region of O1 ended the outer one"
            with pytest.raises(ZeroDivisionError), accel.autocast(low, table="O1"):
                raise ZeroDivisionError
            with torch.autocast(kind, low):
                assert dtypes() == before, "O1 goes on in torch.autocast, behind its region"


def _has_o1(accel: Backend) -> bool:
    return "O1" in accel.capabilities.autocast_tables and bool(accel.capabilities.autocast_dtypes)
