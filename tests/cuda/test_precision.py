"""TF32, fp16 and bf16 as the GPU computes them."""

from __future__ import annotations

import pytest
import torch

from accelcore.testing.support.oracles import error


def product(accel):
    """A matrix product on the GPU, and how far it is from the one in float64."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(256, 512, generator=generator), torch.randn(512, 256, generator=generator)
    return error(a.to(accel.device) @ b.to(accel.device), a.double() @ b.double())


def convolution(accel):
    """A convolution on the GPU, and how far it is from the one in float64."""
    generator = torch.Generator().manual_seed(0)
    images, filters = torch.randn(8, 64, 16, 16, generator=generator), torch.randn(64, 64, 3, 3, generator=generator)
    found = torch.nn.functional.conv2d(images.to(accel.device), filters.to(accel.device))
    return error(found, torch.nn.functional.conv2d(images.double(), filters.double()))


# Which algorithm cuDNN takes is its own affair: some are less exact in fp32, some are exact although TF32 is allowed.
@pytest.mark.parametrize(("compute", "exact", "tf32"), [(product, 5e-6, 5e-5), (convolution, 5e-5, 0.0)])
def test_ieee_is_exact_and_fast_is_tf32(accel, compute, exact, tf32):
    with accel.precision.fp32("ieee"):
        assert compute(accel) < exact
    if accel.capabilities.fast_fp32 != "tf32":
        pytest.skip("not declared: TF32")
    with accel.precision.fp32("fast"):
        assert tf32 < compute(accel) < 5e-3, "TF32 keeps 10 bits of the fraction"
    with accel.precision.fp32("ieee"):
        assert compute(accel) < exact


def test_both_switches_are_put_back(accel):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for mode in ("ieee", "fast") if accel.capabilities.fast_fp32 else ("ieee",):
        with pytest.raises(ZeroDivisionError), accel.precision.fp32(mode):
            raise ZeroDivisionError
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_backward_is_in_the_same_arithmetic_in_a_trainer(accel):
    """Gradients of a product are products, too: under fp32="ieee" they are exact."""
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(512, 256, bias=False)
    inputs, wanted = torch.randn(64, 512, generator=generator), torch.randn(64, 256, generator=generator)
    start, rate = layer.weight.detach().double().clone(), 1.0
    optimizer = accel.optimizers.create("sgd", layer.parameters(), lr=rate)
    trainer = accel.trainer(layer, optimizer, loss=lambda model, batch: (model(batch[0]) * batch[1]).sum(), fp32="ieee")
    trainer(accel.runtime.to_device((inputs, wanted)))
    change = (start - layer.weight.detach().cpu().double()) / rate
    assert error(change, wanted.double().t() @ inputs.double()) < 1e-5


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_convolutions_run_in_low_precision(accel, name):
    if name not in accel.capabilities.autocast_dtypes:
        pytest.skip(f"not declared: autocast to {name}")
    layer = torch.nn.Conv2d(8, 16, 3).to(accel.device)
    with accel.autocast(getattr(torch, name)):
        output = layer(torch.ones(2, 8, 8, 8, device=accel.device))
    output.float().sum().backward()
    assert output.dtype is getattr(torch, name)
    assert bool(layer.weight.grad.isfinite().all())
