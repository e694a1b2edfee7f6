"""Linter for PyTorch training scripts. It parses them with `ast`, and never imports or runs them.

It needs neither torch nor accelcore.
"""

from __future__ import annotations

__version__ = "0.1.0"
