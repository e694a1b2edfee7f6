"""Port: rewrites training scripts from one vendor's devices to all, where the result is certain."""

from accelcore_lint.port.model import Level, Note
from accelcore_lint.port.rewrite import Outcome, port_source

__all__ = ["Level", "Note", "Outcome", "port_source"]
