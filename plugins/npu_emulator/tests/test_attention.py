"""torch's attention and dropout: launches, memory and results of the operators that the device has."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_npu", exc_type=ImportError)

from accelcore_npu_emulator import counters  # noqa: E402
from torch.nn import functional  # noqa: E402

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
