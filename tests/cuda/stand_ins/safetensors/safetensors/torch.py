"""What accelcore.checkpoint uses."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["save_file"]

_NAMES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_TYPES = {name: getattr(torch, name) for name in _NAMES}


def save_file(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    torch.save({"metadata": metadata, "tensors": tensors}, path)
