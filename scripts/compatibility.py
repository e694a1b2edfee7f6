"""Try accelcore with one version of torch, and write the page of all versions that were tried.

`tox run -e torch2.7` runs `python scripts/compatibility.py try docs/compatibility`, which takes minutes, in an
environment with that torch. It writes a JSON file named after the version of torch. `python scripts/compatibility.py
page docs/compatibility docs/compatibility.md` writes the page from these files.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
_HEAD = """\
# Versions

<!-- Written by scripts/compatibility.py from the files in docs/compatibility. Do not edit. -->

accelcore needs torch 2.7 or later and Python 3.10 or later. `make test` runs torch 2.13.0 and Python 3.11. The other
versions below were tried by hand, with `tox run -e torch2.7` and the like: each environment runs the conformance suite
on the CPU (`accelcore verify backend cpu`). `tox run -e torch2.7 -- tests` runs tests, too. Devices other than the CPU
were not tried here.

What a version of torch lacks is asked for as a feature, never by comparing versions. Kernels that compute wrong results
are in [another table](known_faults.md).
"""


def main(arguments: Sequence[str]) -> int:
    """Run one of the two commands; return the exit code."""
    command, folder, *rest = arguments
    if command == "try":
        attempt(Path(folder), rest)
    elif command == "page":
        Path(rest[0]).write_text(page(map(_loaded, Path(folder).glob("*.json"))), encoding="utf-8")
    else:
        raise SystemExit(f"{command!r} is not a command; available: try, page")
    return 0


def attempt(folder: Path, tests: Sequence[str]) -> None:
    """Run the suite and the tests (folders; none: no tests), and write what passed into a file in `folder`."""
    from importlib.metadata import version

    from accelcore.torch_features import TORCH_FEATURES

    torch = version("torch")
    result = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "torch": torch,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "lacks": [{"name": str(one), "instead": one.instead} for one in TORCH_FEATURES if not one.present],
        "suite": _suite(),
        "tests": _tests(tests) if tests else None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"torch-{torch.partition('+')[0]}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: result[name] for name in ("torch", "python", "suite", "tests")}))  # noqa: T201


def _suite() -> dict[str, Any]:
    command = [sys.executable, "-m", "accelcore", "verify", "backend", "cpu", "--json"]
    answer = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)  # noqa: S603
    report = json.loads(answer.stdout)
    tests = report["tests"]
    counts = {outcome: sum(one["outcome"] == outcome for one in tests) for outcome in ("passed", "failed")}
    failed = [f"{one['role']}: {one['name']}[{one['case']}]" for one in tests if one["outcome"] == "failed"]
    return {**counts, "failures": failed}


def _tests(folders: Sequence[str]) -> dict[str, Any]:
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
        subprocess.run(command, cwd=ROOT, check=False)  # noqa: S603
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
    ordered = sorted(results, key=lambda one: [int(part) for part in _release(one).split(".")])
    lines = [_HEAD, "## What was tried", ""]
    lines += ["| torch | Python | date | conformance suite, CPU | tests |", "|---|---|---|---|---|"]
    for one in ordered:
        suite, tests = one["suite"], one["tests"]
        lines.append(f"| {one['torch']} | {one['python']} | {one['date']} | {_verdict(suite)} | {_verdict(tests)} |")
    lines += ["", "## What versions lack, and what accelcore does instead", ""]
    lines += ["| part of torch | missing in | instead |", "|---|---|---|"]
    lacks: dict[tuple[str, str], list[str]] = {}
    for one in ordered:
        for part in one["lacks"]:
            lacks.setdefault((part["name"], part["instead"]), []).append(_release(one))
    lines += [f"| `{name}` | {', '.join(missing)} | {instead}. |" for (name, instead), missing in lacks.items()]
    lines += ["", "## What fails", ""]
    for one in ordered:
        failures = [*one["suite"]["failures"], *(one["tests"]["failures"] if one["tests"] else ())]
        if failures:
            lines += [f"torch {_release(one)}:", "", *(f"- `{name}`" for name in failures), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _release(result: dict[str, Any]) -> str:
    """Return the version of torch without the name of its build."""
    release: str = result["torch"].partition("+")[0]
    return release


def _verdict(counts: dict[str, Any] | None) -> str:
    if counts is None:
        return "not run"
    return f"{counts['passed']} pass" + (f", {counts['failed']} fail" if counts["failed"] else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
