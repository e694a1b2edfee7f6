"""Which variant is recommended, and what limits the comparison: over trials that are made up."""

from __future__ import annotations

import json
import math
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from accelcore.advise import PRESETS, advise
from accelcore.advise.trials import Outcome, Script
from accelcore.cli import advise as report
from accelcore.errors import ConfigurationError, TrainingError

ABOUT = {
    "name": "Net", "device": "gadget", "emulated": False, "autocast": ["bfloat16", "float16"],
    "model_dtypes": ["float32", "bfloat16", "float16"], "fast_fp32": "tf32", "compilers": ["compiler"],
    "compiled": False, "overridden": [], "eager": "", "torch": "2.13.0",
}  # fmt: skip


class Machine:
    """Makes trials up: a loss curve for each seed, and what is set for a variant's name."""

    def __init__(self, **variants):
        self.about, self.variants, self.tried = dict(ABOUT), variants, []

    def __call__(self, script, variant):
        self.tried.append(variant)
        given = {"shift": 0.0, "seconds": 2e-3, "overflows": (), "failure": "", "steps": script.steps}
        given |= {"batches": 0, "scatter": 0.02}
        given |= self.variants.get(variant.name.replace("-", "_").replace(" ", "_"), {})
        losses = [
            1 / (step + 1) + given["shift"] + given["scatter"] * (variant.seed % 7) for step in range(given["steps"])
        ]
        if callable(given["batches"]):
            given["batches"] = given["batches"]()
        return Outcome(
            about=self.about | given.get("about", {}),
            trainers=1,
            checksums=[[given["batches"]]],
            losses=[loss if math.isfinite(loss) else None for loss in losses],
            seconds=[given["seconds"] * (1 + 0.01 * (step % 3)) for step in range(given["steps"] - 1)],
            overflows=[step in given["overflows"] for step in range(given["steps"])],
            memory=0 if given["failure"] else 2**20,
            failure=given["failure"],
        )

    def advise(self, **options):
        return advise(Script(["train.py"], 50, 60), run=self, **options)


def row(advice, name):
    return next(row for row in advice.rows if row.variant.name == name)


@pytest.mark.parametrize("every", [False, True])
def test_each_trial_is_announced_with_the_most_that_there_can_be(every):
    """Every variant agrees, so that the most is what there is."""
    shown, machine = [], Machine()
    machine.advise(every=every, show=lambda *trial: shown.append(trial))
    names, numbers, most = zip(*shown, strict=True)
    assert numbers == (*range(1, len(machine.tried) + 1),)
    assert most == (0, *[len(machine.tried)] * (len(machine.tried) - 1))
    assert names[:3] == ("fp32", "fp32, seed 1", "fp32, seed 2")


def test_the_fastest_that_agrees_is_recommended():
    advice = Machine(bf16={"seconds": 1e-3}, O3={"seconds": 0.5e-3, "shift": 5.0}).advise()
    assert advice.recommended == "bf16"
    assert advice.exit_code == 0
    assert row(advice, "bf16").seconds[1] == pytest.approx(1.01e-3)
    assert "more than the noise" in row(advice, "O3").why


def test_a_simpler_one_that_is_slower_is_said_to_be_so():
    reason = Machine(bf16={"seconds": 1e-3}).advise(presets=["bf16"]).reason
    assert "fp32: simpler, but slower" in reason
    assert "quicker" not in reason


def test_a_quicker_way_to_run_the_recommended_preset_that_is_not_recommended_has_a_reason():
    advice = Machine(bf16={"seconds": 1e-3}, bf16_flat={"seconds": 0.995e-3}).advise()
    assert advice.recommended == "bf16"
    assert "fp32-fast: simpler, but slower" in advice.reason
    assert "bf16 flat: quicker by less than the spread" in advice.reason


def test_ties_go_to_the_simplest():
    assert Machine(O2={"seconds": 1.995e-3}).advise().recommended == "fp32"


