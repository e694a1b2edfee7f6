"""Plugins that worked once, kept as they were: version 1 of the plugin interface must not change under them.

`wheel` is a whole package, which `tox run -e full` installs as a wheel and verifies. If one of these tests fails, keep
what it uses, or raise `accelcore.API` and refuse the old version: do not change the folder `plugins_kept`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

import accelcore

KEPT = Path(__file__).parent / "plugins_kept"
FILES = {
    "accelcore_bare/__init__.py": "2b468b3785646121",
    "accelcore_bare/backend.py": "1c74cca5c190cc28",
    "accelcore_hostchip/__init__.py": "4cbd7a8c7fec937c",
    "accelcore_hostchip/backend.py": "c550e7919a9d784c",
    "kept_lion.py": "84e25c4cbb41351d",
    "wheel/pyproject.toml": "964290a5d199acba",
    "wheel/accelcore_kept/__init__.py": "97a84cecd126aad7",
    "wheel/accelcore_kept/backend.py": "f8c64133fa81aeff",
    "wheel/accelcore_kept/optimizers.py": "6478565a706057dc",
}


@pytest.fixture
def installed(tmp_path, import_from):
    """Installs the kept plugins for this test."""
    for folder in (KEPT, KEPT / "wheel"):
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name, group, point in (
        ("accelcore_bare", "backends", "bare = accelcore_bare"),
        ("accelcore_hostchip", "backends", "hostchip = accelcore_hostchip"),
        ("accelcore_kept", "backends", "kept = accelcore_kept"),
        ("kept_lion", "extensions", "lion = kept_lion"),
    ):
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[accelcore.{group}]\n{point}\n")
    import_from(tmp_path)


def test_the_interface_that_they_were_written_for_is_supported():
    assert max(1, accelcore.API - 1) == 1, "version 1 is no longer supported: keep plugins of the new version instead"


@pytest.mark.parametrize("name", FILES)
def test_they_are_as_they_were(name):
    found = hashlib.sha256((KEPT / name).read_bytes()).hexdigest()[:16]
    assert found == FILES[name], "a plugin in plugins_kept was changed: change what it uses back, not the plugin"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "precision", "loss_scale"),
    [("adamw", "bf16", "dynamic"), ("lion", "fp32", None), ("sgd", "O2", None)],
)
def test_a_kept_backend_trains_as_the_cpu(name, precision, loss_scale, tmp_path):
    policy = accelcore.Policy.preset(precision, dtype="bfloat16") if precision == "O2" else precision
    losses = {}
    for device in ("cpu", "hostchip", "kept", "bare"):
        accel = accelcore.select(device)
        accel.runtime.seed(1)
        with accel.distributed(rank=0, world_size=1, init_method=f"file://{tmp_path}/{device}.meeting"):
            model = torch.nn.Linear(4, 2)
            optimizer = accel.optimizers.create(name, model.parameters(), lr=0.01)
            trainer = accel.trainer(
                model, optimizer, loss=lambda m, b: m(b).square().mean(), precision=policy, loss_scale=loss_scale,
                accumulate=2, clip_norm=1.0,
            )  # fmt: skip
            batches = trainer.batches([torch.ones(3, 4) * number for number in range(6)])
            losses[device] = [float(trainer(batch)) for batch in batches]
            trainer.save(tmp_path / device)
            assert trainer.resume(tmp_path / device) is not None
            assert trainer.skipped == 0
    assert losses["hostchip"] == losses["kept"] == losses["bare"] == pytest.approx(losses["cpu"], rel=1e-3)
    assert losses["cpu"][-1] != losses["cpu"][0]


@pytest.mark.usefixtures("installed")
def test_a_kept_compiler_checks_its_options_and_compiles():
    compiler = accelcore.select("kept").compiler
    with pytest.raises(accelcore.ConfigurationError, match="kept"):
        compiler.check({"mode": "kept"})
    module = torch.nn.Linear(4, 2)
    compiled = compiler.compile(module, {"backend": "eager"})
    assert torch.equal(compiled.module(torch.ones(3, 4)), module(torch.ones(3, 4)))


@pytest.mark.usefixtures("installed")
def test_a_kept_backend_has_its_roles():
    accel = accelcore.select("hostchip")
    assert accelcore.installed()["hostchip"].available
    assert accel.runtime.memory().used <= accel.runtime.memory().peak
    assert accel.runtime.to_device([torch.ones(2)])[0].device == accel.device
    assert accel.runtime.set_rng_state(accel.runtime.rng_state()) == []
    with accel.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    scaler = accel.scaler.create(init=8.0)
    assert float(scaler.scale(torch.ones(()))) == 8.0
    with accel.distributed() as job:
        assert job.world_size == 1
    with pytest.raises(accelcore.UnsupportedError):
        accel.compiler.compile(torch.nn.Linear(1, 1), {})


@pytest.mark.full
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ["bare", "kept"])
def test_a_kept_backend_conforms(name, fork, tmp_path):
    """The whole suite: it asks for no declaration and no method that plugins of this version did not need."""
    done = fork("-m", "accelcore", "verify", "backend", name, "--json", PYTHONPATH=str(tmp_path)).finish(900)
    assert done.returncode == 0, done.stdout + done.stderr
    card = json.loads(done.stdout)
    assert card["conforms"]
    assert all(counts["passed"] for counts in card["roles"].values())
