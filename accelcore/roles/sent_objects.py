"""Objects as bytes that can be sent, and read by those who do not trust the sender: without pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from accelcore.checkpoint.codec import decode, encode
from accelcore.errors import CheckpointError, ConfigurationError

__all__ = ["object_of", "rows_of"]

_TREE = "tree"  # the object's own tensors are under "sent"


def rows_of(value: object) -> Tensor:
    """An object as a one-dimensional uint8 tensor on the CPU, never empty.

    Raises:
        ConfigurationError: it holds something else than plain values, tensors, and lists, tuples and dicts of these.
    """
    try:
        data, tensors = encode({"sent": value})
    except CheckpointError as error:
        raise ConfigurationError(
            "an object cannot be sent to other ranks",
            why=error.what,
            available=error.available,
            remedy="turn it into one of those before, or into text",
        ) from error
    tensors[_TREE] = _of_bytes(json.dumps(data).encode())
    return _of_bytes(save(tensors))


def object_of(rows: Tensor) -> Any:
    """The object that `rows_of` made such a tensor of; tensors in it are on the CPU."""
    tensors = load(rows.numpy().tobytes())
    data = json.loads(tensors.pop(_TREE).numpy().tobytes())
    return decode(data, tensors)["sent"]


def _of_bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
