"""Groups with configurations of their own, each of which hccl takes or refuses when the group is first used."""

import torch
import torch.distributed as dist
import torch_npu
from emulated_jobs import start


def configured(**config):
    """A group of all ranks with that `hccl_config`."""
    options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
    options.hccl_config = config
    return dist.new_group(pg_options=options)


def told_of_configurations(configs):
    """What is told of each, or the sum of ones that a group with it gives."""
    _, _, device = start()
    told = []
    for config in configs:
        total = torch.ones(1, device=device)
        try:
            dist.all_reduce(total, group=configured(**config))
            told.append(total.item())
        except RuntimeError as error:
            told.append(str(error))
    dist.destroy_process_group()
    return told


def told_of_time(seconds):
    """Rank 1 does not come to a second sum in a group that waits so long; what rank 0 is told."""
    rank, _, device = start()
    store = dist.distributed_c10d._get_default_store()
    group = configured(hccl_exec_timeout=seconds)
    dist.all_reduce(torch.ones(1, device=device), group=group)
    if rank == 1:
        store.wait(["told"])
        return ""
    try:
        dist.all_reduce(torch.ones(1, device=device), group=group)
    except RuntimeError as error:
        return str(error)
    finally:
        store.set("told", "1")
    return "nothing"


def told_of_variable():
    """What is told of the variables of the environment, or the sum of ones."""
    _, _, device = start()
    total = torch.ones(1, device=device)
    try:
        dist.all_reduce(total)
    except RuntimeError as error:
        return str(error)
    return total.item()
