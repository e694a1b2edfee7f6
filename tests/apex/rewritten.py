"""Run a script that was written for apex after changing its import lines, and nothing else.

As a program, a rank of a job: rewritten.py FOLDER RUNS, a JSON list of scripts with their arguments, in which RANK
stands for the rank's number. Each forms the process group, as it thinks; what they return goes to FOLDER/rank-N.json.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

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


def _ranks(folder: str, runs: str) -> None:
    from accelcore.apex import amp
    from accelcore.torch_internals import unlocked_destruction

    args = json.loads(runs)
    dist.init_process_group(os.environ.get("DIST_BACKEND", "gloo"))
    dist.init_process_group, leave = lambda backend: None, dist.destroy_process_group
    dist.destroy_process_group = lambda: None
    found = []
    for script, *arguments in args:
        found.append(run(script, *(each.replace("RANK", os.environ["RANK"]) for each in arguments)))
        amp.reset()
    Path(folder, f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")
    with unlocked_destruction():  # torch 2.7 may wait forever without it
        leave()


if __name__ == "__main__":
    _ranks(*sys.argv[1:])
