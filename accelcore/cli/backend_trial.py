"""The child process of `accelcore doctor --deep`, with a backend's name as its argument or none.

Imports torch; with a name also selects that backend and multiplies two small matrices on it. The line on stderr
that begins with `SAYS` tells that all is well, or the root of the error; the exit code is 0 or 1 accordingly.
"""

from __future__ import annotations

import sys
import traceback

__all__ = ["SAYS", "WORKS", "main"]

SAYS = "accelcore trial: "
"""How the line begins that tells the parent what came of it."""

WORKS = "works"
"""What that line says where all is well: an exit code of 0 alone may be a library's own `exit`."""


def main() -> int:
    """Try what the arguments say."""
    try:
        import torch

        for name in sys.argv[1:]:
            import accelcore

            backend = accelcore.select(name)
            matrix = torch.tensor([[0.0, 1.0], [2.0, 3.0]], device=backend.device)
            product = (matrix @ matrix).cpu().tolist()
            if product != [[2.0, 3.0], [6.0, 11.0]]:
                raise ArithmeticError(f"{name} multiplies wrongly: [[0, 1], [2, 3]] squared is {product}")
    except BaseException as error:  # noqa: BLE001  # SystemExit too: it is the plugin's, not this program's
        traceback.print_exc()
        from accelcore.plugins import describe

        while error.__cause__ is not None:
            error = error.__cause__
        sys.stderr.write(f"{SAYS}{describe(error)}\n")
        return 1
    sys.stderr.write(f"{SAYS}{WORKS}\n")
    return 0
