"""Commands that other distributions bring."""

from __future__ import annotations

import pytest

HELLO = """
    import click

    @click.command()
    @click.argument("words", nargs=-1)
    @click.option("--code", type=int, default=0)
    def hello(words, code):
        click.echo(" ".join(("hello", *words)))
        return code
"""


def test_a_command_of_another_distribution_runs_with_its_arguments_and_exit_code(machine):
    module = machine.fakes.install(HELLO, commands=["hello"], value="fake:hello")
    machine.module("fake", f"from {module} import hello")
    done = machine.run("hello", "a", "b", "--code", "3")
    assert (done.returncode, done.stdout, done.stderr) == (3, "hello a b\n", "")


def test_help_and_completion_list_it_and_import_nothing(machine):
    machine.fakes.install("raise SystemExit('imported')", commands=["hello"], distribution="greeter")
    done = machine.run("--help")
    assert done.returncode == 0
    assert "hello" in done.stdout
    assert "greeter 1.0" in done.stdout
    machine.variables |= {"_ACCELCORE_COMPLETE": "bash_complete", "COMP_WORDS": "accelcore he", "COMP_CWORD": "1"}
    assert "hello" in machine.run().stdout


def test_its_own_options_are_completed(machine):
    module = machine.fakes.install(HELLO, commands=["hello"], value="fake:hello")
    machine.module("fake", f"from {module} import hello")
    machine.variables |= {"_ACCELCORE_COMPLETE": "bash_complete", "COMP_WORDS": "accelcore hello --", "COMP_CWORD": "2"}
    assert "--code" in machine.run().stdout


@pytest.mark.parametrize(
    ("code", "says"),
    [("raise RuntimeError('no luck')", "no luck"), ("hello = 3", "not a click.Command"), ("", "hello")],
)
def test_a_broken_one_is_named_and_the_others_work(machine, code, says):
    module = machine.fakes.install(code, commands=["hello"], value="fake:hello", distribution="greeter")
    machine.module("fake", f"from {module} import hello")
    done = machine.run("hello")
    assert done.returncode == 64
    assert says in done.stderr
    assert "greeter 1.0" in done.stderr
    assert machine.run("--version").returncode == 0


def test_two_distributions_with_one_command_are_named(machine):
    for name in ("first", "second"):
        machine.fakes.install(HELLO, commands=["hello"], distribution=name)
    done = machine.run("hello")
    assert done.returncode == 64
    assert "first 1.0 and second 1.0" in done.stderr


def test_accelcores_own_command_takes_precedence(machine):
    machine.fakes.install("raise SystemExit('imported')", commands=["verify"])
    assert machine.run("verify", "--help").returncode == 0


def test_the_message_for_a_missing_command_of_ours_names_what_installs_it(machine):
    # What is installed is hidden: no distribution brings the command.
    machine.module("sitecustomize", "import importlib.metadata as m\nm.entry_points = lambda **group: []")
    done = machine.run("lint", "x.py")
    assert done.returncode == 64
    assert "pip install ./plugins/lint" in done.stderr
    assert "lint" in machine.run("--help").stdout


def test_an_extra_that_brings_commands_is_no_backend(machine):
    done = machine.run("run", "--device", "lint", machine.write("x.py", "import accelcore; accelcore.select()"))
    assert "accelcore-lint" not in done.stderr
    assert "no backend 'lint'" in done.stderr
