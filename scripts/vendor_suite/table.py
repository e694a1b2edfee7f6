"""What the tests' ends amount to: `python table.py RESULT.json...` prints the table of results written before."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from explained import explanation
from run_file import Outcome

__all__ = ["RESULT", "Table", "verdict"]

RESULT = "vendor_suite.json"
VERDICTS = ("passed", "refused", "wrong", "limit", "torch_npu", "hardware", "environment", "skipped")
_MEANING = {
    "passed": "the test's own verdict",
    "refused": "the failure says EMULATED",
    "wrong": "it failed or its process died, and neither a rule in `table.py` nor `explained.py` says why",
    "limit": "it was stopped at a limit of time, memory or processes",
    "hardware": "it is about times, another part, random numbers recorded on a device, or CANN's profiler and logs",
    "environment": "a package or program is not installed, pytest cannot start it, or it is for another torch-npu",
    "torch_npu": "torch_npu's own code does this, on any device, as its public source shows",
    "skipped": "by the suite itself, in its code or in its list of tests that do not work",
}
# A line of an error, or of what the test's processes said; not one of source, which pytest indents.
_REFUSED = re.compile(r"^(?!>|    ).*EMULATED: ", re.MULTILINE)
_ENVIRONMENT = (
    r"ModuleNotFoundError: No module named",
    r"FileNotFoundError: \[Errno 2\] No such file or directory: '(etcd|msprof|npu-smi|git|ninja|bisheng|clang)'",
    r"urllib\.error\.URLError|requests\.exceptions\.ConnectionError",
    r"ModuleNotFoundError: nvidia-ml-py does not seem to be installed",
    r"OSError: Could not load this library: .*libop_plugin_atb\.so",  # Ascend's transformer library is a package apart
    r"Failed to build stub:",  # of C++ allocators, by sources beside the tests
    r"fixture 'mesh' not found|object has no attribute '(runTest|assert\w+)'",  # no tests: scripts, base classes
    r"'yield' keyword is allowed in fixtures, but not in tests",
    # A rank that ended before its result was fetched, which the test does not wait for.
    r"in rebuild_storage_fd(?s:.)*(ConnectionReset|EOF)Error|def SocketClient(?s:.)*FileNotFoundError",
    r"TypeError: \w+\.\w+\(\) missing \d+ required positional arguments",  # nor are these, without their own runner
    r"TypeError: foreach_(all_gather|reduce)\(\) (takes|missing|got) ",  # torch-npu is not that of the tests
    r"Expected: warn\('Unable to hit fast path of NPUGraphs",
    r'"Overriden is not allowed" does not match|"input must have the type" does not match',  # nor the installed torch
    r"ImportError: cannot import name '\w+' from 'torch\.",
    r"AttributeError: module 'torch\._C' has no attribute",
    r"TypeError: only 0-dimensional arrays can be converted|module 'numpy' has no attribute",  # nor the installed numpy
)
_HARDWARE = (
    r"assertTrue\(slow_time > fast_time\)",
    r"assertRtolEqual\(base_result\[index\]",  # random numbers, recorded on a device
    r"assertFalse\(done_event\.query\(\)\)",  # that the device is still at work
    r"is not supported by the current soc version\.",  # another part
    r"check_operators_in_prof\(|self\.assertIn\('aclnn",
)
_TORCH_NPU = (
    # Its registration of torch's sparse kernels does not select the device of their tensors.
    r"device\(\) == values_\.device\(\) INTERNAL ASSERT FAILED",
    r"^E +RuntimeError: Only contiguous_format or preserve_format is supported\.",  # of a conversion on the device
)
_LIMIT = (r"OutOfMemoryError: NPU out of memory\. .* 4\.00 GiB total capacity",)  # of an emulated device
_RULES = {"torch_npu": _TORCH_NPU, "limit": _LIMIT, "environment": _ENVIRONMENT, "hardware": _HARDWARE}


def verdict(outcome: Outcome) -> str:
    """One of `VERDICTS`; what a failure is, is told by its text, and where that says too little by its name, too."""
    if outcome.outcome in ("passed", "skipped", "limit"):
        return outcome.outcome
    if _REFUSED.search(outcome.text):
        return "refused"
    if (explained := explanation(outcome.test, outcome.text)) is not None:
        return explained.verdict
    for name, patterns in _RULES.items():
        if any(re.search(pattern, outcome.text, re.MULTILINE) for pattern in patterns):
            return name
    return "wrong"


def _row(first: str, rest: Iterable[str]) -> str:
    return f"| {' | '.join([first, *rest])} |"


class Table:
    """The results of a run, by file."""

    def __init__(self, revision: str) -> None:
        self.revision = revision
        self.files: dict[str, list[Outcome]] = {}

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Table:
        """The results that were written before, as one."""
        table = cls("")
        for path in paths:
            content = json.loads(path.read_text(encoding="utf-8"))
            table.revision = content["revision"]
            for file, outcomes in content["files"].items():
                table.files[file] = [Outcome(*outcome) for outcome in outcomes]
        return table

    def add(self, file: str, outcomes: list[Outcome]) -> None:
        """A file's results."""
        self.files[file] = outcomes

    def counts(self, file: str) -> Counter[str]:
        """How many of a file's tests have each verdict."""
        return Counter(verdict(outcome) for outcome in self.files[file])

    def summary(self, file: str) -> str:
        """A file's results in a line."""
        return ", ".join(f"{count} {name}" for name, count in sorted(self.counts(file).items())) or "nothing to run"

    def markdown(self) -> str:
        """The table, by folder, and what it comes to."""
        folders: dict[str, Counter[str]] = {}
        for file in self.files:
            folder = file.partition("/")[0] if "/" in file else "(no folder)"
            folders.setdefault(folder, Counter()).update(self.counts(file))
        total: Counter[str] = sum(folders.values(), Counter())
        lines = [f"EMULATED: torch_npu's own tests, revision {self.revision}; {len(self.files)} files", ""]
        lines += [_row("folder", VERDICTS), _row("---", ["---"] * len(VERDICTS))]
        rows = [*sorted(folders.items()), ("all", total)]
        lines += [_row(folder, [str(counts[name]) for name in VERDICTS]) for folder, counts in rows]
        good = total["passed"] + total["refused"]
        counted = good + total["wrong"] + total["limit"]
        share = f"{100 * good / counted:.1f} %" if counted else "none"
        lines += ["", f"Of {counted} tests that need no hardware, {share} passed or were refused clearly.", ""]
        lines += [f"- {name}: {meaning}" for name, meaning in _MEANING.items()]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Write both files."""
        content: dict[str, Any] = {"emulated": True, "revision": self.revision}
        content["files"] = {
            file: [(one.test, one.outcome, "" if one.outcome == "passed" else one.text) for one in outcomes]
            for file, outcomes in self.files.items()
        }
        (folder / RESULT).write_text(json.dumps(content, indent=0) + "\n", encoding="utf-8")
        (folder / "vendor_suite.md").write_text(self.markdown(), encoding="utf-8")


if __name__ == "__main__":
    sys.stdout.write(Table.read(map(Path, sys.argv[1:])).markdown())
