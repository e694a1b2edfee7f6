from __future__ import annotations

import subprocess
import sys
import textwrap

import accelcore_cpu
import pytest
import torch
from accelcore_cpu.backend import declare
from accelcore_cpu.optimizers import FUSED, NATIVE
from by_hand import trains_in_fp16_as_by_hand

import accelcore
from accelcore.errors import BackendUnavailableError


def run(script):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# The probe, and what is created.


def test_there_is_always_a_cpu_which_all_ranks_share():
    probe = accelcore_cpu.accelcore_probe()
    assert probe == accelcore.Probe(
        "cpu",
        available=True,
        reason=probe.reason,
        priority=0,
        count=1,
        exclusive=False,
        api=accelcore.API,
        environment=("ACCEL_KERNEL_CACHE",),
    )
    assert accelcore.installed()["cpu"] == probe


def test_the_probe_imports_no_torch():
    run("import sys, accelcore_cpu; accelcore_cpu.accelcore_probe(); assert 'torch' not in sys.modules")


def test_creating_gives_the_cpu_and_each_time_a_new_one():
    one, other = (accelcore_cpu.accelcore_create_backend(name="cpu", index=0) for _ in range(2))
    assert (one.name, one.index, one.emulated, one.passed_over) == ("cpu", 0, False, ())
    assert one.device == torch.device("cpu")
    assert one is not other
    assert one.optimizers is not other.optimizers


def test_the_name_of_another_is_left_to_others():
    assert accelcore_cpu.accelcore_create_backend(name="cuda", index=0) is None


@pytest.mark.parametrize(("given", "places"), [("cpu:1", ""), (None, " by ACCEL_DEVICE or --device")])
def test_there_is_no_second_cpu(monkeypatch, given, places):
    monkeypatch.setenv("ACCEL_DEVICE", "cpu:1")
    with pytest.raises(BackendUnavailableError, match="no device cpu:1") as caught:
        accelcore.select(given)
    assert (caught.value.available, caught.value.remedy) == ("cpu:0", f"choose cpu:0{places}")


# What it declares, beside what the conformance suite looks at.


def test_an_fp16_model_with_fp32_masters_trains_as_the_loop_by_hand(accel):
    trains_in_fp16_as_by_hand(accel)


def test_native_optimizers_have_a_kernel_and_no_others_do(accel):
    routes = {name: [choice.route for choice in accel.optimizers.explain(name)] for name in accel.optimizers.names()}
    fused = {name for name, found in routes.items() if "fused" in found}
    native = {name for name, found in routes.items() if "native" in found}
    assert (fused, native) == (set(FUSED), set(NATIVE))
    assert fused | native == set(accel.capabilities.native_optimizers)
    assert all(routes[name][0] == "native" for name in native)
    assert set(declare(compiler=False).native_optimizers) == fused


@pytest.mark.parametrize("name", FUSED)
def test_the_fused_route_runs_torchs_kernel(accel, name, monkeypatch):
    calls = []
    kernel = getattr(torch, f"_fused_{name}_")
    monkeypatch.setattr(torch, f"_fused_{name}_", lambda *args, **kwargs: calls.append(1) or kernel(*args, **kwargs))
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(5)]
    for weight in weights:
        weight.grad = torch.ones(3)
    groups = [{"params": weights[:2]}, {"params": weights[2:]}]
    accel.optimizers.create(name, groups, lr=0.1, route="fused").step()
    assert calls == [1], "one launch for all parameters, also of groups with equal options"


def test_a_model_cast_after_its_optimizer_was_made_is_trained_or_refused_and_never_left_as_it_was(accel):
    """torch's fused SGD for the CPU passes over most bf16 elements (pytorch#191763)."""
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.5)
    model.to(torch.bfloat16)
    before = model.weight.detach().clone()
    model.weight.grad = torch.ones_like(model.weight)
    try:
        optimizer.step()
    except accelcore.AccelError:
        return
    assert torch.equal(model.weight, before - 0.5)


def test_it_declares_nothing_that_only_an_accelerator_has(accel):
    able = accel.capabilities
    assert {able.streams, able.graphs, able.pinned_memory, able.overflow_flag} == {False}


# What is its own.


def test_slow_low_precision_is_said_once_and_fast_not_at_all(fork, tmp_path):
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import logging

        import torch

        import accelcore

        messages = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        # An older torch has slower kernels, too.
        handler.addFilter(lambda record: "instructions for" in record.getMessage())
        logging.getLogger("accelcore").addHandler(handler)
        torch.cpu.get_capabilities = lambda: {"avx512_bf16": True}
        for _ in range(3):
            accel = accelcore.select("cpu")
            with accel.autocast(enabled=False), accel.autocast(torch.bfloat16, enabled=False):
                assert not messages
        for dtype in (None, torch.bfloat16, torch.float16, torch.float16):
            with accelcore.select("cpu").autocast(dtype):
                pass
        print(len(messages), *(message.split("instructions for ")[1].split(":")[0] for message in messages))
    """)
    )
    done = fork(tmp_path / "script.py").finish()
    assert done.stdout.split() == ["1", "float16"], done.stderr


def test_memory_is_the_processs_and_the_machines(accel):
    import psutil

    memory = accel.runtime.memory()
    assert memory.total == psutil.virtual_memory().total
    assert memory.used == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)


def test_a_missing_cpp_compiler_is_named():
    from accelcore_cpu.backend import missing_compiler
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("/nowhere/c++",)}):
        reason = missing_compiler()
    assert "/nowhere/c++" in reason
    assert "install g++" in reason


@pytest.mark.parametrize("compiler", ["", "/"], ids=["empty", "folder"])
def test_a_cpp_compiler_that_cannot_be_run_is_named_and_the_model_runs_eagerly(accel, monkeypatch, compiler):
    from torch._inductor import config

    monkeypatch.setenv("CXX", compiler)
    module = torch.nn.Linear(2, 2)
    with config.patch({"cpp.cxx": (None, compiler)}):
        compiled = accel.compiler.compile(module, {})
    assert (compiled.compiled, compiled.module) == (False, module)
    assert "CXX" in compiled.reason


def test_a_process_that_trains_with_several_threads_can_be_forked():
    """torch alone hangs in the child's first product; both sides go on, here and in a child's child."""
    script = """
        import os, signal
        import torch
        import accelcore

        torch.set_num_threads(2)  # before: what a process did earlier must not matter

        def train():
            weight = torch.linspace(-1, 1, 250_000).view(500, 500).requires_grad_()
            (weight @ weight).exp().sum().backward()
            return weight.grad.double().sum().item()

        expected = train()
        accelcore.select("cpu")
        for depth in range(2):
            child = os.fork()
            if child:
                assert train() == expected
                assert os.waitpid(child, 0)[1] == 0
                os._exit(0)
            signal.alarm(30)
            assert train() == expected
    """
    run(script)
