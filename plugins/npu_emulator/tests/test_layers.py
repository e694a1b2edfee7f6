"""Layers and losses whose operators the CPU lacks, against torch's on the CPU."""

import pytest

torch = pytest.importorskip("torch")
torch_npu = pytest.importorskip("torch_npu")

from against_torch import same
from torch import nn
from torch.nn import functional

pytestmark = [
    pytest.mark.usefixtures("emulated_npu"),
    pytest.mark.filterwarnings("ignore:Cannot create tensor with intern?al format"),
]


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


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_loss_of_several_steps_is_rounded_once(reduction):
    def loss(x, y, w):
        return functional.binary_cross_entropy_with_logits(x, y, pos_weight=w, reduction=reduction)

    inputs = [torch.randn(10, 64).half(), torch.rand(10, 64).half(), torch.rand(64).half() * 3]
    device = [value.npu() for value in inputs]
    device[0].requires_grad_()
    single = [value.float() for value in inputs]
    single[0].requires_grad_()
    expected, found = loss(*single), loss(*device)
    assert torch.equal(found.cpu(), expected.half())
    expected.sum().backward()
    found.sum().backward()
    assert torch.equal(device[0].grad.cpu(), single[0].grad.half())


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this torch has no LinearCrossEntropyLoss")
@pytest.mark.parametrize("chunk", [None, 2])
def test_linear_cross_entropy_in_bfloat16_is_within_a_few_roundings(chunk):
    options = None if chunk is None else nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(8, 5, generator=generator).bfloat16()
    target = torch.randint(0, 4, (8,), generator=generator)
    loss = nn.LinearCrossEntropyLoss(5, 4, dtype=torch.bfloat16, reduction="sum", options=options)
    weight = loss.linear.weight.detach()
    exact = tokens.double().requires_grad_()
    functional.cross_entropy(exact @ weight.double().T, target, reduction="sum").backward()
    found = tokens.npu().requires_grad_()
    loss.npu()(found, target.npu()).backward()
    rounding = torch.finfo(torch.bfloat16).eps * exact.grad.abs().max().item()
    torch.testing.assert_close(found.grad.cpu().double(), exact.grad, rtol=0, atol=4 * rounding)
