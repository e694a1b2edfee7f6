"""Operators that the CPU lacks, against formulas of torch's own."""

import math

import pytest

torch = pytest.importorskip("torch")
torch_npu = pytest.importorskip("torch_npu")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("emulated_npu"),
    pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format"),
    # torch_npu's fused attention says so whenever the optimizer's flag is not set.
    pytest.mark.filterwarnings("ignore:.*npu_fusion_attention"),
]


def same(on_npu, on_cpu, inputs, tolerance=1e-5):
    """Compare values and gradients of two functions of the same tensors."""
    host = [value.clone().requires_grad_() for value in inputs]
    device = [value.npu().requires_grad_() for value in inputs]
    expected, found = on_cpu(*host), on_npu(*device)
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (found * weight.npu()).sum().backward()
    for one, other in zip(device, host, strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=tolerance, atol=tolerance)


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


UNARY = {
    "rms_norm": (lambda x: torch_npu.npu_rms_norm(x, torch.full((8,), 2.0).to(x.device), 1e-5)[0],
                 lambda x: functional.rms_norm(x, (8,), torch.full((8,), 2.0), 1e-5)),
    "swiglu": (torch_npu.npu_swiglu, lambda x: functional.silu(x[..., :4]) * x[..., 4:]),
    "fast_gelu": (torch_npu.fast_gelu, lambda x: x * torch.sigmoid(1.702 * x)),
    "gelu": (lambda x: torch_npu.npu_gelu(x, approximate="tanh"), lambda x: functional.gelu(x, approximate="tanh")),
    "silu": (torch_npu.npu_silu, functional.silu),
    "mish": (torch_npu.npu_mish, functional.mish),
    "transpose first": (lambda x: torch_npu.npu_confusion_transpose(x, (0, 2, 1), (4, 48), True),
                        lambda x: x.permute(0, 2, 1).reshape(4, 48)),
    "reshape first": (lambda x: torch_npu.npu_confusion_transpose(x, (0, 2, 1), (4, 12, 4), False),
                      lambda x: x.reshape(4, 12, 4).permute(0, 2, 1)),
    "dtype_cast": (lambda x: torch_npu.npu_dtype_cast(x, torch.bfloat16).float(), lambda x: x.bfloat16().float()),
    "format_cast": (lambda x: torch_npu.npu_format_cast(x, 2) * 3, lambda x: x * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_tensor(name):
    same(*UNARY[name], [torch.randn(4, 6, 8)])


def test_rms_norm_has_the_gradient_of_its_weight():
    same(
        lambda x, w: torch_npu.npu_rms_norm(x, w)[0],
        lambda x, w: functional.rms_norm(x, (8,), w, 1e-6),
        [torch.randn(5, 8), torch.randn(8)],
    )


def test_rms_norm_of_a_sum():
    x, y, weight = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    found = torch_npu.npu_add_rms_norm(x.npu(), y.npu(), weight.npu())
    torch.testing.assert_close(found[0].cpu(), functional.rms_norm(x + y, (8,), weight, 1e-6))
    torch.testing.assert_close(found[2].cpu(), x + y)


def test_layer_norm_of_a_sum():
    x, y, weight, bias = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8), torch.randn(8)
    found = torch_npu.npu_add_layer_norm(x.npu(), y.npu(), weight.npu(), bias.npu(), 1e-5, True)
    torch.testing.assert_close(found[0].cpu(), functional.layer_norm(x + y, (8,), weight, bias))
    torch.testing.assert_close(found[3].cpu(), x + y)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_fused_cross_entropy(reduction):
    target = torch.tensor([1, 0, 4, 2])
    same(
        lambda x: torch_npu.npu_cross_entropy_loss(x, target.npu(), reduction=reduction)[0],
        lambda x: functional.cross_entropy(x, target, reduction=reduction).reshape(-1),
        [torch.randn(4, 5)],
    )


def test_rotary_embedding():
    same(
        torch_npu.npu_rotary_mul,
        lambda x, cosine, sine: x * cosine + rotate_half(x) * sine,
        [torch.randn(2, 3, 4, 8), torch.randn(1, 3, 1, 8), torch.randn(1, 3, 1, 8)],
    )


def test_linear_and_convolution():
    same(torch_npu.npu_linear, functional.linear, [torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)])


def test_masked_softmax():
    mask = torch.rand(2, 1, 32, 32) > 0.7
    same(
        lambda x: torch_npu.npu_scaled_masked_softmax(x, mask.npu(), 0.5, False),
        lambda x: (x * 0.5).masked_fill(mask, -10000.0).softmax(-1),
        [torch.randn(2, 3, 32, 32)],
    )


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


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_layers(layer, bidirectional):
    torch.manual_seed(1)
    host = layer(5, 7, 2, bidirectional=bidirectional)
    device = layer(5, 7, 2, bidirectional=bidirectional).npu()
    device.load_state_dict(host.state_dict())
    same(lambda x: device(x)[0], lambda x: host(x)[0], [torch.randn(4, 3, 5)])
    for one, other in zip(device.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-4, atol=1e-5)


