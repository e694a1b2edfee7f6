"""A rank that is missing is named, with where it is, by the others: soon, or when the job's timeout is over."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch

RECORDED = hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json")  # by torch 2.10 and later
COLLECTIVE = r", its last collective is gloo:all_reduce of \([\d, ]+\) \(collective \d+\)" if RECORDED else ""
SCRIPT = Path(__file__).with_name("lost_ranks.py")


# Ranks that wait take seconds and no processor: what one of a row is wanted for, all of the row begin.
TOGETHER = (
    ("waits", "waits, and is asked again", "gathers alone"),
    ("is killed, and rank 2 notices first", "fails, and rank 2 notices first", "is killed"),
    ("saves early, within a window", "saves alone", "evaluates alone"),
    ("saves alone, joined", "evaluates alone, joined", "exits, joined", "gathers alone, joined"),
    ("means, while others train", "resumes, while others read", "stands alone at a barrier", "reduces alone, joined"),
)


@pytest.fixture(scope="module")
def begun(fork_ranks, tmp_path_factory):
    """The ranks of jobs that run, by what happens in them."""
    jobs = {}

    def begin(way, **environ):
        if way not in jobs:
            for each in next((row for row in TOGETHER if way in row), (way,)):
                size = 3 if each.endswith("rank 2 notices first") else 2
                jobs[each] = fork_ranks(SCRIPT, each, tmp_path_factory.mktemp("job"), size=size, **environ)
        return jobs.pop(way)

    return begin


@pytest.fixture
def run(begun):
    def run(way, **environ):
        """What the ranks of a job wrote to stderr, and their exit codes; rank 1 may never end."""
        ranks = begun(way, **environ)
        ended = [ranks[0].finish(60)]
        if way.startswith("waits"):
            ranks[1].kill()
        ended.extend(rank.finish(60) for rank in ranks[1:])
        return [one.stderr for one in ended], [one.returncode for one in ended]

    return run


def final(stderr):
    """The last error: those before it are its causes."""
    return stderr.rsplit("accelcore.errors.DistributedError: ", 1)[-1]


def test_who_did_not_come_in_time_is_named_with_step_and_collective(run):
    (first, _), codes = run("waits")
    assert codes == [1, -signal.SIGKILL]
    said = final(first)
    assert said.startswith("rank 1 of this job did not join a collective that others wait in\n")
    assert re.search(f"rank 1 has begun step 2{COLLECTIVE}\n +rank 0 has begun step 3", said)
    assert "5000ms" in said, "what torch says of the timeout"
    assert "The above exception was the direct cause" in first


def test_who_did_not_come_is_named_also_when_gloo_has_given_up_before(run):
    (first, _), codes = run("waits, and is asked again")
    assert codes == [1, -signal.SIGKILL]
    assert final(first).startswith("rank 1 of this job did not join a collective that others wait in\n")
    assert "Application timeout caused pair closure" in first


def test_a_rank_that_was_killed_is_named_in_seconds(run):
    (first, _), codes = run("is killed")
    assert codes == [1, -signal.SIGKILL]
    said = final(first)
    assert "GLHF" not in said, "gloo's advice"
    assert said.startswith("rank 1 of this job does not answer: its process has ended, or is stopped\n")
    assert re.search(r"rank 1 has begun (no step|step [12])", said), "as of its last note"
    assert "rank 0 has begun step 3" in said


@pytest.mark.parametrize("way", ["fails", "fails, and that is wrapped", "fails, and that is said in other words"])
def test_where_a_rank_fails_the_others_say_what_failed(run, way):
    (first, second), codes = run(way)
    assert codes == [1, 1]
    assert second.rstrip().endswith("ValueError: a row is bad")
    assert "DistributedError" not in second
    said = final(first)
    assert said.startswith("rank 1 of this job failed, and the others cannot go on without it\n")
    assert re.search(
        r"rank 1 failed at lost_ranks\.py:\d+ in loads \(raise ValueError\(.*\)\): ValueError: a row is bad; it ", said
    )


def test_a_rank_that_calls_exit_is_named(run):
    (first, _), codes = run("exits")
    assert codes == [1, 0]
    said = final(first)
    assert said.startswith("rank 1 of this job ended by sys.exit(), and the others cannot go on without it\n")
    assert re.search(r"rank 1 failed at lost_ranks\.py:\d+ in loads \(sys\.exit\(0\)\)", said)


def test_a_rank_that_calls_exit_after_join_is_named_before_the_timeout(run):
    (first, second), codes = run("exits, joined")
    assert codes == [1, 1], "a rank that left by an error does not end with 0"
    assert "rank 1 has ended its part of the job, and rank 0 did not\n" in second
    said = final(first)
    assert said.startswith("rank 1 of this job left the job, which others have not\n")
    assert re.search("rank 1 failed.*; it has begun step 2, ", said)
    assert "5000ms" not in first, "it was noticed at the timeout only"


def test_a_rank_that_fails_is_logged_where_no_collective_raises(run):
    """NCCL's return at once, and the device waits."""
    (first, _), codes = run("fails, and rank 0 is not in a collective")
    assert codes == [1, 1]
    (logged,) = re.findall("^a rank of this job failed: (.*)$", first, re.MULTILINE)
    assert re.match(r"rank 1 failed at .*: ValueError: a row is bad; it has begun step 2", logged)


