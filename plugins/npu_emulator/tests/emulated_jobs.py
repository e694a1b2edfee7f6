"""What ranks and child processes do. Importable in every one of them."""

import os

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  # where torch does not load it by itself


def start(backends="hccl"):
    """Join the job; this rank, its size and its device."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.npu.set_device(rank)
    dist.init_process_group(backends, init_method=f"file://{os.environ['MASTER_FILE']}", rank=rank, world_size=size)
    return rank, size, torch.device("npu", rank)


DTYPES = ("float32", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
OPERATIONS = {
    "SUM": lambda x: x.sum(0),
    "MAX": lambda x: x.amax(0),
    "MIN": lambda x: x.amin(0),
    "PRODUCT": lambda x: x.prod(0),
}


def contribution(rank, dtype, length=37):
    """Small whole numbers, which every type holds exactly, also when they are added and multiplied."""
    return ((torch.arange(length) * (rank + 3)) % 3).to(getattr(torch, dtype))


def all_reductions(rank, size, device):
    wrong = []
    for dtype in DTYPES:
        inputs = torch.stack([contribution(r, dtype) for r in range(size)]).double()
        for name, expected in OPERATIONS.items():
            x = contribution(rank, dtype).to(device)
            dist.all_reduce(x, getattr(dist.ReduceOp, name))
            if not torch.equal(x.cpu().double(), expected(inputs)):
                wrong.append((dtype, name, x.tolist()))
    return wrong


def average(rank, size, device):
    x = contribution(rank, "float32").to(device)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    return x.tolist()


def average_of_integers(rank, size, device):
    x = torch.tensor([1, 4, -3], device=device) * (rank + 1)
    y = torch.empty(1, dtype=torch.int32, device=device)
    dist.reduce_scatter_tensor(y, torch.full((size,), 5 + rank, dtype=torch.int32, device=device), dist.ReduceOp.AVG)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    return x.tolist(), y.tolist()


def collectives():
    """All of these in one job: what makes a process ready takes longer than what it does."""
    place = start()
    works = (all_reductions, average, average_of_integers, data_movement, messages, coalesced)
    done = {work.__name__: work(*place) for work in works}
    dist.destroy_process_group()
    return done


def half_rounding(pairs):
    """Sums of pairs, one of each on either of two ranks."""
    rank, _, device = start()
    sums = []
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.tensor(pairs)[:, rank].to(dtype).to(device)
        dist.all_reduce(x)
        sums.append(x.tolist())
    dist.destroy_process_group()
    return sums


def long_tensor(length):
    """More than fits into the shared memory at a time."""
    rank, size, device = start()
    x = (torch.arange(length) % 1000 + rank).float().to(device)
    gathered = [torch.empty(length, device=device) for _ in range(size)]
    dist.all_gather(gathered, x)
    dist.all_reduce(x)
    message = torch.full((length,), float(rank), device=device)
    answer = torch.empty_like(message)
    operations = [dist.P2POp(dist.isend, message, (rank + 1) % size), dist.P2POp(dist.irecv, answer, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    dist.destroy_process_group()
    steps = (torch.arange(length) % 1000).float()
    right = torch.equal(x.cpu(), steps * size + sum(range(size)))
    right &= all(torch.equal(gathered[r].cpu(), steps + r) for r in range(size))
    return right and bool((answer.cpu() == (rank - 1) % size).all())


def data_movement(rank, size, device):
    me = torch.arange(3.0, device=device) + 10 * rank
    result = {}

    x = me.clone()
    dist.broadcast(x, 1)
    result["broadcast"] = x.tolist()

    parts = [torch.empty(3, device=device) for _ in range(size)]
    dist.all_gather(parts, me)
    result["all_gather"] = [p.tolist() for p in parts]

    uneven = [torch.empty(r + 1, device=device) for r in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank), device=device))
    result["all_gather uneven"] = [p.tolist() for p in uneven]

    x = torch.empty(2, device=device)
    dist.reduce_scatter(x, list((torch.arange(2.0 * size, device=device) * (rank + 1)).chunk(size)))
    result["reduce_scatter"] = x.tolist()

    x = torch.empty(rank + 1, device=device)
    dist.reduce_scatter(x, [torch.full((r + 1,), float(r), device=device) for r in range(size)])
    result["reduce_scatter uneven"] = x.tolist()

    x = torch.empty(size, device=device)
    dist.all_to_all_single(x, torch.arange(float(size), device=device) + 10 * rank)
    result["all_to_all"] = x.tolist()

    # Rank r sends r + 1 numbers to rank 0 and one to every other.
    to = [rank + 1] + [1] * (size - 1)
    back = [r + 1 for r in range(size)] if rank == 0 else [1] * size
    x = torch.empty(sum(back), device=device)
    dist.all_to_all_single(x, torch.full((sum(to),), float(rank), device=device), back, to)
    result["all_to_all uneven"] = x.tolist()

    parts = [torch.empty(3, device=device) for _ in range(size)] if rank == 0 else None
    dist.gather(me, parts, dst=0)
    result["gather"] = [p.tolist() for p in parts or []]

    x = torch.empty(2, device=device)
    dist.scatter(x, [torch.full((2,), float(r), device=device) for r in range(size)] if rank == 0 else None, src=0)
    result["scatter"] = x.tolist()

    x = me.clone()
    dist.reduce(x, 0)
    result["reduce"] = x.tolist() if rank == 0 else []

    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    result["objects"] = objects

    x = torch.empty(0, device=device)
    dist.all_reduce(x)
    result["empty"] = x.tolist()
    dist.barrier()
    return result


def messages(rank, size, device):
    x = torch.full((3,), float(rank), device=device)
    got = {}
    if rank == 0:
        for peer in range(1, size):
            dist.send(x + peer, peer)
            dist.send(x - peer, peer)
    else:
        for name in ("first", "second"):
            dist.recv(x, 0)
            got[name] = x.tolist()
    return got


def subgroups():
    """Two halves that work at the same time, and a pair across them, beside the whole."""
    rank, size, device = start()
    halves = [dist.new_group(range(size // 2)), dist.new_group(range(size // 2, size))]
    across = dist.new_group([0, size - 1])
    mine = halves[rank >= size // 2]
    sums = []
    for group in (mine, None, *([across] if rank in (0, size - 1) else []), mine):
        x = torch.tensor([float(rank)], device=device)
        dist.all_reduce(x, group=group)
        sums.append(x.item())
    dist.destroy_process_group()
    return sums


def coalesced(rank, size, device):
    tensors = [torch.full((n,), float(rank + 1), device=device) for n in (1, 2, 5)]
    with dist._coalescing_manager(device=device):
        for x in tensors:
            dist.all_reduce(x)
    return [x.tolist() for x in tensors]


def captured_reduction():
    _, _, device = start()
    x = torch.ones(1, device=device)
    dist.all_reduce(x)
    try:
        with torch.npu.graph(torch.npu.NPUGraph()):
            dist.all_reduce(x)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def double_precision():
    rank, _, device = start()
    x = torch.tensor([1 / 3 if rank == 0 else 0.0], dtype=torch.float64, device=device)
    dist.broadcast(x, 0)
    try:
        dist.all_reduce(x)
    except RuntimeError as error:
        return x.tolist(), str(error)
    return x.tolist(), "nothing"


def sums_until_failure(count):
    """All-reduce again and again; how often it went well, and what ended it."""
    _, _, device = start()
    done = 0
    try:
        for _ in range(count):
            dist.all_reduce(torch.ones(1, device=device))
            done += 1
    except RuntimeError as error:
        return done, str(error)
    dist.destroy_process_group()
    return done, ""


def absent_rank():
    """Rank 1 does not come to the second all-reduce, though it lives on; what rank 0 is told."""
    rank, _, device = start()
    store = dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(1, device=device))
    if rank == 1:
        store.wait(["told"])
        return ""
    try:
        dist.all_reduce(torch.ones(1, device=device))
    except RuntimeError as error:
        store.set("told", "1")
        return str(error)
    return "nothing"


def unanswered_messages():
    """Rank 1 ends after the first of three messages; what rank 0 is told."""
    rank, _, device = start()
    x = torch.ones(1, device=device)
    if rank == 1:
        dist.recv(x, 0)
        return ""
    try:
        for _ in range(3):
            dist.send(x, 1)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def failure_of_first_use():
    try:
        torch.ones(1, device="npu")
    except RuntimeError as error:
        return str(error)
    return ""


def use_after_fork():
    """What a forked child is told when it uses the device: new tensors, and those it inherited."""
    x = torch.ones(2, device="npu")
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        for use in (lambda: torch.ones(1, device="npu"), lambda: x + 1, x.cpu, torch.npu.synchronize):
            try:
                use()
                os.write(tell, b"nothing\n")
            except RuntimeError as error:
                os.write(tell, " ".join(str(error).split()).encode() + b"\n")
        os._exit(0)
    os.close(tell)
    _, status = os.waitpid(child, 0)
    with os.fdopen(told) as lines:
        return status, lines.read().splitlines(), (x + 1).tolist()


def use_before_fork():
    """A child that is forked before the device is used may use it."""
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.ones(2, device="npu").sum().item() == 2 else 1)
    return os.waitpid(child, 0)[1]
