"""Devices that forget, cast or invent."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from accelcore.roles.runtime import Memory
from lies.lie import declaring, lie, replaced


@lie("TestRuntime.test_random_state_replays")
def random_state_without_numpy(backend):
    def rng_state(honest):
        return {name: value for name, value in honest.rng_state().items() if not name.startswith("numpy")}

    return replaced(backend, "runtime", rng_state=rng_state)


@lie("TestRuntime.test_transfers_keep_values")
def transfer_that_casts_fp64(backend):
    def to_device(honest, batch):
        return batch.float() if batch.dtype == torch.float64 else honest.to_device(batch)

    return replaced(backend, "runtime", to_device=to_device)


@lie("TestRuntime.test_random_state_replays")
def random_state_that_is_not_restored(backend):
    return replaced(backend, "runtime", set_rng_state=lambda honest, state: [])


@lie("TestRuntime.test_seed")
def seed_that_is_ignored(backend):
    return replaced(backend, "runtime", seed=lambda honest, n, deterministic=False: None)


@lie("TestRuntime.test_random_state_of_another_device")
def unknown_random_state_in_silence(backend):
    def set_rng_state(honest, state):
        honest.set_rng_state(state)
        return []

    return replaced(backend, "runtime", set_rng_state=set_rng_state)


@lie("TestRuntime.test_batches_move_whole")
def silent_cpu_tensor(backend):
    """Its device is another than the host, and tensors stay on the host."""
    backend = replaced(backend, "runtime", to_device=lambda honest, batch: batch)
    backend.runtime.device = torch.device("meta")
    return backend


@lie("TestRuntime.test_memory")
def memory_that_is_always_nothing(backend):
    return replaced(backend, "runtime", memory=lambda honest: Memory(0, 0, 1))


@lie("TestRuntime.test_side_stream")
def side_stream_that_is_not_declared(backend):
    return replaced(backend, "runtime", side_stream=lambda honest: nullcontext())


@lie("TestRuntime.test_pinned_memory")
def pinned_memory_that_is_not_pinned(backend):
    backend = replaced(backend, "runtime", pin=lambda honest, tensor: tensor)
    return declaring(backend, pinned_memory=True)


@lie("TestRuntime.test_no_needless_copy")
def transfer_that_always_copies(backend):
    return replaced(backend, "runtime", to_device=lambda honest, batch: [batch[0].clone()])


@lie("TestRuntime.test_memory", says="the driver cannot be asked")
def memory_that_cannot_be_read(backend):
    def memory(honest):
        raise OSError("the driver cannot be asked")

    return replaced(backend, "runtime", memory=memory)
