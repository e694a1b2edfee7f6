"""NCCL, with gloo beside it. Two ranks on two GPUs are in the conformance suite, too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from accelcore.testing.support.oracles import batches, error, network, weights
from accelcore.training.parallel.ddp import DDP
from accelcore.training.parallel.fsdp import FullySharded
from accelcore.training.parallel.strategy import CombineDDP, Zero1

STRATEGIES = {"ddp": DDP, "combine_ddp": CombineDDP, "zero1": Zero1, "fsdp": FullySharded}

needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
pytestmark = needs_nccl


def test_one_rank_reduces_on_the_device_and_on_the_host(accel, tmp_path):
    with accel.distributed(rank=0, world_size=1, init_method=f"file://{tmp_path}/meeting") as job:
        assert torch.cuda.current_device() == accel.device.index
        tensor = torch.tensor([3.0, 4.0], device=accel.device)
        for op in ("sum", "avg", "min", "max"):
            assert job.all_reduce(tensor, op) is tensor
        assert job.broadcast(tensor).tolist() == [3.0, 4.0]
        host = torch.tensor([5])
        dist.all_reduce(host, group=job.cpu_group())
        assert host.tolist() == [5]
        job.barrier()
    assert not dist.is_initialized()


def test_a_group_of_nccl_alone_gets_one_for_the_host(accel, tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        with accel.distributed() as job:
            host = torch.tensor([5])
            dist.all_reduce(host, group=job.cpu_group())
            assert host.tolist() == [5]
        assert dist.is_initialized(), "the script's own group is left alone"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("parallel", STRATEGIES)
def test_a_strategy_over_one_rank_is_the_training_without_it_and_waits_for_nothing(
    accel, tmp_path, monkeypatch, no_waiting, parallel
):
    """A job of one process needs no strategy, and takes none. Here it gets one, whose collectives are NCCL's."""

    def train(**options):
        model = network()
        optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.01)
        loss = torch.nn.functional.cross_entropy
        trainer = accel.trainer(model, optimizer, loss=lambda model, batch: loss(model(batch[0]), batch[1]), **options)
        data = accel.runtime.to_device(batches(10))
        for batch in data[:4]:  # NCCL starts, and state is made
            trainer(batch)
        with no_waiting():
            for batch in data[4:]:
                trainer(batch)
        return [getattr(weight, "full_tensor", lambda weight=weight: weight)() for weight in weights(model)]

    alone = train()
    kind = STRATEGIES[parallel]
    monkeypatch.setattr("accelcore.training.plan.create_strategy", kind)
    with accel.distributed(rank=0, world_size=1, init_method=f"file://{tmp_path}/meeting"):
        together = train(parallel=parallel)
    assert all(error(a, b) < 1e-6 for a, b in zip(together, alone, strict=True))


@needs_two
def test_a_rank_that_fails_ends_the_others_long_before_the_timeout(run_python):
    """The communicator of rank 0 is aborted, and rank 0 raises before it uses the result. This has not run yet."""
    script = """
        import time
        import accelcore, torch
        accel = accelcore.select("cuda")
        begin, wrong = time.monotonic(), False
        try:
            with accel.distributed() as job:
                tensor = torch.ones(1, device=accel.device)
                job.all_reduce(tensor)
                if job.rank == 1:
                    raise ValueError("a row is bad")
                accel.collectives.all_reduce(tensor)
                tensor.item()
                wrong = True
        except accelcore.DistributedError as error:
            assert job.rank == 0
            assert "rank 1 of this job failed" in str(error)
            assert "a row is bad" in str(error)
        except ValueError:
            assert job.rank == 1
        assert not wrong
        assert time.monotonic() - begin < 120
    """
    run_python(script, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@needs_two
def test_a_host_group_of_some_ranks_stops_nobody(run_python):
    script = """
        import accelcore, torch
        import torch.distributed as dist
        accel = accelcore.select("cuda")
        with accel.distributed() as job:
            first = dist.new_group([0], backend="gloo")
            if job.rank == 0:
                dist.barrier(group=first)
            total = job.all_reduce(torch.ones(1, device=accel.device))
            assert total.item() == 2
    """
    run_python(script, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@needs_two
def test_no_rank_makes_a_context_on_the_gpu_of_another(run_python):
    script = """
        import accelcore, torch
        accel = accelcore.select("cuda")
        with accel.distributed() as job:
            job.all_reduce(torch.ones(1, device=accel.device))
            job.barrier()
            assert not torch._C._cuda_hasPrimaryContext(1 - job.rank)
    """
    run_python(script, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
