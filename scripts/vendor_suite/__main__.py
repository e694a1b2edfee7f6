"""torch_npu's own tests on the emulated NPU: `python scripts/vendor_suite CHECKOUT --output FOLDER`.

CHECKOUT is a checkout of torch_npu's public repository, https://gitcode.com/Ascend/pytorch, at the revision nearest to
the installed torch-npu. Its tests are copied to a temporary folder and run file by file, each within limits of time,
memory and processes, and without pkill and killall. Nothing of them becomes part of this repository. The result is
`vendor_suite.json`, with every test and what became of it, and `vendor_suite.md`, the table. A run that was stopped
goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from accelcore_npu_emulator import Settings, environment
from run_file import Limits, run_file
from table import RESULT, Table

FOLDERS = (
    "allocator", "autograd", "contrib", "custom_ops", "distributed", "nn", "npu", "optim", "trans_contiguous", "utils",
)  # fmt: skip
LARGEST = 64 * 2**10
COMPILERS = ("_jit", "_fx", "dynamo", "inductor")
_DISABLED = "unsupported_test_cases/.pytorch-disabled-tests.json"


def chosen(suite: Path) -> Iterator[str]:
    """The files that are run, by a rule that knows nothing of results.

    All in the folders about what a training script uses. Of the files beside the folders those about the NPU itself,
    and the others up to 64 KiB: the larger ones are torch's own suites, adapted, and test each operator as the
    self-test does. Left out are compilers, profilers, exporters and C++ extensions, whose work the device does not do.
    """
    for folder in FOLDERS:
        yield from sorted(str(path.relative_to(suite)) for path in (suite / folder).rglob("test_*.py"))
    for path in sorted(suite.glob("test_*.py")):
        if any(compiler in path.name for compiler in COMPILERS):
            continue
        if path.name.startswith("test_npu") or path.stat().st_size <= LARGEST:
            yield path.name


def variables(suite: Path, file: str) -> dict[str, str]:
    """The environment of a file: emulated, and as the suite's own runner sets it."""
    # What a file does when it is run as a script, some do on the part that saturates alone.
    _, _, script = (suite / file).read_text(encoding="utf-8").partition("if __name__ ==")
    soc = "Ascend910A" if '"Ascend910A"' in script else "Ascend910B2"
    devices = 4 if file.startswith("distributed") else 2  # many tests leave themselves out where there are fewer
    environ = {**os.environ, **environment(Settings(devices=devices, memory=4 * 2**30, soc=soc))}
    environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)  # many tests import torch alone
    here = Path(__file__).parent
    path = [str(here), str(suite), str((suite / file).parent), environ["PYTHONPATH"]]
    environ |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    programs = [str(here / "stand_ins"), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    environ |= {"PATH": os.pathsep.join(programs)}
    environ |= {"DISABLED_TESTS_FILE": str(suite / _DISABLED)}
    if file.startswith("distributed"):
        environ |= {"BACKEND": "hccl", "INIT_METHOD": "env://", "WORLD_SIZE": "2", "TEMP_DIR": tempfile.gettempdir()}
    return environ


def main() -> None:
    """Run the files, and write the table after each."""
    parser = argparse.ArgumentParser(prog="python scripts/vendor_suite", description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", metavar="PREFIX", help="only files that begin so, such as optim/")
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="only every Nth file of those, from the first"
    )
    parser.add_argument("--output", type=Path, default=Path("outputs/vendor_suite"), help="the folder for the result")
    parser.add_argument("--revision", default="unknown", help="what is checked out, for the table")
    options = parser.parse_intermixed_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="vendor-suite-") as folder:
        suite = Path(folder) / "test"
        shutil.copytree(options.checkout / "test", suite)
        files = [file for file in chosen(suite) if not options.files or file.startswith(tuple(options.files))]
        files = files[:: options.every]
        table = Table(options.revision)
        if (options.output / RESULT).exists():
            table = Table.read([options.output / RESULT])
        for number, file in enumerate(files, 1):
            if file in table.files:
                continue
            outcomes = run_file(file, suite, variables(suite, file), Limits())
            table.add(file, outcomes)
            table.write(options.output)
            sys.stdout.write(f"[{number}/{len(files)}] {file}: {table.summary(file)}\n")
            sys.stdout.flush()
    sys.stdout.write(table.markdown())


if __name__ == "__main__":
    main()
