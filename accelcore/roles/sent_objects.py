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
    return torch.frombuffer(bytearray(save(tensors, {"tree": json.dumps(data)})), dtype=torch.uint8)


def object_of(rows: Tensor) -> Any:
    """The object that `rows_of` made such a tensor of; tensors in it are on the CPU."""
    found = rows.numpy().tobytes()
    length = int.from_bytes(found[:8], "little")
    header = json.loads(found[8 : 8 + length])
    return decode(json.loads(header["__metadata__"]["tree"]), load(found))["sent"]