def test_the_noise_is_the_range_over_the_seeds():
    advice = Machine().advise(seeds=3)
    tails = [row(advice, "fp32").loss, *advice.seeds]
    assert len(advice.seeds) == 3
    assert advice.noise == pytest.approx(max(tails) - min(tails))
    assert 0 < advice.noise < 0.13


@pytest.mark.parametrize(("inside", "agrees"), [(0.9, True), (1.1, False)])
def test_a_difference_counts_from_the_noise_on(inside, agrees):
    noise = Machine().advise().noise
    advice = Machine(bf16={"shift": -inside * noise}).advise(presets=["bf16"])
    assert row(advice, "bf16").agrees is agrees
    assert row(advice, "bf16").divergence == pytest.approx(inside * noise)


def test_overflows_at_the_end_count_and_those_of_the_search_for_a_scale_do_not():
    quick = {"seconds": 1e-3}
    advice = Machine(fp16=quick | {"overflows": (0, 1)}, O1=quick | {"overflows": (0, 45)}).advise()
    assert (row(advice, "fp16").agrees, row(advice, "fp16").overflows) == (True, 2)
    assert "overflow" in row(advice, "O1").why


def test_a_loss_that_is_not_finite_does_not_agree():
    assert "finite" in row(Machine(fp16={"shift": math.nan, "seconds": 1e-3}).advise(), "fp16").why


def test_a_variant_that_fails_is_tried_once_and_shown_with_its_error():
    machine = Machine(
        O2={"failure": "Traceback\n  File x\nRuntimeError: expected Half\n  what to do: cast\nin step 1", "steps": 0}
    )
    advice = machine.advise(rounds=3)
    assert row(advice, "O2").why == "RuntimeError: expected Half"
    assert [variant.name for variant in machine.tried].count("O2") == 1


def test_what_the_device_does_not_declare_is_not_tried():
    machine = Machine()
    machine.about |= {"autocast": ["bfloat16"], "model_dtypes": ["float32", "bfloat16"], "fast_fp32": None}
    advice = machine.advise()
    assert {variant.name for variant in machine.tried} >= {"bf16", "O1-bf16", "O2-bf16", "O3-bf16"}
    assert not {"fp16", "fp32-fast"} & {variant.name for variant in machine.tried}
    assert "float16" in row(advice, "fp16").why
    assert "fp32" in row(advice, "fp32-fast").why


def test_the_recommended_one_is_tried_flat_and_compiled_in_turn_with_itself():
    machine = Machine(bf16={"seconds": 1e-3}, bf16_compiled={"seconds": 0.4e-3}, bf16_flat={"seconds": 2e-3})
    advice = machine.advise(presets=["bf16"], rounds=2)
    assert advice.recommended == "bf16 compiled"
    last = [variant.name for variant in machine.tried[-8:]]
    assert all(last.count(name) == 2 for name in ("bf16", "bf16 compiled", "bf16 flat", "bf16 not flat"))
    assert last[0] != last[4]  # another order in each round
    assert row(advice, "bf16 compiled").variant.options == {"precision": "bf16", "compile": True}


def test_a_preset_that_is_the_fastest_compiled_only_is_found_if_all_are_tried():
    machine = Machine(bf16={"seconds": 1e-3}, fp32_compiled={"seconds": 0.4e-3})
    advice = machine.advise(presets=["bf16"])
    assert advice.recommended == "bf16"
    assert any("only bf16" in note and "--all" in note for note in advice.notes)
    advice = machine.advise(presets=["bf16"], every=True)
    assert advice.recommended == "fp32 compiled"
    assert not any("--all" in note for note in advice.notes)
    assert "slower: bf16, 1.01 ms" in advice.reason


def test_a_compiled_script_is_tried_not_compiled():
    machine = Machine(fp32={"about": {"compiled": True}})
    assert any(variant.options.get("compile") is False for variant in machine.advise() and machine.tried)


