"""`accelcore replay`: exit codes, and what it refuses to replace."""

from __future__ import annotations

import json

from accelcore.cli import main


def test_itself_replaces_no_recording(tmp_path, capsys):
    reference = tmp_path / "ref"
    reference.mkdir()
    (reference / "mine").write_text("mine")
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    assert main(["replay", "--self", str(reference), str(script)]) == 64
    assert "exists" in capsys.readouterr().err
    assert (reference / "mine").read_text() == "mine"


def test_a_damaged_recording_is_an_invalid_request(tmp_path, capfd):
    rank = tmp_path / "ref" / "rank-00000"
    rank.mkdir(parents=True)
    (rank / "recording.json").write_text(json.dumps({"format": 1}))
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    assert main(["replay", str(tmp_path / "ref"), str(script)]) == 64
    assert "damaged" in capfd.readouterr().err


def test_a_script_that_fails_is_named_with_its_exit_code(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    assert main(["replay", "--self", str(tmp_path / "new"), str(script)]) == 2
    assert "exit code 3" in capfd.readouterr().err


def test_a_script_that_is_missing_starts_nothing(tmp_path, capsys):
    missing = str(tmp_path / "train.py")
    for command in (["advise"], ["record", "--out", str(tmp_path / "ref")], ["replay", str(tmp_path / "ref")]):
        assert main([*command, missing]) == 64
        said = capsys.readouterr()
        assert "no script" in said.err
        assert "trial" not in said.err + said.out
