"""The runner of the vendor's suite, on a suite made here: what it stops, and what it counts as what."""

import os
import runpy
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

SUITE = """
import os, signal, subprocess, sys, time, unittest
import pytest

class TestAll(unittest.TestCase):
    def test_a_passes(self): pass
    def test_b_dies(self): os.kill(os.getpid(), signal.SIGSEGV)
    def test_c_fails(self): assert 1 == 2
    def test_d_is_refused(self): raise RuntimeError("EMULATED: npu operator aten::none is not emulated")
    def test_e_hangs(self): subprocess.run(["sleep", "600"], start_new_session=True)
    def test_f_is_skipped(self): self.skipTest("not here")
    def test_g_misses_a_package(self): import no_such_package
    def test_h_has_one_bad_part(self):
        for part in range(3):
            with self.subTest(part=part): self.assertNotEqual(part, 1)
    def test_i_starts_many(self):
        for _ in range(30): subprocess.Popen(["sleep", "600"])
        time.sleep(600)
    def test_j_takes_much_memory(self): bytearray(1 << 42)
    def test_k_passes(self): pass
"""


@pytest.fixture(scope="module")
def runner():
    sys.path.insert(0, str(Path(__file__).parents[3] / "scripts" / "vendor_suite"))
    yield import_module("run_file"), import_module("table")
    sys.path.pop(0)


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="the same without torch_npu, as in `tox run -e tests`")
def test_every_test_gets_its_verdict_and_no_process_is_left(runner, tmp_path):
    run_file, table = runner
    (tmp_path / "test_it.py").write_text(SUITE)
    environ = {**os.environ, "PYTHONPATH": os.path.dirname(run_file.__file__), "SUITE_TEST": str(tmp_path)}
    limits = run_file.Limits(test_seconds=4, file_seconds=120, processes=10)
    outcomes = run_file.run_file("test_it.py", tmp_path, environ, limits)
    told = {one.test.rpartition("test_")[2]: table.verdict(one) for one in outcomes}
    assert told == {
        "a_passes": "passed", "b_dies": "wrong", "c_fails": "wrong", "d_is_refused": "refused", "e_hangs": "limit",
        "f_is_skipped": "skipped", "g_misses_a_package": "environment", "h_has_one_bad_part": "wrong",
        "i_starts_many": "limit", "j_takes_much_memory": "wrong", "k_passes": "passed",
    }  # fmt: skip
    texts = {one.test.rpartition("test_")[2]: one.text for one in outcomes}
    assert "SIGSEGV" in texts["b_dies"]
    assert "more than 4 seconds" in texts["e_hangs"]
    assert "more than 10 processes" in texts["i_starts_many"]
    assert "MemoryError" in texts["j_takes_much_memory"]
    mark = f"SUITE_TEST={tmp_path}".encode()
    assert not [path for path in Path("/proc").glob("[0-9]*/environ") if mark in read(path).split(b"\0")]


def read(path):
    try:
        return path.read_bytes()
    except OSError:  # another's, or gone
        return b""


def test_the_table_counts_what_needs_no_hardware(runner, tmp_path):
    run_file, tables = runner
    table = tables.Table("v1")
    table.add(
        "npu/test_a.py", [run_file.Outcome("a", "passed"), run_file.Outcome("b", "failed", "E   Error: EMULATED: x")]
    )
    table.add("test_b.py", [run_file.Outcome("c", "failed", ">   raise Error('EMULATED: y')\nE   Error: z")])
    table.add(
        "optim/test_c.py",
        [run_file.Outcome("d", "skipped"), run_file.Outcome("e", "failed", "(slow_time > fast_time)")],
    )
    fault = "E   RuntimeError: device() == values_.device() INTERNAL ASSERT FAILED at ..."
    table.add("npu/test_d.py", [run_file.Outcome("f", "failed", fault)])
    table.write(tmp_path)
    lines = (tmp_path / "vendor_suite.md").read_text().splitlines()
    assert lines[0] == "EMULATED: torch_npu's own tests, revision v1; 4 files"
    assert "| all | 1 | 1 | 2 | 0 | 1 | 0 | 0 | 1 |" in lines
    assert "Of 4 tests that need no hardware, 50.0 % passed or were refused clearly." in lines
    again = tables.Table.read([tmp_path / tables.RESULT])
    assert again.markdown() == table.markdown()


def test_a_file_has_what_lies_beside_it_and_a_distributed_one_has_four_devices(runner, emulated_npu, tmp_path):
    main = runpy.run_path(str(Path(runner[0].__file__).with_name("__main__.py")))
    found = {}
    for file in ("npu/test_a.py", "distributed/deep/test_b.py"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
        environ = main["variables"](tmp_path, file)
        assert str((tmp_path / file).parent) in environ["PYTHONPATH"].split(os.pathsep)
        found[file] = environ["ACCEL_EMULATED_DEVICES"]
    assert found == {"npu/test_a.py": "2", "distributed/deep/test_b.py": "4"}


def test_a_test_loads_torch_npu_and_ends_nobody_elses_processes(runner, emulated_npu, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    main = runpy.run_path(str(Path(runner[0].__file__).with_name("__main__.py")))
    (tmp_path / "test_a.py").touch()
    environ = main["variables"](tmp_path, "test_a.py")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in environ
    for command in ("pkill", "killall"):
        program = shutil.which(command, path=environ["PATH"])
        assert Path(program).parent.name == "stand_ins"
        assert subprocess.run([program, "-9", "python"], env=environ, check=False).returncode == 1


def test_what_was_looked_into_is_explained_where_it_says_the_same(runner):
    run_file, tables = runner
    name = "npu/test_torch_fftplancache.py::TorchFFTPlanCacheApiTestCase::test_size"
    text = ">   self.assertEqual(torch.npu.backends.fft_plan_cache.size, 1)"
    assert tables.verdict(run_file.Outcome(name, "failed", text)) == "hardware"
    assert tables.verdict(run_file.Outcome(name, "failed", "E   RuntimeError: it crashed")) == "wrong"
    assert tables.verdict(run_file.Outcome(f"{name}_of_another", "failed", text)) == "wrong"
    assert tables.verdict(run_file.Outcome(name, "passed")) == "passed"


def test_every_explanation_has_a_verdict_of_the_table(runner):
    _, tables = runner
    explained = import_module("explained")
    assert {one.verdict for one in explained.EXPLAINED.values()} <= set(tables.VERDICTS) - {"passed", "wrong"}
