"""Type what README says under "Install" into a new virtual environment, and see that scripts still run in it.

Run by `tox run -e readme` with the Python of the environment `install`, whose torch it borrows: no package index is
asked, so the command that downloads torch-npu is left out. What the others require, and is not there, is an error.
With a folder of other packages as its argument, which has transformers (`tox run -e full`), that is imported, too, a
plugin is installed from a wheel, and the script is started without `accelcore run`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import torch, accelcore
accel = accelcore.select()
with accel.distributed() as job:
    print(f"{accel.name}: rank {job.rank} of {job.world_size}", torch.ones(2, device=accel.device).sum().item())
"""
# It looks for devices' packages when it is imported.
TRANSFORMERS = """
import torch, transformers
sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 9}
model = transformers.BertModel(transformers.BertConfig(**sizes))
assert model(torch.ones(1, 3, dtype=torch.long)).last_hidden_state.shape == (1, 3, 8)
"""
KEPT = "python -m pip wheel --no-deps --wheel-dir kept tests/plugins_kept/wheel && pip install --no-deps kept/*.whl"
AFTERWARDS = """
accelcore verify backend cpu --only backend
accelcore run train.py
python -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch_npu') and 'torch_npu is importable')"
"""
IN_FULL = f"""
{KEPT}
accelcore verify backend kept --only backend
python train.py
python -m torch.distributed.run --standalone --nproc-per-node 2 train.py
python transform.py
"""


def commands(heading: str) -> str:
    """Return the commands below a heading of README, and one that installs all rows of the table in docs/install.md."""
    section = (ROOT / "README.md").read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.search(r"^```sh\n(.*?)^```$", section, re.M | re.S)
    assert found is not None, heading
    rows = re.findall(r"^\|.*`pip install ([^`]+)`", (ROOT / "docs/install.md").read_text(), re.M)
    assert len(rows) > 1, "the table installs nothing"
    return f"{found[1]}pip install {' '.join(rows)}\n"


def borrow(folder: Path, others: list[str]) -> None:
    """Let the new environment import what this one has installed, but for accelcore and pip; and what `others` have."""
    site = Path(sysconfig.get_path("purelib"))
    links = folder / "borrowed"
    links.mkdir()
    for path in site.iterdir():
        if "accelcore" not in path.name and not path.name.startswith("pip"):
            (links / path.name).symlink_to(path)
    new = folder / site.relative_to(sys.prefix)
    for old in new.glob("setuptools*"):  # that Python 3.10 and 3.11 put there, too old to build accelcore
        shutil.rmtree(old)
    # A path, not a part of the environment: pip changes nothing in it.
    (new / "borrowed.pth").write_text("\n".join([str(links), *others]))


def main() -> None:
    """Install and run; the first command that fails ends the program."""
    with tempfile.TemporaryDirectory(prefix="accelcore-") as name:
        folder = Path(name)
        clone = folder / "clone"
        # A copy, because building leaves files beside the sources.
        shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".*", "build", "dist", "outputs"))
        (clone / "train.py").write_text(SCRIPT)
        (clone / "transform.py").write_text(TRANSFORMERS)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON", "TORCH_"))}
        programs = os.pathsep.join([str(Path(sys.base_prefix) / "bin"), os.environ["PATH"]])
        offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_QUIET": "1"}
        # pip reads these as "build isolation: no" and "compile: no". Modules are compiled when they are imported.
        offline |= {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_COMPILE": "0"}
        first, rest = commands("Install").split("\n", 1)
        more = IN_FULL if sys.argv[1:] else ""
        for script in (first, f". .venv/bin/activate\n{rest}{AFTERWARDS}{more}"):
            shell = ["bash", "-euxc", script]
            subprocess.run(shell, check=True, cwd=clone, env=kept | offline | {"PATH": programs})  # noqa: S603
            if script is first:
                borrow(clone / ".venv", sys.argv[1:])


if __name__ == "__main__":
    main()
