"""Counters of launches, host synchronisations and copies: the cost of code without timing.

Example::

    with counters.count() as cost:
        loss = trainer(batch)
    assert cost.synchronizations.total() == 0
    print(cost.launches.total(), cost.launches.most_common(5))

An operator that torch_npu sends to the device is one launch, through torch's dispatcher, the legacy single-operator
interface or HCCL. Replaying a captured graph is one launch, too. A synchronisation is a wait of the host for the
device: an explicit one, a blocking copy, or an operator whose result the host needs, such as `item()` or `nonzero()`.

The counts do not depend on the machine, its load or its speed, so a test may assert exact numbers. They are not times:
a real CANN may run several kernels for one operator, or one for several, and kernels differ in length. Use them to
compare the launches of programs, and to see if launches grow with the number of parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from accelcore.errors import BackendUnavailableError
from accelcore_npu_emulator import native

__all__ = ["Cost", "count"]


@dataclass
class Cost:
    """Counts of all threads of this process.

    Attributes:
        launches: operators executed on the device, by name, such as `"aten::add.Tensor"` or `"HcclAllReduce"`.
        synchronizations: waits of the host, by cause, such as `"stream"` or `"device to host"`.
        copies: copies, by direction, such as `"host to device"`.
        bytes: bytes copied, by direction.
    """

    launches: Counter[str] = field(default_factory=Counter)
    synchronizations: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)


@contextmanager
def count() -> Iterator[Cost]:
    """Count in the `with` block. The counters are filled when it ends; blocks may be nested.

    Raises:
        BackendUnavailableError: the NPU of this process is not emulated.
    """
    library = native.opened()
    if library is None:
        raise BackendUnavailableError(
            "launches cannot be counted",
            why="only the emulated NPU counts them, and it is not in use here",
            remedy="start with `accelcore run --emulate npu`, or call accelcore_npu_emulator.activate() first",
        )
    before, cost = native.read_counters(library), Cost()
    try:
        yield cost
    finally:
        for name, after in native.read_counters(library).items():
            getattr(cost, name).update(after - before[name])  # they only grow; this drops those that did not
