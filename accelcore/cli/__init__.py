"""The command line. Nothing here trains: scripts and the conformance suite run in processes of their own.

Only `precision` and `export` import torch in this process.

For every command, a user's mistake is one message on stderr and exit code 64. `--debug` adds the traceback. A reader
that closes early, like `head`, is not an error.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

from accelcore.errors import AccelError

if TYPE_CHECKING:
    import click

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

    settings = SimpleNamespace(debug=False)
    try:
        code = app.main(
            None if arguments is None else list(arguments), prog_name="accelcore", standalone_mode=False, obj=settings
        )
        sys.stdout.flush()
    except (AccelError, click.ClickException) as error:
        if settings.debug:
            traceback.print_exc()
        elif isinstance(error, click.ClickException):
            _show(error)
        else:
            print(f"accelcore: {error}", file=sys.stderr)  # noqa: T201
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout again at exit; that must not fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return int(code or 0)


def _show(error: click.ClickException) -> None:
    """Print an error of click in the form of accelcore's own errors."""
    text = error.format_message()
    context: click.Context | None = getattr(error, "ctx", None)
    if context is not None and not text.startswith("Usage:"):  # the help of a group that was called without a command
        text = "\n".join(
            (
                f"accelcore: {text[:1].lower()}{text[1:].removesuffix('.')}",
                f"  usage: {context.get_usage().removeprefix('Usage: ')}",
                f"  what to do: see {context.command_path} --help",
            )
        )
    print(text, file=sys.stderr)  # noqa: T201
