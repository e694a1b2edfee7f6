"""A backend from what torch says of a device: the CPU, devices that are not there, and one outside of torch."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import subprocess
import sys
from mmap import mmap
from pathlib import Path
from types import FunctionType, ModuleType

import pytest
import torch

import accelcore
from accelcore.devices.select import imitations, ten_lines
from accelcore.errors import BackendUnavailableError, ConfigurationError, UnknownBackendError, UnsupportedError
from accelcore.roles import from_torch
from accelcore.torch_internals import register_kernel


@pytest.fixture(scope="module")
def host():
    return from_torch("cpu")


def trained(accel, optimizer="adamw", **options):
    accel.runtime.seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    own = accel.optimizers.create(optimizer, model.parameters(), lr=0.01)
    trainer = accel.trainer(model, own, loss=lambda m, batch: m(batch).square().mean(), **options)
    losses = [float(trainer(torch.full((2, 4), number / 8))) for number in range(6)]
    return losses, [value.detach().cpu() for value in model.parameters()]


def test_the_cpu_declares_what_its_own_plugin_declares_but_for_what_that_adds(host, accel):
    ours, by_hand = host.capabilities, accel.capabilities
    for field in ("autocast_dtypes", "model_dtypes", "process_groups", "parallel"):
        assert getattr(ours, field) == getattr(by_hand, field), field
    assert ours.native_optimizers == ("adagrad", "adam", "adamw", "sgd"), "torch's kernels, and no other"
    assert ours.autocast_tables == ("torch",), "O1 needs treatments for operators that only this device has"
    assert [ours.streams, ours.graphs, ours.pinned_memory, ours.sync_batchnorm] == [False] * 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_trains_as_the_loop_by_hand(host, precision):
    losses, values = trained(host, precision=precision)
    host.runtime.seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number, loss in enumerate(losses):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            wanted = model(torch.full((2, 4), number / 8)).square().mean()
        optimizer.zero_grad()
        wanted.backward()
        optimizer.step()
        assert loss == pytest.approx(wanted.item(), rel=1e-4)
    for value, same in zip(values, model.parameters(), strict=True):
        torch.testing.assert_close(value, same.detach())


def test_its_memory_is_the_process(host):
    before = host.runtime.memory()
    # Pages of the system: torch may be given memory that the process has kept since an earlier test.
    with mmap(-1, 2**26) as pages:
        pages.write(bytes(2**26))
        after = host.runtime.memory()
    assert 0 < before.used <= before.peak <= before.total == after.total
    assert after.used - before.used > 0.8 * 2**26


@pytest.mark.parametrize(("device", "words"), [("xpu", "is_available"), ("nowhere", "nowhere")])
def test_a_device_that_is_not_there_is_an_error_with_what_torch_reports(device, words):
    with pytest.raises(BackendUnavailableError, match=words) as caught:
        from_torch(device)
    assert device in caught.value.what
    assert "cpu" in caught.value.available


def test_an_index_beyond_the_devices_or_in_the_name_is_refused():
    with pytest.raises(ConfigurationError, match="index"):
        from_torch("cpu:0")
    with pytest.raises(BackendUnavailableError, match="cpu:1"):
        from_torch("cpu", 1)


@pytest.mark.filterwarnings("ignore:.*(previously|Overriding).*:UserWarning")
def test_a_kernel_that_computes_something_else_is_not_declared(caplog):
    def nothing(*arguments, **options):
        pass

    library = torch.library.Library("aten", "IMPL")
    register_kernel(library, torch.ops.aten._fused_sgd_.default, nothing, "CPU", False)
    try:
        with caplog.at_level(logging.INFO, "accelcore"):
            declared = from_torch("cpu").capabilities.native_optimizers
    finally:
        library._destroy()
    assert declared == ("adagrad", "adam", "adamw")
    assert any("fused sgd is not declared" in message for message in caplog.messages)
    assert "sgd" in from_torch("cpu").capabilities.native_optimizers


def test_a_declaration_by_hand_is_not_tried_and_a_role_can_be_replaced():
    mine = from_torch("cpu", name="mine", capabilities=accelcore.Capabilities())
    assert (mine.name, mine.capabilities) == ("mine", accelcore.Capabilities())
    with pytest.raises(UnsupportedError):
        mine.autocast(torch.bfloat16)
    with pytest.raises(UnsupportedError):
        mine.compiler.compile(torch.nn.Identity(), {})
    runtime = from_torch("cpu").runtime
    assert dataclasses.replace(mine, runtime=runtime).runtime is runtime


@pytest.mark.usefixtures("nothing_installed")
def test_the_ten_lines_are_a_backend(fakes):
    fakes.install(ten_lines("cpu"), backends=["cpu"])
    accel = accelcore.select()
    assert accel.name == "cpu"
    assert len(trained(accel)[0]) == 6
    assert len([line for line in ten_lines("cpu").splitlines() if line]) <= 10


@pytest.fixture
def a_device_without_plugin(monkeypatch):
    """torch has an accelerator that works, and that no plugin serves."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)


