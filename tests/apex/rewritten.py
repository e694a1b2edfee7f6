"""Run a script that was written for apex after changing its import lines, and nothing else.

As a program: rewritten.py FOLDER SCRIPT ARGUMENTS; what the script returns goes to FOLDER/rank-N.json.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"


def load(script: str) -> dict[str, Any]:
    """The names in a script of `scripts/`."""
    source = (SCRIPTS / script).read_text(encoding="utf-8")
    changed = re.sub(r"(?m)^from apex\b", "from accelcore.apex", source)
    changed = re.sub(r"(?m)^import apex$", "from accelcore import apex", changed)
    assert changed != source
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(changed, script, "exec"), names)
    return names


def run(script: str, *arguments: object) -> dict[str, Any]:
    """What its `main` returns."""
    return load(script)["main"]([str(argument) for argument in arguments])


if __name__ == "__main__":
    folder, script, *arguments = sys.argv[1:]
    found = run(script, *arguments)
    Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")
