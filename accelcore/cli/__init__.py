"""The command line. Nothing here trains: scripts and the conformance suite run in processes of their own.

Only `precision`, `export` and `replay` import torch in this process.

For every command, a user's mistake is one message on stderr and exit code 64: click's own, or accelcore's. `--debug`
adds the traceback. A reader that closes early, like `head`, is not an error.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from types import SimpleNamespace

from accelcore.errors import AccelError

USAGE = 64  # exit code of an invalid request; `sysexits.h` calls it EX_USAGE. 1 and 2 belong to doctor's findings.

ROLES = (
    *("backend", "operators", "precision", "scaler", "optimizers", "collectives", "compiler", "runtime", "training"),
    "parallel",
)
"""Parts of the conformance suite: the backend as a whole, its operators, its six roles, training, jobs of ranks."""

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code."""
    import click

    from accelcore.cli.commands import app

    arguments = sys.argv[1:] if arguments is None else arguments
    settings = SimpleNamespace(debug=False)
    try:
        code = app.main(list(arguments), prog_name="accelcore", standalone_mode=False, obj=settings)
        sys.stdout.flush()
    except (AccelError, click.ClickException) as error:
        if settings.debug:
            traceback.print_exc()
        elif isinstance(error, click.ClickException):
            error.show()
        else:
            print(f"accelcore: {error}", file=sys.stderr)  # noqa: T201
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        print("accelcore: interrupted", file=sys.stderr)  # noqa: T201
        return _INTERRUPTED
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
        # The interpreter flushes stdout again at exit; that must not fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return int(code or 0)
