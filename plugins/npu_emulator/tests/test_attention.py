"""torch's attention and dropout, and torch_npu's fused attention: launches, memory and results."""

import pytest

torch = pytest.importorskip("torch")
torch_npu = pytest.importorskip("torch_npu", exc_type=ImportError)

from accelcore_npu_emulator import counters
from against_torch import same
from torch.nn import functional

# torch_npu's fused attention says so whenever the optimizer's flag is not set.
pytestmark = pytest.mark.filterwarnings("ignore:.*npu_fusion_attention")

HEADS, LENGTH, WIDTH = 4, 128, 32


def inputs(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, HEADS, LENGTH, WIDTH, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_attention_is_one_launch_each_way_and_keeps_no_scores(dtype):
    query, key, value = (tensor.npu().requires_grad_() for tensor in inputs(dtype))
    before = torch.npu.memory_allocated()
    with counters.count() as cost:
        out = functional.scaled_dot_product_attention(query, key, value)
    assert cost.launches.total() == 1
    scores = 2 * HEADS * LENGTH * LENGTH * 2  # bytes that attention by parts keeps at least once
    statistics = 2 * (2 * HEADS * LENGTH * 8) * 4  # the maximum and the sum of each row, in blocks of eight floats
    kept = torch.npu.memory_allocated() - before
    assert kept <= out.numel() * 2 + statistics + 4096 < scores * 3
    with counters.count() as cost:
        out.backward(torch.ones_like(out))
    assert sum(count for name, count in cost.launches.items() if "attention" in name) == 1


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"mask": True}, {"scale": 0.3}], ids=str)
def test_attention_and_its_gradients_are_the_cpus(options):
    options = dict(options)
    hosts = [tensor.requires_grad_() for tensor in inputs(torch.float32)]
    devices = [tensor.npu().requires_grad_() for tensor in inputs(torch.float32)]
    if options.pop("mask", False):
        options["attn_mask"] = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(5)
    expected = functional.scaled_dot_product_attention(*hosts, **options)
    if "attn_mask" in options:
        options["attn_mask"] = options["attn_mask"].npu()
    found = functional.scaled_dot_product_attention(*devices, **options)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)
    for device, host in zip(devices, hosts, strict=True):
        torch.testing.assert_close(device.grad.cpu(), host.grad, atol=1e-4, rtol=1e-3)


