"""Optimizers, compiler, collectives and determinism, as far as no GPU is needed."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from datetime import timedelta
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import accelcore_cuda.compiler
import pytest
import torch
import torch.distributed as dist
from accelcore_cuda.collectives import CudaCollectives
from accelcore_cuda.compiler import CudaCompiler, missing_for_inductor, replays_graphs
from accelcore_cuda.known_faults import MIX_ORDER_REDUCTION
from accelcore_cuda.runtime import make_deterministic

from accelcore.errors import ConfigurationError, DistributedError
from accelcore.jobs.launchers import Launch

DEVICE = torch.device("cuda", 1)


# Compiler.


def look_up(monkeypatch, module, **functions):
    """Give the plugin's compiler these functions in place of a module."""
    monkeypatch.setattr(accelcore_cuda.compiler, module, SimpleNamespace(**functions))


@pytest.fixture
def complete(monkeypatch, tmp_path):
    """A machine with all that inductor needs; tests take things away from it."""
    (tmp_path / "Python.h").touch()
    # In the plugin's eyes alone: torch asks the same functions for things of its own.
    look_up(monkeypatch, "importlib", util=SimpleNamespace(find_spec=lambda name: ModuleSpec(name, None)))
    look_up(monkeypatch, "shutil", which=lambda name: f"/usr/bin/{name}")
    paths = {"include": str(tmp_path)}
    look_up(monkeypatch, "sysconfig", get_default_scheme=lambda: "posix_prefix", get_paths=lambda scheme: paths)
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def test_with_all_it_needs_inductor_compiles(complete):
    assert missing_for_inductor((7, 0), rocm=False) is None
    assert missing_for_inductor((0, 0), rocm=True) is None


def test_a_gpu_that_is_too_old_for_triton_is_named(complete):
    reason = missing_for_inductor((6, 1), rocm=False)
    assert "sm_70 or newer" in reason
    assert "sm_61" in reason


def test_a_missing_triton_is_named(complete, monkeypatch):
    look_up(monkeypatch, "importlib", util=SimpleNamespace(find_spec=lambda name: None))
    assert "Triton" in missing_for_inductor((8, 0), rocm=False)
    assert "pip install" in missing_for_inductor((8, 0), rocm=False)


def test_a_missing_c_compiler_is_named(complete, monkeypatch):
    look_up(monkeypatch, "shutil", which=lambda name: None)
    assert "C compiler" in missing_for_inductor((8, 0), rocm=False)
    monkeypatch.setenv("CC", "/opt/cc")
    assert missing_for_inductor((8, 0), rocm=False) is None


def test_missing_headers_are_named(complete):
    (complete / "Python.h").unlink()
    assert str(complete / "Python.h") in missing_for_inductor((8, 0), rocm=False)


def test_what_cannot_be_compiled_runs_eagerly_with_one_report(complete, caplog):
    module = torch.nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING, logger="accelcore"):
        compiled = CudaCompiler((6, 1), rocm=False).compile(module, {"mode": "reduce-overhead"})
    assert compiled.module is module
    assert not compiled.compiled
    assert "sm_61" in compiled.reason
    assert len(caplog.records) == 1


def test_another_backend_is_not_held_back(complete, caplog):
    compiled = CudaCompiler((6, 1), rocm=False).compile(torch.nn.Linear(2, 2), {"backend": "eager"})
    assert compiled.compiled
    assert not caplog.records
    assert compiled.module(torch.ones(1, 2)).shape == (1, 2)


def test_options_are_refused_also_where_nothing_is_compiled(complete):
    with pytest.raises(ConfigurationError):
        CudaCompiler((6, 1), rocm=False).compile(torch.nn.Linear(2, 2), {"no_such_option": 1})


@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        ({}, False),
        ({"mode": None, "options": None}, False),
        ({"mode": "reduce-overhead"}, True),
        ({"mode": "max-autotune"}, True),
        ({"mode": "max-autotune-no-cudagraphs"}, False),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({"options": {"max_autotune": True}}, False),
        ({"backend": "cudagraphs"}, True),
        ({"backend": "eager"}, False),
    ],
)
def test_options_that_make_graphs_are_known(options, graphs):
    assert replays_graphs(options) is graphs


@pytest.mark.parametrize(("backend", "overwrites"), [("cudagraphs", True), ("eager", False)])
def test_graphs_say_that_they_overwrite(backend, overwrites):
    compiled = CudaCompiler((9, 0), rocm=False).compile(torch.nn.Linear(2, 2), {"backend": backend})
    assert compiled.overwrites is overwrites


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, {"triton.mix_order_reduction": False}),
        ({"mode": "reduce-overhead"}, {"triton.mix_order_reduction": False, "triton.cudagraphs": True}),
        ({"options": {"triton.mix_order_reduction": True}}, {"triton.mix_order_reduction": True}),
        ({"backend": "eager"}, None),
    ],
)
def test_the_optimization_that_computes_wrong_gradients_is_off_unless_asked_for(complete, monkeypatch, options, given):
    seen = []
    monkeypatch.setattr(torch, "compile", lambda module, **keywords: seen.append(keywords) or module)
    compiled = CudaCompiler((9, 0), rocm=False).compile(torch.nn.Linear(2, 2), options)
    if MIX_ORDER_REDUCTION.applies:
        assert seen[0].get("options") == given
        assert MIX_ORDER_REDUCTION in compiled.avoids
    else:
        assert seen[0].get("options") == options.get("options")


