from __future__ import annotations

import json
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from accelcore.errors import ConfigurationError

OPS = ("sum", "avg", "min", "max")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64")
PROLOGUE = """
    import json, os, sys
    from datetime import timedelta
    from pathlib import Path

    import torch
    import torch.distributed as dist

    import accelcore

    def attempt(function):
        try:
            result = function()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return result.tolist() if isinstance(result, torch.Tensor) else result

    folder = Path(sys.argv[1])
    accel = accelcore.select("cpu")
"""


@pytest.fixture
def start(fork_ranks, tmp_path):
    """Run a script as each rank of a job, with the environment that torchrun leaves."""

    def start(script, size=2):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(PROLOGUE) + textwrap.dedent(script))
        return [rank.finish() for rank in fork_ranks(path, tmp_path, size=size)]

    return start


def told(ended):
    """What each rank printed last, as JSON; all must have succeeded."""
    assert [rank.returncode for rank in ended] == [0] * len(ended), "\n".join(rank.stderr for rank in ended)
    return [json.loads(rank.stdout.splitlines()[-1]) for rank in ended]


@pytest.fixture(autouse=True)
def _no_group_is_left():
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# Alone.


@pytest.mark.parametrize("op", OPS)
def test_alone_every_reduction_is_the_identity(accel, op):
    tensor = torch.tensor([1.5, -2.0])
    assert accel.collectives.all_reduce(tensor, op) is tensor
    assert tensor.tolist() == [1.5, -2.0]


def test_alone_a_loop_need_not_ask(accel):
    tensor = torch.tensor([3])
    with accel.distributed() as collectives:
        assert collectives.local_rank == 0
        assert (collectives.rank, collectives.world_size) == (0, 1)
        assert collectives.broadcast(tensor) is tensor
        assert collectives.cpu_group() is None
        collectives.barrier()
    assert tensor.tolist() == [3]
    assert not dist.is_initialized()


def test_closing_what_was_never_joined_does_nothing(accel):
    accel.collectives.close()
    accel.collectives.init(None)
    accel.collectives.close()
    accel.collectives.close()
    assert accel.collectives.world_size == 1


def test_a_mistake_shows_already_when_alone(accel):
    floats = torch.ones(2)
    for op in ("mean", "SUM", "", None):
        with pytest.raises(ConfigurationError, match="no reduction") as caught:
            accel.collectives.all_reduce(floats, op)
        assert caught.value.available == ", ".join(OPS)
    for dtype in (torch.int64, torch.bool, torch.uint8):
        with pytest.raises(ConfigurationError, match=f"average of {dtype}"):
            accel.collectives.all_reduce(torch.ones(2).to(dtype), "avg")
    for src in (1, -1):
        with pytest.raises(ConfigurationError, match=f"no rank {src}") as caught:
            accel.collectives.broadcast(floats, src)
        assert caught.value.available == "ranks 0 to 0"


# Together.

SCENARIO = """
    found = {}
    with accel.distributed(timeout=timedelta(seconds=60)) as collectives:
        rank, size = collectives.rank, collectives.world_size
        found["place"] = [rank, size, dist.is_initialized(), dist.get_backend()]

        def mine(dtype=torch.float32):
            # rank 0: [1, -1, 0], rank 1: [2, -2, 10], rank 2: [4, -4, 20]
            return torch.tensor([2**rank, -(2**rank), 10 * rank]).to(dtype)

        for op in ("sum", "avg", "min", "max"):
            for name in ("float32", "float64", "float16", "bfloat16", "int64"):
                if op == "avg" and name == "int64":
                    continue
                tensor = mine(getattr(torch, name))
                result = collectives.all_reduce(tensor, op)
                found[f"{op} {name}"] = [result is tensor, str(result.dtype), result.tolist()]

        large = torch.tensor([6e4, -6e4], dtype=torch.float16)
        found["large average"] = collectives.all_reduce(large, "avg").tolist()
        # Three thirds, each rounded, add up to another number than a third of the sum.
        found["exact average"] = collectives.all_reduce(torch.arange(100.0) + rank, "avg").tolist()

        strided = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]) + 10 * rank
        collectives.all_reduce(strided[:, 1], "sum")
        found["strided sum"] = strided.tolist()
        strided = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]) + 10 * rank
        collectives.broadcast(strided[:, 1], 1)
        found["strided broadcast"] = strided.tolist()
        found["scalar"] = collectives.all_reduce(torch.tensor(float(rank)), "max").item()

        weight = torch.nn.Parameter(mine())
        found["parameter"] = attempt(lambda: collectives.all_reduce(weight, "avg").detach())

        for src in range(size):
            tensor = mine()
            found[f"broadcast {src}"] = [collectives.broadcast(tensor, src) is tensor, tensor.tolist()]
        found["broadcast parameter"] = attempt(lambda: collectives.broadcast(torch.nn.Parameter(mine())).detach())

        # All ranks are refused alike, before any of them sends something.
        found["no such op"] = attempt(lambda: collectives.all_reduce(mine(), "mean"))
        found["integers"] = attempt(lambda: collectives.all_reduce(mine(torch.int64), "avg"))
        found["no such rank"] = attempt(lambda: collectives.broadcast(mine(), size))

        (folder / f"here-{rank}").touch()
        collectives.barrier()
        found["met"] = len(list(folder.glob("here-*")))

        sizes = torch.tensor([rank + 1])
        dist.all_reduce(sizes, group=collectives.cpu_group())
        found["cpu group"] = sizes.tolist()
    found["left"] = [dist.is_initialized(), collectives.rank, collectives.world_size]
    print(json.dumps(found))
"""


