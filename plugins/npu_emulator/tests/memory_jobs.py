"""What processes do with the memory of a device, and with devices that are not all to be seen."""

import os
import resource

import torch
import torch_npu  # noqa: F401  # where torch does not load it by itself
from torch.nn import functional

# Results that are too large for a device of 64 MiB, by how they are made.
_GIGABYTES = {
    "zeros": lambda row, column: torch.zeros(2**28, device="npu"),
    "tera": lambda row, column: torch.zeros(2**40, device="npu"),
    "random": lambda row, column: torch.randn(2**40, device="npu"),
    "range": lambda row, column: torch.arange(2**40, device="npu"),
    "fine range": lambda row, column: torch.arange(0, 1, 2.0**-40, device="npu"),
    "identity": lambda row, column: torch.eye(2**14, device="npu"),
    "triangle": lambda row, column: torch.triu_indices(2**14, 2**14, device="npu"),
    "sum": lambda row, column: row + column,
    "product": lambda row, column: column @ row,
    "repeated": lambda row, column: row.repeat(2**14, 1),
    "expanded": lambda row, column: row.expand(2**14, 2**14).clone(),
    "padded": lambda row, column: functional.pad(row, (0, 0, 2**13, 2**13)),
    "joined": lambda row, column: torch.cat([row] * 2**14),
    "one hot": lambda row, column: functional.one_hot(column.long().flatten(), 2**14),
    "looked up": lambda row, column: functional.embedding(column.long().flatten() - 1, row),
    "distances": lambda row, column: torch.cdist(column, column),
    "distances of pairs": lambda row, column: functional.pdist(column),
    "diagonal": lambda row, column: torch.diag_embed(row),
    "counted": lambda row, column: torch.bincount(column.long().flatten(), minlength=2**44),
    "scanned": lambda row, column: row[:, 0].expand(2**44).cumsum(0),
    "into": lambda row, column: torch.eye(2**14, out=torch.empty(0, device="npu")),
}


def host_memory_of_refusals():
    """What each is refused with, and by how many MiB the process grew in all."""
    row, column = torch.ones(1, 2**14, device="npu"), torch.ones(2**14, 1, device="npu")
    torch.ones(2, device="meta") + 1  # loads what finds shapes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    told = {}
    for name, make in _GIGABYTES.items():
        try:
            make(row, column)
            told[name] = "nothing"
        except (RuntimeError, MemoryError) as error:
            told[name] = type(error).__name__
    return told, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10


def out_of_memory():
    """Whether too large a tensor fails as torch says, and what still works afterwards."""
    device = torch.device("npu", 0)
    _, total = torch.npu.mem_get_info(device)
    try:
        torch.empty(total, dtype=torch.uint8, device=device).fill_(0)
        torch.empty(total, dtype=torch.uint8, device=device)
        failed = ""
    except torch.OutOfMemoryError as error:
        failed = str(error)
    torch.npu.empty_cache()
    return {
        "total": total,
        "failed": failed,
        "other device": torch.ones(total // 8, device="npu:1").mean().item(),
        "afterwards": torch.ones(total // 8, device=device).mean().item(),
        "accounted": total - torch.npu.mem_get_info(device)[0],
        "reserved": torch.npu.memory_reserved(device),
    }


def allocations(count, size):
    """Which of several allocations fail; each is larger than what torch_npu keeps in its cache."""
    failed = []
    kept = []
    for number in range(1, count + 1):
        try:
            kept.append(torch.empty(size, dtype=torch.uint8, device="npu"))
        except torch.OutOfMemoryError as error:
            failed.append((number, str(error)))
    return failed


def fresh_memory():
    x = torch.empty(1 << 20, device="npu")
    y = torch.empty(1 << 20, dtype=torch.int64, device="npu")
    return x.isnan().sum().item(), (y == -1).sum().item()


def visible_devices():
    count = torch.npu.device_count()
    if count:
        torch.ones(1, device=f"npu:{count - 1}")
    return count


def visible_devices_said_late():
    """How many devices there are before and after a script names two of four; then it uses the second."""
    counts = [torch.npu.device_count()]
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "1,3"
    counts.append(torch.npu.device_count())
    torch.ones(1, device="npu:1")
    return counts
