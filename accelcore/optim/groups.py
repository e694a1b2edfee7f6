"""Parameter groups that a kernel can update together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["merged"]

_NAMES = ("params", "param_names", "initial_lr")
"""What a group says beside options of the update."""


def merged(groups: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The groups, those of equal options as one: an update that looks at no group as a whole gives the same result.

    Options that are tensors are equal where they are the same tensor.
    """
    if len(groups) == 1:
        return groups
    alike: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for group in groups:
        options = {key: id(v) if isinstance(v, Tensor) else v for key, v in group.items() if key not in _NAMES}
        same = next((together for known, together in alike if known == options), None)
        if same is None:
            alike.append((options, {**group, "params": list(group["params"])}))
        else:
            same["params"] += group["params"]
    return [together for _, together in alike]
