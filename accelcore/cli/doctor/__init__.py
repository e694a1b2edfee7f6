"""`accelcore doctor`: ask plugins in separate processes, diagnose, and print.

It only reports: `devices` chooses, and `known_faults.py` and `torch_features.py` have the tables.
"""

from __future__ import annotations

import click

from accelcore.cli.options import common, json_option, number


@click.command()
@json_option
@click.option("--deep", is_flag=True, help="Also import torch and try each usable backend, in processes of their own.")
@number("--timeout", "SECONDS", 60, "How long one trial of --deep may take.", most=86400)
@common
def doctor(as_json: bool, deep: bool, timeout: int) -> int:
    """Report which backends work here, and what the others lack.

    Asks plugins and reads package metadata, and touches no device. If `import torch` also loads other packages, a child
    process tries it. With --deep, child processes import torch and multiply two small matrices on every usable
    backend, so that a crash or a hang is reported.

    \b
    Exit code:
      0   every plugin answered, and at least one backend is usable
      1   something is broken: torch, a plugin, a trial of --deep, versions; or select() raises
      2   no backend is usable, broken or not, and import torch was not seen to fail
      64  the request is invalid

    \b
    Examples:
      accelcore doctor
      accelcore doctor --deep --timeout 120
      accelcore doctor --json | python -m json.tool
    """  # noqa: D301  # click reads the backspace: what follows keeps its lines
    from accelcore.cli.doctor import diagnosis, layout

    found = diagnosis.diagnose(deep_timeout=timeout if deep else None)
    layout.show(found, as_json=as_json)
    return found.exit_code
