"""What the faults of the GPU's compilers ask of the installed version; see `known_faults.py`.

Written from the reference and not yet run on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

__all__ = ["mix_order_reduction"]

_ROWS, _WIDTH = 32768, 1024  # large enough for inductor to mix the orders of its reductions


def mix_order_reduction() -> bool | None:
    """Two norms in a row, whose scales and shifts are slices of one parameter: is its compiled gradient another?"""
    if not torch.cuda.is_available():
        return None
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
