"""torch_npu's fused attention, against torch's own."""

import math

import pytest

torch = pytest.importorskip("torch")
torch_npu = pytest.importorskip("torch_npu")

from against_torch import same  # noqa: E402
from torch.nn import functional  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("emulated_npu"),
    # torch_npu's fused attention says so whenever the optimizer's flag is not set.
    pytest.mark.filterwarnings("ignore:.*npu_fusion_attention"),
]


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


def test_fused_attention_replays_its_dropout_in_the_backward():
    value = torch.randn(1, 2, 16, 16, device="npu", requires_grad=True)
    query = torch.zeros(1, 2, 16, 16, device="npu")
    out = torch_npu.npu_fusion_attention(query, query, value, 2, "BNSD", keep_prob=0.5)[0]
    out.backward(torch.eye(16, device="npu").expand(1, 2, 16, 16).contiguous())
    # Each output row is the kept values' sum, so that <out, I> = <value, gradient>.
    ours = (value.detach() * value.grad).sum().item()
    assert math.isclose(ours, out.diagonal(dim1=-2, dim2=-1).sum().item(), rel_tol=1e-4, abs_tol=1e-5)


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


def test_torch_attention():
    same(
        lambda *qkv: functional.scaled_dot_product_attention(*qkv, is_causal=True),
        lambda *qkv: functional.scaled_dot_product_attention(*qkv, is_causal=True),
        [torch.randn(2, 4, 6, 8) for _ in range(3)],
    )
