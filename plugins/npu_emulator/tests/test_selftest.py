"""The self-test finds what is wrong, counts what proves nothing by itself, and passes on the emulator."""

import functools
import json
import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch_npu").torch
pytest.importorskip("expecttest", reason="torch's operator samples need it")

import selftest_jobs as jobs
from accelcore_npu_emulator import selftest
from accelcore_npu_emulator.selftest.__main__ import main
from accelcore_npu_emulator.selftest.report import Comparison

SAMPLES = "torch.testing._internal.common_methods_invocations"
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


# How many comparisons by value there are at least, for all operators: an operator that is left out is no success.
LEAST = {"forward": 1600, "backward": 1350, "in place": 420, "out=": 600}
MOST = {"disagree": 30, "fallback": 270, "random": 110, "refused": 3}


@pytest.fixture(scope="module")
def swept(results, tmp_path_factory):
    """How the command ended, for every Nth operator; and for two, of which one is missing."""

    def run(every):
        folder = tmp_path_factory.mktemp("swept")
        sweep = ("--sample-limit", "1", "--every", str(every), "--json", str(folder / "report.json"))
        missing = {"ACCEL_EMULATED_FAULTS": "missing@aten::exp"}
        [(whole, part)] = results(jobs.commands, (sweep, {}), (("exp", "sum"), missing), patience=200 + 1800 // every)
        return folder, whole, part

    return functools.cache(run)


@pytest.mark.parametrize("every", [24, pytest.param(1, marks=pytest.mark.full)])
def test_nearly_all_operators_agree_with_the_cpu(swept, every):
    folder, (code, output), _ = swept(every)
    report = json.loads((folder / "report.json").read_text())
    assert code == 0, output
    assert output.startswith("EMULATED")
    assert report["emulated"] is True
    assert report["share"] >= 0.98, output
    # A part of the operators is not like all of them, and what is wrong is wrong in several dtypes.
    slack, more = (1, 0) if every == 1 else (1.4, len(FLOATS))
    for form, least in LEAST.items():
        assert report["counts"][form]["values"] >= least / every / slack, output
    for verdict, most in MOST.items():
        assert sum(counts[verdict] for counts in report["counts"].values()) <= most / every * slack + more, output
    assert [path.name for path in folder.iterdir()] == ["report.json"]


def test_the_command_fails_when_operators_are_missing(swept):
    _, _, (code, output) = swept(24)
    assert code == 1
    assert "exp (forward" in output
    assert "NotImplementedError: EMULATED: npu operator aten::exp is not emulated" in output
    assert "of what can be compared by value" in output


@pytest.fixture
def verdicts(monkeypatch, emulated_npu):
    """Have the self-test compare a function of one tensor; its verdicts by form, and the reasons it gives."""

    def run(function, *, in_place=None, out=False, dtypes=FLOATS):
        operator = SimpleNamespace(
            name="subject", variant_test_name="", op=function, inplace_variant=in_place, supports_out=out,
            supports_autograd=in_place is None and not out,
            supported_dtypes=lambda device: dtypes, supported_backward_dtypes=lambda device: dtypes,
            sample_inputs=sample_inputs,
        )  # fmt: skip
        # In place of torch's samples, whose import takes seconds.
        monkeypatch.setitem(sys.modules, SAMPLES, SimpleNamespace(op_db=[operator]))
        report = selftest.sweep()
        reasons = " ".join(one.reason for one in report.comparisons)
        return {one.form: one.verdict for one in report.comparisons}, reasons

    return run


def sample_inputs(device, dtype, requires_grad):
    tensor = torch.rand(3, 4, device=device).add(0.5).to(dtype).requires_grad_(requires_grad)
    yield SimpleNamespace(input=tensor, args=(), kwargs={}, broadcasts_input=False)


def here(tensor):
    return tensor.device.type == "npu"


def test_what_is_right_agrees_in_every_form(verdicts):
    assert verdicts(torch.exp)[0] == {"forward": "values", "backward": "values"}
    told, _ = verdicts(torch.exp, in_place=torch.exp_, out=True)
    assert told == {"forward": "values", "in place": "values", "out=": "values"}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.exp() + 1 if here(x) else x.exp(), "not close"),
        (lambda x: x.exp().cpu(), "the result is on cpu"),
        (lambda x: x.exp().t().contiguous().t() if here(x) else x.exp(), "the strides is (1, 3) instead of (4, 1)"),
        (lambda x: x.exp().float() if here(x) else x.exp(), "the dtype is torch.float32 instead of"),
        (lambda x: x.exp()[:2] if here(x) else x.exp(), "the shape is (2, 4) instead of (3, 4)"),
        (lambda x: x.exp() + 1 if here(x) and x.dtype == torch.bfloat16 else x.exp(), "not close"),
        (lambda x: torch.rand_like(x)[:2] if here(x) else torch.rand_like(x), "the shape is (2, 4)"),
    ],
    ids=["values", "device", "strides", "dtype", "shape", "bf16 alone", "shape of random values"],
)
def test_what_differs_is_found(verdicts, function, reason):
    told, reasons = verdicts(function)
    assert told["forward"] == "disagree"
    assert reason in reasons


