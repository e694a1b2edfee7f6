"""Operators that torch_npu has no kernel for, which it computes on the host unless it is told not to."""

import pytest

SCRIPT = """
import accelcore, torch

accel = accelcore.select("npu")
model = torch.nn.Linear(4, 1)
trainer = accel.trainer(
    model, accel.optimizers.create("adamw", model.parameters(), lr=0.1), clip_norm=1.0, precision="fp16",
    loss=lambda model, rows: model(rows).square().mean(),
)
print("loss", trainer(torch.ones(2, 4, device=accel.device)).item())
for operator in (torch.digamma, lambda x: torch.digamma(x, out=torch.empty_like(x)), torch.linalg.eigvals):
    try:
        print("computed", operator(torch.eye(2, device=accel.device)).device)
    except accelcore.AccelError as error:
        print(type(error).__name__, error)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("fallback") / "script.py"
    path.write_text(SCRIPT)
    return path


def test_what_torch_npu_computes_on_the_host_raises_where_it_is_asked_to(fork, script):
    done = fork(script, ACCEL_NPU_FALLBACK="raise").finish()
    assert done.returncode == 0, done.stderr
    loss, *others = (line for line in done.stdout.splitlines() if line.startswith(("loss", "comp", "Uns")))
    assert loss.startswith("loss")
    assert len(others) == 3
    for line, operator in zip(others, ("digamma.out", "digamma.out", "_linalg_eigvals"), strict=True):
        assert line.startswith(f"UnsupportedError the operator aten::{operator}"), line


def test_a_setting_that_is_none_is_an_error(fork, script):
    done = fork(script, ACCEL_NPU_FALLBACK="raises").finish()
    assert done.returncode != 0
    assert "ACCEL_NPU_FALLBACK=" in done.stderr
    assert "available: allow, raise" in done.stderr
