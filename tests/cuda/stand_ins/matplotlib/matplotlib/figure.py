"""What train_gpt.py uses."""

from __future__ import annotations

from unittest.mock import MagicMock as Figure

__all__ = ["Figure"]
