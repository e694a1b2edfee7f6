"""Making a backend, and what refuses to be one. No GPU is needed: torch's answers are put in its mouth."""

from __future__ import annotations

import accelcore_cuda
import pytest
import torch
from accelcore_cuda.runtime import CudaRuntime

from accelcore.errors import BackendUnavailableError
from accelcore.jobs.collectives import NoCollectives

create = accelcore_cuda.accelcore_create_backend


@pytest.fixture
def gpus(monkeypatch):
    """torch answers as on a machine with two H200; tests change what it says."""
    answers = {"init": None, "count": 2, "capability": (9, 0), "built": ["sm_80", "sm_90"], "forked": False}

    def init():
        if answers["init"] is not None:
            raise answers["init"]

    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: answers["count"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: answers["capability"])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: answers["built"])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: answers.update(current=device))
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: answers["forked"])
    return answers


def test_a_backend_is_composed_of_the_roles_of_its_gpu(gpus):
    backend = create(name="cuda", index=1)
    assert (backend.name, backend.index, backend.emulated) == ("cuda", 1, False)
    assert backend.device == torch.device("cuda:1")
    assert gpus["current"] == 1, "a bare .cuda() would go to another GPU"
    assert backend.capabilities.fast_fp32 == "tf32"
    assert backend.capabilities.autocast_dtypes == ("bfloat16", "float16")
    if not torch.distributed.is_nccl_available():
        assert isinstance(backend.collectives, NoCollectives)
        assert backend.capabilities.parallel == ("none",)
    other = create(name="cuda", index=1)
    assert other.optimizers is not backend.optimizers


def test_a_build_without_cuda_is_refused_with_torchs_reason():
    if torch.backends.cuda.is_built():
        pytest.skip("this torch is built for CUDA")
    with pytest.raises(BackendUnavailableError, match="cuda:3 cannot be used") as caught:
        create(name="cuda", index=3)
    assert caught.value.why == "Torch not compiled with CUDA enabled"
    assert isinstance(caught.value.__cause__, AssertionError)
    assert caught.value.remedy


def test_what_torch_says_of_a_driver_is_passed_on(gpus):
    gpus["init"] = RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update")
    with pytest.raises(BackendUnavailableError) as caught:
        create(name="cuda", index=0)
    assert caught.value.why == "The NVIDIA driver on your system is too old (found version 11040)."


def test_an_error_without_words_is_named(gpus):
    gpus["init"] = RuntimeError()
    with pytest.raises(BackendUnavailableError) as caught:
        create(name="cuda", index=0)
    assert caught.value.why == "RuntimeError"


def test_a_gpu_that_is_not_there_is_refused(gpus):
    with pytest.raises(BackendUnavailableError, match="no device cuda:2") as caught:
        create(name="cuda", index=2)
    assert caught.value.available == "cuda:0, cuda:1"


def test_a_gpu_that_torch_has_no_code_for_is_refused(gpus):
    gpus["capability"] = (6, 1)
    with pytest.raises(BackendUnavailableError) as caught:
        create(name="cuda", index=0)
    assert caught.value.why == "torch has code for sm_80, sm_90, and this GPU is sm_61"
    assert "build of torch" in caught.value.remedy


# After a fork.


def test_no_backend_is_made_in_a_forked_process(gpus):
    gpus["forked"] = True
    with pytest.raises(BackendUnavailableError, match="this process") as caught:
        create(name="cuda", index=0)
    assert "forked" in caught.value.why
    assert "spawn" in caught.value.remedy


def test_a_backend_that_was_made_before_a_fork_is_refused_after_it(gpus):
    runtime = create(name="cuda", index=0).runtime
    assert isinstance(runtime, CudaRuntime)
    gpus["forked"] = True
    uses = [
        runtime.synchronize,
        runtime.rng_state,
        runtime.memory,
        runtime.side_stream,
        lambda: runtime.seed(1),
        lambda: runtime.set_rng_state({}),
        lambda: runtime.to_device(torch.ones(1)),
        lambda: runtime.prefetch(torch.ones(1)),
        lambda: runtime.capture(lambda: None),
    ]
    for use in uses:
        with pytest.raises(BackendUnavailableError, match="this process"):
            use()
