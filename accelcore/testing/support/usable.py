"""Devices that a failed kernel has made unusable for the rest of the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

_lost: dict[torch.device, str] = {}


def why_unusable() -> str:
    """Return since when no call on a tested device works any more; empty if all of them are usable."""
    return next(iter(_lost.values()), "")


def check_usable(device: torch.device, after: str) -> None:
    """Fail the test if no call on the device works any more after what is named, and remember it."""
    try:
        torch.ones(1, device=device).sum().item()
    except Exception as error:  # noqa: BLE001  devices raise errors of any kind
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        _lost[device] = f"since {after}, every call on {device} in this process fails ({reason})"
        pytest.fail(f"{_lost[device]}: the tests after it are not run, because their results would mean nothing")


class DeviceTests:
    """Base of the suite's classes."""

    @pytest.fixture(autouse=True)
    def _usable_device(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Skip the test if the device is unusable, and fail it if the device is unusable after it."""
        if why_unusable():
            pytest.skip(f"not run: {why_unusable()}")
        device = request.getfixturevalue("accel").device
        yield
        if not why_unusable():
            check_usable(device, request.node.nodeid)