_found: dict[int, list[dict[str, object]]] = {}


@pytest.fixture(params=[2, 3])
def found(request, start):
    """What each of 2 ranks, or 3, found; they run once."""
    if request.param not in _found:
        _found[request.param] = told(start(SCENARIO, request.param))
    return _found[request.param]


def rows(size):
    return [[1, -1, 0], [2, -2, 10], [4, -4, 20]][:size]


def test_ranks_that_a_launcher_started_find_each_other_and_part(found):
    assert [rank["place"] for rank in found] == [[index, len(found), True, "gloo"] for index in range(len(found))]
    assert [rank["left"] for rank in found] == [[False, index, len(found)] for index in range(len(found))]


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, dtype) for op in OPS for dtype in DTYPES if (op, dtype) != ("avg", "int64")],
)
def test_every_rank_gets_the_reduction_in_place(found, op, dtype):
    columns = list(zip(*rows(len(found)), strict=True))
    reduce = {"sum": sum, "avg": lambda column: sum(column) / len(column), "min": min, "max": max}[op]
    expected = torch.tensor([reduce(column) for column in columns], dtype=torch.float64)
    for rank in found:
        same, kind, values = rank[f"{op} {dtype}"]
        assert same
        assert kind == f"torch.{dtype}"
        assert values == expected.to(getattr(torch, dtype)).tolist()


def test_an_average_that_fp16_holds_does_not_overflow(found):
    expected = torch.tensor(6e4, dtype=torch.float16).item()
    for rank in found:
        assert rank["large average"] == pytest.approx([expected, -expected], rel=torch.finfo(torch.float16).eps)


def test_an_fp32_average_is_rounded_as_the_divided_sum(found):
    for rank in found:
        assert rank["exact average"] == [number + (len(found) - 1) / 2 for number in range(100)]


def test_a_scalar_is_reduced(found):
    assert [rank["scalar"] for rank in found] == [len(found) - 1] * len(found)


def test_of_a_strided_view_exactly_the_view_is_combined(found):
    """gloo takes the memory from the view's first element on, whatever its strides (pytorch#192920)."""
    size = len(found)
    raised = 10 * sum(range(size))
    for index, rank in enumerate(found):
        left = [10.0 * index + value for value in (0, 2, 4)]
        assert [row[0] for row in rank["strided sum"]] == left, "the neighbours were changed"
        assert [row[1] for row in rank["strided sum"]] == [size * value + raised for value in (1.0, 3.0, 5.0)]
        assert [row[0] for row in rank["strided broadcast"]] == left, "the neighbours were changed"
        assert [row[1] for row in rank["strided broadcast"]] == [11.0, 13.0, 15.0]


def test_parameters_can_be_averaged_and_broadcast_as_they_can_alone(found):
    means = torch.tensor([sum(column) / len(found) for column in zip(*rows(len(found)), strict=True)]).tolist()
    for rank in found:
        assert rank["broadcast parameter"] == rows(1)[0]
        assert rank["parameter"] == means


def test_every_rank_can_be_the_source_of_a_broadcast(found):
    for source, row in enumerate(rows(len(found))):
        assert [rank[f"broadcast {source}"] for rank in found] == [[True, row]] * len(found)


def test_mistakes_are_refused_on_every_rank(found):
    for rank in found:
        assert rank["no such op"].startswith("ConfigurationError: there is no reduction 'mean'")
        assert rank["integers"].startswith("ConfigurationError: the average of torch.int64")
        assert rank["no such rank"].startswith(f"ConfigurationError: there is no rank {len(found)}")