def test_packed_sequences():
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    torch.manual_seed(1)
    layer, values, lengths = nn.LSTM(5, 7, batch_first=True), torch.randn(3, 4, 5), torch.tensor([4, 2, 1])
    expected = pad_packed_sequence(layer(pack_padded_sequence(values, lengths, True))[0])[0]
    found = pad_packed_sequence(layer.npu()(pack_padded_sequence(values.npu(), lengths, True))[0])[0]
    torch.testing.assert_close(found.cpu(), expected)


def test_pieces_of_synchronised_batch_norm_make_a_batch_norm():
    values, weight, upstream = torch.randn(8, 3, 4, 4), torch.rand(3) + 1, torch.randn(8, 3, 4, 4)
    norm = nn.BatchNorm2d(3)
    norm.weight.data.copy_(weight)
    host = values.clone().requires_grad_()
    expected = norm(host)
    expected.backward(upstream)

    device, halves = values.npu(), values.npu().chunk(2)
    running_mean, running_var = torch.zeros(3, device="npu"), torch.ones(3, device="npu")
    counts = torch.full((2,), 64.0, device="npu")
    stats = [torch.batch_norm_stats(half, norm.eps) for half in halves]
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        device, torch.stack([s[0] for s in stats]), torch.stack([s[1] for s in stats]), running_mean, running_var, 0.1,
        norm.eps, counts,
    )  # fmt: skip
    sums = [torch_npu.batch_norm_reduce(half, norm.eps) for half in halves]
    again = torch_npu.batch_norm_gather_stats_update(
        device, torch.stack([s[0] for s in sums]), torch.stack([s[1] for s in sums]), None, None, 0.1, norm.eps, counts
    )
    torch.testing.assert_close(again[0].cpu(), mean.cpu())
    torch.testing.assert_close(again[1].cpu(), invstd.cpu())
    out = torch.batch_norm_elemt(device, weight.npu(), torch.zeros(3).npu(), mean, invstd, norm.eps)
    torch.testing.assert_close(out.cpu(), expected.detach())
    torch.testing.assert_close(running_mean.cpu(), norm.running_mean)
    torch.testing.assert_close(running_var.cpu(), norm.running_var)
    sum_dy, sum_dy_xmu, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
        upstream.npu(), device, mean, invstd, weight.npu(), True, True, True
    )
    grad = torch.batch_norm_backward_elemt(
        upstream.npu(), device, mean, invstd, weight.npu(), sum_dy, sum_dy_xmu, counts.int()
    )
    torch.testing.assert_close(grad.cpu(), host.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad_weight.cpu(), norm.weight.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad_bias.cpu(), norm.bias.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transform", ["fft", "ifft", "rfft", "irfft", "hfft", "fft2", "rfft2", "irfft2", "rfftn"])
@pytest.mark.parametrize("norm", ["backward", "ortho"])
def test_fourier_transforms_and_their_gradients(transform, norm):
    def real(x):
        y = getattr(torch.fft, transform)(x, norm=norm)
        return torch.view_as_real(y.resolve_conj()) if y.is_complex() else y

    same(real, real, [torch.randn(3, 4, 6)])


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "loss",
    [
        lambda x, r: functional.cross_entropy(x, torch.arange(4, device=x.device), reduction=r, label_smoothing=0.1),
        lambda x, r: functional.l1_loss(x, torch.zeros_like(x) + 0.3, reduction=r),
        lambda x, r: functional.mse_loss(x, torch.ones_like(x), reduction=r),
        lambda x, r: functional.smooth_l1_loss(x, torch.ones_like(x), reduction=r),
        lambda x, r: functional.kl_div(x.log_softmax(-1), torch.full_like(x, 0.2), reduction=r),
        lambda x, r: functional.binary_cross_entropy_with_logits(x, torch.full_like(x, 0.4), reduction=r),
        lambda x, r: functional.nll_loss(x.log_softmax(-1), torch.arange(4, device=x.device), reduction=r),
    ],
)
def test_losses(loss, reduction):
    same(lambda x: loss(x, reduction), lambda x: loss(x, reduction), [torch.randn(4, 5)])


def steps(optimizer, parameters, gradients):
    for _ in range(3):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.to(parameter)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in parameters]


OPTIMIZERS = {
    "adamw": lambda p, **o: torch.optim.AdamW(p, lr=0.1, **o),
    "adamw amsgrad": lambda p, **o: torch.optim.AdamW(p, lr=0.1, amsgrad=True, **o),
    "adam": lambda p, **o: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, **o),
    "sgd": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **o),
}


