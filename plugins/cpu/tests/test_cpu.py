from __future__ import annotations

import subprocess
import sys
import textwrap

import accelcore_cpu
import pytest
import torch
import torch.distributed as dist
from accelcore_cpu.backend import declare
from accelcore_cpu.optimizers import FUSED, NATIVE
from by_hand import trains_in_fp16_as_by_hand

import accelcore
from accelcore.errors import BackendUnavailableError, UnsupportedError

CAPABILITIES = declare(compiler=True)


def run(script):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def losses(accel, dtype, autocast=None, steps=8):
    """The loss of a small regression over a few steps."""
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(accel.device, dtype)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    inputs = torch.randn(32, 4).to(dtype)
    targets = inputs.sum(1, keepdim=True)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        with accel.autocast(autocast, enabled=autocast is not None):
            output = model(inputs)
        assert output.dtype is (autocast or dtype)
        loss = torch.nn.functional.mse_loss(output.float(), targets.float())
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {dtype}
    return found


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
    assert (caught.value.available, caught.value.remedy) == ("cpu:0", f"choose one of those{places}")


# What it declares, it can.


def test_the_declaration_can_be_read_as_plain_words(accel):
    assert accel.capabilities == CAPABILITIES
    for value in vars(accel.capabilities).values():
        assert isinstance(value, str | bool | None) or all(isinstance(word, str) for word in value)


@pytest.mark.parametrize("name", CAPABILITIES.autocast_dtypes)
def test_each_declared_autocast_dtype_trains(accel, name):
    dtype = getattr(torch, name)
    low, exact = losses(accel, torch.float32, dtype), losses(accel, torch.float32)
    assert low[-1] < 0.7 * low[0]
    assert low == pytest.approx(exact, rel=0.05)
    assert low != exact, "nothing was computed in low precision"


@pytest.mark.parametrize("name", CAPABILITIES.model_dtypes)
def test_a_whole_model_trains_in_each_declared_dtype(accel, name):
    found = losses(accel, getattr(torch, name))
    assert found[-1] < 0.7 * found[0]
    assert found == pytest.approx(losses(accel, torch.float64), rel=0.1)


def test_an_fp16_model_with_fp32_masters_trains_as_the_loop_by_hand(accel):
    trains_in_fp16_as_by_hand(accel)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e5m2])
def test_an_autocast_dtype_that_is_not_declared_is_refused(accel, dtype):
    assert str(dtype).removeprefix("torch.") not in accel.capabilities.autocast_dtypes
    with pytest.raises(UnsupportedError):
        accel.autocast(dtype)


def test_each_declared_autocast_table_is_there_and_no_other(accel):
    for table in ("torch", "O1", "O2", "none"):
        if table in accel.capabilities.autocast_tables:
            assert accel.precision.table(table)
        else:
            with pytest.raises(UnsupportedError):
                accel.precision.table(table)


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


def test_each_declared_compiler_is_one_of_torchs(accel):
    assert set(accel.capabilities.compilers) <= set(torch._dynamo.list_backends())


def test_each_declared_process_group_is_there(accel, tmp_path):
    assert accel.capabilities.process_groups == ("gloo",)
    assert dist.is_gloo_available()
    with accel.distributed(rank=0, world_size=1, init_method=f"file://{tmp_path}/meeting"):
        assert dist.get_backend() in accel.capabilities.process_groups


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