@pytest.mark.parametrize(("scatter", "is_large"), [(0.04, False), (0.06, True)])
def test_noise_that_is_large_beside_what_the_loss_changes_is_told_of(scatter, is_large):
    """The loss falls by 0.98, a quarter of which is 0.245; the noise is five times the scatter, 0.2 and 0.3."""
    advice = Machine(fp32={"scatter": scatter}).advise(presets=["bf16"])
    assert advice.noise == pytest.approx(5 * scatter)
    assert any("noise of seeds" in note and "large" in note for note in advice.notes) == is_large


def test_what_ran_eagerly_is_not_recommended_as_compiled():
    machine = Machine(fp32_compiled={"seconds": 1e-4, "about": {"eager": "no C++ compiler"}})
    advice = machine.advise(presets=["bf16"])
    assert advice.recommended == "fp32"
    assert "C++" in row(advice, "fp32 compiled").why


def test_seeds_that_change_nothing_leave_the_noise_unknown():
    machine = Machine()
    advice = advise(
        Script(["train.py"], 50, 60), run=lambda script, variant: machine(
            script, type(variant)(variant.name, variant.options)
        )
    )  # fmt: skip
    assert (advice.noise, advice.exit_code) == (0, 1)
    assert any("seed" in note for note in advice.notes)


def test_a_random_order_of_the_data_is_reported():
    numbers = iter(range(1000))
    advice = Machine(fp32={"batches": lambda: next(numbers)}).advise()
    assert any("order of the data is random" in note for note in advice.notes)


def test_a_script_that_ends_early_is_compared_over_the_steps_it_has():
    machine = Machine(fp32={"steps": 20, "failure": "it ended after 20 of 50 steps"})
    tried = []

    def run(script, variant):
        tried.append(script.steps)
        if script.steps == 20:
            machine.variants = {}
        return machine(script, variant)

    advice = advise(Script(["train.py"], 50, 60), run=run)
    assert (tried[0], set(tried[1:])) == (50, {20})
    assert any("20 of 50" in note for note in advice.notes)
    assert advice.recommended


@pytest.mark.parametrize(
    ("failure", "steps"),
    [("it ended after 3 of 50 steps", 3), ("it made no trainer: x", 0), ("ValueError: mine", 30), ("no step for 9", 0)],
)
def test_a_script_that_cannot_be_tried_is_an_error(failure, steps):
    with pytest.raises(TrainingError, match=failure):
        Machine(fp32={"failure": failure, "steps": steps}).advise()


def test_an_unknown_preset_is_refused():
    with pytest.raises(ConfigurationError, match=r"'bf17'(?s:.*)bf16"):
        Machine().advise(presets=["bf17"])


def test_the_presets_are_precisions_of_a_trial():
    from accelcore.precision.policy import Policy

    for options in PRESETS.values():
        name, _, dtype = options["precision"].partition(" ")
        assert Policy.preset(name, dtype=dtype or None)


def test_the_reports_hold_each_variant(tmp_path: Path):
    machine = Machine(bf16={"seconds": 1e-3}, O2={"failure": "Error: <b>half</b>", "steps": 0})
    machine.about["emulated"] = True
    advice = machine.advise()
    console = Console(width=200, record=True, file=StringIO())
    report.print_table(advice, console)
    report.write_page(advice, tmp_path / "new" / "advice.html")
    text, page = console.export_text(), (tmp_path / "new" / "advice.html").read_text()
    for row in advice.rows:
        assert row.variant.name in text
        assert f">{row.variant.name}</th>" in page
    assert "EMULATED" in text
    assert "EMULATED" in page
    assert "Recommended: bf16" in text
    assert "&lt;b&gt;half" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    values = json.loads(json.dumps(report.report_of(advice), allow_nan=False))
    assert (values["recommended"], values["exit_code"], values["emulated"]) == ("bf16", 0, True)
    assert len(values["variants"]) == len(advice.rows)


def test_a_page_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be written"):
        report.write_page(Machine().advise(), tmp_path / "file" / "advice.html")
