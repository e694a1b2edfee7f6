"""`accelcore advise`: try the unchanged script under each preset, then compiled and flat, and recommend one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from accelcore.advise.rule import Advice, Row, check_repeats, choose, judge, measure_noise, reason
from accelcore.advise.trials import Outcome, Script, Variant, try_script
from accelcore.errors import ConfigurationError, TrainingError

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {"precision": "fp32", "fp32": "ieee"},
    "fp32-fast": {"precision": "fp32", "fp32": "fast"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "O1": {"precision": "O1 float16"},
    "O1-bf16": {"precision": "O1 bfloat16"},
    "O2": {"precision": "O2 float16"},
    "O2-bf16": {"precision": "O2 bfloat16"},
    "O3": {"precision": "O3 float16"},
    "O3-bf16": {"precision": "O3 bfloat16"},
}
"""The options of each preset, the simplest first."""

_SEEDS_APART = 1_000_003  # distance of two seeds, so that ranks that seed with their number do not share one
_FEWEST = 10  # steps below which a script has ended too early to compare


def advise(
    script: Script,
    *,
    presets: Sequence[str] = (),
    every: bool = False,
    seeds: int = 3,
    rounds: int = 2,
    show: Callable[[str, int, int], None] = lambda trial, number, most: None,
    run: Callable[[Script, Variant], Outcome] = try_script,
) -> Advice:
    """Try a script and recommend a variant by the rule of `accelcore.advise.rule`.

    The options are those of the command. `run` runs a trial. Before it, `show` is called with its name, its number from
    1 on, and the largest number of trials, 0 before the first one has told what the device declares.
    """
    for name in presets:
        if name not in PRESETS:
            raise ConfigurationError(f"there is no preset {name!r} to try", available=", ".join(PRESETS))

    numbers, most = count(1), 0

    def attempt(variant: Variant) -> Outcome:
        name = f"{variant.name}, seed {variant.seed // _SEEDS_APART}" if variant.seed else variant.name
        show(name, next(numbers), most)
        return run(script, variant)

    reference = Row(Variant("fp32", PRESETS["fp32"]))
    first = attempt(reference.variant)
    advice = Advice(script, first.about)
    if first.failure:
        script = advice.script = _shortened(script, first, advice.notes)
    rows, refused = _rows(presets, first.about)
    rows = [reference, *rows]
    tried_again = (len(rows) if every else 1) * (1 + len(_executions(reference.variant, first.about)))
    most = 1 + seeds + rounds * (len(rows) + tried_again)
    others = [attempt(replace(reference.variant, seed=_SEEDS_APART * number)) for number in range(1, seeds + 1)]
    measure_noise(advice, first, others)
    _take_turns(rows, rounds, attempt)
    check_repeats(advice, first, reference.outcomes[0])
    judge(rows, advice, first)
    advice.rows = [*rows, *refused]
    best = choose(rows)
    if best is None:
        advice.reason = "no variant did all its steps, without lasting overflows, with the loss of fp32"
        return advice
    bases = [row for row in rows if row.agrees] if every else [best]
    executions = {row.variant.name: [Row(each) for each in _executions(row.variant, first.about)] for row in bases}
    # The bases are tried again, so that the times of all are of the same minutes.
    tried = [each for row in bases for each in (row, *executions[row.variant.name])]
    _take_turns(tried, rounds, attempt)
    judge(tried, advice, first)
    chosen = choose(tried) or best
    advice.rows += [each for row in bases for each in executions[row.variant.name]]
    advice.recommended, advice.reason = chosen.variant.name, reason(chosen, tried)
    if not every:
        of_presets = reason(best, rows)
        advice.reason = (
            of_presets if chosen is best else f"{advice.reason}. Of the presets, {best.variant.name}: {of_presets}"
        )
        advice.notes.append(
            f"only {best.variant.name} was tried compiled, flat and not flat: --all tries each preset that agrees"
        )
    if first.trainers > 1:
        advice.notes.append(
            f"the script makes {first.trainers} trainers: all have the options of the trial, and the first is compared"
        )
    return advice


def _shortened(script: Script, first: Outcome, notes: list[str]) -> Script:
    """Return a script for as many steps as it can do; raise TrainingError if those are too few."""
    done = len(first.losses)
    if done < _FEWEST or first.memory or not first.failure.startswith("it ended"):
        raise TrainingError(
            "the script cannot be tried: in fp32 it does not do its steps",
            why=first.failure,
            remedy=f"the script has to make accel.trainer(...) and to train for {_FEWEST} steps or more; see whether "
            "`accelcore run` runs it",
        )
    notes.append(f"the script {first.failure.removeprefix('it ')}: all trials have {done} steps")
    return replace(script, steps=done)


def _rows(presets: Sequence[str], about: Mapping[str, Any]) -> tuple[list[Row], list[Row]]:
    """Return rows for the presets that the device declares, and rows for the others with the reason."""
    half = "float16" in about["autocast"] and "float16" in about["model_dtypes"]
    doubled = {f"O{level}-bf16" if half else f"O{level}" for level in (1, 2, 3)}
    rows: list[Row] = []
    refused: list[Row] = []
    for name, options in PRESETS.items():
        if name == "fp32" or (name not in presets if presets else name in doubled):
            continue
        row = Row(Variant(name, options))
        dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(name, options["precision"].partition(" ")[2])
        declared = about["model_dtypes"] if name.startswith(("O2", "O3")) else about["autocast"]
        if dtype and dtype not in declared:
            row.why = f"{about['device']} does not declare {dtype} for it"
        elif options.get("fp32") == "fast" and about["fast_fp32"] is None:
            row.why = f"{about['device']} has no faster fp32"
        (refused if row.why else rows).append(row)
    return rows, refused


def _executions(best: Variant, about: Mapping[str, Any]) -> list[Variant]:
    """Return other ways to run a variant: flat, not flat, and compiled if the script is not, or the reverse."""
    found = [
        Variant(f"{best.name} not flat", {**best.options, "flat": False}),
        Variant(f"{best.name} flat", {**best.options, "flat": True}),
    ]
    if about["compiled"]:
        found.insert(0, Variant(f"{best.name} not compiled", {**best.options, "compile": False}))
    elif about["compilers"]:
        found.append(Variant(f"{best.name} compiled", {**best.options, "compile": True}))
    return found


def _take_turns(rows: Sequence[Row], rounds: int, attempt: Callable[[Variant], Outcome]) -> None:
    """Try each row once a round, each round in another order. A row that failed is not tried again."""
    for number in range(rounds):
        start = number % len(rows)
        for row in (*rows[start:], *rows[:start]):
            if not any(outcome.failure for outcome in row.outcomes):
                row.outcomes.append(attempt(row.variant))
