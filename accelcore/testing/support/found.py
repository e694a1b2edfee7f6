"""Findings of an operator, what is said of the samples in them, and errors that do not count."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accelcore import Backend
from accelcore.devices.plugins import find
from accelcore.known_faults import TORCH_FAULTS, KnownFault
from accelcore.testing.support.layouts import BEHIND

_REFUSES = re.compile(
    r"(not|n't) (currently )?(implement|support)|unsupported|only supports|no (kernel|implementation)|EMULATED|"
    r"requires dtype|could not create a primitive|"
    r"must be .*(Half|BFloat16)",
    re.I,
)

_LONGEST = 240  # characters of a sample's description

OF_GRADIENT = "of the gradient"
"""Says of a sample that the operator's gradient is computed in place of its result."""

LARGE, SMALL = "with large numbers", "with small numbers"
"""Says of a sample that its first argument was multiplied by a large factor, or a small one."""
OTHERWISE = "of other options"
"""Says of a sample in low precision that it has options that the usual samples do not have."""
MANY = "of many elements"
"""Says of a sample that it has more elements than a vector, a block or the part of a thread."""
FROZEN = "of frozen inputs"
"""Says of a sample that some of its arguments need no gradient."""

ENDS, COMPLEX = "with the ends of integers", "of complex numbers"
"""Says of a sample that its first argument has the least and the largest whole number, or that it is complex."""

BOUNDS = "with the ends of a range"
"""Says of a sample whose numbers lie in a range that some are its ends, such as probabilities of 0 and 1."""

ALIKE = "with masks that are all alike"
"""Says of a sample that its masks, or the numbers that an operator counts, choose everything or nothing."""

EQUAL = "with equal numbers"
"""Says of a sample that its numbers are whole, and of an operator that it chooses among equal ones as the CPU does."""

INFINITE = {"with inf": math.inf, "with -inf": -math.inf}
"""Says of a sample that elements of its first argument are that."""

ALONE = (
    *("with NaN", *INFINITE, LARGE, SMALL, "with whole numbers", "between other calls"),
    *(OTHERWISE, FROZEN, ENDS, COMPLEX, ALIKE, EQUAL, BOUNDS),
)
"""What is said of samples of which only the result as it is is compared."""

REPEATED = ("", "broadcast", OTHERWISE)
"""What is said of samples that are also run without gradients, and of which backward runs twice."""


@dataclass(frozen=True)
class Variant:
    """An operator, and arguments for it: a sample of torch's, as it is or changed.

    Attributes:
        info, dtype, arguments: the operator's OpInfo, and the sample.
        what: how the sample was changed, in words; empty if it was not.
        layout: of the arguments, if something is said of the sample.
        aside: whether arguments lie behind other elements.
        out: layout of the tensors given as `out=`.
        writes: whether it is also run in place and with `out=`, if that is not done with such samples.
    """

    info: Any
    dtype: torch.dtype
    arguments: Any
    what: str
    layout: str = ""
    aside: bool = False
    out: str = BEHIND
    writes: bool = False


@dataclass
class Found:
    """Findings of one operator.

    Attributes:
        compared: how many results were compared by value.
        known: known bugs of the installed versions that show in findings.
        wrong: each other difference, in a sentence.
        seen: the known bugs that were seen, or because of which a sample was not run.
        refused: errors with which the device refuses the operator.
        on_host: operators that the device hands to the CPU.
    """

    known: Sequence[KnownFault] = ()
    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    on_host: set[str] = field(default_factory=set)
    seen: dict[str, None] = field(default_factory=dict)

    def note(self, finding: str, arguments: Any = None) -> None:
        """Add what is wrong, with the arguments for which it is; or the known bug that it shows."""
        fault = next((each for each in self.known if re.fullmatch(each.findings, finding)), None)
        if fault is None:
            self.wrong.append(finding if arguments is None else f"{finding}, for {_described(arguments)}")
        else:
            self.seen[str(fault)] = None

    def leaves_out(self, sample: str) -> bool:
        """Return whether a known bug would make the device unusable on this sample, and add the bug."""
        fault = next((each for each in self.known if each.unusable and re.fullmatch(each.unusable, sample)), None)
        if fault is not None:
            self.seen[f"not run, because then the device is unusable: {fault}"] = None
        return fault is not None


def _described(arguments: Any) -> str:
    """Return a call's arguments, of tensors dtype and shape, and strides if they are not contiguous."""

    def text(value: Any) -> str:
        if isinstance(value, tuple | list):
            return f"[{', '.join(map(text, value))}]"
        if not isinstance(value, Tensor):
            return repr(value)
        gaps = value.layout == torch.strided and not value.is_contiguous()
        strides = f" of strides {tuple(value.stride())}" if gaps else ""
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{strides}"

    given, options = arguments
    described = ", ".join([*map(text, given), *(f"{name}={text(value)}" for name, value in options.items())])
    return described if len(described) <= _LONGEST else f"{described[:_LONGEST]}..."


def known_faults(accel: Backend) -> list[KnownFault]:
    """Return the known bugs that a backend meets in the installed versions: torch's own too where the host computes."""
    plugin, on_host = find(accel.name), accel.device.type == "cpu"  # an emulation has kernels of its own
    faults = [*(() if plugin is None else plugin.faults), *(TORCH_FAULTS if on_host else ())]
    return [fault for fault in faults if fault.applies]


def is_refusal(error: Exception) -> bool:
    """Return whether a device says by an error that it has no such kernel."""
    return isinstance(error, NotImplementedError) or bool(_REFUSES.search(" ".join(str(error).splitlines()[:2])[:200]))


def says_fallback(message: str) -> bool:
    """Return whether a warning reports that the CPU computed in place of the device."""
    return bool(re.search(r"fall(s|ing)? ?back", message, re.I) and re.search(r"\bcpu\b", message, re.I))
