"""Scripts that `accelcore port` has rewritten, on the emulated NPU: they give the losses that they gave for CUDA."""

from pathlib import Path

import pytest

CORPUS = Path(__file__).parents[2] / "lint" / "tests" / "port" / "corpus"
IMPOSTOR = "import torch_npu\nfrom torch_npu.contrib import transfer_to_npu\n"


def losses(done):
    assert done.returncode == 0, done.stderr
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss ")]


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("plain_cuda", "trainer"),
        *(
            pytest.param(name, level, marks=pytest.mark.full)
            for name in ("plain_cuda", "accumulate", "checkpoint")
            for level in ("torch", "roles")
        ),
    ],
)
def test_trains_on_an_npu_as_it_did_by_transfer_to_npu(name, level, fork, tmp_path):
    scripts = {
        "before": IMPOSTOR + (CORPUS / f"{name}.py").read_text(),
        "after": (CORPUS / "expected" / f"{name}.{level}.py").read_text(),
    }
    found = {}
    for word, source in scripts.items():
        script = tmp_path / f"{word}.py"
        script.write_text(source)
        found[word] = losses(fork(script, ACCEL_DEVICE="npu").finish())
    assert len(found["before"]) > 3
    assert found["after"] == pytest.approx(found["before"], rel=1e-4, abs=1e-6)
