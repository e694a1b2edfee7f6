"""Try accelcore with one version of torch, and write the page of all versions that were tried.

`tox run -e torch2.7` runs `python scripts/compatibility.py try docs/compatibility`, which takes minutes, in an
environment with that torch. It writes a JSON file named after the version of torch. If something fails, add the `cause`
to the file, a sentence or two. In the same environment, `python scripts/compatibility.py emulate docs/compatibility`
adds the result of the NPU's tests over the emulator. `python scripts/compatibility.py page docs/compatibility
docs/compatibility.md` writes the page from these files.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
_HEAD = """\
# Versions

<!-- Written by scripts/compatibility.py from the files in docs/compatibility. Do not edit. -->

accelcore needs torch 2.7 or later and Python 3.10 or later. `make test` runs torch 2.13.0 and Python 3.11. The other
versions below were tried by hand. `tox run -e torch2.7` and the like run the conformance suite on the CPU (`accelcore
verify backend cpu`). `tox run -e torch2.7 -- tests plugins/cpu/tests plugins/cuda/tests` runs the tests, too. The last
column has the tests of the NPU's plugin and of the emulator, EMULATED, with the torch-npu that fits this torch:
`tox exec -e torch2.7 -- python scripts/compatibility.py emulate docs/compatibility`. "-": the emulator has no torch-npu
for this torch. Tests are skipped that need a device, or what this torch or torch-npu lacks.

accelcore tests whether torch has a feature. It compares versions only for [kernels that compute wrong
results](known_faults.md), and in the conformance suite, where torch changed a result. `accelcore doctor --deep` shows
what the installed torch lacks.
"""


def main(arguments: Sequence[str]) -> int:
    """Run one of the two commands; return the exit code."""
    command, folder, *rest = arguments
    if command == "try":
        attempt(Path(folder), rest)
    elif command == "emulate":
        emulate(Path(folder))
    elif command == "page":
        Path(rest[0]).write_text(page(map(_loaded, Path(folder).glob("*.json"))), encoding="utf-8")
    else:
        raise SystemExit(f"{command!r} is not a command; available: try, emulate, page")
    return 0


def attempt(folder: Path, tests: Sequence[str]) -> None:
    """Run the suite and the tests (folders; none: no tests), and write what passed into a file in `folder`."""
    from accelcore.torch_features import TORCH_FEATURES

    torch, path = version("torch"), _file(folder)
    result = {
        "date": _today(),
        "torch": torch,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "lacks": [{"name": str(one), "instead": one.instead} for one in TORCH_FEATURES if not one.present],
        "suite": _suite(),
        "tests": _tests(tests, os.environ) if tests else None,
        "emulator": _loaded(path)["emulator"] if path.exists() else None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    _write(path, result)
    print(json.dumps({name: result[name] for name in ("torch", "python", "suite", "tests")}))  # noqa: T201


def emulate(folder: Path) -> None:
    """Run the NPU's tests over the emulator, and add what passed to the file that `try` has written in `folder`."""
    from accelcore_npu_emulator.install import install
    from accelcore_npu_emulator.wheel import fitting

    environ = {**os.environ, "PYTHONPATH": str(install()), "ACCEL_REQUIRE_EMULATED": "1"}
    counts = _tests(("plugins/npu/tests", "plugins/npu_emulator/tests"), environ)
    found = {"date": _today(), "torch_npu": fitting(), **counts}
    path = _file(folder)
    _write(path, {**_loaded(path), "emulator": found})
    print(json.dumps(found))  # noqa: T201


def _file(folder: Path) -> Path:
    return folder / f"torch-{version('torch').partition('+')[0]}.json"


def _today() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d")


def _write(path: Path, result: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _suite() -> dict[str, Any]:
    command = [sys.executable, "-m", "accelcore", "verify", "backend", "cpu", "--json"]
    answer = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
    report = json.loads(answer.stdout)
    tests = report["tests"]
    counts = {outcome: sum(one["outcome"] == outcome for one in tests) for outcome in ("passed", "failed")}
    failed = [f"{one['role']}: {one['name']}[{one['case']}]" for one in tests if one["outcome"] == "failed"]
    return {**counts, "failures": failed}


def _tests(folders: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            "--dist",
            "worksteal",
            f"--junitxml={report}",
            *folders,
        ]
        subprocess.run(command, cwd=ROOT, check=False, env=environ)  # noqa: S603
        cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314  # pytest wrote it just now
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    left_out = sum(case.find("skipped") is not None for case in cases)
    failures = sorted(f"{case.get('classname')}: {case.get('name')}" for case in bad)
    return {"passed": len(cases) - len(bad) - left_out, "failed": len(bad), "skipped": left_out, "failures": failures}


def _loaded(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def page(results: Iterable[dict[str, Any]]) -> str:
    """Return the page: a table of versions, what each lacks, and what fails."""
    from accelcore_npu_emulator.wheel import RELEASES

    ordered = sorted(results, key=lambda one: [int(part) for part in _release(one).split(".")])
    lines = [_HEAD, "## What was tried", ""]
    lines += ["| torch | Python | date | conformance suite, CPU | tests | NPU, emulated |", "|---|---|---|---|---|---|"]
    for one in ordered:
        npu = _verdict(one["emulator"]) if _release(one) in RELEASES else "-"
        if one["emulator"]:
            npu = f"torch-npu {one['emulator']['torch_npu']}, {one['emulator']['date']}: {npu}"
        cells = (one["torch"], one["python"], one["date"], _verdict(one["suite"]), _verdict(one["tests"]), npu)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## What versions lack, and what accelcore does instead", ""]
    lines += ["| part of torch | missing in | instead |", "|---|---|---|"]
    lacks: dict[tuple[str, str], list[str]] = {}
    for one in ordered:
        for part in one["lacks"]:
            lacks.setdefault((part["name"], part["instead"]), []).append(_release(one))
    lines += [f"| `{name}` | {', '.join(missing)} | {instead}. |" for (name, instead), missing in lacks.items()]
    start = len(lines)
    for one in ordered:
        parts = (one["suite"], one["tests"], one["emulator"])
        failures = [name for part in parts if part for name in part["failures"]]
        if failures:
            lines += [f"torch {_release(one)}:", "", *(f"- `{name}`" for name in failures), ""]
            lines += [one["cause"], ""] if "cause" in one else []
    lines[start:start] = ["", "## What fails", ""] if len(lines) > start else []
    return "\n".join(lines).rstrip("\n") + "\n"


def _release(result: dict[str, Any]) -> str:
    """Return the version of torch without the name of its build."""
    release: str = result["torch"].partition("+")[0]
    return release


def _verdict(counts: dict[str, Any] | None) -> str:
    if counts is None:
        return "not run"
    named = (("passed", "pass"), ("failed", "fail"), ("skipped", "skipped"))
    return ", ".join(f"{counts[name]} {word}" for name, word in named if counts.get(name))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
