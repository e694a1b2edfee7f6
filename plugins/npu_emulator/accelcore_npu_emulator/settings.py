"""Settings of the emulated machine, and their environment variables.

Three of CANN's variables work as in CANN: ASCEND_RT_VISIBLE_DEVICES, and the seconds that ranks wait for each other,
HCCL_CONNECT_TIMEOUT (120 by default) and HCCL_EXEC_TIMEOUT (300; CANN's default is 1836). The end of a rank is noticed
at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from accelcore.errors import ConfigurationError
from accelcore.util.text import shown

_NATURAL = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
_MEMORY = re.compile(r"([1-9][0-9]{0,17})(KiB|MiB|GiB)?", re.ASCII)
_SOCS = (
    "Ascend910PremiumA", "Ascend910ProA", "Ascend910A", "Ascend910ProB", "Ascend910B", "Ascend310P1", "Ascend310P2",
    "Ascend310P3", "Ascend310P4", "Ascend310P5", "Ascend310P7", "Ascend910B1", "Ascend910B2", "Ascend910B2C",
    "Ascend910B3", "Ascend910B4", "Ascend910B4-1", "Ascend310B1", "Ascend310B2", "Ascend310B3", "Ascend310B4",
    "Ascend910_9391", "Ascend910_9392", "Ascend910_9381", "Ascend910_9382", "Ascend910_9372", "Ascend910_9362",
    "Ascend910_9363",
)  # fmt: skip
_SOC = re.compile(
    "|".join(map(re.escape, _SOCS)) + "|Ascend950[0-9A-Za-z_]{0,20}", re.ASCII
)  # the chips that torch_npu knows
_FAULT = re.compile(
    r"(?P<kind>overflow|out_of_memory|timeout)@(?P<count>[1-9][0-9]{0,8})"
    r"|(?P<die>die)@(?P<rank>0|[1-9][0-9]{0,3}):(?P<at>[1-9][0-9]{0,8})"
    r"|(?P<missing>missing)@(?P<operator>[a-z_]+::[A-Za-z0-9_.]+)",
    re.ASCII,
)
_UNITS = {None: 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_MOST_DEVICES = 64
_MOST_MEMORY = 2**50


@dataclass(frozen=True)
class Fault:
    """One injected fault.

    Attributes:
        kind: `"overflow"`, `"out_of_memory"`, `"timeout"`, `"die"` or `"missing"`.
        count: number of the event that fails, counted from 1; 0 for `"missing"`, which always fails.
        rank: the rank that dies.
        operator: the operator that is missing, such as `"aten::add.Tensor"`.
    """

    kind: str
    count: int = 0
    rank: int = 0
    operator: str = ""

    def __str__(self) -> str:
        if self.kind == "missing":
            return f"missing@{self.operator}"
        return f"die@{self.rank}:{self.count}" if self.kind == "die" else f"{self.kind}@{self.count}"


@dataclass(frozen=True)
class Settings:
    """The emulated machine. Each attribute has an environment variable, `ACCEL_EMULATED_` and its name in capitals.

    Attributes:
        devices: number of NPUs, 1 to 64.
        soc: the chip's name; `"Ascend910A"` overflows by saturation instead of inf and NaN.
        memory: bytes of device memory for each process; in the environment also `512MiB` or `8GiB`.
        poison: fill new device memory with NaN, so that reads of unwritten memory show.
        trace: a file that gets one line a call, `"-"` for stderr, or None (in the environment: empty).
        faults: injected faults. In the environment: `overflow@K`, `out_of_memory@K`, `timeout@K`,
            `die@RANK:K` and `missing@OPERATOR`, separated by commas; K counts from 1.
    """

    devices: int = 2
    soc: str = "Ascend910B2"
    memory: int = 8 * 2**30
    poison: bool = True
    trace: str | None = None
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        # The same readers check arguments and environment variables.
        for name, read in _READERS.items():
            value = getattr(self, name)
            found = read(name, self.variables()[_variable(name)])
            if found != value:
                raise ConfigurationError(
                    f"{name}={value!r} would be read as {found!r}",
                    why="processes get each setting through an environment variable",
                    remedy="see the attributes of Settings",
                )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Read the variables that are set; the rest keep their defaults.

        Raises:
            ConfigurationError: a variable has an invalid value, or an unknown name.
        """
        environ = os.environ if environ is None else environ
        names = {_variable(field.name): field.name for field in fields(cls)}
        given = {variable: text for variable, text in environ.items() if variable.startswith("ACCEL_EMULATED_")}
        for variable in given:
            if variable not in names:
                raise ConfigurationError(
                    f"the environment variable {variable} is unknown",
                    available=", ".join(names),
                    remedy="correct its name, or unset it",
                )
        return cls(**{names[variable]: _READERS[names[variable]](variable, text) for variable, text in given.items()})

    def variables(self) -> dict[str, str]:
        """Return all settings as environment variables, including defaults."""
        texts = {
            "devices": str(self.devices),
            "soc": self.soc,
            "memory": str(self.memory),
            "poison": str(int(self.poison)),
            "trace": self.trace or "",
            "faults": ",".join(str(fault) for fault in self.faults),
        }
        return {_variable(name): text for name, text in texts.items()}


