"""Known bugs of torch's kernels and compilers for the GPU. This module does not import torch."""

from __future__ import annotations

from accelcore.known_faults import KnownFault

MIX_ORDER_REDUCTION = KnownFault(
    kernel="torch.compile (inductor) on a GPU: gradients of a model with chained norms that share one parameter",
    package="torch",
    versions=">=2.10,<2.14",
    what="part of the gradient of a shared scale and shift is never written, so it keeps what the memory held before",
    instead="accelcore compiles with triton.mix_order_reduction=False, unless the options set it",
    reference="https://github.com/pytorch/pytorch/issues/193061",
    seen="",
)
KNOWN_FAULTS = (MIX_ORDER_REDUCTION,)
