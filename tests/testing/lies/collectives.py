"""Ranks that do not agree."""

from __future__ import annotations

import dataclasses

import torch.distributed as dist

from accelcore.roles.collectives import TorchCollectives
from lies.lie import LIES, Lie, declaring, lie


class _ForgetsToSum(TorchCollectives):
    def all_reduce(self, tensor, op="sum"):
        return tensor if op == "sum" else super().all_reduce(tensor, op)


class _SumsForAverage(TorchCollectives):
    def all_reduce(self, tensor, op="sum"):
        return super().all_reduce(tensor, "sum" if op == "avg" else op)


class _AlwaysFromZero(TorchCollectives):
    def broadcast(self, tensor, src=0):
        return super().broadcast(tensor, 0)


class _BroadcastsACopy(TorchCollectives):
    def broadcast(self, tensor, src=0):
        return super().broadcast(tensor.clone(), src)


class _ForgetsScalars(TorchCollectives):
    def all_reduce(self, tensor, op="sum"):
        return super().all_reduce(tensor, op) if tensor.dim() else tensor


class _NeverWaits(TorchCollectives):
    def barrier(self):
        pass


class _AveragesACopy(TorchCollectives):
    def all_reduce(self, tensor, op="sum"):
        return super().all_reduce(tensor if op != "avg" or tensor.is_contiguous() else tensor.contiguous(), op)


class _AddsBeforeItDivides(TorchCollectives):
    def all_reduce(self, tensor, op="sum"):
        super().all_reduce(tensor, "sum" if op == "avg" else op)
        return tensor.div_(self.world_size) if op == "avg" else tensor


class _TakesNeighbours(TorchCollectives):
    """What gloo does with a view (pytorch#192920)."""

    def broadcast(self, tensor, src=0):
        dist.broadcast(tensor, src)
        return tensor


_VIEW = "not what was asked for"

for _name, _kind, _test, _says, _arguments in (
    ("broadcast_of_a_copy", _BroadcastsACopy, "test_views", "another tensor",
     {"operation": "broadcast", "kind": "row"}),
    ("broadcast_of_neighbours", _TakesNeighbours, "test_views", _VIEW, {"operation": "broadcast", "kind": "column"}),
    ("all_reduce_that_forgets_scalars", _ForgetsScalars, "test_views", _VIEW, {"operation": "sum", "kind": "element"}),
    ("average_that_is_a_sum", _SumsForAverage, "test_views", _VIEW, {"operation": "avg", "kind": "whole"}),
    ("average_of_a_copy", _AveragesACopy, "test_views", "another tensor", {"operation": "avg", "kind": "transposed"}),
    ("average_that_overflows", _AddsBeforeItDivides, "test_low_precision", "average is none", {"dtype": "float16"}),
    ("barrier_that_does_not_wait", _NeverWaits, "test_barrier", "left the barrier", {}),
    ("all_reduce_that_forgets_to_sum", _ForgetsToSum, "test_all_reduce", "than the sum",
     {"what": "large", "expected": [3.0]}),
    ("broadcast_always_from_zero", _AlwaysFromZero, "test_broadcast", "another rank's tensor", {}),
):  # fmt: skip
    LIES[_name] = Lie(
        _name,
        lambda backend, kind=_kind: dataclasses.replace(backend, collectives=kind(backend.device, "gloo")),
        f"TestCollectives.{_test}",
        _says,
        _arguments,
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
