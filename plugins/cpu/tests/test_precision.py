"""fp32 by oneDNN's route, products of fp16 and sums of gradients in fp32, attention in another form."""

from __future__ import annotations

import copy
import logging
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelcore_cpu import precision, processor, rounded_products
from toys import precision_watch

from accelcore.precision import reset
from accelcore.torch_features import GET_KERNEL

REPLACES = pytest.mark.skipif(not GET_KERNEL.present, reason=f"torch has no {GET_KERNEL}")


@pytest.fixture(autouse=True)
def _as_it_was():
    torch.manual_seed(0)
    yield
    reset()
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.fixture
def capabilities(monkeypatch):
    """Pretend that the processor has these capabilities, by torch's names."""

    def pretend(**found):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)  # older torch lacks it
        processor._has.cache_clear()

    yield pretend
    processor._has.cache_clear()


@pytest.fixture
def without_fp16_units(monkeypatch):
    known = processor.has_units
    monkeypatch.setattr(processor, "has_units", lambda dtype: dtype is not torch.float16 and known(dtype))
    precision.warn_without_units.cache_clear()
    yield
    precision.warn_without_units.cache_clear()


def worst(found, expected):
    return float((found.detach().double() - expected.detach()).abs().max() / expected.detach().abs().max())


@pytest.mark.parametrize(
    ("capability", "fast", "setting"),
    [
        ("avx512_f", "fp32", "medium"), ("amx_tile", "bf16", "medium"), ("bf16", "bf16", "medium"),
        ("avx2", "fp32", "highest"),
    ],
)  # fmt: skip
def test_what_fast_is_depends_on_the_processors_instructions_alone(capabilities, capability, fast, setting):
    capabilities(**{capability: True})
    assert (processor.fast_format(), processor.fast_setting()) == (fast, setting)


@pytest.mark.parametrize("capability", ["avx512_bf16", "amx_bf16", "bf16"])
def test_the_best_precision_is_one_that_the_processor_has_units_for(accel, capabilities, capability):
    for name, dtype in ((capability, torch.bfloat16), ("none", torch.float32)):
        capabilities(**{name: True})
        with accel.autocast("best"):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype


@pytest.mark.skipif(processor.fast_format() != "fp32", reason="this CPU multiplies in bf16 under fp32='fast'")
class TestFastFp32:
    def test_it_is_declared_as_exact_and_is(self, accel):
        a, b = torch.randn(96, 512), torch.randn(512, 160)
        with accel.precision.fp32("fast"):
            assert torch.get_float32_matmul_precision() == processor.fast_setting()
            found = a @ b
        assert accel.capabilities.fast_fp32 == "fp32"
        assert worst(found, a.double() @ b.double()) < 1e-6

    def test_a_trainer_holds_it_in_forward_backward_and_update(self, accel):
        watched, seen = precision_watch()

        class Muon(torch.optim.SGD):
            def step(self, closure=None):
                seen.append(torch.get_float32_matmul_precision())
                return super().step(closure)

        model = torch.nn.Linear(4, 4)
        trainer = accel.trainer(
            model, Muon(model.parameters(), lr=0.1), loss=lambda m, x: watched(m(x)).sum(), fp32="fast"
        )
        for _ in range(2):
            trainer(torch.ones(64, 4))
        assert seen == [processor.fast_setting()] * 6

    @pytest.mark.parametrize("option", [{"precision": "bf16"}, {"precision": "fp16"}, {"precision": "O1"}, {}])
    def test_nothing_else_turns_it_on(self, accel, option):
        seen = []
        model = torch.nn.Linear(64, 64)

        def loss(m, x):
            seen.append(torch.get_float32_matmul_precision())
            return m(x).sum()

        trainer = accel.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, **option)
        trainer(torch.ones(64, 64))
        assert seen == ["highest"]


SHAPES = {"even": (2, 4, 64, 64, 32), "odd": (1, 3, 37, 50, 24), "long": (1, 2, 300, 300, 16)}
MASKS = ["none", "causal", "bool", "float", "nothing to see"]


