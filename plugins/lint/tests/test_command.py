"""The command: its output, its exit codes, its settings, and files of every kind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelcore_lint.rules import RULES

MOVES = "import torch\nx = torch.ones(2).cuda()\n"


def codes(done):
    return [entry["code"] for entry in json.loads(done.stdout)]


def test_a_finding_shows_its_place_the_line_a_mark_and_two_sentences(run):
    run.write("train.py", "import torch\n\n\tif_ = 1\n".replace("\t", "") + 'é = torch.ones(2, device="cuda")\n')
    done = run("train.py")
    assert done.exit_code == 1
    head, line, mark, why, write, see, _ = done.stdout.splitlines()
    assert head == "train.py:4:26 ACC103 device-string"
    assert line.index('"cuda"') == mark.index("^^^^^^")
    assert mark.count("^") == len('"cuda"')
    assert why.startswith("  why: ")
    assert write.startswith("  instead: ")
    assert see.endswith("docs/lint.md#acc103-device-string")


def test_nothing_found_is_zero_and_exit_zero_forgives(run):
    run.write("clean.py", "import torch\n")
    run.write("moves.py", MOVES)
    assert run("clean.py").exit_code == 0
    assert run("moves.py").exit_code == 1
    assert run("moves.py", "--exit-zero").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--select", "ACC999", "."], "ACC999"),
        (["--nonsense"], "--nonsense"),
        (["nowhere.py"], ": nowhere.py: there is no such file or folder\n  what to do: correct the path"),
        ([""], "empty"),
        (["--config", "none.toml", "."], "none.toml"),
        (["--explain", "ACC"], "ACC101"),
    ],
)
def test_a_mistake_is_one_message_and_64(run, arguments, says):
    done = run(*arguments)
    assert done.exit_code == 64
    assert says in done.stderr
    assert ("Error: " in done.stderr) == ("Usage: " in done.stderr)  # else as accelcore's own errors
    assert done.stdout == ""


def test_a_selection_is_by_code_family_or_all(run):
    run.write("a.py", MOVES + 'state = torch.load("x", map_location="cuda")\n')
    assert codes(run("a.py", "--format", "json")) == ["ACC102", "ACC310", "ACC107"]
    assert codes(run("a.py", "--format", "json", "--select", "ACC3")) == ["ACC310"]
    assert codes(run("a.py", "--format", "json", "--select", "ACC1", "--ignore", "ACC102")) == ["ACC107"]
    assert codes(run("a.py", "--format", "json", "--select", "ALL", "--ignore", "ACC1,ACC310")) == []


def test_statistics_count_rules(run):
    run.write("a.py", MOVES + MOVES)
    done = run("--statistics")
    assert done.stdout.split() == ["2", "ACC102", "vendor-move"]
    assert done.exit_code == 1


def test_explain_shows_a_rule_with_examples(run):
    done = run("--explain", "ACC101")
    assert done.exit_code == 0
    assert "silent-skip" in done.stdout
    assert "torch.autocast" in done.stdout


def test_standard_input_is_a_script(run):
    done = run("-", "--format", "json", input=MOVES)
    assert [(entry["file"], entry["line"], entry["code"]) for entry in json.loads(done.stdout)] == [("-", 2, "ACC102")]


def test_github_annotations_escape_what_has_a_meaning(run):
    run.write("a,b:100%.py", MOVES)
    (line,) = run("--format", "github").stdout.splitlines()
    assert line.startswith("::warning file=a%2Cb%3A100%25.py,")
    assert "line=2,col=5,endLine=2" in line
    assert run("--format", "github", "--select", "ACC3").stdout == ""


def test_sarif_has_what_its_schema_requires(run):
    run.write("an odd näme.py", MOVES)
    log = json.loads(run("--format", "sarif").stdout)
    assert log["version"] == "2.1.0"
    (job,) = log["runs"]
    driver = job["tool"]["driver"]
    assert driver["name"] == "accelcore-lint"
    assert [rule["id"] for rule in driver["rules"]] == ["ACC001", *RULES]
    assert all(rule["shortDescription"]["text"] for rule in driver["rules"])
    (result,) = job["results"]
    assert result["message"]["text"]
    assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"] == "ACC102"
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "an%20odd%20n%C3%A4me.py"
    assert place["region"] == {"startLine": 2, "startColumn": 5, "endLine": 2, "endColumn": 25}


@pytest.mark.parametrize(
    "data", [b"import torch\ndef (:\n", b"def (:\n", b"import torch\n\0", b"import torch\n'\xff'", b"# coding: none\n"]
)
def test_what_cannot_be_read_is_named_and_the_rest_is_linted(run, data):
    run.write("bad.py", data)
    run.write("good.py", MOVES)
    done = run("--format", "json")
    assert done.exit_code == 1
    assert "bad.py was not linted: " in done.stderr
    assert ("decoded" in done.stderr) == ("convert it to UTF-8" in done.stderr)
    assert codes(done) == ["ACC102"]
    assert run("bad.py").stderr.endswith("\nno findings in 0 files\n")


def test_a_file_in_another_encoding_is_read_by_its_declaration(run):
    run.write("latin.py", "# coding: latin-1\nimport torch\nx = 'é'; torch.ones(2).cuda()\n".encode("latin-1"))
    run.write("bom.py", b"\xef\xbb\xbf" + MOVES.replace("\n", "\r\n").encode())
    found = {entry["file"]: (entry["line"], entry["column"]) for entry in json.loads(run("--format", "json").stdout)}
    assert found == {"latin.py": (3, 10), "bom.py": (2, 5)}


def test_a_huge_file_a_pipe_and_a_loop_of_links_are_named(run):
    run.write("huge.py", b"import torch\n" + b"#" * (2 << 20))
    os.mkfifo(run.folder / "pipe.py")
    (run.folder / "loop.py").symlink_to("loop.py")
    (run.folder / "folder").mkdir()
    (run.folder / "folder" / "again").symlink_to(run.folder)
    run.write("folder/a.py", MOVES)
    done = run("--format", "json")
    assert codes(done) == ["ACC102"]
    for name in ("huge.py", "pipe.py", "loop.py"):
        assert f"{name} was not linted: " in done.stderr


def test_others_code_is_left_out_with_a_note_unless_it_is_named(run):
    run.write("third_party/a.py", MOVES)
    run.write(".venv/a.py", MOVES)
    done = run("--format", "json")
    assert codes(done) == []
    assert "third_party" in done.stderr
    assert ".venv" not in done.stderr
    assert codes(run("--format", "json", "third_party")) == ["ACC102"]


def test_a_name_with_control_characters_stays_on_its_line(run):
    run.write("a\x1b[31m\nb.py", MOVES)
    done = run()
    assert "\x1b" not in done.stdout
    assert done.stdout.startswith("a\\x1b[31m\\nb.py:2:5 ")


def test_a_notebook_is_linted_by_its_cells(run):
    cells = [
        {"cell_type": "markdown", "source": ["x.cuda()"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "import torch\n", "!pip list"]},
        {"cell_type": "code", "source": "%%bash\nls"},
        {"cell_type": "code", "source": ["x = 1\n", "y = torch.ones(2).cuda()"]},
    ]
    run.write("a.ipynb", json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    (entry,) = json.loads(run("--format", "json").stdout)
    assert (entry["cell"], entry["line"], entry["code"]) == (3, 2, "ACC102")
    assert "a.ipynb:cell 3:2:5 " in run().stdout
    run.write("b.ipynb", "{}")
    assert "b.ipynb was not linted: it is not a Jupyter notebook" in run().stderr


def test_settings_of_the_project_count_and_the_command_line_takes_precedence(run):
    run.write(
        "pyproject.toml",
        "[tool.accelcore.lint]\nselect = ['ACC1']\nignore = ['ACC107']\nexclude = ['old', 'src/gen_*.py']\n"
        "per-file-ignores = { 'tests/*' = ['ACC102'] }\n",
    )
    for name in ("a.py", "old/a.py", "src/gen_a.py", "tests/a.py"):
        run.write(name, MOVES + 'state = torch.load("x", map_location="cuda")\n')
    assert codes(run("--format", "json")) == ["ACC102"]
    assert codes(run("--format", "json", "old/a.py")) == []
    assert codes(run("--format", "json", "a.py", "--select", "ACC310,ACC107")) == ["ACC310", "ACC107"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tool.accelcore.lint]\nselekt = []", "selekt"),
        ("[tool.accelcore.lint]\nselect = 'ACC1'", "ACC1"),
        ("[tool.accelcore.lint]\nselect = ['E501']", "E501"),
        ("[tool.accelcore.lint]\nper-file-ignores = ['a']", "per-file-ignores"),
        ("[tool.accelcore]\nlint = 3", "table"),
        ("[tool.accelcore.lint", "pyproject.toml"),
    ],
)
def test_a_mistake_in_the_settings_is_named(run, text, says):
    run.write("pyproject.toml", text)
    done = run()
    assert done.exit_code == 64
    assert says in done.stderr


def test_comments_ignore_on_a_line_or_in_the_file(run):
    run.write("line.py", MOVES.rstrip() + "  # accel: ignore[ACC102]\ny = x.cuda()\n")
    run.write("file.py", '"""Docstring."""\n# accel: ignore[ACC102, ACC103]\n' + MOVES)
    run.write("end.py", "import torch\nx = torch.ones(\n    2,\n).cuda()  # accel: ignore[ACC102]\n")
    found = json.loads(run("--format", "json").stdout)
    assert [(entry["file"], entry["line"]) for entry in found] == [("line.py", 3)]


@pytest.mark.parametrize(
    "comment", ["x = 1  # accel: ignore[ACC999]", "x = 1  # accel: ignore", "x = 1\n# accel: ignore[ACC102]"]
)
def test_a_comment_that_ignores_nothing_is_found(run, comment):
    run.write("a.py", f"import torch\n{comment}\n")
    assert codes(run("--format", "json")) == ["ACC001"]


def test_many_files_are_linted_as_few_in_their_order(run):
    for number in range(120):
        run.write(f"{number:03}.py", MOVES)
    found = json.loads(run("--format", "json").stdout)
    assert [entry["file"] for entry in found] == [f"{number:03}.py" for number in range(120)]


ALONE = """
import sys