def test_wrong_gradients_are_found(verdicts):
    told, _ = verdicts(lambda x: x.exp() + (2 * x.exp() - 2 * x.exp().detach() if here(x) else 0))
    assert told == {"forward": "values", "backward": "disagree"}


def test_a_form_that_writes_elsewhere_is_found(verdicts):
    told, reasons = verdicts(torch.exp, in_place=lambda x: x.exp())
    assert told == {"forward": "values"}, "the CPU's own is no standard to compare with"
    told, reasons = verdicts(torch.exp, in_place=lambda x: x.exp() if here(x) else x.exp_())
    assert told["in place"] == "disagree"
    assert "another tensor" in reasons
    told, _ = verdicts(lambda x, out=None: x.exp() if here(x) or out is None else torch.exp(x, out=out), out=True)
    assert told == {"forward": "values", "out=": "disagree"}


def test_random_values_are_told_from_wrong_ones(verdicts):
    def seeded(x):
        torch.manual_seed(42)
        return torch.nn.functional.dropout(x)

    assert verdicts(torch.rand_like)[0]["forward"] == "random"
    assert verdicts(seeded)[0]["forward"] == "random"
    assert verdicts(lambda x: torch.nn.functional.dropout(x, p=0.0))[0]["forward"] == "values"


def test_what_torch_npu_has_the_cpu_compute_is_counted_by_itself(verdicts):
    told, reasons = verdicts(lambda x: torch.mode(x).values, dtypes=FLOATS[:1])
    assert told["forward"] == "fallback"
    assert "aten::mode" in reasons


@pytest.mark.parametrize(("wrong", "passed"), [(0, True), (2, True), (3, False)])
def test_a_report_passes_with_98_of_100(wrong, passed):
    kinds = ["disagree"] * wrong + ["values"] * (100 - wrong) + ["random", "fallback"] * 50
    report = selftest.Report([Comparison(f"operator{i}", "float32", "forward", kind) for i, kind in enumerate(kinds)])
    assert report.passed is passed
    assert report.count("fallback") == 50


@pytest.mark.parametrize("verdict", ["random", "fallback"])
def test_nothing_compared_by_value_is_no_pass(verdict):
    assert not selftest.Report([Comparison("rand", "float32", "forward", verdict)], unknown=["jiterator_unary"]).passed


@pytest.mark.parametrize("option", ["--sample-limit", "--every"])
@pytest.mark.parametrize("limit", ["0", "-1", "many"])
def test_a_senseless_number_is_an_error(option, limit, capsys):
    with pytest.raises(SystemExit) as error:
        main([option, limit])
    assert error.value.code == 2
    assert option in capsys.readouterr().err
