"""The probe against what torch finds, and what the backend declares against what the GPU does."""

from __future__ import annotations

import gc

import pytest
import torch

import accelcore
from accelcore.errors import BackendUnavailableError


def test_the_probe_counts_what_torch_counts():
    probe = accelcore.installed()["cuda"]
    assert probe.available, f"torch finds {torch.cuda.device_count()} GPUs, and the probe says: {probe.reason}"
    assert probe.count == torch.cuda.device_count()


@pytest.mark.parametrize("value", ["0", "0,0", "0,-1", "-1", "", "99", "0,99", "GPU-ffffffff", "nonsense"])
def test_the_probe_reads_visible_devices_as_cuda_does(value, run_python):
    # Not set in this process: if CUDA is not initialized in it yet, it would be without a GPU from then on.
    found = run_python(
        f"""
        import os
        os.environ["CUDA_VISIBLE_DEVICES"] = {value!r}
        import accelcore
        count = accelcore.installed()["cuda"].count
        import warnings
        import torch
        warnings.simplefilter("ignore")
        print(count, torch.cuda.device_count(), torch._C._cuda_getDeviceCount())
        """
    )
    by_probe, by_torch, by_cuda = map(int, found.split())
    assert by_probe == by_torch == by_cuda


def test_the_gpus_uuid_is_known(run_python):
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    script = f"import os; os.environ['CUDA_VISIBLE_DEVICES'] = {uuid[:16]!r}; import accelcore"
    assert run_python(f"{script}; print(accelcore.installed()['cuda'].count)").strip() == "1"


def test_the_next_index_is_refused():
    count = torch.cuda.device_count()
    with pytest.raises(BackendUnavailableError, match=f"no device cuda:{count}") as caught:
        accelcore.select(f"cuda:{count}")
    assert caught.value.available.startswith("cuda:0")


def test_the_declaration_is_the_one_of_this_gpu(accel):
    able = accel.capabilities
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    assert (able.autocast_dtypes[0] == "bfloat16") is native
    assert ("bfloat16" in able.model_dtypes) is native
    if torch.version.hip is None:
        assert (able.fast_fp32 == "tf32") is torch.cuda.is_tf32_supported()
    assert {"adam", "adamw", "sgd"} <= set(able.native_optimizers)


