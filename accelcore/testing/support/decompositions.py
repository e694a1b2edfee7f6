"""Decompositions of matrices, of which several results are right: what all right ones have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _of_svd(u: Tensor, s: Tensor, vh: Tensor) -> list[Tensor]:
    if not u.numel():
        return [s]
    k = s.shape[-1]
    return [s, (u[..., :k] * s[..., None, :]) @ vh[..., :k, :], *_gram(u), *_gram(vh.mH)]


def _of_eigh(given: Any, w: Tensor, v: Tensor) -> list[Tensor]:
    return [w, (v * w[..., None, :]) @ v.mH, *_gram(v)]


def _of_eig(given: Any, w: Tensor, v: Tensor) -> list[Tensor]:
    """Return the matrix as its eigenvectors have it, their lengths, and sums over the eigenvalues in any order."""
    same = (given[0] + (given[0].to(v.dtype) @ v - v * w[..., None, :])).detach()
    return [*map(_real, (same, w.sum(-1), (w * w).sum(-1))), torch.linalg.vector_norm(v, dim=-2).detach()]


def _of_qr(given: Any, q: Tensor, r: Tensor) -> list[Tensor]:
    return [r.detach().abs(), *([q @ r, *_gram(q)] if q.numel() else [])]


def _of_geqrf(given: Any, a: Tensor, tau: Tensor) -> list[Tensor]:
    k = tau.shape[-1]
    return [torch.linalg.householder_product(a[..., :k], tau) @ a.triu()[..., :k, :]]


def _gram(q: Tensor) -> list[Tensor]:
    return [_real((q.mH @ q).detach())]


def _real(value: Tensor) -> Tensor:
    return torch.view_as_real(value) if value.is_complex() else value


UNIQUE: dict[str, Callable[..., list[Tensor]]] = {
    "linalg.svd": lambda given, u, s, vh: _of_svd(u, s, vh),
    "svd": lambda given, u, s, v: _of_svd(u, s, v.mH),
    "linalg.eigh": _of_eigh,
    "linalg.eig": _of_eig,
    "linalg.qr": _of_qr,
    "qr": _of_qr,
    "geqrf": _of_geqrf,
    "linalg.lstsq": lambda given, solution, *others: [solution],
}
"""Tensors of which each is the same for all right results, by operator, from its arguments and its result."""


class Unique:
    """An operator of `UNIQUE` with results of which one is right.

    Args:
        name, info: the operator and its OpInfo.
    """

    inplace_variant, supports_out = None, False

    def __init__(self, name: str, info: Any) -> None:
        self._unique, self._info = UNIQUE[name], info

    def op(self, *given: Any, **options: Any) -> list[Tensor]:
        """Return what all right results have in common."""
        return self._unique(given, *self._info.op(*given, **options))