sys.modules["torch"] = sys.modules["accelcore"] = sys.modules["libcst"] = None
sys.argv = ["accelcore-lint", "planted.py"]
from accelcore_lint.lint_command import main

main()
"""


def test_it_needs_neither_torch_nor_accelcore_and_runs_nothing(run):
    run.write("planted.py", MOVES + "open('ran', 'w')\n")
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=run.folder, capture_output=True, text=True)
    assert (done.returncode, done.stdout.count("ACC102")) == (1, 1), done.stderr
    assert not (run.folder / "ran").exists()


def test_it_is_a_plugin_of_flake8(run):
    run.write("a.py", MOVES + "y = x.cuda()  # noqa: ACC102\n")
    command = [sys.executable, "-m", "flake8", "--isolated", "--select", "ACC", "a.py"]
    done = subprocess.run(command, cwd=run.folder, capture_output=True, text=True)
    assert [line.split(" ")[:2] for line in done.stdout.splitlines()] == [["a.py:2:5:", "ACC102"]], done.stderr


def test_the_page_has_the_rules_as_they_are():
    from accelcore_lint.page import MARK, rules

    page = Path(__file__).parents[3] / "docs" / "lint.md"
    made = page.read_text(encoding="utf-8").partition(MARK)[2]
    assert made.strip() == rules().strip(), "run: python -m accelcore_lint.page docs/lint.md"
