"""Combinations of torch, torch-npu and CANN that fit together. This module does not import torch.

A torch-npu is built against one release of torch, and its metadata name it: `Requires-Dist: torch==2.13.0.*`. The
metadata do not name a CANN. The table holds what the vendor publishes: COMPATIBILITY.md of
https://gitcode.com/Ascend/pytorch (final releases), and the README of the wheels on PyPI (release candidates).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """One published combination."""

    torch_npu: str  # version of the package torch-npu
    torch: str  # release of torch that it was built against
    cann: str  # version of CANN that it was released for


RELEASES = (
    Release("2.12.0", "2.12.0", "9.1.0"),
    Release("2.12.0rc1", "2.12.0", "8.5.0"),
    Release("2.11.0", "2.11.0", "9.1.0"),
    Release("2.11.0rc1", "2.11.0", "8.5.0"),
    Release("2.10.0.post4", "2.10.0", "9.1.0"),
    Release("2.10.0rc2", "2.10.0", "8.5.0"),
    Release("2.9.0.post6", "2.9.0", "9.1.0"),
    Release("2.9.0.post2", "2.9.0", "9.0.0"),
    Release("2.9.0", "2.9.0", "8.5.0"),
    Release("2.8.0.post4", "2.8.0", "9.0.0"),
    Release("2.8.0.post2", "2.8.0", "8.5.0"),
    Release("2.8.0", "2.8.0", "8.3.RC1"),
    Release("2.7.1.post8", "2.7.1", "9.1.0"),
    Release("2.7.1.post4", "2.7.1", "9.0.0"),
    Release("2.7.1.post2", "2.7.1", "8.5.0"),
    Release("2.7.1", "2.7.1", "8.3.RC1"),
)
"""Published combinations: newest torch first, and for each torch newest CANN first."""

_RELEASE = re.compile(r"\d+\.\d+\.\d+")


def torch_of(torch_npu: str) -> str:
    """Return the release of torch that a torch-npu needs. Its version begins with it: `2.9.0.post2` needs `2.9.0`."""
    match = _RELEASE.match(torch_npu)
    return match[0] if match else torch_npu


def cann_of(torch_npu: str) -> str | None:
    """Return the version of CANN that a torch-npu was released for; None if it is not published."""
    return next((release.cann for release in RELEASES if release.torch_npu == torch_npu), None)


def release_for(torch: str, cann: str | None) -> str:
    """Return the version of torch-npu to install for a torch and a CANN, as pip takes it."""
    base = torch_of(torch)
    fitting = [release for release in RELEASES if release.torch == base]
    best = next((release for release in fitting if release.cann == cann), fitting[0] if fitting else None)
    return best.torch_npu if best else f"{base}.*"


def built_for_cuda(torch: str, requirements: Iterable[str]) -> bool:
    """Return whether a torch is built for CUDA, by its version and by the packages that its metadata require."""
    _, _, label = torch.partition("+")
    if label:
        return label.startswith("cu")
    return any(requirement.startswith(("nvidia-", "cuda-")) for requirement in requirements)


def fault(torch: str, torch_npu: str, cann: str | None) -> tuple[str, str] | None:
    """Return why a torch and a torch-npu do not fit, and what to install; None if they fit."""
    needed = torch_of(torch_npu)
    if torch_of(torch) == needed:
        return None
    return (
        f"torch-npu {torch_npu} is built for torch {needed}, and torch {torch} is installed",
        f"pip install 'torch-npu=={release_for(torch, cann)}', or torch=={needed}",
    )
