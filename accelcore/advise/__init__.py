"""`accelcore advise`: try a script under each preset, then compiled and flat, and recommend one by this rule.

1. The reference is fp32, computed exactly. The *loss* of a trial is the mean over the last fifth of its steps. The
   *noise* is the range of this loss over runs in fp32 that differ in their seed alone.
2. A variant *agrees* if it did all its steps, no update in its last fifth was skipped for overflow, and its loss
   differs from the reference's loss by no more than the noise.
3. The fastest variant is the one with the lowest median time of a step, among the variants that agree. Another variant
   *ties* with it if its lower quartile is not above the upper quartile of the fastest.
4. The first variant that ties is recommended: variants are in the order of their simplicity.

`trials` runs one trial. The script's side of it is `training/trial.py`; table, page and JSON are in `cli/advise.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from statistics import fmean, quantiles
from typing import Any

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
_SHARE = 5  # the loss is the mean over one part in so many at the end of a trial, and over 5 steps at least
_LARGE = 0.25  # noise that is a larger part than this of what the loss changes in a trial gets a note
_NAMED = re.compile(r"[A-Za-z_][\w.]*(:|$)")  # how the line of a traceback begins that names the exception
_WARM_UP = 3  # the first part in so many of a trial is not timed


@dataclass
class Row:
    """Results of a variant, and their differences from the reference."""

    variant: Variant
    outcomes: list[Outcome] = field(default_factory=list)  # one for each round
    loss: float = math.nan  # of the first round, by rule 1; NaN if there is none
    difference: float = math.nan  # of this loss from the reference's
    divergence: float = math.nan  # mean over all steps of the loss's distance from the reference's
    overflows: int = 0  # how many updates of the first round were skipped because a gradient overflowed
    # lower quartile, median and upper quartile of a step, over all rounds; NaN if there are none
    seconds: tuple[float, float, float] = (math.nan, math.nan, math.nan)
    memory: int = 0  # peak in bytes, the largest of all rounds
    agrees: bool = False  # whether the variant trains as fp32 does, by rule 2
    why: str = ""  # the reason if it does not agree, or was not tried


@dataclass
class Advice:
    """Result of `advise`."""

    script: Script
    about: dict[str, Any]  # facts of the first trial: the model, the device, its capabilities, overridden options
    rows: list[Row] = field(default_factory=list)  # one for each variant, the reference first
    seeds: list[float] = field(default_factory=list)  # losses of the runs in fp32 with other seeds
    noise: float = math.nan  # range of the loss over all seeds; NaN if it is not known
    seed_divergence: float = math.nan  # mean distance, step by step, of another seed's loss from the reference's
    recommended: str = ""  # name of the recommended variant; empty if none can be recommended
    reason: str = ""  # why it is recommended
    notes: list[str] = field(default_factory=list)  # what limits the comparison, in sentences

    @property
    def exit_code(self) -> int:
        """0 if a variant is recommended and the noise is known, else 1."""
        return 0 if self.recommended and self.noise > 0 else 1


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
    """Try a script and recommend a variant by the rule above.

    The options are the command's. `run` runs a trial. Before it, `show` is called with its name, its number from
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
    _measure_noise(advice, first, others)
    _take_turns(rows, rounds, attempt)
    _check_repeats(advice, first, reference.outcomes[0])
    _judge(rows, advice, first)
    advice.rows = [*rows, *refused]
    best = _choose(rows)
    if best is None:
        advice.reason = "no variant did all its steps, without lasting overflows, with the loss of fp32"
        return advice
    bases = [row for row in rows if row.agrees] if every else [best]
    families = [[row, *map(Row, _executions(row.variant, first.about))] for row in bases]
    # The bases are tried again, so that the times of all are of the same minutes.
    tried = [each for family in families for each in family]
    _take_turns(tried, rounds, attempt)
    _judge(tried, advice, first)
    chosen = _choose(tried) or best
    advice.rows += [each for family in families for each in family[1:]]
    advice.recommended, advice.reason = chosen.variant.name, _reason(chosen, tried)
    if not every:
        of_presets = f"{advice.reason}. Of the presets, {best.variant.name}: {_reason(best, rows)}"
        advice.reason = _reason(best, [*rows, *tried[1:]]) if chosen is best else of_presets
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
            "the script cannot be tried: in fp32 it ends before its last step",
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


def _measure_noise(advice: Advice, reference: Outcome, others: Sequence[Outcome]) -> None:
    """Set the noise of seeds, from a run in fp32 and runs that differ in their seed alone."""
    for other in others:
        if other.failure:
            advice.notes.append(f"fp32 with another seed failed: {_last_line(other.failure)}")
    others = [other for other in others if not other.failure]
    advice.seeds = [_loss(other) for other in others]
    losses = [_loss(reference), *advice.seeds]
    advice.noise = max(losses) - min(losses) if all(map(math.isfinite, losses)) and others else math.nan
    advice.seed_divergence = fmean([_divergence(other, reference) for other in others]) if others else math.nan
    if advice.noise == 0:
        advice.notes.append(
            "other seeds change nothing, so that the noise is not known: seed the script by accel.runtime.seed(...), "
            "and draw the order of the data from torch's own generator"
        )
    elif math.isnan(advice.noise):
        advice.notes.append("the noise is not known: a loss in fp32 is not finite, or no other seed could be tried")
    began = reference.losses[0]
    change = math.nan if began is None else abs(began - losses[0])
    if advice.noise > _LARGE * change:
        advice.notes.append(
            f"the noise of seeds, {advice.noise:.3g}, is large beside what the loss changes in a trial, {change:.3g}: "
            "a variant that trains worse may agree. Try more --steps"
        )