def test_the_backward_of_attention_drops_what_the_forward_dropped():
    query, key, value = (tensor.npu() for tensor in inputs(torch.float32))
    value.requires_grad_()
    out = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    weight = torch.randn_like(out)
    out.backward(weight)
    # Attention is linear in its values, so that the gradient tells the result again.
    torch.testing.assert_close((value.grad * value.detach()).sum(), (weight * out.detach()).sum(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_takes_a_bit_for_each_element(p):
    x = torch.ones(1000, 999, device="npu", requires_grad=True)
    before = torch.npu.memory_allocated()
    y = functional.dropout(x, p)
    kept = torch.npu.memory_allocated() - before - y.numel() * 4
    if p == 0.3:
        assert y.numel() / 8 <= kept < y.numel() / 8 + 4096
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert (y != 0).float().mean().item() == pytest.approx(1 - p, abs=0.01)
    assert y.mean().item() == pytest.approx(float(p < 1), abs=0.01)


def test_native_attention_in_half_precision_is_as_exact_as_half_precision_can_be(emulated_npu):
    batch, width = 16, 64
    generator = torch.Generator().manual_seed(0)
    tokens = 6 * torch.rand(batch, 8, width, generator=generator) - 3
    weight, bias = (torch.rand(shape, generator=generator) / 4 - 0.125 for shape in ((3 * width, width), (3 * width,)))
    halves = [value.half() for value in (tokens, weight, bias)]
    rest = torch.eye(width).half(), torch.zeros(width).half()
    query, *projections = (value.to(emulated_npu) for value in (*halves, *rest))
    _, found = torch._native_multi_head_attention(
        query, query, query, width, HEADS, *projections, need_weights=True, average_attn_weights=False
    )

    def weights(tokens, weight, bias, rounded=lambda x: x):
        query, key, _ = rounded(functional.linear(tokens.double(), weight.double(), bias.double())).chunk(3, -1)
        query, key = (part.reshape(batch, 8, HEADS, -1).transpose(1, 2) for part in (query, key))
        return rounded(rounded(query @ key.transpose(-1, -2) / query.size(-1) ** 0.5).softmax(-1))

    torch.testing.assert_close(found.cpu().double(), weights(*halves), rtol=8e-3, atol=2e-4)
    # Exact arithmetic whose results alone are rounded is no closer to float32 than this: a test that asks for 5e-4
    # passes or fails by the numbers that it draws.
    ideal = weights(*halves, rounded=lambda x: x.half().double())
    assert not torch.allclose(ideal, weights(tokens, weight, bias), rtol=5e-4, atol=5e-4)


# torch_npu's own.

HIDDEN = torch.ones(6, 6).triu(1).bool()
ATTENTION = {
    "plain": ({}, {}),
    "mask": ({"atten_mask": HIDDEN}, {"attn_mask": ~HIDDEN}),
    "top-left causal": ({"atten_mask": HIDDEN, "sparse_mode": 2}, {"is_causal": True}),
    "bottom-right causal": ({"atten_mask": HIDDEN, "sparse_mode": 3}, {"is_causal": True}),
    "band": (
        {"atten_mask": HIDDEN, "sparse_mode": 4, "pre_tockens": 2, "next_tockens": 0},
        {"attn_mask": ~HIDDEN & ~torch.ones(6, 6).tril(-3).bool()},
    ),
}


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
@pytest.mark.parametrize("kind", ATTENTION)
def test_fused_attention(kind, layout):
    options, reference = ATTENTION[kind]
    options = {name: value.npu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}

    def lay(x):
        if layout == "BNSD":
            return x
        x = x.transpose(1, 2)
        if layout == "BSND":
            return x
        x = x.flatten(2)
        return x.transpose(0, 1) if layout == "SBH" else x

    same(
        lambda q, k, v: torch_npu.npu_fusion_attention(lay(q), lay(k), lay(v), 4, layout, scale=0.3, **options)[0],
        lambda q, k, v: lay(functional.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True, **reference)),
        [torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)],
    )


@pytest.mark.parametrize("version", ["", "_v2", "_v3"])
def test_the_backward_returns_nothing_for_what_was_not_given(version):
    query = torch.randn(2, 4, 6, 8, device="npu")
    backward = getattr(torch_npu, f"npu_fusion_attention_grad{version}")
    *gradients, sink = backward(query, query, query, query, 4, "BNSD")
    assert [g.shape for g in gradients[:3]] == [query.shape] * 3
    assert gradients[3:] == [None] * (3 if version == "_v2" else 1)
    assert (sink.shape, sink.dtype) == ((0,), torch.float32)


def test_the_gradient_of_a_bias_is_memory_that_nobody_writes():
    query, bias = torch.randn(2, 4, 6, 8, device="npu"), torch.zeros(1, 4, 6, 6, device="npu")
    gradient = torch_npu.npu_fusion_attention_grad(query, query, query, query, 4, "BNSD", pse=bias)[3]
    assert gradient.shape == bias.shape
    assert gradient.isnan().all()


def test_fused_attention_refuses_what_it_does_not_know():
    query = torch.randn(4, 2, 8, device="npu")
    with pytest.raises(RuntimeError, match="EMULATED: npu operator npu::npu_fusion_attention is not emulated with"):
        torch_npu.npu_fusion_attention(query, query, query, 2, "TND", actual_seq_qlen=[2, 4], actual_seq_kvlen=[2, 4])
