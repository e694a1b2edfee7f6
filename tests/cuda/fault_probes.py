"""Probes: whether the installed torch still has the known faults of its kernels and its compiler for the GPU."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, batch_norm, embedding, layer_norm

# Runs in a process of its own, because no call on the device works after it. torch takes MATH if it refuses the kernel.
_ATTENTION = """
import sys
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
size, begin = (2, 4, 16, 64), 4
memory = [torch.zeros(begin + 2 * 4 * 16 * 64, device="cuda", dtype=torch.float16) for _ in range(3)]
with sdpa_kernel([getattr(SDPBackend, sys.argv[1]), SDPBackend.MATH]):
    torch.nn.functional.scaled_dot_product_attention(*(each[begin:].view(size) for each in memory))
torch.cuda.synchronize()
"""

_ROWS, _WIDTH = 32768, 1024  # large enough for inductor to mix the orders of its reductions


def mix_order_reduction() -> bool:
    """Check if two norms whose scales are slices of one parameter have another gradient if they are compiled."""
    torch.manual_seed(0)
    table = torch.randn(1, 4, _WIDTH, device="cuda")
    rows = torch.randn(1, _ROWS, _WIDTH, device="cuda")

    def forward(table: Tensor) -> Tensor:
        shift1, scale1, shift2, scale2 = table.chunk(4, dim=1)
        hidden = layer_norm(rows, (_WIDTH,)) * (1 + scale1) + shift1
        return layer_norm(hidden, (_WIDTH,)) * (1 + scale2) + shift2

    gradients: list[Tensor] = []
    for call in (forward, torch.compile(forward, options={"triton.mix_order_reduction": True})):
        leaf = table.clone().requires_grad_()
        gradients += torch.autograd.grad(call(leaf).square().mean(), [leaf])
    return not torch.allclose(gradients[0], gradients[1], rtol=1e-2, atol=1e-5)


def pooled_gradient() -> bool:
    """Check if the gradient of a padded average depends on the layout of its input."""
    images = torch.arange(32.0, device="cuda").reshape(1, 2, 4, 4)
    gradients: list[Tensor] = []
    for layout in (torch.contiguous_format, torch.channels_last):
        leaf = images.contiguous(memory_format=layout).requires_grad_()
        gradients += torch.autograd.grad(avg_pool2d(leaf, 2, stride=1, padding=1).square().sum(), [leaf])
    return not torch.allclose(*gradients)


def pooled_out() -> bool:
    """Check if an average that is given `out=` with gaps writes into the gaps."""
    memory = torch.full((1, 1, 2, 2, 2), 77.0, device="cuda")
    torch._C._nn.avg_pool2d(torch.ones(1, 1, 4, 4, device="cuda"), 2, out=memory[..., 1])
    return bool((memory[..., 0] != 77).any())


def running_statistics() -> bool:
    """Check if a batch leaves a running mean and variance as they were if these have gaps between their elements."""
    images = torch.arange(64.0, device="cuda").reshape(4, 4, 2, 2)
    mean, variance = torch.zeros(2, 4, 2, device="cuda")[..., 0]
    ones = torch.ones(4, device="cuda")
    batch_norm(images, mean, variance, ones, ones, training=True)  # torch gives cuDNN no layer without a weight
    return not bool(mean.any())


def renormed_embedding() -> bool:
    """Check if the norm of a row depends on the layout of the weight."""
    weight = torch.arange(1.0, 26.0, device="cuda").reshape(5, 5)
    index = torch.tensor([1, 3], device="cuda")
    rows = [embedding(index, each, max_norm=1.0) for each in (weight.clone(), weight.t().contiguous().t())]
    return not torch.allclose(*rows)


def flash_attention() -> bool:
    """Check if flash attention fails on tensors that begin 8 bytes behind a multiple of 16."""
    return _misaligned("FLASH_ATTENTION")


def efficient_attention() -> bool:
    """Check if memory-efficient attention fails on tensors that begin 8 bytes behind a multiple of 16."""
    return _misaligned("EFFICIENT_ATTENTION")


def _misaligned(kernel: str) -> bool:
    command = [sys.executable, "-c", _ATTENTION, kernel]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    misaligned = "misaligned address" in done.stderr
    if done.returncode and not misaligned:
        raise RuntimeError(done.stderr)
    return misaligned
