"""Objects that can be copied, and not pickled."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from accelcore.errors import UnsupportedError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Copied"]


class Copied:
    """Is copied through its `__getstate__` and `__setstate__`; the state holds what only this process has."""

    def __getstate__(self) -> dict[str, Any]:
        raise NotImplementedError

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def __copy__(self) -> Self:
        return self._twin(self.__getstate__())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._twin(copy.deepcopy(self.__getstate__(), memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"this {type(self).__name__} cannot be pickled",
            why="it holds the routes of the device in this process",
            remedy="pickle its state_dict(), and load that into one that is made anew",
        )

    def _twin(self, state: dict[str, Any]) -> Self:
        twin = type(self).__new__(type(self))
        twin.__setstate__(state)
        return twin