def test_a_mode_beside_options_is_refused_as_by_torch(complete):
    with pytest.raises(ConfigurationError, match="mode"):
        CudaCompiler((9, 0), rocm=False).compile(
            torch.nn.Linear(2, 2), {"mode": "reduce-overhead", "options": {"max_autotune": True}}
        )


def test_a_torch_without_the_fault_compiles_as_asked(complete, monkeypatch):
    monkeypatch.setattr(accelcore_cuda.compiler, "MIX_ORDER_REDUCTION", replace(MIX_ORDER_REDUCTION, versions="<1"))
    seen = []
    monkeypatch.setattr(torch, "compile", lambda module, **keywords: seen.append(keywords) or module)
    compiled = CudaCompiler((9, 0), rocm=False).compile(torch.nn.Linear(2, 2), {"mode": "max-autotune"})
    assert seen == [{"mode": "max-autotune"}]
    assert not [fault for fault in compiled.avoids if fault.kernel == MIX_ORDER_REDUCTION.kernel]


def test_graphs_by_configuration_are_known():
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert replays_graphs({})
        assert not replays_graphs({"options": {"triton.cudagraphs": False}})
    assert not replays_graphs({})


# Collectives. NCCL is for a GPU to show; here is what is asked of torch.distributed.


@pytest.fixture
def current(monkeypatch):
    """The devices that were made current, in order."""
    devices = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    return devices


def test_alone_no_device_is_made_current(current):
    role = CudaCollectives(DEVICE)
    role.init(None)
    role.barrier()
    assert role.cpu_group() is None
    role.close()
    assert not current


def test_a_rank_makes_its_device_current_before_it_joins(current, monkeypatch):
    def join(backend, **settings):
        assert current == [DEVICE]
        assert backend == "cpu:gloo,cuda:nccl"
        assert "device_id" not in settings
        raise RuntimeError(f"nobody there in {settings['timeout']}")

    # It waits for the others.
    monkeypatch.setattr("accelcore.jobs.collectives.store_of_ranks", lambda launch, timeout: None)
    monkeypatch.setattr(dist, "init_process_group", join)
    for timeout, waits in ((None, "0:10:00"), (timedelta(seconds=5), "0:00:05")):
        current.clear()
        with pytest.raises(DistributedError, match=waits):
            CudaCollectives(DEVICE).init(Launch(0, 2, 0, "tcp://127.0.0.1:1"), timeout=timeout)


@pytest.fixture
def group(tmp_path):
    """A group of one rank, formed by the script itself."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_that_was_formed_for_nccl_alone_gets_gloo_beside_it(current, monkeypatch, group):
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    role = CudaCollectives(DEVICE)
    role.init(None)
    role.init(None)
    beside = role.cpu_group()
    assert beside is not dist.group.WORLD
    total = torch.tensor([3.0])
    dist.all_reduce(total, group=beside)
    assert total.tolist() == [3.0]
    role.close()
    assert role.cpu_group() is beside
    role.close()
    assert dist.is_initialized(), "the script's own group is left alone"
    assert role.cpu_group() is dist.group.WORLD


def test_a_group_that_serves_both_is_taken_as_it_is(current, monkeypatch, group):
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    role = CudaCollectives(DEVICE)
    role.init(None)
    assert role.cpu_group() is dist.group.WORLD
    role.close()


def test_a_group_that_cannot_reduce_on_the_device_is_refused(current, monkeypatch, group):
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo")
    with pytest.raises(DistributedError, match="cannot reduce cuda tensors"):
        CudaCollectives(DEVICE).init(None)


def test_the_barrier_names_the_device(monkeypatch, group):
    asked = []
    monkeypatch.setattr(dist, "barrier", lambda **settings: asked.append(settings))
    CudaCollectives(DEVICE).barrier()
    assert asked == [{"device_ids": [1]}]


# Determinism.


@pytest.fixture
def used(monkeypatch):
    """How many tensors the device has held."""
    stats = {"allocation.all.allocated": 0}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    # What is set here for good ends with the test.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield stats
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def test_cudnn_and_cublas_are_made_deterministic(used, caplog):
    torch.backends.cudnn.benchmark = True
    make_deterministic(DEVICE)
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not caplog.records


def test_a_device_that_was_used_may_have_its_workspace_already(used, caplog):
    used["allocation.all.allocated"] = 3
    make_deterministic(DEVICE)
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8 was set after the device was used" in caplog.text
    make_deterministic(DEVICE)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("value", [":4096:8", ":16:8"])
def test_a_deterministic_workspace_is_left_as_it_is(used, caplog, monkeypatch, value):
    used["allocation.all.allocated"] = 3
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
    make_deterministic(DEVICE)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == value
    assert not caplog.records


@pytest.mark.parametrize("value", ["", ":0:0", ":4096:2:16:8"])
def test_another_workspace_is_refused_and_nothing_is_set(used, monkeypatch, value):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
    before = torch.backends.cudnn.deterministic
    with pytest.raises(ConfigurationError, match="CUBLAS_WORKSPACE_CONFIG"):
        make_deterministic(DEVICE)
    assert torch.backends.cudnn.deterministic is before
