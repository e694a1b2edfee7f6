"""What happens between a backward pass and the next: optimizers' steps, clipping, unscaling."""

import math

import pytest

torch = pytest.importorskip("torch")
torch_npu = pytest.importorskip("torch_npu")

from torch import nn

pytestmark = pytest.mark.usefixtures("emulated_npu")


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
