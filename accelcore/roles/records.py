"""Records that torch, or a vendor's library, keeps of collectives where environment variables say so."""

from __future__ import annotations

import os
from collections.abc import Mapping

from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]  # its types leave them out

__all__ = ["Records"]


class Records:
    """Variables that are set while a job stands, but for those that the user has set.

    Args:
        always: what costs nothing that can be measured.
        detailed: what costs time; only where TORCH_DISTRIBUTED_DEBUG is DETAIL.
    """

    def __init__(self, always: Mapping[str, str] | None, detailed: Mapping[str, str] | None) -> None:
        self._always, self._detailed = always or {}, detailed or {}
        self._set: list[str] = []

    def keep(self) -> None:
        """Set them; the libraries read them when they form a group."""
        wanted = {**self._always, **(self._detailed if get_debug_level() == DebugLevel.DETAIL else {})}
        self._set = [name for name in wanted if name not in os.environ]
        os.environ.update({name: wanted[name] for name in self._set})

    def put_back(self) -> None:
        """Have the environment as it was."""
        for name in self._set:
            os.environ.pop(name, None)
        self._set = []