def attended(shape, mask, dtype, tensors):
    """The output of attention and its gradients, in a dtype."""
    _, _, length, keys, _ = shape
    visible = torch.ones(length, keys, dtype=torch.bool).tril(keys - length)
    given = {"none": None, "causal": None, "bool": visible, "nothing to see": visible.clone()}.get(mask)
    if mask == "nothing to see":
        given[3] = False
    if mask == "float":
        given = torch.linspace(-2, 2, keys).expand(length, keys).to(dtype)
    query, key, value, gradient = (each.to(dtype).detach().requires_grad_() for each in tensors)
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=given, is_causal=mask == "causal")
    return output, *torch.autograd.grad(output, (query, key, value), gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_attention_is_as_exact_as_torchs(accel, shape, mask, dtype):
    batch, heads, length, keys, width = shape
    tensors = [
        torch.randn(batch, rows, heads, width).bfloat16().transpose(1, 2) for rows in (length, keys, keys, length)
    ]
    exact, torchs = attended(shape, mask, torch.float64, tensors), attended(shape, mask, dtype, tensors)
    accel.precision.prepare(dtype)
    accel.precision.fp32("fast")
    found = attended(shape, mask, dtype, tensors)
    for one, other, true in zip(found, torchs, exact, strict=True):
        assert one.dtype is dtype
        assert one.stride() == other.stride(), "compiled code relies on how torch's kernel lays it out"
        assert worst(one, true) < max(2 * worst(other, true), 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "product",
    [
        torch.mm, torch.matmul, lambda a, b: torch.addmm(b[0], a, b, beta=2, alpha=0.5),
        lambda a, b: torch.mv(a, b[:, 0]),
        lambda a, b: torch.bmm(a[None], b[None]), lambda a, b: F.linear(a[None], b.t(), b[0]),
        lambda a, b: torch.baddbmm(b[None, :1], a[None], b[None]), lambda a, b: torch.einsum("ij,jk->k", a, b),
        lambda a, b: F.conv1d(a[None], b[:8, :, None].expand(-1, -1, 3)), lambda a, b: a @ b[:, 0],
        lambda a, b: F.conv_transpose1d(a[None], b[:40, :8, None].expand(-1, -1, 3)),
        lambda a, b: F.conv2d(a[None, :8, :, None], b[:1].t()[:8, :, None, None], groups=8),
    ],
)  # fmt: skip
def test_products_of_fp16_are_those_of_fp32_rounded(accel, without_fp16_units, product):
    a, b = torch.randn(40, 64).half(), torch.randn(64, 40).half()
    with accel.autocast(torch.float16):
        low_inputs = [each.clone().requires_grad_() for each in (a, b)]
        found = product(*low_inputs)
        gradients = torch.autograd.grad(found, low_inputs, torch.ones_like(found), allow_unused=True)
    exact_inputs = [each.double().requires_grad_() for each in (a, b)]
    expected = product(*exact_inputs)
    exact = torch.autograd.grad(expected, exact_inputs, torch.ones_like(expected), allow_unused=True)
    assert found.dtype is torch.float16
    # Sums in fp32, each result rounded once: half a unit in the last place, which is eps / 2 of it at most.
    for one, true in zip((found, *gradients), (expected, *exact), strict=True):
        assert worst(one, true) <= 0.51 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize(
    "product",
    [
        torch.mm, lambda a, b: torch.mv(a, b[:, 0]), lambda a, b: torch.bmm(a[None], b[None]),
        lambda a, b: F.linear(a, b.t()), lambda a, b: F.conv1d(a[None], b[:8, :, None].expand(-1, -1, 3)),
        lambda a, b: torch.mm(a, b.half(), out=torch.empty(40, 40)),
    ],
)  # fmt: skip
def test_products_of_fp16_and_fp32_are_refused_as_by_torch(accel, without_fp16_units, product):
    a, b = torch.ones(40, 64).half(), torch.ones(64, 40)
    with pytest.raises(RuntimeError) as torchs:
        product(a, b)
    accel.precision.prepare(torch.float16)
    with pytest.raises(RuntimeError) as ours:
        product(a, b)
    assert str(ours.value) == str(torchs.value)


@REPLACES
def test_a_model_that_its_owner_cast_to_fp16_has_the_products_of_fp16(accel, without_fp16_units, monkeypatch, caplog):
    installed = []
    monkeypatch.setattr(rounded_products, "install", installed.append)
    for dtype, expected in ((torch.float32, False), (torch.float16, True)):
        model = torch.nn.Linear(8, 8).to(dtype)
        accel.trainer(model, accel.optimizers.create("sgd", model.parameters()), loss=lambda m, rows: m(rows).sum())
        assert bool(installed) is expected
    assert "no instructions for float16" in caplog.text


def test_products_of_fp16_overflow_as_fp16(accel, without_fp16_units):
    with accel.autocast(torch.float16):
        assert (torch.full((2, 2), 300.0) @ torch.full((2, 2), 300.0)).isinf().all()


@REPLACES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("table", ["torch", "O1"])
def test_recurrent_layers_train_in_low_precision(accel, without_fp16_units, table, dtype):
    layer, rows = torch.nn.LSTM(8, 16, batch_first=True), torch.randn(4, 5, 8)
    expected = layer(rows)[0]
    expected.sum().backward()
    exact = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    with accel.autocast(dtype, table=table):
        found = layer(rows)[0]
    found.float().sum().backward()
    close = 8 * torch.finfo(dtype).eps
    assert worst(found, expected) < close
    for parameter, true in zip(layer.parameters(), exact, strict=True):
        assert worst(parameter.grad, true) < close


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled_products_of_fp16_are_the_eager_ones(accel, without_fp16_units, backend):
    torch._dynamo.reset()
    accel.precision.prepare(torch.float16)
    model = torch.nn.Sequential(torch.nn.Linear(48, 64), torch.nn.ReLU(), torch.nn.Linear(64, 48)).half()
    rows = torch.randn(32, 48).half()
    compiled = accel.compiler.compile(model, {"backend": backend})
    results = []
    for call in (model, compiled.module):
        output = call(rows)
        output.sum().backward()
        results.append([output, *(parameter.grad.clone() for parameter in model.parameters())])
        model.zero_grad()
    assert compiled.compiled
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


@REPLACES
def test_reset_gives_torchs_kernels_back(accel, without_fp16_units):
    kernels = {name: torch._C._dispatch_dump(name) for name in ("aten::mm", "aten::convolution")}
    with accel.autocast(torch.float16):
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert all(torch._C._dispatch_dump(name) != before for name, before in kernels.items())
    reset()
    assert all(torch._C._dispatch_dump(name) == before for name, before in kernels.items())
    accel.autocast(torch.float16)
    assert torch._C._dispatch_dump("aten::mm") != kernels["aten::mm"], "a region that is made later puts them back"


ROWS, MANY = torch.linspace(-2, 3000, 24008).sin().view(3001, 2, 4), torch.arange(9000).remainder(3).view(-1, 4)


class Table(torch.nn.Module):
    def __init__(self, *shape, dimensions=1):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-2, 2, math.prod(shape)).view(shape))
        self.dimensions = dimensions

    def forward(self, places):
        return self.weight[(places, *[places[:, :1]] * (self.dimensions - 1))]


