"""Probes: whether the installed torch still has the known faults of its kernels and its compiler for the GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, layer_norm

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