def _check_repeats(advice: Advice, first: Outcome, second: Outcome) -> None:
    """Add a note if two runs with the same seed and options differ."""
    if first.checksums != second.checksums:
        advice.notes.append(
            "the order of the data is random: two runs with one seed read other batches, so that each variant has "
            "noise of its own. Seed the script, with accel.runtime.seed(...)"
        )
    elif first.losses != second.losses:
        steps = min(len(first.losses), len(second.losses))
        parts = next((step for step in range(steps) if first.losses[step] != second.losses[step]), steps) + 1
        advice.notes.append(
            f"two runs with one seed part at step {parts}: weights, random numbers or kernels are not repeatable"
        )


def _judge(rows: Sequence[Row], advice: Advice, reference: Outcome) -> None:
    """Set the results of rows, and whether they agree with the reference, by rules 1 and 2."""
    for row in rows:
        first = row.outcomes[0]
        seconds = [each for outcome in row.outcomes for each in outcome.seconds[len(outcome.seconds) // _WARM_UP :]]
        if len(seconds) > 1:
            lower, middle, upper = quantiles(seconds, n=4, method="inclusive")
            row.seconds = (lower, middle, upper)
        row.memory = max(outcome.memory for outcome in row.outcomes)
        row.overflows = sum(first.overflows)
        row.loss, row.divergence = _loss(first), _divergence(first, reference)
        row.difference = row.loss - _loss(reference)
        failed = next((outcome.failure for outcome in row.outcomes if outcome.failure), "")
        if failed:
            row.why = _last_line(failed)
        elif any(first.overflows[-_tail(first) :]):
            row.why = "updates are still skipped for overflow at the end"
        elif not math.isfinite(row.loss):
            row.why = "the loss is not finite"
        elif not (abs(row.difference) <= advice.noise or row.difference == 0):
            row.why = "the loss differs from fp32 by more than the noise of seeds"
            if row.overflows:
                row.why += f"; it skipped {row.overflows} updates for overflow: try more steps, or a lower loss_scale"
        row.agrees = not row.why
        eager = first.about.get("eager", "")
        if eager:
            row.agrees, row.why = False, f"it ran eagerly, not compiled: {_last_line(eager)}"


def _choose(rows: Sequence[Row]) -> Row | None:
    """Return the recommended row, by rules 3 and 4; None if no row agrees."""
    agreeing = [row for row in rows if row.agrees and math.isfinite(row.seconds[1])]
    if not agreeing:
        return None
    fastest = min(agreeing, key=lambda row: row.seconds[1])
    return next(row for row in agreeing if row is fastest or row.seconds[0] <= fastest.seconds[2])


def _reason(best: Row, rows: Sequence[Row]) -> str:
    """Return why a row was chosen among others."""
    place = next(number for number, row in enumerate(rows) if row is best)
    simpler, agreeing = ([row for row in each if row.agrees] for each in (rows[:place], rows[place + 1 :]))
    text = f"it agrees with fp32 within the noise of seeds, and takes {best.seconds[1] * 1e3:.3g} ms a step"
    if best.variant.name == "fp32":
        text = f"it is the reference, and takes {best.seconds[1] * 1e3:.3g} ms a step"
    quicker = [row.variant.name for row in agreeing if row.seconds[1] < best.seconds[1]]
    slower = [row for row in agreeing if row.seconds[1] >= best.seconds[1]]
    if quicker:
        text += f"; {', '.join(quicker)}: quicker by less than the spread of times, so the simpler setting is taken"
    if slower:
        next_best = min(slower, key=lambda row: row.seconds[1])
        text += f"; next of those that agree, and slower: {next_best.variant.name}, {next_best.seconds[1] * 1e3:.3g} ms"
    if simpler:
        names = ", ".join(row.variant.name for row in simpler)
        text += f"; {names}: simpler, but slower than the fastest by more than the spread of times"
    elif not agreeing:
        text += "; no other variant agrees"
    return text


def _last_line(text: str) -> str:
    """Return the line of an error that says what is wrong: the last one with a name, as notes follow an exception."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(" ")]
    lines = [line for line in lines if _NAMED.match(line)] or lines
    return lines[-1].strip() if lines else text.strip()


def _tail(outcome: Outcome) -> int:
    return max(5, len(outcome.losses) // _SHARE)


def _loss(outcome: Outcome) -> float:
    tail = outcome.losses[-_tail(outcome) :]
    return fmean([math.nan if loss is None else loss for loss in tail]) if tail else math.nan


def _divergence(outcome: Outcome, reference: Outcome) -> float:
    """Return the mean distance of two runs' losses over the steps that both did; NaN if a loss is not finite."""
    pairs = list(zip(outcome.losses, reference.losses, strict=False))
    distances = [math.nan if one is None or other is None else abs(one - other) for one, other in pairs]
    return fmean(distances) if distances else math.nan
