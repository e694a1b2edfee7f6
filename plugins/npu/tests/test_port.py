"""Scripts that `accelcore port` has rewritten, on the emulated NPU: they give the losses that they gave for CUDA."""

from pathlib import Path

import pytest

CORPUS = Path(__file__).parents[2] / "lint" / "tests" / "port" / "corpus"
IMPOSTOR = "import torch_npu\nfrom torch_npu.contrib import transfer_to_npu\n"
WITHOUT_LOSSES = {"shadowed", "two_devices"}
LEFT = {("npu_fused", "torch"), ("nanogpt_style", "torch")}
"""Scripts with a line that a level leaves: torch has no `Lamb`, and no question for bfloat16."""

NAMES = sorted(
    path.stem
    for path in CORPUS.glob("*.py")
    # Ranks need processes of their own, and NVIDIA's apex is not there.
    if path.stem not in {*WITHOUT_LOSSES, "accelerate_loop"} and not path.stem.startswith(("ddp_", "apex_"))
)

RUN = """
import sys
from pathlib import Path

sys.path.insert(0, {folder!r})
import port_runs

for name in {names!r}:
    print("of", name, *port_runs.losses(Path({pattern!r}.format(name)).read_text(), name))
"""


def losses(done):
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("of ")]
    return {name: [float(loss) for loss in found] for _, name, *found in lines}


@pytest.mark.parametrize(
    "level", ["roles", pytest.param("torch", marks=pytest.mark.full), pytest.param("trainer", marks=pytest.mark.full)]
)
def test_each_script_trains_on_an_npu_as_it_did_by_transfer_to_npu(level, fork, tmp_path):
    patterns = {"before": str(CORPUS / "{}.py"), "after": str(CORPUS / "expected" / f"{{}}.{level}.py")}
    # Level trainer has a file only if it differs from level roles.
    names = [name for name in NAMES if (name, level) not in LEFT and Path(patterns["after"].format(name)).exists()]
    running = {}
    for word, pattern in patterns.items():
        script = tmp_path / f"{word}.py"
        run = RUN.format(folder=str(CORPUS.parent), names=names, pattern=pattern)
        script.write_text((IMPOSTOR if word == "before" else "") + run)
        running[word] = fork(script, ACCEL_DEVICE="npu")
    before, after = (losses(each.finish()) for each in running.values())
    assert list(before) == list(after) == names
    for name in names:
        assert len(before[name]) >= 3
        assert after[name] == pytest.approx(before[name], rel=1e-4, abs=1e-6), name
