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

# In a process of its own, because the kernel writes behind its buffer.
_LAYER_NORM = """
import torch
rows = torch.ones(70000, 2, 2, device="cuda", requires_grad=True)
weight = torch.ones(2, 2, device="cuda", requires_grad=True)
torch.nn.functional.layer_norm(rows, (2, 2), weight, weight).sum().backward()
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


def out_with_gaps() -> bool:
    """Check if an average and drawn numbers that are given `out=` with gaps are written into the gaps."""
    memory = torch.full((1, 1, 2, 2, 2), 77.0, device="cuda")
    torch._C._nn.avg_pool2d(torch.ones(1, 1, 4, 4, device="cuda"), 2, out=memory[..., 1])
    drawn = torch.full((2, 4, 2), 77, device="cuda")
    torch.multinomial(torch.ones(2, 4, device="cuda"), 4, out=drawn[..., 1])
    return bool((memory[..., 0] != 77).any()) and bool((drawn[..., 0] != 77).any())


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


def scans() -> bool:
    """Check if a sum of ones in bf16 stands still along the first dimension."""
    ones = torch.ones(4096, 3, device="cuda", dtype=torch.bfloat16)
    return float(ones.cumsum(0)[-1, 0]) < 2048 and float(ones.logcumsumexp(0)[-1, 0]) < 8


def copied_negative() -> bool:
    """Check if a copy of a view that is negative or conjugate by a mark is not, in both directions."""
    numbers = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6 + 0j]])
    wrong = [
        torch.equal(torch.empty(2, 2, dtype=view.dtype, device=to).copy_(view).cpu(), -right if real else right.conj())
        for given, to in ((numbers, "cuda"), (numbers.cuda(), "cpu"))
        for real, view, right in (
            (True, given.conj().imag, numbers.conj().imag.resolve_neg()),
            (False, given.mH, numbers.mH.resolve_conj()),
        )
    ]
    return all(wrong)


def eigenvalues() -> bool:
    """Check if eigenvalues of a matrix whose columns are contiguous overwrite it."""
    matrix = torch.arange(9.0, device="cuda").reshape(3, 3).t()
    before = matrix.clone()
    torch.linalg.eigvals(matrix)
    return not torch.equal(matrix, before)


def layer_norm_of_planes() -> bool:
    """Check if the gradient of a weight of two dimensions over many rows has another shape."""
    return _fails(_LAYER_NORM, because="invalid gradient")


def mean_of_whole() -> bool:
    """Check if the mean 1 of fractions is another whole number in `out=`."""
    out = torch.full((1,), 77, device="cuda")
    try:
        torch.mean(torch.tensor([[0.5, 1.0, 1.5]], device="cuda"), 1, out=out)
    except RuntimeError:
        return False
    return int(out) != 1


def flash_attention() -> bool:
    """Check if flash attention fails on tensors that begin 8 bytes behind a multiple of 16."""
    return _misaligned("FLASH_ATTENTION")


def efficient_attention() -> bool:
    """Check if memory-efficient attention fails on tensors that begin 8 bytes behind a multiple of 16."""
    return _misaligned("EFFICIENT_ATTENTION")


def _misaligned(kernel: str) -> bool:
    return _fails(_ATTENTION, kernel, because="misaligned address")


def _fails(script: str, *arguments: str, because: str) -> bool:
    """Return whether a script ends with this error. Another error is raised."""
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120)
    if done.returncode and because not in done.stderr:
        raise RuntimeError(done.stderr)
    return bool(done.returncode)