@pytest.mark.parametrize("name", ["adagrad", "adam", "adamw", "sgd"])
def test_a_native_optimizer_runs_torchs_kernel(accel, name, monkeypatch):
    if name not in accel.capabilities.native_optimizers:
        pytest.skip(f"not declared: {name}")
    calls = []
    kernel = getattr(torch, f"_fused_{name}_")
    monkeypatch.setattr(torch, f"_fused_{name}_", lambda *args, **options: calls.append(1) or kernel(*args, **options))
    weights = [torch.nn.Parameter(torch.ones(3, device=accel.device)) for _ in range(5)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    accel.optimizers.create(name, weights, lr=0.1).step()
    assert calls == [1], "one launch for all parameters"


def test_others_run_compiled_or_foreach(accel):
    def chosen(name):
        return next(choice.route for choice in accel.optimizers.explain(name) if choice.chosen)

    assert chosen("nadam") == "foreach"
    assert chosen("rmsprop") == ("compiled" if "inductor" in accel.capabilities.compilers else "foreach")


def test_memory_follows_what_is_allocated(accel):
    gc.collect()  # what other tests left must not go meanwhile
    torch.cuda.empty_cache()
    before = accel.runtime.memory()
    held = torch.empty(2**24, dtype=torch.uint8, device=accel.device)
    after = accel.runtime.memory()
    assert after.used - before.used == held.numel()
    assert after.peak >= after.used
    assert after.total == pytest.approx(torch.cuda.mem_get_info(accel.device)[1], rel=0.01)
    del held
    assert accel.runtime.memory().used == before.used


def test_a_captured_graph_replays(accel):
    layer = torch.nn.Linear(8, 8).to(accel.device)
    inputs = torch.ones(4, 8, device=accel.device)
    with accel.runtime.side_stream(), torch.no_grad():
        layer(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = layer(inputs)
    inputs.fill_(2.0)
    graph.replay()
    accel.runtime.synchronize()
    with torch.no_grad():
        assert torch.allclose(output, layer(inputs))


def test_a_side_stream_is_another_stream_and_the_same_each_time(accel):
    outer = torch.cuda.current_stream(accel.device)
    seen = []
    for _ in range(2):
        with accel.runtime.side_stream():
            seen.append(torch.cuda.current_stream(accel.device))
    assert seen[0] == seen[1] != outer
    with pytest.raises(ZeroDivisionError), accel.runtime.side_stream():
        raise ZeroDivisionError
    assert torch.cuda.current_stream(accel.device) == outer


def test_events_properties_and_forks_that_port_writes_do_what_cudas_do(accel):
    """`accelcore port` replaces torch.cuda.Event, torch.cuda.get_device_properties and forks of CUDA's numbers."""
    x = torch.randn(2048, 2048, device=accel.device)
    x @ x
    torch.accelerator.synchronize()
    kinds = torch.Event, torch.cuda.Event
    begins, ends = ([kind(enable_timing=True) for kind in kinds] for _ in range(2))
    for event in begins:
        event.record()
    for _ in range(200):
        x @ x
    for event in ends:
        event.record()
    side = torch.cuda.Stream()
    side.wait_event(ends[0])
    ends[0].synchronize()
    assert ends[0].query()
    ours, cudas = (begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True))
    assert ours == pytest.approx(cudas, rel=0.1)

    properties = torch.get_device_module().get_device_properties(0)
    assert properties.name == torch.cuda.get_device_name(0)
    assert properties.total_memory == pytest.approx(torch.cuda.mem_get_info(0)[1], rel=0.01)

    torch.manual_seed(0)
    with torch.random.fork_rng(devices=[torch.accelerator.current_device_index()], device_type=accel.device.type):
        torch.rand(1), torch.rand(1, device=accel.device)
    drawn = torch.rand(3), torch.rand(3, device=accel.device)
    torch.manual_seed(0)
    again = torch.rand(3), torch.rand(3, device=accel.device)
    assert all(map(torch.equal, drawn, again))


def test_deterministic_training_can_be_repeated(run_python):
    script = """
        import accelcore, torch
        accel = accelcore.select("cuda")
        for _ in range(2):
            accel.runtime.seed(3, deterministic=True)  # before the first matrix product
            layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4)
            model = torch.nn.Sequential(*layers)
            optimizer = accel.optimizers.create("adamw", model.parameters(), lr=1e-2)
            trainer = accel.trainer(model, optimizer, loss=lambda model, batch: model(batch).square().mean())
            losses = [trainer(torch.randn(16, 3, 8, 8, device=accel.device)) for _ in range(20)]
            print([loss.item() for loss in losses])
    """
    first, second = run_python(script).splitlines()
    assert first == second


# Fork.


def test_the_probe_leaves_fork_safe(run_python):
    run_python(
        """
        import os
        import accelcore
        assert accelcore.installed()["cuda"].available
        child = os.fork()
        if child == 0:
            import torch
            os._exit(int(torch.ones(3, device=accelcore.select("cuda").device).sum().item()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        """
    )


def test_use_after_a_fork_is_refused(run_python):
    run_python(
        """
        import os
        import warnings
        import accelcore, torch
        warnings.simplefilter("ignore")  # newer Pythons warn of a fork with threads
        accel = accelcore.select("cuda")
        torch.ones(3, device=accel.device)
        uses = [accel.runtime.synchronize, accel.runtime.memory, accel.runtime.rng_state, lambda: accel.runtime.seed(1),
                lambda: accel.runtime.to_device(torch.ones(1)), lambda: accel.device,
                lambda: accelcore.select("cuda")]
        child = os.fork()
        if child == 0:
            refused = 0
            for use in uses:
                try:
                    use()
                except accelcore.BackendUnavailableError as error:
                    refused += "forked" in str(error)
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(uses)
        """
    )
