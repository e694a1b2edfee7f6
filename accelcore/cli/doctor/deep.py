"""Try `import torch` and, for `doctor --deep`, every usable backend, each in a child process with a time limit.

The child may crash, hang or raise. It writes a line that begins with `SAYS`: that all is well, or the error. An attempt
of `import torch` that worked is remembered, because it takes longer than all else that doctor does.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from importlib.machinery import PathFinder
from logging.handlers import MemoryHandler
from pathlib import Path

from accelcore.devices.plugins import (
    AUTOLOAD,
    Candidate,
    Declared,
    autoload_enabled,
    autoloads_of_unusable_backends,
    describe_error,
)
from accelcore.devices.requirements import installed_version
from accelcore.devices.select import imitations, ten_lines, unserved_device
from accelcore.jobs.launchers import outside_any_job
from accelcore.torch_features import TORCH_FEATURES
from accelcore.util import child_process
from accelcore.util.files import replace_file, user_cache

SAYS = "accelcore attempt: "  # begins the line in which the child reports its result
WORKS = "works"  # the result if all is well; exit code 0 alone may come from a library that exits
_NOTES = "accelcore notes: "  # begins the line with a JSON list of remarks
_KEPT = 30  # lines of a child's stderr
_LONGEST = 300  # characters of its last line that are shown
_REMEDIES = {
    "undefined symbol": "it is built for another version of what it links to: install versions that fit together",
    "cannot open shared object file": "a library is missing: install the vendor's runtime, or set up its environment",
    "No module named": "install what is missing",
}


@dataclass(frozen=True)
class Attempt:
    """Result of one child process."""

    name: str  # `"torch"` or a backend
    outcome: str  # `"works"`, `"failed"` (it raised), `"crashed"` (a signal ended it), `"hung"` or `"not tried"`
    reason: str = ""
    remedy: str = ""
    seconds: float = 0.0
    stderr: tuple[str, ...] = ()  # the last lines that the process wrote
    # remarks if it works: on torch, a device that no plugin serves, a package that answers for another, or a part that
    # this version lacks; on a backend, what it has logged
    notes: tuple[str, ...] = ()


def try_torch(candidates: Sequence[Candidate], found: Sequence[Declared], timeout: float) -> tuple[Attempt, bool]:
    """Try `import torch`. Also return whether it works with torch's autoload off, and not without."""
    environ = outside_any_job(os.environ)  # the attempt is not a rank
    torch = _try("torch", environ, timeout)
    if torch.outcome == "works":
        with suppress(OSError):  # then the next doctor tries again
            path = _memory()
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps([_installation(), asdict(torch)]).encode())
        return torch, False
    if not found or not autoload_enabled(environ):
        return torch, False
    if _try("torch", {**environ, AUTOLOAD: "0"}, timeout).outcome != "works":
        return torch, False
    return _blamed_on_autoload(torch, found, candidates), True


def remembered_torch() -> Attempt | None:
    """Return the last attempt of `import torch` that worked, unless torch or its environment has changed since."""
    with suppress(OSError, ValueError, TypeError):  # the file is missing, or nothing that `try_torch` has written
        installation, attempt = json.loads(_memory().read_bytes())
        if installation == _installation():
            attempt["reason"] = "it worked when it was tried before, and has not changed; --deep tries it again"
            return Attempt(**attempt)
    return None


def _memory() -> Path:
    """Return the file of the last attempt that worked with this Python on this machine."""
    place = f"{platform.node()} {sys.executable}"
    return user_cache() / "doctor" / f"{sha256(place.encode()).hexdigest()[:16]}.json"


def _installation() -> list[object]:
    """Return what decides whether `import torch` works, as far as it is quick to read."""
    spec = PathFinder.find_spec("torch")  # also if this process has another torch
    init = (spec and spec.origin) or ""
    status, packages = os.stat(init), Path(init).parents[1].stat()
    stamps = [status.st_size, status.st_mtime_ns, packages.st_mtime_ns]
    variables = [os.environ.get(name) for name in ("LD_LIBRARY_PATH", "PYTHONPATH", AUTOLOAD)]
    return [sys.version, installed_version("torch"), init, *stamps, *variables]


def examine(
    candidates: Sequence[Candidate], torch: Attempt, autoload_broken: bool, timeout: float
) -> tuple[Attempt, ...]:
    """Try each usable backend for `timeout` seconds, after `try_torch`; the others are listed as not tried."""
    environ = outside_any_job(os.environ)
    if autoload_broken:
        environ = {**environ, AUTOLOAD: "0"}
    backends = []
    for candidate in candidates:
        if not candidate.probe.available:
            backends.append(Attempt(candidate.name, "not tried", "it is not usable here"))
        elif torch.outcome != "works" and not autoload_broken:
            backends.append(Attempt(candidate.name, "not tried", "torch cannot be imported"))
        else:
            backends.append(_try(candidate.name, environ, timeout, candidate.name))
    return tuple(backends)


