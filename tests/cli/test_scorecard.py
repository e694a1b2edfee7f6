"""The text of a scorecard; what runs the suite is tested in tests/testing."""

from __future__ import annotations

from accelcore.cli.verify import Scorecard, Verdict, show


def test_each_test_that_was_not_tried_is_listed_under_its_reason(capsys):
    backend = {"name": "toaster", "index": 0, "torch": "2.13.0", "emulated": False}
    alone = "there is one device"
    verdicts = [
        Verdict("runtime", "test_copies", "", "Copies arrive.", "passed"),
        Verdict("runtime", "test_travels", "bf16", "Tensors travel.", "not tried", alone),
        Verdict("runtime", "test_streams", "", "Streams wait.", "not tried", alone),
        Verdict("compiler", "test_compiled", "", "Results are equal.", "not tried", "there is no compiler"),
        Verdict("precision", "test_nested", "", "Regions nest.", "not tried", "mat1 has another dtype"),
        Verdict("compiler", "test_options", "", "Options are taken.", "not declared", "it declares none"),
    ]
    show(Scorecard(backend, verdicts))
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(f"not tried  runtime: {alone}")
    assert lines[at + 1 : at + 3] == ["    Tensors travel. [bf16]", "    Streams wait."]
    at = lines.index("not tried  compiler: there is no compiler")
    assert lines[at + 1] == "    Results are equal."
    assert "not tried  precision: mat1 has another dtype" in lines
    assert sum("    " in line[:4] and line.endswith(("travel. [bf16]", "wait.", "equal.")) for line in lines) == 3
    assert "not declared  compiler: it declares none" in lines
    hardly = "1 of 1 tests of precision, 1 of 2 tests of compiler, 2 of 3 tests of runtime"
    assert lines[-1] == f"the tested part of toaster conforms; not tried: {hardly}"