@pytest.mark.usefixtures("a_device_without_plugin")
def test_select_shows_the_ten_lines_for_a_device_that_no_plugin_serves(caplog, monkeypatch):
    with pytest.raises(UnknownBackendError) as caught:
        accelcore.select("xpu")
    assert ten_lines("xpu") in caught.value.remedy
    with caplog.at_level(logging.WARNING, "accelcore"):
        accelcore.select("auto")
    assert "new-backend xpu" in caplog.text


def distribution(folder, name, module, entry_points):
    """Write a distribution of one module, and return the PYTHONPATH that has it."""
    (folder / f"{name}.py").write_text(module)
    information = folder / f"{name}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(entry_points)
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def _function(package="vendor"):
    torch.xpu.device_count = FunctionType((lambda: 1).__code__, {"__name__": f"{package}.devices"})


def _wrapper():
    original = torch.xpu.device_count
    _function("wrapping")
    functools.update_wrapper(torch.xpu.device_count, original)


def _module():
    torch.xpu = sys.modules["torch.xpu"] = ModuleType("replacing.xpu")
    _function("replacing")


@pytest.mark.parametrize(
    ("imitate", "package"), [(_function, "vendor"), (_wrapper, "wrapping"), (_module, "replacing")]
)
def test_a_package_that_answers_for_torch_is_named(monkeypatch, caplog, imitate, package):
    assert list(imitations()) == []
    monkeypatch.setattr(torch.xpu, "device_count", torch.xpu.device_count)  # puts all back at the end
    monkeypatch.setattr(torch, "xpu", torch.xpu)
    monkeypatch.setitem(sys.modules, "torch.xpu", torch.xpu)
    imitate()
    (sentence,) = imitations()
    assert f"torch.xpu is answered by {package} " in sentence
    with caplog.at_level(logging.WARNING, "accelcore"):
        accelcore.select("cpu")
    assert sentence in caplog.messages


IMPORT = f"import sys, torch; sys.path.insert(0, {str(Path(__file__).parent)!r})"
OUTSIDE = f"""
import dataclasses, json
{IMPORT}
import testchip
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import accelcore
from accelcore.roles import from_torch
from roles.test_from_torch import trained

accel, host = from_torch("testchip"), from_torch("cpu")
there, here = trained(accel, clip_norm=1.0), trained(host, clip_norm=1.0)
same = all(torch.allclose(one, other, atol=1e-6) for one, other in zip(there[1], here[1]))
print(json.dumps([dataclasses.asdict(accel.capabilities), there[0], here[0], same,
                  dataclasses.astuple(accel.runtime.memory()), str(accel.device)]))
"""


@pytest.mark.full
def test_a_device_outside_of_torch_trains_as_the_cpu(run_python):
    """Its library takes some 15 seconds to compile, once a version of torch."""
    declared, there, here, same, (used, peak, _), device = json.loads(run_python(OUTSIDE).stdout)
    assert device == "testchip:0"
    assert declared["model_dtypes"] == ["float32", "float64", "bfloat16", "float16"]
    assert declared["autocast_dtypes"] == [], "autocast changes nothing there, so it is not declared"
    assert (declared["parallel"], declared["streams"], declared["native_optimizers"]) == (["none"], False, [])
    assert there == pytest.approx(here, rel=1e-5)
    assert same
    assert 0 <= used < peak


@pytest.mark.full
def test_a_device_outside_of_torch_conforms(tmp_path):
    """The whole suite, on the ten lines: some four minutes."""
    lines = ten_lines("testchip").replace("import from_torch", f"import from_torch\n    {IMPORT}\n    import testchip")
    path = distribution(tmp_path, "chip", lines, "[accelcore.backends]\ntestchip = chip\n")
    command = [sys.executable, "-m", "accelcore", "verify", "backend", "testchip", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=os.environ | {"PYTHONPATH": path})
    tests = json.loads(done.stdout)["tests"]
    assert len(tests) > 1000
    assert [test for test in tests if test["outcome"] == "failed"] == []
    assert done.returncode == 0
