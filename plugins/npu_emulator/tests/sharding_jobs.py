"""What ranks do that shard their parameters. Importable in every one of them."""

from inspect import signature

import torch
import torch.distributed as dist
import torch_npu
from emulated_jobs import start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

BACKENDS = "cpu:gloo,npu:hccl"


def collectives_of_a_step(device, reshard):
    """How many of each collective the forward and the backward pass of a sharded model call, on a kind of device."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).to(device)
    for layer in model[:2]:  # the third is the root's own
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    counts = []
    with CommDebugMode() as passed:
        loss = model(torch.ones(2, 4, device=device)).sum()
    counts.append({str(name): count for name, count in passed.get_comm_counts().items()})
    with CommDebugMode() as passed:
        loss.backward()
    counts.append({str(name): count for name, count in passed.get_comm_counts().items()})
    return counts


def collectives_of_steps():
    start(BACKENDS)
    default = signature(fully_shard).parameters["reshard_after_forward"].default  # None only in newer versions
    told = {
        (device, reshard): collectives_of_a_step(device, reshard)
        for device in ("cpu", "npu")
        for reshard in {True, False, default}
    }
    dist.destroy_process_group()
    return told


def norm_over_a_mesh_of_two_dimensions():
    """By kind of device, the gradients' norm, that after clipping by it, and how many all-reduces this takes."""
    start(BACKENDS)
    values, told = torch.arange(64.0).reshape(8, 8) / 64, {}
    for device in ("cpu", "npu"):
        mesh = init_device_mesh(device, (2, dist.get_world_size() // 2))
        parameter = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Shard(1)]))
        parameter.grad = distribute_tensor(values, mesh, [Shard(0), Shard(1)])
        with CommDebugMode() as passed:
            norm = nn.utils.clip_grad_norm_([parameter], 0.5)
        reductions = passed.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
        told[device] = norm.full_tensor().item(), parameter.grad.full_tensor().norm().item(), reductions
    dist.destroy_process_group()
    return told, values.norm().item()


def operators_of_divided_tensors():
    """Values and gradients of operators of torch_npu's own, of tensors that are divided and of the same ones whole."""
    start(BACKENDS)
    mesh = init_device_mesh("npu", (dist.get_world_size(),))
    torch.manual_seed(0)

    def both(function, inputs, placement):
        """The results and gradients, divided and gathered, and of a single device."""
        told = []
        for divide in (True, False):
            leaves = [x.npu() for x in inputs]
            leaves = [distribute_tensor(x, mesh, [placement]) if divide else x for x in leaves]
            leaves = [x.detach().requires_grad_() for x in leaves]
            result = function(*leaves)
            result.backward(torch.ones_like(result))
            values = [result, *(x.grad for x in leaves)]
            told.append(numbers(values))
        return told

    def attend(query, key, value):
        return torch_npu.npu_fusion_attention(query, key, value, 4, "BNSD", scale=0.3)[0]

    told = {
        f"repeat_interleave of {size} columns": both(
            lambda x: x.repeat_interleave(3, dim=1), [torch.randn(2, size)], Shard(1)
        )
        for size in (3, 4)
    }
    told["attention"] = both(attend, [torch.randn(2, 4, 6, 8) for _ in range(3)], Shard(0))
    told["convolution"] = whole_numbers_convolved(mesh)
    dist.destroy_process_group()
    return told


def whole_numbers_convolved(mesh):
    """Gradients of a convolution of whole numbers, whose sums are exact in every order."""
    image, weight = torch.randint(-4, 5, (4, 3, 9, 9)).float().npu(), torch.randint(-4, 5, (4, 3, 3, 3)).float().npu()
    upstream, options = torch.ones(4, 4, 9, 9).npu(), ((1, 1), (1, 1), (1, 1), 1, [True, True, False])
    divided = [distribute_tensor(x, mesh, [Shard(0)]) for x in (image, upstream)]
    found = torch_npu.npu_conv2d_backward(*divided, distribute_tensor(weight, mesh, [Replicate()]), *options)[:2]
    whole = torch_npu.npu_conv2d_backward(image, upstream, weight, *options)[:2]
    return [numbers(found), numbers(whole)]


def numbers(tensors):
    """The values of tensors, divided or whole."""
    gathered = [x.full_tensor() if isinstance(x, DTensor) else x for x in tensors]
    return [x.detach().flatten().tolist() for x in gathered]
