from __future__ import annotations

import os
import shutil
import subprocess
import sys

import click
import pytest

from accelcore.cli import main
from accelcore.cli.verify import commands


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["doctor"],
        ["export"],
        ["run"],
        ["verify"],
        ["verify", "backend"],
        ["precision"],
        ["plot"],
        ["record"],
        ["replay"],
        ["advise"],
        ["new-backend"],
    ],
)
def test_help_shows_examples_and_no_escape_codes(capsys, command):
    assert main([*command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"Usage: accelcore {' '.join(command)}".strip() in out
    assert "Examples:\n" in out
    assert "\x1b" not in out
    assert "\b" not in out


def test_help_of_doctor_tells_the_exit_codes(capsys):
    main(["doctor", "--help"])
    text = capsys.readouterr().out
    for code in ("  0   every plugin", "  1   something", "  2   no backend", "  64  the request"):
        assert code in text


def test_a_backend_in_place_of_a_word_of_verify_is_named_with_that_word(capsys):
    assert main(["verify", "cpu"]) == 64
    assert "accelcore verify backend cpu" in capsys.readouterr().err
    assert commands.get_command(click.Context(commands, resilient_parsing=True), "cpu") is None  # to complete a line


@pytest.mark.parametrize("command", ["run", "verify backend", "doctor --dep"])
def test_a_wrong_call_is_one_message_with_the_usage_and_where_help_is(capsys, command):
    assert main(command.split()) == 64
    shown = capsys.readouterr().err
    command = command.partition(" --")[0]
    assert shown.startswith(f"Usage: accelcore {command} ")
    assert f"accelcore {command} --help" in shown
    assert "\nError: " in shown


@pytest.mark.parametrize(
    ("arguments", "late"),
    [
        (["it.py", "--nproc", "2", "--lr", "1"], "--nproc"),
        (["-m", "json", "--apex", "--device=cpu"], "--apex, --device"),
        (
            ["it.py", "--help", "--debug", "--nproc-per-node", "2", "--", "nproc"],
            None,
        ),  # many scripts have such options
        (["--nproc", "1", "it.py"], None),
        (["--device", "cpu", "it.py", "--device", "mps"], None),
    ],
)
def test_an_option_of_run_after_the_script_gets_a_line_and_goes_to_the_script(
    capsys, monkeypatch, tmp_path, arguments, late
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it.py").touch()
    started = []
    monkeypatch.setattr(os, "execve", lambda file, words, environ: started.append(words))
    assert main(["run", *arguments]) == 0
    said = capsys.readouterr().err
    assert (f"the script gets {late}: " in said) if late else not said
    if late:
        assert started[0][-2:] == arguments[-2:]


@pytest.mark.parametrize(
    ("word", "says"),
    [("docter", "did you mean 'doctor'"), ("linnt", "did you mean 'lint'"), ("trian", ""), ("train.py", "")],
)
def test_an_unknown_command_says_how_a_script_is_run(capsys, word, says):
    assert main([word]) == 64
    shown = capsys.readouterr().err
    assert f"'{word}'" in shown
    assert says in shown
    assert "accelcore run SCRIPT" in shown


def test_verify_shows_that_a_backend_follows_the_word_backend(capsys):
    assert main(["verify", "cpu"]) == 64
    assert "verify [OPTIONS] backend NAME" in capsys.readouterr().err


def test_the_console_script_is_the_same_program(machine):
    script = shutil.which("accelcore", path=sys.executable.rpartition("/")[0])
    assert script is not None
    done = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, machine.run("--version").stdout)
    assert done.stdout.startswith("accelcore 0.")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_the_shell(machine, shell):
    machine.variables["_ACCELCORE_COMPLETE"] = f"{shell}_source"
    done = machine.run()
    assert done.returncode == 0
    assert f"_ACCELCORE_COMPLETE={shell}_complete" in done.stdout


@pytest.mark.parametrize(
    ("words", "offers"),
    [
        (
            "accelcore ",
            {
                "advise",
                "doctor",
                "export",
                "lint",
                "new-backend",
                "plot",
                "port",
                "precision",
                "record",
                "replay",
                "run",
                "verify",
            },
        ),
        ("accelcore doctor --", {"--json", "--deep", "--timeout", "--debug", "--help"}),
        ("accelcore run --device c", {"cpu", "cuda"}),
    ],
)
def test_commands_options_and_devices_are_completed(machine, words, offers):
    count = len(words.split(" ")) - 1
    machine.variables |= {"_ACCELCORE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    done = machine.run()
    assert {line.partition(",")[2] for line in done.stdout.split()} == offers


def test_a_reader_that_leaves_early_is_no_traceback(machine):
    machine.no_torch()
    child = machine.start("doctor", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    assert child.stderr.read() == ""
    child.stderr.close()
    assert child.wait() == 1
