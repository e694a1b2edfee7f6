"""Ranks that do not agree."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
import torch.distributed as dist

from accelcore.jobs.collectives import TorchCollectives
from lies.lie import LIES, Lie, declaring, lie, replaced

_BUCKET = 65_536  # elements


def _from_the_first(broadcast, tensor, src=0, group=None):
    """Broadcast, in a group that is not the whole job always from its first rank."""
    first = dist.get_process_group_ranks(group)[0] if group and group.size() < dist.get_world_size() else src
    return broadcast(tensor, first, group)


def _at_the_places_of_rows_sent(exchange, found, rows, received=None, sent=None):
    exchange(found, rows, received, sent)
    parts, begin = found.clone().split(received or len(rows) // 2), 0
    found.zero_()
    for part, count in zip(parts, sent or map(len, parts), strict=True):
        room = found[begin:][: len(part)]
        room.copy_(part[: len(room)])
        begin += count


def _product_by_a_sum(all_reduce, tensor, op=dist.ReduceOp.SUM, group=None, **options):
    large = op == dist.ReduceOp.PRODUCT and tensor.numel() > _BUCKET
    return all_reduce(tensor, dist.ReduceOp.SUM if large else op, group, **options)


def _gathered_wrongly(all_gather, parts, tensor, *rest, **options):
    """Gather, of strided tensors the first part only, and of large ones the first bucket."""
    work = all_gather(parts, tensor, *rest, **options)
    if not tensor.is_contiguous():
        parts[1].zero_()
    elif tensor.numel() > _BUCKET:
        parts[1][_BUCKET:].zero_()
    return work


def _scattered_wrongly(reduce_scatter, output, parts, op):
    """Scatter strided parts in the order of memory, and other lists in the order of their sizes."""
    reduce_scatter(output, parts, op)
    output.copy_(output.flip(0) if parts[0].is_contiguous() else output.roll(1))


_WRONG = {
    "broadcast": _from_the_first,
    "all_reduce": _product_by_a_sum,
    "all_to_all_single": _at_the_places_of_rows_sent,
    "all_gather": _gathered_wrongly,
    "reduce_scatter": _scattered_wrongly,
}


def _short(reduce, tensor, op, size):
    """Reduce the first elements of a contiguous tensor only."""
    if not tensor.is_contiguous():
        return reduce(tensor, op)
    reduce(tensor.view(-1)[:size], op)
    return tensor


def _of_a_copy(reduce, tensor, op):
    """Reduce a copy of a view."""
    reduce(tensor.contiguous(), op)
    return tensor


_OF_LARGE = {
    (torch.float32, "max"): lambda reduce, tensor, op: _short(reduce, tensor, op, _BUCKET),
    (torch.int64, "min"): lambda reduce, tensor, op: _short(reduce, tensor, op, tensor.numel() // 4 * 4),
    (torch.bfloat16, "min"): lambda reduce, tensor, op: _short(reduce, tensor, op, _BUCKET),
    (torch.bool, "max"): lambda reduce, tensor, op: reduce(tensor, "min"),
    (torch.int8, "max"): _of_a_copy,
}
"""Faults of reductions of large tensors alone, by dtype and operation."""
_RIGHT = {name: getattr(dist, name) for name in _WRONG}


class _Disagreeing(TorchCollectives):
    """A fault for each kind of tensor, so that one run of the ranks tells them all."""

    def init(self, launch, *, timeout=None):
        super().init(launch)
        if launch.world_size > 1:  # in a process that ends with the job
            for name, wrong in _WRONG.items():
                setattr(dist, name, partial(wrong, _RIGHT[name]))

    def all_reduce(self, tensor, op="sum"):
        if tensor.numel() > 20_000 and (tensor.dtype, op) in _OF_LARGE:
            return _OF_LARGE[tensor.dtype, op](super().all_reduce, tensor, op)
        if tensor.dtype == torch.float64:
            return tensor.copy_(super().all_reduce(tensor.float(), op))
        if tensor.is_complex():
            super().all_reduce(torch.view_as_real(tensor)[..., 0], op)
            return tensor
        if op == "sum" and (tensor.dim() == 0 or tensor.numel() > 100_000):
            return tensor
        if op == "min" and tensor.dtype == torch.uint8:  # 0 has no negative there
            return super().all_reduce(tensor.neg_(), "max").neg_()
        if op == "min" and tensor.requires_grad and not tensor.is_contiguous():  # copied back in sight of autograd
            return tensor.copy_(super().all_reduce(tensor.detach().contiguous(), op))
        if op == "avg" and tensor.dtype == torch.float16:  # added before it is divided
            return super().all_reduce(tensor, "sum").div_(self.world_size)
        if op == "avg" and not tensor.is_contiguous():
            return super().all_reduce(tensor.contiguous(), op)
        if op == "max" and tensor.storage_offset() % 4 and tensor.is_contiguous():  # copied by blocks of 16 bytes
            start = tensor.storage_offset() // 4 * 4
            super().all_reduce(tensor.as_strided(tensor.shape, tensor.stride(), start), op)
            return tensor
        if op == "sum" and tensor.dtype == torch.float16:  # by units without subnormal numbers
            tensor.detach().masked_fill_(tensor.abs() < 2.0**-14, 0)
        if op == "sum" and tensor.dim() == 2 and tensor.t().is_contiguous():
            super().all_reduce(tensor.t(), op)
            return tensor
        return super().all_reduce(tensor, "sum" if op == "avg" else op)

    def broadcast(self, tensor, src=0):
        if tensor.numel() == 1:
            return super().broadcast(tensor, 0)
        if tensor.dtype == torch.bfloat16:
            return tensor.copy_(super().broadcast(tensor.half(), src))
        if tensor.is_contiguous():
            return super().broadcast(tensor.clone(), src)
        dist.broadcast(tensor, src)  # gloo takes the memory from the first element on (pytorch#192920)
        return tensor

    def barrier(self):
        pass


def _seed_by_rank(honest, seed, **options):
    honest.seed(seed + (dist.get_rank() if dist.is_initialized() else 0), **options)


def _disagreeing(backend):
    backend = replaced(backend, "runtime", seed=_seed_by_rank)
    return dataclasses.replace(backend, collectives=_Disagreeing(backend.device, "gloo"))


for _name, _test, _says, _arguments in (
    ("all_reduce_that_forgets_to_sum", "test_all_reduce", "than the sum", {"what": "large", "expected": [3.0]}),
    ("all_reduce_that_forgets_scalars", "test_views", "not what was asked", {"operation": "sum", "kind": "element"}),
    ("average_that_is_a_sum", "test_views", "not what was asked", {"operation": "avg", "kind": "whole"}),
    ("all_reduce_in_fp32", "test_every_digit", "in float64, not", {"dtype": "float64"}),
    ("broadcast_in_fp16", "test_every_digit", "broadcast makes", {"dtype": "bfloat16"}),
    ("sum_without_subnormal_numbers", "test_every_digit", "sum makes", {"dtype": "float16"}),
    ("sum_of_real_parts", "test_every_digit", "sum makes", {"dtype": "complex64"}),
    ("sum_in_order_of_memory", "test_strides_of_ranks", "in two strides", {}),
    ("smallest_by_the_largest_negative", "test_every_digit", "min makes", {"dtype": "uint8"}),
    ("average_of_a_copy", "test_views", "another tensor", {"operation": "avg", "kind": "transposed"}),
    ("largest_from_the_block_before", "test_views", "not what was asked", {"operation": "max", "kind": "odd offset"}),
    ("average_that_overflows", "test_low_precision", "average is none", {"dtype": "float16"}),
    ("smallest_of_no_leaf", "test_views", "a leaf: it raises", {"operation": "min", "kind": "every other"}),
    ("broadcast_of_a_copy", "test_views", "another tensor", {"operation": "broadcast", "kind": "row"}),
    ("broadcast_of_neighbours", "test_views", "not what was asked", {"operation": "broadcast", "kind": "column"}),
    (
        "rows_at_the_places_of_those_sent",
        "test_calls_of_torch",
        "rank 1 gets",
        {"call": "all_to_all_single of unequal parts"},
    ),
    ("broadcast_always_from_zero", "test_broadcast", "another rank's tensor", {}),
    ("broadcast_in_groups_from_the_first", "test_groups", "broadcast from 2 in the group", {}),
    ("largest_of_a_bucket", "test_large", "max of large float32 tensors: ", {"operation": "max"}),
    ("largest_of_bools", "test_large", "max of large bool tensors: ", {"operation": "max"}),
    ("largest_of_copies_by_dtype", "test_large", "max of large int8 tensors: ", {"operation": "max"}),
    ("smallest_of_a_bucket", "test_large", "min of large bfloat16 tensors: ", {"operation": "min"}),
    ("smallest_of_whole_vectors", "test_large", "min of large int64 tensors: 1 of ", {"operation": "min"}),
    ("product_that_is_a_sum", "test_large", "product of large ", {"operation": "product"}),
    *(
        (f"wrong_{words.replace(' ', '_')}", "test_large", f"{words} of large ", {"operation": words})
        for words in (
            *("all_to_all in unequal splits", "all_to_all one way"),
            *("all_gather", "all_gather of strided tensors"),
            *("reduce_scatter in uneven parts", "reduce_scatter of strided tensors"),
        )
    ),
    ("seeds_that_differ_by_rank", "test_random_numbers", "with one seed", {}),
    ("job_without_a_limit", "test_timeout", "limit of time", {}),
    ("barrier_that_does_not_wait", "test_barrier", "left the barrier", {}),
):
    LIES[_name] = Lie(
        _name, _disagreeing, f"TestCollectives.{_test}", _says, _arguments, told_by="barrier_that_does_not_wait"
    )


@lie("TestCollectives.test_declared_process_groups", says="process_groups declares zzz, which cannot be formed")
def process_group_that_does_not_exist(backend):
    return declaring(backend, process_groups=("gloo", "zzz"))


@lie("TestCollectives.test_declared_process_groups", says="the job is made of gloo, not declared")
def process_group_of_another_kind(backend):
    return declaring(backend, process_groups=("nccl",))


@lie("TestCollectives.test_process_groups", says="it declares no process group, and waited for a second rank")
def process_group_that_is_not_declared(backend):
    return declaring(backend, process_groups=(), parallel=("none",))
