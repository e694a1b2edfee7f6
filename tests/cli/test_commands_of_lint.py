"""The commands of accelcore-lint, a distribution of its own."""

from __future__ import annotations

import pytest


def test_help_and_completion_list_them_and_import_nothing(machine):
    machine.module("accelcore_lint", "raise SystemExit('imported')")
    assert {"lint", "port"} <= set(machine.run("--help").stdout.split())


def test_its_own_options_are_completed(machine):
    pytest.importorskip("accelcore_lint")
    machine.variables |= {"_ACCELCORE_COMPLETE": "bash_complete", "COMP_WORDS": "accelcore lint --", "COMP_CWORD": "2"}
    assert "--format" in machine.run().stdout


def test_the_message_for_a_missing_one_names_what_installs_it(machine):
    machine.module("sitecustomize", "import sys\nsys.modules['accelcore_lint'] = None")
    done = machine.run("lint", "x.py")
    assert done.returncode == 64
    assert "pip install ./plugins/lint" in done.stderr