@pytest.mark.parametrize("route", ["foreach", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_optimizers(name, route):
    values, gradients = [torch.randn(3, 4), torch.randn(5)], [torch.randn(3, 4), torch.randn(5)]
    host, device = [v.clone().requires_grad_() for v in values], [v.npu().requires_grad_() for v in values]
    expected = steps(OPTIMIZERS[name](host, foreach=False), host, gradients)
    found = steps(OPTIMIZERS[name](device, **{route: True}), device, gradients)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_sgd_in_low_precision_moves_every_element(dtype):
    value = torch.randn(100).to(dtype)
    parameter = value.npu().requires_grad_()
    [found] = steps(torch.optim.SGD([parameter], lr=0.1, fused=True), [parameter], [torch.ones(100)])
    torch.testing.assert_close(found.float(), value.float() - 0.3, rtol=0, atol=0.05)
    assert not (found == value).any()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_npu_apply_adam_w(amsgrad):
    value, gradient = torch.randn(6), torch.randn(6)
    host = value.clone().requires_grad_()
    [expected] = steps(torch.optim.AdamW([host], lr=0.1, weight_decay=0.2, amsgrad=amsgrad), [host], [gradient])
    state = value.npu(), torch.zeros(6).npu(), torch.zeros(6).npu()
    largest = torch.zeros(6).npu()
    for t in range(3):
        torch_npu.npu_apply_adam_w(
            0.9**t, 0.999**t, 0.1, 0.2, 0.9, 0.999, 1e-8, gradient.npu(), largest, amsgrad, False, out=state
        )
    torch.testing.assert_close(state[0].cpu(), expected, rtol=1e-5, atol=1e-6)


def test_npu_apply_adam():
    value, gradient = torch.randn(6), torch.randn(6)
    host = value.clone().requires_grad_()
    [expected] = steps(torch.optim.Adam([host], lr=0.1, eps=0.0), [host], [gradient])
    state = value.npu(), torch.zeros(6).npu(), torch.zeros(6).npu()
    for t in range(1, 4):
        torch_npu.npu_apply_adam(0.9**t, 0.999**t, 0.1, 0.9, 0.999, 0.0, gradient.npu(), False, False, out=state)
    torch.testing.assert_close(state[0].cpu(), expected, rtol=1e-5, atol=1e-6)


def test_foreach_norm_and_clipping():
    tensors = [torch.randn(4, 3), torch.randn(7)]
    expected = torch.stack([t.norm() for t in tensors])
    torch.testing.assert_close(torch.stack(torch._foreach_norm([t.npu() for t in tensors])).cpu(), expected)
    parameters = [nn.Parameter(t.npu()) for t in tensors]
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.grad = tensor.npu()
    assert math.isclose(nn.utils.clip_grad_norm_(parameters, 0.5).item(), expected.norm().item(), rel_tol=1e-5)
    clipped = torch.cat([parameter.grad.flatten() for parameter in parameters])
    assert math.isclose(clipped.norm().item(), 0.5, rel_tol=1e-4)


@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_non_finite_check(bad):
    gradients = [torch.full((3,), 8.0, device="npu"), torch.full((2,), 4.0, device="npu")]
    if bad is not None:
        gradients[1][0] = bad
    found, inverse = torch.zeros(1, device="npu"), torch.full((1,), 0.5, device="npu")
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
    assert found.item() == (bad is not None)
    assert gradients[0].tolist() == [4.0] * 3
    assert torch_npu._amp_foreach_non_finite_check(gradients) is (bad is not None)


def test_gradients_of_two_dtypes_are_not_unscaled_together():
    gradients = [torch.ones(2, device="npu"), torch.ones(2, device="npu", dtype=torch.float16)]
    found, inverse = torch.zeros(1, device="npu"), torch.ones(1, device="npu")
    with pytest.raises(RuntimeError, match=r"must have the same dtype, not torch\.float16, torch\.float32"):
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)


def test_update_scale():
    scale, tracker = torch.full((), 8.0, device="npu"), torch.zeros((), dtype=torch.int32, device="npu")
    for found, expected in ((0.0, 8.0), (0.0, 16.0), (1.0, 8.0)):
        torch._amp_update_scale_(scale, tracker, torch.full((), found, device="npu"), 2.0, 0.5, 2)
        assert scale.item() == expected


def test_private_formats_hold_the_same_values():
    torch.npu.config.allow_internal_format = True
    try:
        values = torch.randn(20, 9)
        cast = torch_npu.npu_format_cast(values.npu(), 29)
        assert torch_npu.get_npu_format(cast) == 29
        torch.testing.assert_close(cast.cpu(), values)
        torch.testing.assert_close((cast + 1).cpu(), values + 1)
    finally:
        torch.npu.config.allow_internal_format = False
