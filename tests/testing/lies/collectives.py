"""Ranks that do not agree."""

from __future__ import annotations

import dataclasses

from accelcore.roles.collectives import TorchCollectives
from lies.lie import LIES, Lie


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


for _name, _kind, _test, _arguments in (
    ("broadcast_of_a_copy", _BroadcastsACopy, "test_broadcast", {}),
    ("all_reduce_that_forgets_scalars", _ForgetsScalars, "test_all_reduce", {"what": "scalar", "expected": [3.0]}),
    ("barrier_that_does_not_wait", _NeverWaits, "test_barrier", {}),
    ("all_reduce_that_forgets_to_sum", _ForgetsToSum, "test_all_reduce", {"what": "sum", "expected": [3.0, 30.0]}),
    ("average_that_is_a_sum", _SumsForAverage, "test_all_reduce", {"what": "avg", "expected": [1.5, 15.0]}),
    ("broadcast_always_from_zero", _AlwaysFromZero, "test_broadcast", {}),
):
    LIES[_name] = Lie(
        _name,
        lambda backend, kind=_kind: dataclasses.replace(backend, collectives=kind(backend.device, "gloo")),
        f"TestCollectives.{_test}",
        _arguments,
    )
