"""What scripts say around the step: of ranks, of evaluation, of a module without a trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import forks
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import accelcore

RANKS = Path(__file__).with_name("rank_words.py")


@pytest.fixture(scope="module")
def job(fork_ranks, tmp_path_factory):
    """What each of three ranks found, and what it printed."""
    folder = tmp_path_factory.mktemp("words")
    ended = [rank.finish() for rank in fork_ranks(RANKS, folder, size=3)]
    assert [rank.returncode for rank in ended] == [0] * 3, "\n".join(rank.stderr for rank in ended)
    return [json.loads((folder / f"{rank}.json").read_text()) | {"said": ended[rank].stdout} for rank in range(3)]


def test_a_rank_knows_its_place_and_the_main_one_prints(job):
    assert [rank["is_main"] for rank in job] == [True, False, False]
    assert [rank["local_rank"] for rank in job] == [0, 1, 2]
    assert [rank["said"] for rank in job] == ["from the main rank\n", "", ""]


def test_one_goes_first_and_the_others_find_what_it_left_also_where_it_failed(job):
    assert [rank["seen"] for rank in job] == [False, True, True]
    assert [rank.get("failed") for rank in job] == ["no room", None, None]


def test_gather_gives_every_rank_the_rows_of_all(job):
    for rank in job:
        assert rank["rows"] == [[10.0, 11.0], [20.0, 21.0], [22.0, 23.0]]
        assert rank["none"] == [0, 2]
        assert rank["scalars"] == [0, 1, 2]
        assert rank["kinds"] == [[0, 1, 0]] * 7
        assert rank["column of one row"] == [1.0] * 3, "its stride is not 1"
        assert rank["columns"] == [[r + c, r + c + 3] for c in range(3) for r in range(3)]
        assert "rows of different kinds" in rank["refused"]


def test_gather_takes_lists_of_which_some_may_be_empty(job):
    assert sorted(rank["errors"] for rank in job) == [[0, 2], [1, 2], [1, 2]], "of 2 rows one rank has no batch"
    for rank in job:
        assert rank["lists"] == [[10.0, 11.0], [10.0, 11.0], [20.0, 21.0], [22.0, 23.0], [20.0, 21.0]]
        assert rank["listed scalars"] == [0, 0, 1]
        none, *refused, mixed, kinds = rank["refused lists"]
        assert "no rank has any rows" in none
        expected = [
            *("torch.float32 of shape (1,), and torch.float16", "(1, 0), and torch.float32 of shape (1, 1)"),
            *("a list with a float in it", "not None", "not a float", "not a generator", "not a str"),
        ]
        assert all(value in said for value, said in zip(expected, refused, strict=True)), refused
        assert mixed == [1, 2, 1, 2], "a tensor on one rank, an empty list on another"
        assert "rows of different kinds" in kinds


def test_objects_are_gathered_and_what_cannot_be_sent_is_refused(job):
    every = [
        {"rank": rank, 7: [("a", None), "é" * rank], "mine": mine}
        for rank, mine in enumerate([[[], []], [[10.0], [11.0]], [[20.0, 22.0], [21.0, 23.0]]])
    ]
    assert [rank["objects"] for rank in job] == [repr(every)] * 3
    for rank in job:
        assert "an object cannot be sent" in rank["no object"]


def test_mean_of_numbers_and_tensors(job):
    for rank in job:
        assert (rank["number"], rank["tensor"], rank["integers"]) == (1.0, [1.0, 1.0], 1.0)
        assert rank["half"] == torch.tensor(6e4).half().item(), "the sum overflowed"
        assert rank["layouts"] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert rank["complex"] == [1.0, -2.0]


def test_negative_and_conjugate_views_are_sent_as_their_values(job):
    """Groups send memory, which holds the opposite of the value."""
    for rank in job:
        assert rank["views"] == [[-2.0] * 3, [-2.0], [-6.0], [[1.0, -2.0]] * 3]


def test_a_replica_averages_in_backward_and_begins_alike(job):
    torch.manual_seed(0)
    weight = nn.Linear(2, 1, bias=False).weight.tolist()
    for rank in job:
        assert rank["replicated"]["weight"] == weight
        assert rank["replicated"]["gradient"] == [[1.0, 1.0]]


def test_an_evaluation_has_every_row_once_over_all_ranks(job):
    every = [float(row) for row in range(20)]
    for name, expected in {
        "plain": every, "shuffled": every, "distributed": every, "dropping": every[:18], "subset": every[::2],
        "list": every, "few": every[:2],
    }.items():  # fmt: skip
        rows = [row for rank in job for row in rank["evaluated"][name]["rows"]]
        assert sorted(rows) == expected, name
        if name in ("plain", "shuffled", "distributed", "dropping", "few"):
            assert rows == expected, f"{name}: what is gathered is out of order"
        for rank in job:
            assert rank["evaluated"][name]["batches"] == rank["evaluated"][name]["length"], name
        lengths = {rank["evaluated"][name]["length"] for rank in job}
        assert len(lengths) == 1 or name in ("list", "few"), f"{name}: a rank would wait for others in the loop"
    assert sorted(row for rank in job for row in rank["stream"]) == every[:14]


def test_a_mean_over_an_evaluation_is_that_of_all_rows_once(job):
    for rank in job:
        few, squares, of_list = rank["means"]
        assert few == {"rows": 0.5, "scalar": 0.5}, "of 2 rows one rank has no batch"
        assert squares == pytest.approx(sum(row * row for row in range(20)) / 20)
        assert of_list == pytest.approx(sum(range(12)) / 12)


def test_a_mean_weighs_batches_by_their_rows_and_refuses_what_has_none(accel):
    trainer, loader = make(accel), DataLoader(torch.arange(10.0), 4)
    assert trainer.evaluate(loader).mean(lambda batch: batch > 7) == pytest.approx(0.2)
    assert trainer.evaluate(loader).mean(torch.mean) == pytest.approx(4.5)
    assert trainer.evaluate(loader).mean(lambda batch: batch[batch > 7]) == pytest.approx(8.5)
    with pytest.raises(accelcore.ConfigurationError, match="no rows"):
        trainer.evaluate([]).mean(torch.mean)
    evaluation = trainer.evaluate(loader)
    evaluation.mean(torch.mean)
    with pytest.raises(accelcore.ConfigurationError, match=r"read once: call trainer\.evaluate"):
        evaluation.mean(torch.mean)
    with pytest.raises(accelcore.ConfigurationError, match="loss='mse' does"):
        make(accel, loss="mse")
    for batch, has in (
        (torch.tensor(1.0), "no tensor with"),
        ({"tokens": torch.ones(37), "x": torch.ones(8, 2)}, "tensors of 8 and 37"),
        ((torch.ones(5, 8), torch.ones(8)), "tensors of 5 and 8"),
    ):
        with pytest.raises(accelcore.TrainingError, match=rf"scalar(.|\n)*{has} rows(.|\n)*one value for each row"):
            trainer.evaluate([batch]).mean(lambda batch: 1.0)
    batches = [{"name": "a", "x": torch.zeros(1)}, {"name": "b", "x": torch.ones(3)}]
    assert trainer.evaluate(batches).mean(lambda batch: batch["x"].mean()) == 0.75
    assert trainer.model.training


def test_a_mean_is_as_exact_as_its_values(accel):
    trainer, loader = make(accel), DataLoader(torch.arange(10.0), 4)
    assert trainer.evaluate(loader).mean(lambda batch: 0.1) == pytest.approx(0.1, rel=1e-14)
    assert (
        trainer.evaluate(loader).mean(lambda batch: torch.full_like(batch, 123456789, dtype=torch.int64)) == 123456789
    )
    assert trainer.evaluate(loader).mean(lambda batch: torch.full_like(batch, 200, dtype=torch.uint8)) == 200


def test_the_length_of_an_epoch_is_what_it_yields(job):
    for rank in job:
        for name, (length, batches) in rank["lengths"].items():
            assert length in (batches, None), name
    assert job[0]["alone"] == [2, 1]


SAMPLES = """
import torch, accelcore
from torch.utils.data import DistributedSampler
accel = accelcore.select("cpu")
with accel.distributed():
    print(len(DistributedSampler(torch.arange(4))))
