"""The self-test: all of torch's operators, one sample each, and what its command says."""

import json

import pytest

pytest.importorskip("torch_npu")
pytest.importorskip("expecttest", reason="torch's operator samples need the package expecttest")

from accelcore_npu_emulator import selftest

COMMAND = ("-m", "accelcore_npu_emulator.selftest")


def test_nearly_all_operators_agree_with_the_cpu(emulated_process, tmp_path):
    path = tmp_path / "report.json"
    # Not `-m`: with runpy's frames on the stack the same sweep takes four times as long (measured: 35 s to 7 s of CPU).
    program = "import sys; from accelcore_npu_emulator.selftest import main; sys.exit(main())"
    done = emulated_process("-c", program, "--sample-limit", "1", "--json", str(path))
    report = json.loads(path.read_text())
    assert done.returncode == 0, done.stdout
    assert report["emulated"] is True
    assert report["total"] > 650
    assert report["agree"] == report["total"] - len(report["disagree"])
    assert report["agree"] >= 0.98 * report["total"], done.stdout
    assert done.stdout.startswith("EMULATED")
    expected = f"{report['agree']} of {report['total']} operators agree with the CPU, forward and backward\n"
    assert done.stdout.endswith(expected)
    assert list(tmp_path.iterdir()) == [path]


def test_the_command_fails_when_operators_disagree(emulated_process):
    done = emulated_process(*COMMAND, "exp", "sum", ACCEL_EMULATED_FAULTS="missing@aten::exp")
    assert done.returncode == 1
    assert "exp: NotImplementedError: EMULATED: npu operator aten::exp is not emulated" in done.stdout
    assert "1 of 2 operators agree" in done.stdout


@pytest.mark.parametrize(
    ("disagree", "passed"), [(0, True), (2, True), (3, False)], ids=["none", "two of 100", "three of 100"]
)
def test_a_report_passes_with_98_of_100(disagree, passed):
    names = [f"operator{i}" for i in range(100)]
    report = selftest.Report(agree=names[disagree:], disagree=dict.fromkeys(names[:disagree], "it differs"))
    assert report.passed is passed
    assert str(report).count("it differs") == disagree


def test_nothing_compared_is_no_pass():
    assert not selftest.Report(unknown=["jiterator_unary"]).passed


@pytest.mark.parametrize("limit", ["0", "-1", "many"])
def test_a_senseless_limit_is_an_error(limit, capsys):
    with pytest.raises(SystemExit) as error:
        selftest.main(["--sample-limit", limit])
    assert error.value.code == 2
    assert "--sample-limit" in capsys.readouterr().err
