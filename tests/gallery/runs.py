"""The gallery's scripts and their twins, made small enough for a test of seconds.

As a program, a rank of a job: runs.py FOLDER ours twins synced runs all the scripts, then their twins, then
imagenet.py with BatchNorm over ranks; what they return goes to FOLDER/rank-N.json. Any of the three can be left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import twins

import accelcore

SMALL = {
    "nanogpt": (
        "--text=3000", "--block-size=16", "--width=32", "--layers=1", "--batch-size=4", "--steps=12", "--warmup=3",
        "--eval-every=4", "--log-every=1",
    ),
    "imagenet": (
        "--size=110", "--classes=10", "--batch-size=10", "--width=4", "--epochs=3", "--step-size=2",
        "--lr=0.003",  # faster, so small a network has gradients of which fp32 keeps few digits
    ),
    "dcgan": ("--size=68", "--batch-size=16", "--epochs=2", "--log-every=1", "--ngf=4", "--ndf=4"),
}  # fmt: skip


def run(which, name, folder, *options):
    """What a script or its twin returns."""
    return getattr(twins, which.upper())[name]([*SMALL[name], f"--output={folder / which / name}", *options])


def main(folder, *which):
    job = accelcore.select().join()  # which the scripts and their twins find
    found = {each: {name: run(each, name, Path(folder)) for name in twins.NAMES} for each in which if each != "synced"}
    if "synced" in which:
        found["synced"] = run("ours", "imagenet", Path(folder), "--sync-batchnorm", f"--output={folder}/synced")
    Path(folder).mkdir(exist_ok=True)
    Path(folder, f"rank-{job.rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
