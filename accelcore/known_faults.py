"""Known wrong kernels: what computes something else than it says, in which versions, and what is done instead.

A table, not a list of complaints: a fault is here because its result is wrong without an error. Those of torch in
general are below; a plugin has those of its device, and answers the hook `accelcore_known_faults` with them. The tests
ask every entry whether it is still true of the installed version, so that the table cannot go out of date unnoticed.
Free of torch, because `accelcore doctor` shows the table and imports none.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version

__all__ = ["TORCH_FAULTS", "KnownFault"]


@dataclass(frozen=True)
class KnownFault:
    """A kernel that computes something else than it says.

    Attributes:
        kernel: what computes it, as its users call it.
        package: the distribution that it comes with.
        versions: in which of its versions, as pip writes it (`">=2.10,<2.14"`).
        what: what is wrong, in one sentence without its full stop.
        instead: what accelcore does instead, likewise.
        reference: where it is described; a URL where there is one.
        seen: with which version and where we have seen it ourselves; empty where we only know it from the reference.
        probe: the function that asks the installed version, as `"module:function"`. It returns whether the kernel is
            wrong, or None where that cannot be told here, because the device is not there.

    Raises:
        ValueError: a field that has to say something is empty or no text.
    """

    kernel: str
    package: str
    versions: str
    what: str
    instead: str
    reference: str
    seen: str
    probe: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) or not (value or field.name == "seen"):
                raise ValueError(f"known fault of {self.kernel!r}: {field.name} is {value!r}")

    @property
    def installed(self) -> str | None:
        """The version of the package that is installed, or None."""
        try:
            return _version(self.package)
        except PackageNotFoundError:
            return None

    @property
    def applies(self) -> bool:
        """Whether the installed version is one of those."""
        from packaging.specifiers import SpecifierSet  # only for those who ask: it takes longer than this module

        has = self.installed
        return has is not None and SpecifierSet(self.versions).contains(has, prereleases=True)

    def still_wrong(self) -> bool | None:
        """Ask the kernel, whatever its version: whether it is wrong, or None where there is no such device here."""
        answer: bool | None = pkgutil.resolve_name(self.probe)()
        return answer

    def __str__(self) -> str:
        return f"{self.what} ({self.package} {self.versions}: {self.reference})"


@cache
def _version(package: str) -> str:
    """Kept, because each backend asks for the same ones again and finding out means parsing all of their metadata."""
    return version(package)


FP16_EPSILON = KnownFault(
    kernel="torch.optim.Adam, AdamW, NAdam, RAdam, RMSprop, Adagrad by loop and foreach, fp16",
    package="torch",
    versions=">=2.11",
    what="the squares of small gradients and an eps of 1e-8 are both 0 in fp16, and the update divides by them: "
    "parameters become inf or NaN in one step",
    instead="the route is refused for such a request, and the fused kernel or the formula taken, where there is one",
    reference="https://github.com/pytorch/pytorch/issues/147437",
    seen="torch 2.13.0, CPU",
    probe="accelcore.fault_probes:fp16_epsilon",
)
SKIPPED_FIRST_STEP = KnownFault(
    kernel="torch.optim.SGD(fused=True) with momentum",
    package="torch",
    versions=">=2.11",
    what="a first step that is skipped for an overflow leaves momentum that was never written, and the next step uses "
    "it",
    instead="our route to the same kernel begins with momentum that is 0",
    reference="https://github.com/LibreYOLO/libreyolo/pull/771",
    seen="torch 2.13.0, CPU",
    probe="accelcore.fault_probes:skipped_first_step",
)
BACKWARD_UNDER_AUTOCAST = KnownFault(
    kernel="torch.compile, backward of a model that was called under autocast",
    package="torch",
    versions=">=2.11",
    what="all of backward is computed in low precision, also what forward computed in fp32",
    instead='compiled models are called with the setting backward_pass_autocast="off"',
    reference="https://github.com/pytorch/pytorch/issues/153044",
    seen="torch 2.13.0, CPU",
    probe="accelcore.fault_probes:backward_under_autocast",
)
TORCH_FAULTS = (FP16_EPSILON, SKIPPED_FIRST_STEP, BACKWARD_UNDER_AUTOCAST)
"""Faults of torch that every device has."""
