"""Timing cases in turns, for as long as there is time."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

from benchmarks.gpu.device import Deadline, Device
from benchmarks.gpu.loops import PEERS, WARM_UP, Loop, Mode, Pass, Work, undeclared
from benchmarks.gpu.results import Case
from benchmarks.paired import compare, sample
from benchmarks.report import Row, Table, print_table

__all__ = ["Entry", "Measured", "check_compiled", "first_line", "largest_batch", "measure", "peers"]


@dataclass(frozen=True)
class Entry:
    """One case to be timed.

    Attributes:
        base: the entry of the same table that ratios are taken to.
        missing: why it cannot run at all, as a peer that is not installed; empty where it can.
        required: whether the stage has failed where this entry fails.
    """

    table: str
    name: str
    base: str
    work: Callable[[], Work]
    loop: Loop
    mode: Mode
    missing: str = ""
    required: bool = True

    @property
    def key(self) -> str:
        return f"{self.table}: {self.name}"


@dataclass
class Measured:
    """What came of the entries."""

    cases: list[Case] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    """Seconds a step, round by round, by the key of the entry."""

    def ratio(self, key: str, base: str) -> float | None:
        """The median ratio of two samples of one round; None where either was not measured."""
        if not {key, base} <= self.samples.keys():
            return None
        return compare({name: self.samples[name] for name in (key, base)}, base)[key].ratio.median

    def extend(self, other: Measured) -> None:
        """Take in what came of other entries."""
        self.cases += other.cases
        self.failures += other.failures
        self.samples |= other.samples


def measure(
    entries: list[Entry], device: Device, deadline: Deadline, *, rounds: int, seconds: float, reserve: float = 40.0
) -> Measured:
    """Warm every entry up, then time all of them in turns, and print a table each.

    An entry that raises, then or later, is a failure of its own; the others are still timed.

    Args:
        rounds: at most; fewer where they would not be over before the deadline, but 2 always.
        seconds: about how long one sample lasts at least.
        reserve: seconds to leave before the deadline.
    """
    measured, passes, notes = Measured(), {}, {}
    works: dict[str, Work] = {}
    peaks: dict[str, float] = {}
    broken: dict[str, str] = {}  # words, because an exception holds what its frames hold, on the device
    for entry in entries:
        reason = entry.missing or undeclared(entry.mode, device)
        if reason:
            notes[entry.key] = f"not run: {reason}"
            continue
        print(f"  preparing {entry.key}", flush=True)
        start, held = device.clock(), device.held()
        try:
            work = entry.work()
            train = entry.loop(work, entry.mode, device)
            first = float(train())
            train()
            check_compiled(work)
            for _ in range(WARM_UP if entry.mode.graph else 0):
                train()  # until everything is captured
            device.measure_peak()  # a compiler's trials are over
            train()
            peak = device.peak()
            if peak is not None and held is not None:
                peaks[entry.key] = float(peak - held)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is what was found
            traceback.print_exc()
            broken[entry.key] = first_line(error)
            continue
        works[entry.key], passes[entry.key] = work, _until_it_breaks(entry.key, train, broken)
        notes[entry.key] = f"loss of the first pass {first:.6g}, prepared in {device.clock() - start:.1f} s"
    gc.collect()
    samples = measured.samples
    if passes:
        a_round = sum(_longest(_once(run, device), seconds) for run in passes.values()) * 1.05
        affordable = max(2, min(rounds, int((deadline.left - reserve - 3 * a_round) / a_round)))
        print(f"  {affordable} rounds of {a_round:.1f} s", flush=True)
        taken = sample(passes, rounds=affordable, seconds=seconds, clock=device.clock)
        samples |= {key: [value / len(works[key].batches) for value in values] for key, values in taken.items()}
        for key, work in works.items():
            try:
                check_compiled(work)  # a recompilation may have failed since
            except RuntimeError as error:
                broken.setdefault(key, first_line(error))
    for key in broken:
        samples.pop(key, None)
    measured.failures += [
        f"{entry.key}: {broken[entry.key]}" for entry in entries if entry.required and entry.key in broken
    ]
    notes |= {key: f"failed: {why}" for key, why in broken.items()}
    for entry in entries:
        base = f"{entry.table}: {entry.base}"
        case = Case(entry.table, entry.name, base=entry.base, note=notes[entry.key])
        if entry.key in samples and base in samples:
            timing = compare({base: samples[base], entry.key: samples[entry.key]}, base)[entry.key]
            values = {"peak_memory_bytes": peaks[entry.key]} if entry.key in peaks else {}
            case = replace(case, timing=timing, samples=len(samples[base]), values=values)
        measured.cases.append(case)
    _show(measured.cases)
    return measured


def peers(table: str, base: str, work: Callable[[], Work], mode: Mode) -> list[Entry]:
    """Other libraries as entries of a table: they may be absent, and may fail."""
    return [
        Entry(
            table, name, base, work, loop, mode, required=False,
            missing="" if find_spec(module) else f"{module} is not installed",
        )
        for name, (loop, module) in PEERS.items()
    ]  # fmt: skip


def largest_batch(peak: Callable[[int], int | None], *, room: int, sizes: tuple[int, int], most: int) -> int:
    """The largest power of two, up to `most`, whose peak memory is within `room`, by a line through two sizes.

    Raises:
        MemoryError: not even a batch of one.
    """
    small, large = (peak(size) or 0 for size in sizes)
    each = max(1, (large - small) // (sizes[1] - sizes[0]))
    fitting = (room - (small - each * sizes[0])) // each
    if fitting < 1:
        raise MemoryError(f"a batch of one needs more than {room} bytes")
    return int(min(most, 2 ** (int(fitting).bit_length() - 1)))


def check_compiled(work: Work) -> None:
    """A trainer that was to compile and runs eagerly would be the wrong thing to time."""
    for trainer in work.kept:
        if trainer.compiled is not None and not trainer.compiled.compiled:
            raise RuntimeError(f"not compiled: {trainer.compiled.reason}")


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _until_it_breaks(key: str, train: Pass, broken: dict[str, str]) -> Callable[[], None]:
    """`train`, which does nothing from the time when it raised: what it raised is then in `broken`."""

    def run() -> None:
        if key not in broken:
            try:
                train()
            except Exception as error:  # noqa: BLE001  # whatever it is, it is what was found
                traceback.print_exc()
                broken[key] = first_line(error)

    return run


def _once(run: Callable[[], None], device: Device) -> float:
    start = device.clock()
    run()
    return device.clock() - start


def _longest(once: float, seconds: float) -> float:
    """What a sample takes at most: it is made of whole passes, of `seconds` or the next that is more."""
    return once if once >= seconds else seconds + once


def _show(cases: list[Case]) -> None:
    tables: dict[str, list[Case]] = {}
    for case in cases:
        tables.setdefault(case.table, []).append(case)
    for title, rows in tables.items():
        unit = "ms" if any(case.timing and case.timing.seconds.median > 1e-3 for case in rows) else "µs"
        print_table(Table(title, rows[0].base, unit, {}, [Row(case.name, case.timing, case.note) for case in rows]))
