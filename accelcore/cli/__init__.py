"""The command line. Nothing here trains: scripts and the conformance suite run in processes of their own.

Only `precision` and `export` import torch in this process.

For every command, a user's mistake is one message on stderr and exit code 64. `--debug` adds the traceback. A reader
that closes early, like `head`, is not an error.
"""

from __future__ import annotations

import errno
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
_NO_OUTPUT = 74  # EX_IOERR: the disk of the output is full


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
            _show(error, arguments)
        else:
            print(f"accelcore: {error}", file=sys.stderr)  # noqa: T201
        return USAGE
    except (click.Abort, KeyboardInterrupt):
        print("accelcore: interrupted", file=sys.stderr)  # noqa: T201
        return _INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # The interpreter flushes stdout again at exit; that must not fail, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.EPIPE:
            return 1
        print(f"accelcore: the output is not complete: {error}", file=sys.stderr)  # noqa: T201
        return _NO_OUTPUT
    return int(code or 0)


def _show(error: click.ClickException, arguments: Sequence[str]) -> None:
    """Print an error of click in the form of accelcore's own errors."""
    import click

    text = error.format_message()
    if isinstance(error, click.UsageError) and not text.startswith("Usage:"):  # else the help of a group
        context = error.ctx or _context(arguments)
        remedy = f"see {context.command_path} --help"
        if isinstance(error, click.NoSuchOption) and error.possibilities:
            has_nproc = any("--nproc" in option.opts for option in context.command.params)
            near = ["--nproc"] if has_nproc and error.option_name == "--ranks" else error.possibilities
            text, remedy = error.message, f"did you mean {' or '.join(near)}? Else {remedy}"
        elif isinstance(error, click.MissingParameter) and error.param is not None:
            given = next((name for name in error.param.opts if name in arguments and name.startswith("-")), None)
            if given is not None:
                remedy = f"write {given} before the script: options after the script are the script's"
        text = "\n".join(
            (
                f"accelcore: {text[:1].lower()}{text[1:].removesuffix('.')}",
                f"  usage: {context.get_usage().removeprefix('Usage: ')}",
                f"  what to do: {remedy}",
            )
        )
    print(text, file=sys.stderr)  # noqa: T201


def _context(arguments: Sequence[str]) -> click.Context:
    """Return the context of the command that was called: click gives none with an option that lacks its value."""
    import click

    from accelcore.cli.commands import app

    context = click.Context(app, info_name="accelcore")
    for word in arguments:
        command = context.command.get_command(context, word) if isinstance(context.command, click.Group) else None
        if command is not None:
            context = click.Context(command, info_name=word, parent=context)
    return context
