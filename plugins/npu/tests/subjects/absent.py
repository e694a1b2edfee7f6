"""One rank of a job with a short timeout, in which rank 1 does not come to a collective. Writes JSON."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import accelcore


def main():
    accel = accelcore.select("npu")
    with accel.distributed(timeout=timedelta(seconds=3)) as job:
        found = {"limit": os.environ.get("HCCL_EXEC_TIMEOUT")}
        accel.collectives.all_reduce(torch.ones(1, device=accel.device))
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=60))
        if job.rank == 0:
            try:
                accel.collectives.all_reduce(torch.ones(1, device=accel.device))
            except RuntimeError as error:
                found["error"] = str(error).strip()
            store.set("told", "1")
            store.wait(["heard"])  # this rank holds the store, and must not leave before the other
        else:
            store.wait(["told"])
            store.set("heard", "1")
        Path(sys.argv[1], f"rank-{job.rank}.json").write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)  # what hccl was left in cannot be left in order


if __name__ == "__main__":
    main()