def _variable(name: str) -> str:
    return f"ACCEL_EMULATED_{name.upper()}"


def _refused(variable: str, text: str, what: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(f"{variable}={shown(text)} is {what}", remedy=remedy)


def _devices(variable: str, text: str) -> int:
    if not _NATURAL.fullmatch(text) or int(text) > _MOST_DEVICES:
        raise _refused(variable, text, "not a number of devices", f"give a whole number from 1 to {_MOST_DEVICES}")
    return int(text)


def _soc(variable: str, text: str) -> str:
    if not _SOC.fullmatch(text):
        known = ", ".join(_SOCS)
        raise _refused(variable, text, "not a chip that torch_npu knows", f"name one of {known}, or an Ascend950 part")
    return text


def _memory(variable: str, text: str) -> int:
    match = _MEMORY.fullmatch(text)
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < size <= _MOST_MEMORY:
        raise _refused(variable, text, "not a size in bytes", "give a number, such as 536870912, 512MiB or 8GiB")
    return size


def _poison(variable: str, text: str) -> bool:
    values = {"1": True, "true": True, "0": False, "false": False}
    if text.lower() not in values:
        raise _refused(variable, text, "neither 1 nor 0", "give 1 or 0")
    return values[text.lower()]


def _trace(variable: str, text: str) -> str | None:
    if "\0" in text:
        raise _refused(variable, text, "not a path", "give the path of a file, or - for stderr")
    if text not in ("", "-") and (not os.access(Path(text).parent, os.W_OK) or Path(text).is_dir()):
        raise _refused(variable, text, "not a file that can be written", "name a file in a folder that exists")
    return text or None


def _faults(variable: str, text: str) -> tuple[Fault, ...]:
    return tuple(_fault(variable, text, part) for part in text.split(",")) if text else ()


def _fault(variable: str, text: str, part: str) -> Fault:
    match = _FAULT.fullmatch(part)
    if not match:
        raise ConfigurationError(
            f"{variable}={shown(text)} is not a list of faults",
            why=f"{shown(part)} is not a fault",
            available="overflow@K, out_of_memory@K, timeout@K, die@RANK:K, missing@OPERATOR",
            remedy="separate faults by commas, and count from 1",
        )
    if match["missing"]:
        return Fault("missing", operator=match["operator"])
    if match["die"]:
        return Fault("die", count=int(match["at"]), rank=int(match["rank"]))
    return Fault(match["kind"], count=int(match["count"]))


_READERS: dict[str, Callable[[str, str], Any]] = {
    "devices": _devices,
    "soc": _soc,
    "memory": _memory,
    "poison": _poison,
    "trace": _trace,
    "faults": _faults,
}