def test_nobody_passes_a_barrier_before_all_are_there(found):
    assert [rank["met"] for rank in found] == [len(found)] * len(found)


def test_the_cpu_group_takes_cpu_tensors(found):
    assert [rank["cpu group"] for rank in found] == [[sum(range(1, len(found) + 1))]] * len(found)


def test_calls_that_differ_raise_on_every_rank_and_name_the_odd_one(start):
    """torch compares nothing: gloo aborts the process, or hangs."""
    script = """
        with accel.distributed(timeout=timedelta(seconds=60)) as job:
            odd = job.rank == 1
            calls = {
                "(4,)": lambda: job.all_reduce(torch.ones(3 + odd)),
                "float64": lambda: job.all_reduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32)),
                "all_reduce max": lambda: job.all_reduce(torch.ones(3), "max" if odd else "sum"),
                "broadcast from rank 0": lambda: job.broadcast(torch.ones(3)) if odd else job.all_reduce(torch.ones(3)),
                "(2, 2)": lambda: job.broadcast(torch.ones(2, 2) if odd else torch.ones(4)),
                "broadcast from rank 2": lambda: job.broadcast(torch.ones(4), 1 + odd),
                "(1,)": lambda: job.mean(torch.ones(1) if odd else torch.tensor(1.0)),
                "gather": lambda: job.gather(torch.ones(3)) if odd else job.mean(1.0),
                "gather_objects": lambda: job.gather_objects(3) if odd else job.gather(torch.ones(3)),
            }
            found = {name: attempt(call) for name, call in calls.items()}
            found["after"] = attempt(lambda: job.all_reduce(torch.ones(3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1).squeeze()))
        print(json.dumps(found))
    """
    for rank in told(start(script, 3)):
        assert rank.pop("after") == [3.0] * 3
        for name, said in rank.items():
            assert said.startswith("DistributedError: rank 1 of this job made another call"), said
            assert f"rank 1: {name}" in said or f" {name} on cpu" in said or f"of {name} " in said, said


def test_a_rank_that_fails_takes_the_others_down_soon(start):
    begin = time.monotonic()
    ended = start(
        """
        with accel.distributed(timeout=timedelta(seconds=60)) as collectives:
            collectives.barrier()
            if collectives.rank == 1:
                raise KeyError("rank 1 has had enough")
            collectives.all_reduce(torch.ones(2))
        """
    )
    assert [rank.returncode for rank in ended] == [1, 1]
    assert "KeyError: 'rank 1 has had enough'" in ended[1].stderr
    assert "rank 1 of this job failed, and the others cannot go on without it" in ended[0].stderr
    assert time.monotonic() - begin < 30, "the other waited until its timeout"


def test_ranks_that_a_script_started_itself_meet_where_it_says(start):
    script = """
        place = int(os.environ.pop("RANK"))
        for variable in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
            del os.environ[variable]
        meeting = f"tcp://127.0.0.1:{os.environ.pop('MASTER_PORT')}"
        with accel.distributed(rank=1 - place, world_size=2, init_method=meeting) as collectives:
            total = collectives.all_reduce(torch.tensor([place + 1]))
            print(json.dumps([collectives.rank, collectives.world_size, total.item()]))
    """
    assert told(start(script)) == [[1, 2, 3], [0, 2, 3]]


def test_jobs_of_one_process_follow_each_other_at_one_address(start):
    ended = start(
        """
        totals = []
        for number in range(3):
            with accel.distributed() as job:
                totals.append(float(job.all_reduce(torch.tensor([number + job.rank + 1.0]))))
        print(json.dumps(totals))
        """
    )
    assert told(ended) == [[3.0, 5.0, 7.0]] * 2


def test_a_job_that_fails_ends_though_a_thread_of_gloo_still_drops_a_tensor(start):
    ended = start(
        """
        import threading, time

        class Slow:
            def __del__(self):
                print(threading.current_thread() is threading.main_thread(), flush=True)
                time.sleep(0.5)

        with accel.distributed() as job:
            tensor = torch.ones(2)
            tensor.slow = Slow()
            gone = folder / "gone"
            while job.rank == 1 and not gone.exists():  # so that a thread of gloo is the last that holds rank 0's
                time.sleep(0.01)
            dist.all_reduce(tensor, async_op=True)
            del tensor
            gone.touch()
            raise KeyError("both ranks")
        """
    )
    assert [rank.returncode for rank in ended] == [1, 1]
    assert "KeyError: 'both ranks'" in ended[0].stderr
    assert ended[0].stdout == "False\n", "no thread of gloo dropped the tensor"