"""


def test_a_sampler_of_torchs_needs_no_arguments_in_a_launched_job_of_one(fork_ranks, tmp_path):
    (tmp_path / "samples.py").write_text(SAMPLES)
    (ended,) = (rank.finish() for rank in fork_ranks(tmp_path / "samples.py", size=1))
    assert (ended.stdout, ended.returncode) == ("4\n", 0), ended.stderr


LEAVES = """
import torch, accelcore
accel = accelcore.select("cpu")
with accel.distributed() as job:
    job.barrier()
print(job.rank, job.world_size, job.is_main, job.local_rank, flush=True)
job.print("from the main rank", flush=True)
def first():
    with job.first():
        raise SystemExit("the block was run")
ones = torch.ones(2)
for call in (
    lambda: job.all_reduce(ones), lambda: job.broadcast(ones), lambda: job.gather(ones), lambda: job.mean(ones),
    lambda: job.mean(1.0), lambda: job.gather_objects([1]), job.barrier, first,
):
    try:
        call()
    except accelcore.DistributedError as error:
        print("refused", "was left" in str(error), "accel.distributed()" in error.remedy)
"""


def test_a_job_that_was_left_keeps_its_numbers_and_exchanges_nothing(fork_ranks, tmp_path):
    (tmp_path / "leaves.py").write_text(LEAVES)
    ended = [rank.finish() for rank in fork_ranks(tmp_path / "leaves.py", size=2)]
    refused = ["refused True True"] * 8
    assert [rank.stdout.splitlines() for rank in ended] == [
        ["0 2 True 0", "from the main rank", *refused],
        ["1 2 False 1", *refused],
    ], ended[0].stderr


JOINS = """
import sys, torch, accelcore
job = accelcore.select("cpu").join()
total = job.all_reduce(torch.ones(1))
if job.rank == 1 and len(sys.argv) > 1:
    raise ValueError("rank 1 ends like this")
