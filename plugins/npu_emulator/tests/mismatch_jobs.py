"""Ranks that do not call the same: each pair of calls in a group of its own, since a refusal ends its group."""

import torch
import torch.distributed as dist
from emulated_jobs import start


def _numbers(count, dtype=torch.float32):
    return torch.ones(count, dtype=dtype, device="npu")


def _gathered(count, of):
    return lambda group: dist.all_gather([_numbers(size) for size in of], _numbers(count), group=group)


def _swapped(send, receive):
    def call(group):
        dist.all_to_all_single(_numbers(sum(receive)), _numbers(sum(send)), receive, send, group=group)

    return call


# What rank 0 calls, what rank 1 calls, and what both must be told of it.
COLLECTIVES = {
    "operation": (
        lambda group: dist.all_reduce(_numbers(3), group=group),
        lambda group: dist.broadcast(_numbers(3), 0, group=group),
        ("rank 0: HcclAllReduce of 3 float32, sum", "rank 1: HcclBroadcast of 3 float32, root 0"),
    ),
    "size": (
        lambda group: dist.all_reduce(_numbers(3), group=group),
        lambda group: dist.all_reduce(_numbers(4), group=group),
        ("rank 0: HcclAllReduce of 3 float32, sum", "rank 1: HcclAllReduce of 4 float32, sum"),
    ),
    "dtype": (
        lambda group: dist.all_reduce(_numbers(2), group=group),
        lambda group: dist.all_reduce(_numbers(4, torch.float16), group=group),
        ("rank 0: HcclAllReduce of 2 float32, sum", "rank 1: HcclAllReduce of 4 float16, sum"),
    ),
    "reduction": (
        lambda group: dist.all_reduce(_numbers(3), group=group),
        lambda group: dist.all_reduce(_numbers(3), dist.ReduceOp.MAX, group=group),
        ("rank 0: HcclAllReduce of 3 float32, sum", "rank 1: HcclAllReduce of 3 float32, maximum"),
    ),
    "root": (
        lambda group: dist.broadcast(_numbers(3), 0, group=group),
        lambda group: dist.broadcast(_numbers(3), 1, group=group),
        ("rank 0: HcclBroadcast of 3 float32, root 0", "rank 1: HcclBroadcast of 3 float32, root 1"),
    ),
    "gathered": (
        _gathered(2, of=(2, 3)),
        _gathered(4, of=(2, 4)),
        ("rank 1: sends 16 bytes to rank 0; rank 0: receives 12 bytes from rank 1",),
    ),
    "exchanged": (
        _swapped((1, 2), (1, 3)),
        _swapped((4, 1), (2, 1)),
        ("rank 1: sends 16 bytes to rank 0; rank 0: receives 12 bytes from rank 1",),
    ),
}


def told_of_mismatches():
    """What this rank is told of each pair, and what still works afterwards."""
    rank, size, device = start()
    told = {}
    for name, calls in COLLECTIVES.items():
        group = dist.new_group(range(size))
        dist.all_reduce(_numbers(1), group=group)
        try:
            calls[rank](group)
            told[name] = "nothing"
        except RuntimeError as error:
            told[name] = str(error)
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    return told, total.item()


def told_of_long_message():
    """Rank 1 waits for more than rank 0 sends; what each is told, rank 0 when it sends once more."""
    rank, _, _ = start()
    store = dist.distributed_c10d._get_default_store()
    try:
        if rank == 1:
            dist.recv(_numbers(5), 0)
        dist.send(_numbers(3), 1)
        store.wait(["told"])
        dist.send(_numbers(3), 1)
    except RuntimeError as error:
        store.set("told", "1")
        return str(error)
    return "nothing"


def fewer_tensors_than_ranks():
    """Sums of one tensor where two are to be scattered; the first of the process, so that all memory is fresh."""
    _, _, device = start()
    x = torch.zeros(2, device=device)
    dist.reduce_scatter(x, [_numbers(2)])
    return x.tolist()
