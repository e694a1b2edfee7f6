"""Operators that torch composes of others: without a kernel of its own, a device runs those of the others."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from accelcore.torch_internals import device_dispatch_key, operator_name, operators_registered_at

_EVERYWHERE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")

_CALLS_ALONE = (
    *("cdist", "histogramdd", "isclose", "item", "istft", "matrix_exp", "nanquantile", "select", "to_sparse", "trapz"),
    *("unflatten", "unique", "__getitem__", "fft.fft", "fft.fftn", "fft.ifft", "fft.irfftn", "fft.rfftn", "logdet"),
    *("linalg.det", "linalg.eigh", "linalg.matrix_power", "linalg.svd", "linalg.tensorsolve"),
    *("nn.functional.bilinear", "nn.functional.cosine_embedding_loss", "nn.functional.ctc_loss"),
    *("nn.functional.conv3d", "nn.functional.conv_transpose1d", "nn.functional.conv_transpose3d"),
    *("nn.functional.dropout", "nn.functional.embedding_bag", "nn.functional.gaussian_nll_loss"),
    *("nn.functional.grid_sample", "nn.functional.interpolate.bicubic", "nn.functional.interpolate.linear"),
    *("nn.functional.interpolate.nearest-exact", "nn.functional.interpolate.trilinear"),
    *("nn.functional.linear_cross_entropy.chunked", "nn.functional.max_pool1d", "nn.functional.max_pool3d"),
    *("nn.functional.multi_head_attention_forward", "nn.functional.multilabel_margin_loss"),
    *("nn.functional.pad.replicate", "nn.functional.rrelu", "nn.functional.triplet_margin_loss"),
    "sparse.sampled_addmm",
)
"""Composed operators by which alone some kernel, or some form of one, is compared: of three dimensions, for example."""


def is_composed(name: str, info: Any, device: torch.device) -> bool:
    """Return whether an operator is nothing but calls of others, whose kernels are compared without it.

    An operator of which the device has a kernel of its own is not, nor one that alone calls a kernel.
    """
    if name in _CALLS_ALONE:
        return False
    word = info.aten_name or info.name
    found = (getattr(torch.ops.aten, each, None) for each in (word, word.replace(".", "_"), word.rpartition(".")[2]))
    packet = None if name.startswith("masked.") else next(filter(None, found), None)  # those are functions in Python
    return packet is None or _with_kernel(device.type).isdisjoint(
        operator_name(getattr(packet, overload)) for overload in packet.overloads()
    )


@cache
def _with_kernel(kind: str) -> frozenset[str]:
    """Return the operators with a kernel for a kind of device, or one for each device."""
    own = device_dispatch_key(kind)
    return frozenset().union(*map(operators_registered_at, (own, f"Autograd{own}", *_EVERYWHERE)))