SUMMED = {
    "LayerNorm": (lambda: torch.nn.LayerNorm(4), ROWS),
    "LayerNorm of two dimensions": (lambda: torch.nn.LayerNorm((4, 2)), ROWS.transpose(1, 2)),
    "LayerNorm without bias": (lambda: torch.nn.LayerNorm(4, bias=False), ROWS[::2]),
    "LayerNorm of long rows": (lambda: torch.nn.LayerNorm(2**18 + 1), torch.arange(2**20 + 4).cos().view(4, -1)),
    "LayerNorm of no rows": (lambda: torch.nn.LayerNorm(4), ROWS[:0]),
    "LayerNorm without weights": (lambda: torch.nn.LayerNorm(4, elementwise_affine=False), ROWS),
    "Embedding": (lambda: torch.nn.Embedding(4, 5, padding_idx=2), MANY),
    "Embedding by frequency": (lambda: torch.nn.Embedding(4, 5, scale_grad_by_freq=True), MANY),
    "EmbeddingBag": (lambda: torch.nn.EmbeddingBag(4, 5), MANY),
    "EmbeddingBag of sums": (lambda: torch.nn.EmbeddingBag(4, 5, mode="sum"), MANY),
    "a table that is indexed": (lambda: Table(4, 5), MANY),
    "a large table, few rows from its end": (lambda: Table(5000, 60), MANY[:400] - 3),
    "a large table by two indices": (lambda: Table(3, 5000, 20, dimensions=2), MANY[:400] - 3),
    "EmbeddingBag of maxima": (lambda: torch.nn.EmbeddingBag(4, 5, mode="max"), MANY),
}  # fmt: skip


