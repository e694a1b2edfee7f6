"""One stage in this process, for scripts/gpu_check.py: `python -m benchmarks.gpu STAGE ...`."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.results import STAGES, Findings

if TYPE_CHECKING:
    from benchmarks.gpu.device import Deadline, Device

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a stage, or only describe the device, and write what was found; 1 where there is no such device."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("what", choices=["describe", *STAGES])
    parser.add_argument("--device", required=True, choices=["cuda", "cpu"])
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--seconds", type=float, default=470.0)
    parser.add_argument("--result", type=Path, required=True)
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

    start = time.perf_counter()  # the imports take seconds, too
    from accelcore import AccelError
    from benchmarks.gpu.device import Deadline, Device

    deadline = Deadline(options.seconds - (time.perf_counter() - start))
    try:
        device = Device(options.device, toy=options.toy)
    except AccelError as error:
        print(error, file=sys.stderr)
        return 1
    if options.what == "describe":
        record = {"chip": device.chip(), "rehearsal": device.rehearsal}
    else:
        record = _record(options.what, device, deadline)
    options.result.write_text(json.dumps(record), encoding="utf-8")
    return 0


def _record(stage: str, device: Device, deadline: Deadline) -> dict[str, Any]:
    import torch._dynamo

    start, date = time.perf_counter(), datetime.now(timezone.utc).isoformat(timespec="seconds")
    # A limit that is hit would otherwise mean eager from then on, in silence.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    machine, before = device.describe(), device.clocks()
    try:
        found = import_module(f"benchmarks.gpu.stage_{stage}").run(device, deadline)
        record = found.record(rehearsal=device.rehearsal)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is what was found
        traceback.print_exc()
        record = Findings({}, failures=[f"{type(error).__name__}: {error}"]).record(rehearsal=device.rehearsal)
    seconds = round(time.perf_counter() - start, 1)
    clocks = {"before": before, "after": device.clocks()}
    run = {"date": date, "toy": device.toy, "device": device.type, "seconds": seconds}
    return {**run, "machine": machine, "clocks": clocks, **record}


if __name__ == "__main__":
    sys.exit(main())