print(total.item(), flush=True)
"""


@pytest.mark.parametrize("fails", [pytest.param((), marks=pytest.mark.full), ("fails",)])
def test_a_job_is_joined_until_exit_and_an_error_waits_for_nobody(fails):
    """Real processes: how an interpreter ends is what is tested."""
    with ExitStack() as stack:
        ranks = []
        for place in forks.places(2):
            rank = subprocess.Popen(
                [sys.executable, "-c", JOINS, *fails], env={**os.environ, **place}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            ranks.append(stack.enter_context(rank))
            stack.callback(rank.kill)
        said = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == ([120, 1] if fails else [0, 0]), said
    assert said[0][0].splitlines()[-1] == "2.0"  # torch 2.10 writes a line of Gloo's before it
    assert "Traceback" not in said[0][1]
    assert fails or said[0][1] == "", "the main rank ends in order, and says nothing more"
    assert ("rank 1 ends like this" in said[1][1]) == bool(fails)


def test_alone_all_words_do_nothing(accel, capsys):
    with accel.distributed() as job:
        rows = torch.ones(2, 3, requires_grad=True)
        assert torch.equal(job.gather(rows), rows)
        assert job.gather(torch.tensor(2.0)).tolist() == [2.0]
        assert job.gather([torch.tensor(2.0), torch.ones(2)]).tolist() == [2.0, 1.0, 1.0]
        with pytest.raises(accelcore.ConfigurationError, match="nothing to gather"):
            job.gather([])
        assert job.gather_objects({"n": (1, "x")}) == [{"n": (1, "x")}]
        with pytest.raises(accelcore.ConfigurationError, match="cannot be sent"):
            job.gather_objects(job)
        assert (job.mean(2), job.mean(torch.tensor([1, 2])).tolist()) == (2.0, [1.0, 2.0])
        assert (job.is_main, job.local_rank) == (True, 0)
        with job.first():
            job.print("here")
        data = torch.arange(4.0)
        sampler = DistributedSampler(data, num_replicas=job.world_size, rank=job.rank)
        trainer = make(accel)
        assert sum(len(batch) for batch in trainer.batches(DataLoader(data, 2, sampler=sampler))) == 4
    assert capsys.readouterr().out == "here\n"
    module = nn.Linear(2, 2)
    assert accel.replicate(module) is module


def make(accel, model=None, **options):
    model = model or nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    return accel.trainer(model, accel.optimizers.create("sgd", model.parameters()), **options)


def test_an_evaluation_draws_as_much_as_plain_torch_and_nothing_with_a_generator(accel):
    trainer, loader = make(accel), DataLoader(torch.ones(5, 4), 2)
    torch.manual_seed(0)
    assert sum(len(rows) for rows in loader) == 5
    expected = torch.get_rng_state()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for generator, after in ((torch.Generator(), before), (None, expected)):
        loader = DataLoader(torch.ones(5, 4), 2, generator=generator)
        assert sum(len(rows) for rows in trainer.evaluate(loader)) == 5
        assert torch.equal(torch.get_rng_state(), after)


def test_in_an_evaluation_nothing_is_trained_and_behind_it_all_is_as_it_was(accel):
    trainer = make(accel, precision="bf16")
    trainer.model[2].eval()
    calls = []
    trainer.model.register_forward_hook(lambda module, *_: calls.append(module.training))

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 5

        def __getitem__(self, index):
            assert torch.is_grad_enabled(), "the data is read as it is in training"
            assert not torch.is_autocast_enabled("cpu")
            return torch.ones(4) * index

    loader, seen = DataLoader(Data(), 2), 0
    assert len(trainer.evaluate(loader)) == 3
    for batch in trainer.evaluate(loader):
        out = trainer.model(batch)
        assert not out.requires_grad
        assert trainer.model[0](batch).dtype == torch.bfloat16
        seen += len(batch)
    assert (seen, calls) == (5, [False] * 3)

    def as_it_was():
        flags = [module.training for module in trainer.model.modules()]
        return (flags, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == (
            [True, True, True, False], True, False,
        )  # fmt: skip

    assert as_it_was()
    for _ in trainer.evaluate(loader):
        break
    assert as_it_was()
    with pytest.raises(ValueError, match="in the loop"):
        raise_in(trainer.evaluate(loader))
    assert as_it_was()
    trainer.backward(trainer.model(torch.ones(3, 4)).sum())


def raise_in(batches):
    for _ in batches:
        raise ValueError("in the loop")


def test_a_module_that_does_something_when_its_mode_changes_does_it_behind_an_evaluation_too(accel):
    class Merges(nn.Linear):  # as layers of low rank do
        merged = False

        def train(self, mode=True):
            self.merged = not mode
            return super().train(mode)

    trainer = make(accel, nn.Sequential(Merges(4, 4)))
    for _ in trainer.evaluate([torch.ones(2, 4)]):
        assert trainer.model[0].merged
    assert not trainer.model[0].merged


def test_what_has_no_length_has_none(accel):
    trainer = make(accel)
    assert len(trainer.batches([1, 2, 3])) == 3
    with pytest.raises(TypeError, match="no len"):
        len(trainer.batches(iter([torch.ones(2, 4)])))
    assert len(list(trainer.batches(iter([torch.ones(2, 4)])))) == 1


def test_what_cannot_be_replicated_is_refused(accel, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(accelcore.DistributedError, match=r"accel\.join"):
        accel.replicate(nn.Linear(2, 2))


def test_a_mean_of_predictions_against_targets_of_another_shape_is_reported_once(accel, caplog):
    trainer = accel.trainer(model := nn.Linear(2, 1), accel.optimizers.create("sgd", model.parameters()))

    def mean(function, sizes):
        caplog.clear()
        trainer.evaluate([(torch.ones(size, 2), torch.ones(size)) for size in sizes]).mean(function)
        return [record.getMessage() for record in caplog.records]

    def error(batch):
        return (model(batch[0]) - batch[1]).square()

    for function, n in ((error, 7), (lambda batch: {"mse": error(batch), "rows": batch[1]}, 8)):
        (said,) = mean(function, [n, n, 1])
        assert all(part in said for part in ("shape (n, n)", f"{n} rows", "(n, 1)", "(n,)", "squeeze(1)"))
        assert not mean(function, [n, n, 1])
    assert not mean(lambda batch: batch[0].new_ones(len(batch[0]), 9), [3, 9])  # a value for each of 9 tokens
    assert not mean(error, [1, 1])


def test_a_count_is_no_mean(accel):
    trainer = accel.trainer(model := nn.Linear(2, 1), accel.optimizers.create("sgd", model.parameters()))
    with pytest.raises(accelcore.TrainingError, match=r"whole number(.|\n)*without \.sum\(\)"):
        trainer.evaluate([torch.ones(4, 2)]).mean(lambda rows: (rows > 0).sum())