def _blamed_on_autoload(attempt: Attempt, found: Sequence[Declared], candidates: Sequence[Candidate]) -> Attempt:
    points = "; ".join(map(str, found))
    # `run` sets the variable only for entry points of backends that are installed and cannot work here.
    run = ", start scripts with accelcore run" if autoloads_of_unusable_backends(found, candidates) else ""
    owners = ", ".join(sorted({autoload.distribution for autoload in found}))
    return replace(
        attempt,
        reason=f"import torch works with {AUTOLOAD}=0, and not without it, because torch's "
        f"backend autoload calls {points} ({attempt.reason})",
        remedy=f"set {AUTOLOAD}=0{run}, or repair or uninstall {owners}",
    )


def _try(name: str, environ: Mapping[str, str], timeout: float, *arguments: str) -> Attempt:
    ended = child_process.call(__name__, *arguments, environ=environ, limit=timeout)
    written = ended.stderr.splitlines()
    said = [line.removeprefix(SAYS) for line in written if line.startswith(SAYS)]
    seconds, stderr = round(ended.seconds, 3), tuple(written[-_KEPT:])
    if ended.status == 0 and said[-1:] == [WORKS]:
        notes = [json.loads(line.removeprefix(_NOTES)) for line in written if line.startswith(_NOTES)]
        return Attempt(name, "works", seconds=seconds, notes=tuple(notes[-1]) if notes else ())
    if ended.status is None:
        remedy = "give it longer with --timeout, or see what its driver says"
        return Attempt(name, "hung", f"it {ended.fate}", remedy, seconds, stderr)
    if ended.signal:
        remedy = "install versions that fit together; the last lines it wrote are in --json"
        if ended.signal == "SIGKILL":
            remedy = "see whether the machine ran out of memory"
        return Attempt(name, "crashed", f"it {ended.fate}", remedy, seconds, stderr)
    last = (said or [line for line in written if line.strip()])[-1:]
    reason = last[0].strip()[:_LONGEST] if last else f"it exited with {ended.status} and wrote nothing"
    remedies = (remedy for part, remedy in _REMEDIES.items() if part in reason)
    return Attempt(name, "failed", reason, next(remedies, "the traceback is in the stderr of --json"), seconds, stderr)


def _remarks() -> Iterator[str]:
    yield from imitations()
    device = unserved_device()
    if device is not None:
        yield f"torch has the device {device}, and no installed backend serves it;"
        yield f"this module would:\n{ten_lines(device)}"
        yield f"`accelcore new-backend {device}` writes the package"
    yield from (f"torch has no {feature}: {feature.instead}" for feature in TORCH_FEATURES if not feature.present)


def main() -> int:
    """Import torch, and try the backend that the arguments may name, in the child process."""
    try:
        import torch

        if not sys.argv[1:]:
            sys.stderr.write(f"{_NOTES}{json.dumps(list(_remarks()))}\n")
        for name in sys.argv[1:]:
            import accelcore

            kept, logger = MemoryHandler(10**6), logging.getLogger("accelcore")
            logger.setLevel(logging.INFO)
            logger.addHandler(kept)
            backend = accelcore.select(name)
            matrix = torch.tensor([[0.0, 1.0], [2.0, 3.0]], device=backend.device)
            product = (matrix @ matrix).cpu().tolist()
            if product != [[2.0, 3.0], [6.0, 11.0]]:
                raise ArithmeticError(f"{name} multiplies wrongly: [[0, 1], [2, 3]] squared is {product}")
            if "adamw" in backend.optimizers.names():  # the first optimizer may build kernels
                parameter = torch.nn.Parameter(matrix)
                parameter.grad = torch.ones_like(matrix)
                backend.optimizers.create("adamw", [parameter], lr=1.0, weight_decay=0.0).step()
                updated = parameter.detach().cpu().round().tolist()
                if updated != [[-1.0, 0.0], [1.0, 2.0]]:
                    raise ArithmeticError(f"{name} updates wrongly: [[0, 1], [2, 3]] less 1 is {updated}")
            sys.stderr.write(f"{_NOTES}{json.dumps([record.getMessage() for record in kept.buffer])}\n")
    except BaseException as error:  # noqa: BLE001  # SystemExit too: it is the plugin's, not this program's
        traceback.print_exc()
        while error.__cause__ is not None:
            error = error.__cause__
        sys.stderr.write(f"{SAYS}{describe_error(error)}\n")
        return 1
    sys.stderr.write(f"{SAYS}{WORKS}\n")
    return 0
