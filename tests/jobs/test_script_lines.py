"""The line of a script that a thread is at, or that an error came from."""

from __future__ import annotations

import json
import threading

import torch

from accelcore.jobs.script_lines import line_of_error, line_of_thread


def wait(begun, ended):  # on one line, because the thread may be at either call
    begun.set() or ended.wait()


def test_a_thread_is_at_the_line_of_the_script_that_called_a_library():
    begun, ended = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait, args=(begun, ended))
    thread.start()
    begun.wait()
    try:
        assert line_of_thread(thread.ident) == "test_script_lines.py:14 in wait (begun.set() or ended.wait())"
    finally:
        ended.set()
        thread.join()


def test_this_thread_has_a_line_and_one_that_is_not_known_has_none():
    here = line_of_thread(threading.get_ident())
    assert here.startswith("test_script_lines.py:")
    assert "line_of_thread(threading.get_ident())" in here
    assert line_of_thread(0) == ""


def test_a_file_whose_name_is_not_ascii(tmp_path):
    script = tmp_path / "später.py"
    script.write_text("here = line_of_thread(ident)\n")
    names = {"line_of_thread": line_of_thread, "ident": threading.get_ident()}
    exec(compile(script.read_text(), script, "exec"), names)
    assert names["here"] == "später.py:1 in <module> (here = line_of_thread(ident))"


def test_an_error_came_from_the_script_and_not_from_what_it_called():
    for wrong in (lambda: torch.ones(2).view(3), lambda: torch.nn.Linear(2, 2)(torch.ones(3)), lambda: json.loads("{")):
        try:
            wrong()
        except (RuntimeError, ValueError) as error:
            found = line_of_error(error.__traceback__)
        assert found.startswith("test_script_lines.py:")
        assert " in <lambda> " in found
    assert line_of_error(None) == ""
