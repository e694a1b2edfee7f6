"""The note of a rank shows where its training thread is, and nothing of a thread that has ended."""

from __future__ import annotations

import _thread
import json
import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore

import accelcore
from accelcore.jobs import missing_ranks
from accelcore.jobs.missing_ranks import MissingRanks


@pytest.fixture
def line(monkeypatch):
    """The line of the script in the note that a rank writes now."""
    store = HashStore()
    monkeypatch.setattr(missing_ranks, "job_store", lambda prefix: store)

    def line(missing):
        missing.ahead()  # writes a note
        return json.loads(store.get("rank 0"))["line"]

    return line


def start_in_threading(call, arguments):
    threading.Thread(target=call, args=arguments).start()


class Last:
    """Sets an event when it is freed, which is when its thread has ended."""

    def __init__(self, event):
        self.event = event

    def __del__(self):
        self.event.set()


def joins(made, is_made, ends, ended, local):
    made.append(MissingRanks(accelcore.select("cpu").collectives, timedelta(seconds=1)))
    local.last = Last(ended)
    is_made.set()
    ends.wait()


def other(begun, ends):
    begun.set()
    ends.wait()


# The `Thread` of a thread that Python's `threading` has not started is alive for ever.
@pytest.mark.parametrize("start", [_thread.start_new_thread, start_in_threading])
def test_a_thread_that_has_ended_has_no_place(line, start):
    for _ in range(5):
        made, local = [], threading.local()
        is_made, ends, ended, begun, over = (threading.Event() for _ in range(5))
        start(joins, (made, is_made, ends, ended, local))
        assert is_made.wait(10)
        try:
            assert " in joins (" in line(made[0])
            ends.set()
            assert ended.wait(10)
            threading.Thread(target=other, args=(begun, over)).start()  # may take the memory of the one that ended
            assert begun.wait(10)
            assert line(made[0]) == ""
        finally:
            ends.set()
            over.set()
            made[0].close()
