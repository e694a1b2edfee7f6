"""One rank of a job that loses another, in a way that the argument names: for test_missing_ranks.py."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import accelcore


def loads(rank: int, step: int) -> torch.Tensor:
    """A batch; in its third step rank 1 has a problem with its data."""
    if rank == 1 and step == 3:
        if sys.argv[1].startswith("waits"):
            threading.Event().wait()
        if sys.argv[1].startswith("is killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1].startswith("fails"):
            raise ValueError("a row is bad")
        if sys.argv[1].startswith("exits"):
            sys.exit(0)
    if rank == 0 and step == 3 and sys.argv[1].endswith("and rank 0 is not in a collective"):
        heard = threading.Event()
        handler = logging.Handler(logging.ERROR)
        handler.emit = lambda record: (sys.stderr.write(f"{record.getMessage()}\n"), heard.set())
        logging.getLogger("accelcore").addHandler(handler)
        assert heard.wait(30)
    if rank == 0 and step == 3 and sys.argv[1].endswith("and the device of rank 0 waits"):
        aborted = threading.Event()
        dist.ProcessGroup.abort = lambda group: aborted.set()  # as NCCL's ends the wait; gloo has no device
        assert aborted.wait(30)
        sys.stderr.write("wrong values were used\n")
    if rank == 0 and step == 3 and sys.argv[1].endswith("and rank 2 notices first"):
        while not Path(sys.argv[2], "rank 2 has ended").exists():
            time.sleep(0.01)
    return torch.ones(2, 3)


def main() -> None:
    try:
        train()
    finally:
        if any(thread.name == "accelcore: barrier" for thread in threading.enumerate()):
            sys.stderr.write("a thread is left in a barrier\n")
        Path(sys.argv[2], f"rank {os.environ['RANK']} has ended").touch()


def train() -> None:
    dist.set_debug_level_from_env()  # torch reads it when it is loaded, which in a fork was before it was set
    accel = accelcore.select("cpu")
    accel.collectives.waits_for_lost_ranks = sys.argv[1].endswith("and the device of rank 0 waits")
    place = {"timeout": timedelta(seconds=5)}
    with nullcontext(accel.join(**place)) if sys.argv[1].endswith("joined") else accel.distributed(**place) as job:
        model = nn.Linear(3, 1)
        optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
        trainer = accel.trainer(
            model,
            optimizer,
            loss=lambda model, rows: model(rows).sum(),
            parallel="combine_ddp",
            accumulate=3 if "within a window" in sys.argv[1] else 1,
        )
        whole = 6 if sys.argv[1] in ("stops early, within a window", "saves early, within a window") else 4
        steps = 2 if sys.argv[1] == "stops early" and job.rank == 1 else 4 if job.rank else whole
        for step in range(1, steps + 1):
            rows = loads(job.rank, step)
            try:
                trainer(rows)
            except RuntimeError as error:
                if sys.argv[1].endswith("in other words"):
                    raise RuntimeError("HcclAllreduce, error code is 9").with_traceback(error.__traceback__) from None
                if sys.argv[1] == "waits, and is asked again":
                    break
                if sys.argv[1] == "fails, and that is wrapped":
                    raise KeyError("the step") from error
                raise
        if sys.argv[1].startswith("flushes alone") and job.rank == 0:
            trainer.flush()
        if sys.argv[1] == "waits, and is asked again":
            job.all_reduce(torch.ones(1))
        if (sys.argv[1].startswith("saves alone") and job.rank == 0) or sys.argv[1].startswith("saves early"):
            trainer.save(sys.argv[2])
        if sys.argv[1].startswith("leaves") and job.rank == 1:
            raise ValueError("nothing to evaluate")
        if sys.argv[1].startswith("leaves") and job.rank == 0:
            while not Path(sys.argv[2], "rank 2 has ended").exists():
                time.sleep(0.01)
            job.barrier()
        if sys.argv[1].startswith("evaluates alone") and job.rank == 0:
            [model(rows) for rows in trainer.evaluate([torch.ones(2, 3)] * 4)]
        if sys.argv[1].startswith("gathers") and job.rank == 0:
            job.gather(torch.ones(1))
        if sys.argv[1] == "gathers before a barrier":
            job.barrier()
        if sys.argv[1].startswith("means, while others train") and job.rank == 0:
            job.mean(1.0)
        if sys.argv[1].startswith("means, while others train"):
            trainer(torch.ones(2, 3))
        if sys.argv[1].startswith("resumes, while others read") and job.rank == 0:
            trainer.resume(sys.argv[2])
        if sys.argv[1].startswith("resumes, while others read"):
            next(iter(trainer.batches(DataLoader(torch.ones(8, 3), shuffle=True))))
        if sys.argv[1].startswith("stands alone at a barrier") and job.rank == 0:
            job.barrier()
        if sys.argv[1].startswith("reduces alone") and job.rank == 0:
            accel.collectives.all_reduce(torch.ones(1))
        if sys.argv[1] == "another collective":
            tensor = torch.ones(3)
            accel.collectives.broadcast(tensor) if job.rank else accel.collectives.all_reduce(tensor)
        if sys.argv[1] == "another shape":
            accel.collectives.all_reduce(torch.ones(3 + job.rank))


def end_as_a_script(main) -> None:
    """As the interpreter does, which multiprocessing's forks do not: show the error, then call what joined the job."""
    try:
        main()
    except Exception as error:  # noqa: BLE001  # shown as Python would
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


if __name__ == "__main__":
    end_as_a_script(main) if sys.argv[1].endswith("joined") else main()
