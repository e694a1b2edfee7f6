"""Variables of launchers, read by hand."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, text_of

_RANKS = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE"),
}
_VISIBLE = {"CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"}


def _check(script: Script) -> Iterator[Mark]:
    for item in script.all(ast.Subscript):
        if script.names.resolve(item.value) == "os.environ":
            yield from _mark(item, text_of(item.slice), reads=isinstance(item.ctx, ast.Load))
    for call, name in script.calls(lambda name: name in {"os.getenv", "os.environ.get", "os.environ.setdefault"}):
        if call.args:
            yield from _mark(call, text_of(call.args[0]), reads=name != "os.environ.setdefault")


def _mark(node: ast.AST, variable: str, *, reads: bool) -> Iterator[Mark]:
    if variable in _VISIBLE:
        yield Mark(
            node,
            f"{variable} hides the devices of one vendor only.",
            "Choose by ACCEL_DEVICE or accelcore.select(); set such a variable where the job is started.",
        )
    elif variable in _RANKS and reads:
        yield Mark(
            node,
            f"{variable} is a variable of certain launchers, read without a check.",
            "Write `with accel.distributed() as job`, which reads every launcher's: job.rank, job.world_size; or "
            "torch.distributed.get_rank() after init_process_group().",
        )


RULE = Rule(
    code="ACC111",
    name="rank-variables",
    about='`int(os.environ["LOCAL_RANK"])` and relatives. Launchers differ in the variables that they set. '
    "`accel.distributed()` reads those of torchrun, Slurm, MPI and others, and names what is missing. Variables "
    "that hide one vendor's devices are found, too.",
    check=_check,
    found='import os, torch\nrank = int(os.environ["LOCAL_RANK"])',
    clean='import os, torch\nthreads = os.environ["OMP_NUM_THREADS"]',
)