def gradients_of(layer, given):
    """The gradients of a layer's input, if it has one, and of its parameters, of which none is a sum of both signs."""
    leaf = given.detach().requires_grad_(given.is_floating_point())
    output = layer(leaf)
    found = torch.autograd.grad(
        (output.to(torch.promote_types(output.dtype, torch.float32)) + 9).square().sum() / 64,
        [*layer.parameters(), *[leaf] * leaf.requires_grad],
    )
    return found[:-1] if leaf.requires_grad else found, found[-1] if leaf.requires_grad else torch.zeros(0)


@REPLACES
@pytest.mark.parametrize("weights", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", SUMMED)
def test_gradients_of_parameters_are_summed_in_fp32(accel, kind, dtype, weights):
    make, given = SUMMED[kind]
    layer, low = make().to(weights or dtype), given.to(dtype) if given.is_floating_point() else given
    _, before = gradients_of(layer, low)
    _, wide = gradients_of(layer.float(), given)
    accel.precision.prepare(dtype)
    found, after = gradients_of(layer.to(weights or dtype), low)
    assert torch.equal(after, before), "the gradient of the input is not that of torch's kernel"
    assert torch.equal(gradients_of(layer.float(), given)[1], wide), "in fp32 it is not that of torch's kernel"
    exact, _ = gradients_of(copy.deepcopy(layer).double(), low.double() if low.is_floating_point() else low)
    for one, true in zip(found, exact, strict=True):
        assert one.dtype is (weights or dtype)
        assert not true.numel() or not true.any() or worst(one, true) < 2 * torch.finfo(dtype).eps


@REPLACES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [3, 2**19])
def test_one_value_is_added_as_often_as_its_place_is_named(accel, dtype, rows):
    accel.precision.prepare(dtype)
    counts = torch.zeros(rows, dtype=dtype).index_put_((MANY,), torch.ones((), dtype=dtype), accumulate=True)
    assert counts[:3].tolist() == torch.full((3,), 3000.0).to(dtype).tolist()
    assert not counts[3:].any()
    with pytest.raises(IndexError, match=f"index -{rows + 1} is out of bounds"):
        counts.index_put_((MANY - rows - 1,), torch.ones((), dtype=dtype), accumulate=True)


def test_a_cpu_without_units_warns_once_for_each_dtype(accel, monkeypatch, caplog):
    monkeypatch.setattr(processor, "has_units", lambda dtype: False)
    precision.warn_without_units.cache_clear()
    for _ in range(2):
        for dtype in (torch.bfloat16, torch.float16):
            accel.autocast(dtype)
    precision.warn_without_units.cache_clear()
    bf16, fp16 = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "no instructions for bfloat16" in bf16
    assert 'precision="fp32"' in bf16
    assert "computed in fp32 and rounded" in fp16


@pytest.mark.parametrize("rank", [0, 1])
def test_of_a_job_only_the_first_rank_warns_that_it_has_no_units(accel, monkeypatch, caplog, rank):
    monkeypatch.setattr(processor, "has_units", lambda dtype: False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    precision.warn_without_units.cache_clear()
    accel.autocast(torch.bfloat16)
    precision.warn_without_units.cache_clear()
    assert ("no instructions for bfloat16" in caplog.text) is (rank == 0)