def test_a_rank_whose_device_waits_for_one_that_failed_raises_before_it_uses_what_was_aborted(run):
    (first, second), codes = run("fails, and the device of rank 0 waits")
    assert codes == [1, 1]
    assert second.rstrip().endswith("ValueError: a row is bad")
    said = final(first)
    assert said.startswith("rank 1 of this job failed, and the others cannot go on without it\n")
    assert "rank 0 has begun step 2" in said
    assert re.search(r"rank 1 failed at .*: ValueError: a row is bad; it has begun step", said)
    assert "wrong values" not in first


def test_a_rank_whose_loop_ends_early_says_so_and_is_named(run):
    (first, second), codes = run("stops early")
    assert codes == [1, 1]
    said = final(second)
    assert said.startswith("rank 1 has ended its part of the job, and rank 0 did not\n")
    assert "rank 1 has begun step 2" in said
    assert "rank 0 has begun step 3" in said
    assert "rank 1 has ended its part of the job" in final(first)


@pytest.mark.parametrize("way", ["stops early, within a window", "flushes alone, within a window"])
def test_a_rank_whose_loop_ends_within_a_window_says_so_before_the_timeout(run, way):
    (first, second), codes = run(way)
    assert codes == [1, 1]
    said = final(second)
    assert said.startswith("rank 1 has ended its part of the job, and rank 0 did not\n")
    assert "rank 1 has begun step 2, it" in said
    assert "rank 0 has begun step 2, micro-batch 3" in said
    assert "5000ms" not in first, "it was noticed at the timeout only"
    assert final(first).startswith("rank 1 of this job left the job")


def test_a_rank_that_saves_within_the_window_of_the_others_says_so_before_the_timeout(run):
    (first, second), codes = run("saves early, within a window")
    assert codes == [1, 1]
    said = final(second)
    assert said.startswith("not every rank of the job came to trainer.save()\n")
    assert re.search(rf"rank 0 has begun step 2, micro-batch 3{COLLECTIVE}\n +rank 1 has begun step 2, it", said)
    assert "5000ms" not in first + second, "it was noticed at the timeout only"
    assert final(first).startswith("rank 1 of this job failed")


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("fails, and rank 2 notices first", "rank 1 of this job failed, "),
        ("is killed, and rank 2 notices first", "rank 1 of this job does not answer"),
        ("leaves by an error, which rank 2 notices first", "rank 1 of this job failed, "),
    ],
)
def test_ranks_that_failed_because_another_did_are_not_named_beside_it(run, way, says):
    (first, _, third), codes = run(way)
    assert codes == [1, -signal.SIGKILL if way.startswith("is killed") else 1, 1]
    for said in (first, third):
        assert final(said).startswith(says), said


@pytest.mark.parametrize(
    ("way", "call"),
    [
        ("saves alone", "trainer.save("),
        ("saves alone, joined", "trainer.save("),
        ("gathers alone", "job.gather("),
        ("gathers alone, joined", "job.gather("),
        ("means, while others train", "job.mean("),
        ("resumes, while others read", "trainer.resume("),
        ("stands alone at a barrier", "job.barrier("),
        ("evaluates alone", "trainer.evaluate("),
        ("evaluates alone, joined", "trainer.evaluate("),
    ],
)
def test_a_call_on_the_main_rank_only_is_named_with_its_line_and_what_to_do(run, way, call):
    (first, _), codes = run(way)
    assert codes[0] == 1
    assert f"not every rank of the job came to {call})" in first
    assert re.search(rf"\(.*{re.escape(call)}", final(first))
    assert f"call {call}) on all ranks" in final(first)
    assert "5000ms" not in first, "it was noticed at the timeout only"
    # It would abort the process when the other ranks have ended.
    assert "a thread is left in a barrier" not in first


def test_a_collective_on_the_main_rank_only_is_named_before_the_timeout(run):
    (first, second), codes = run("reduces alone, joined")
    assert codes[0] == 1
    assert "rank 1 has ended its part of the job, and rank 0 did not\n" in second
    assert not RECORDED or "its last collective is gloo:all_reduce of (1,)" in second
    assert "5000ms" not in first, "it was noticed at the timeout only"


def test_a_job_compares_a_barrier_with_its_other_calls(run):
    said, codes = run("gathers before a barrier")
    assert codes == [1, 1]
    for one in said:
        assert final(one).startswith("rank 1 of this job made another call than the others\n")
        assert "rank 0: gather; rank 1: barrier" in one


@pytest.mark.parametrize("way", ["another collective", "another shape"])
def test_collectives_that_do_not_match_raise_on_every_rank_where_torch_checks_them(run, way):
    said, codes = run(way, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert codes == [1, 1]
    for one in said:
        assert "Detected mismatch between collectives on ranks" in one
