"""Devices that forget, cast or invent."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch

from accelcore import Backend
from accelcore.roles.runtime import Memory
from accelcore.torch_features import GET_KERNEL
from lies.lie import declaring, lie, replaced
from lies.operators import _note


@lie("TestRuntime.test_random_state_replays", says="does not repeat the numbers")
def random_state_without_numpy(backend):
    def rng_state(honest):
        return {name: value for name, value in honest.rng_state().items() if not name.startswith("numpy")}

    return replaced(backend, "runtime", rng_state=rng_state)


@lie("TestRuntime.test_state_at_any_point", says="put back gives other numbers", draw="randn")
def random_state_without_a_kept_number(backend):
    """The host's generator makes normal numbers in pairs, and keeps the second one."""

    def rng_state(honest):
        state = honest.rng_state()
        state["torch"][-16:] = 0
        return state

    return replaced(backend, "runtime", rng_state=rng_state)


@lie("TestRuntime.test_seed", says="the same seed gives other numbers")
def seed_that_leaves_a_kept_number(backend):
    def seed(honest, n):
        before = torch.get_rng_state()
        honest.seed(n)
        torch.set_rng_state(torch.cat([torch.get_rng_state()[:-40], before[-40:]]))

    return replaced(backend, "runtime", seed=seed)


@lie("TestRuntime.test_every_dtype_travels", says="arrived as torch.float32", name="float64", way="to_device")
def transfer_that_casts_fp64(backend):
    def to_device(honest, batch):
        return batch.float() if batch.dtype == torch.float64 else honest.to_device(batch)

    return replaced(backend, "runtime", to_device=to_device)


@lie("TestRuntime.test_random_state_replays", says="does not repeat the numbers")
def random_state_that_is_not_restored(backend):
    return replaced(backend, "runtime", set_rng_state=lambda honest, state: [])


@lie("TestRuntime.test_seed", says="the same seed gives other numbers")
def seed_that_is_ignored(backend):
    return replaced(backend, "runtime", seed=lambda honest, n, deterministic=False: None)


@lie("TestRuntime.test_same_seed_everywhere", says="rand gives other numbers than everywhere", needs=GET_KERNEL)
def same_numbers_that_are_its_own(backend):
    return replaced(backend, "runtime", seed=lambda honest, n, same=None: honest.seed(n))


@lie("TestRuntime.test_same_seed_everywhere", says="does not give the device's own numbers", needs=GET_KERNEL)
def same_numbers_from_then_on(backend):
    def seed(honest, n, same=None):
        seed.alike = seed.alike or same
        honest.seed(n, same=seed.alike)

    seed.alike = None
    return replaced(backend, "runtime", seed=seed)


@lie("TestRuntime.test_random_state_of_another_device", says="is not reported")
def unknown_random_state_in_silence(backend):
    def set_rng_state(honest, state):
        honest.set_rng_state(state)
        return []

    return replaced(backend, "runtime", set_rng_state=set_rng_state)


@lie("TestRuntime.test_batches_move_whole", says="stayed on cpu", kind="list", way="to_device")
def silent_cpu_tensor(backend):
    """Its device is another than the host, and tensors stay on the host."""
    backend = replaced(backend, "runtime", to_device=lambda honest, batch: batch)
    backend.runtime._device = torch.device("meta")
    return backend


@lie("TestRuntime.test_memory", says="the figure did not follow")
def memory_that_is_always_nothing(backend):
    return replaced(backend, "runtime", memory=lambda honest: Memory(0, 0, 1))


@lie("TestRuntime.test_side_stream", says="unexpected success: side streams")
def side_stream_that_is_not_declared(backend):
    return replaced(backend, "runtime", side_stream=lambda honest: nullcontext())


@lie("TestRuntime.test_no_needless_copy", says="it was copied")
def transfer_that_always_copies(backend):
    return replaced(backend, "runtime", to_device=lambda honest, batch: [batch[0].clone()])


@lie("TestRuntime.test_batches_move_whole", says="a Pair arrived as a tuple", kind="namedtuple", way="prefetch")
def prefetch_that_forgets_names(backend):
    def prefetch(honest, batch):
        return lambda: tuple(batch) if isinstance(batch, tuple) else honest.to_device(batch)

    return replaced(backend, "runtime", prefetch=prefetch)


@lie("TestRuntime.test_fetch_is_a_copy", says="a scalar was fetched as 0.0")
def fetch_that_copies_no_scalar(backend):
    def fetch(honest, tensor):
        return honest.fetch(tensor) if tensor.dim() else tensor.detach

    return replaced(backend, "runtime", fetch=fetch)


@lie("TestRuntime.test_prefetch", says="not the batch that was prefetched")
def prefetch_into_one_buffer(backend):
    buffer = {}

    def prefetch(honest, batch):
        buffer.update(batch)
        return lambda: buffer

    return replaced(backend, "runtime", prefetch=prefetch)


@lie("TestRuntime.test_fetch_is_a_copy", says="followed a later change")
def fetch_that_reads_late(backend):
    return replaced(backend, "runtime", fetch=lambda honest, tensor: tensor.detach().cpu)


@lie("TestRuntime.test_fetch_is_a_copy", says="followed a later change")
def fetch_into_one_buffer(backend):
    buffers = {}

    def fetch(honest, tensor):
        buffer = buffers.setdefault(tensor.shape, torch.empty(tensor.shape)).copy_(tensor.detach())
        return lambda: buffer

    return replaced(backend, "runtime", fetch=fetch)


@lie("TestRuntime.test_every_dtype_travels", says="as other numbers", name="int64", way="to")
def fetch_by_way_of_fp32(backend):
    def fetch(honest, tensor):
        ready = honest.fetch(tensor.float())
        return lambda: ready().to(tensor.dtype)

    return replaced(backend, "runtime", fetch=fetch)


@lie("TestRuntime.test_every_dtype_travels", says="came back by fetch as other numbers", name="bfloat16", way="to")
def fetch_of_many_in_order_of_memory(backend):
    def fetch(honest, tensor):
        if tensor.numel() < 2**16 or tensor.is_contiguous() or 0 in tensor.stride():
            return honest.fetch(tensor)
        return honest.fetch(tensor.as_strided((tensor.numel(),), (1,)).view(tensor.shape))

    return replaced(backend, "runtime", fetch=fetch)


@lie("TestRuntime.test_conjugates_and_negatives_travel", says="what is negative fetched by to", way="to")
def fetch_without_a_negative_mark(backend):
    def fetch(honest, tensor):
        return honest.fetch(torch._neg_view(tensor) if tensor.is_neg() else tensor)

    return replaced(backend, "runtime", fetch=fetch)


@lie("TestRuntime.test_large_tensors_travel", says="some arrived as others", way="prefetch")
def prefetch_of_the_first_mebibyte(backend):
    def prefetch(honest, batch):
        moved = honest.to_device(batch).clone()
        moved.view(-1)[2**18 :] = 0
        return lambda: moved

    return replaced(backend, "runtime", prefetch=prefetch)


@lie("TestRuntime.test_every_seed_is_another", says="give the numbers of seed 7")
def seed_of_16_bits(backend):
    return replaced(backend, "runtime", seed=lambda honest, n: honest.seed(n & 0xFFFF))


@lie("TestRuntime.test_views_keep_values", says="False", kind="column")
def transfer_of_neighbours(backend):
    """Takes the memory from a view's first element on, whatever its strides."""

    def to_device(honest, batch):
        return batch.as_strided(batch.shape, torch.empty(batch.shape).stride())

    return replaced(backend, "runtime", to_device=to_device)


@lie("TestRuntime.test_views_keep_values", says="by fetch a view on the device comes back", kind="block")
def fetch_from_the_first_element(backend):
    """Copies a view from the beginning of its memory."""

    def fetch(honest, tensor):
        return honest.fetch(tensor.as_strided(tensor.shape, tensor.stride(), 0))

    return replaced(backend, "runtime", fetch=fetch)


@lie("TestRuntime.test_reading_keeps_the_peak", says="freed before a reading is not in the peak")
def peak_of_its_readings(backend):
    def memory(honest):
        found = honest.memory()
        memory.peak = max(memory.peak, found.used)
        return dataclasses.replace(found, peak=memory.peak)

    memory.peak = 0
    return replaced(backend, "runtime", memory=memory)


@lie("TestRuntime.test_seed_deterministic", says="deterministic=True was ignored")
def seed_that_is_not_deterministic(backend):
    return replaced(backend, "runtime", seed=lambda honest, n, deterministic=False: honest.seed(n))


@lie("TestRuntime.test_side_stream", says="queued on the stream outside")
def side_stream_that_is_none(backend):
    return declaring(replaced(backend, "runtime", side_stream=lambda honest: nullcontext()), streams=True)


@lie("TestRuntime.test_side_stream", says="after an error, later work is queued on it")
def side_stream_that_an_error_leaves_behind(backend):
    @contextmanager
    def side_stream(honest):
        context = torch.cpu.stream(torch.cpu.Stream())
        context.__enter__()
        yield
        context.__exit__(None, None, None)

    return declaring(replaced(backend, "runtime", side_stream=side_stream), streams=True)


@lie("TestRuntime.test_capture", says="a launch did something else than the work")
def graph_that_is_a_stub(backend):
    """What a launch does not do, training does not notice either: its clipping, say."""
    stub = replaced(backend, "runtime", capture=lambda honest, work: (work(), lambda: None))
    return declaring(stub, graphs=True)


@lie("TestRuntime.test_captured_draws", says="draws the numbers of the one before")
def capture_of_drawn_numbers(backend):
    return declaring(replaced(backend, "runtime", capture=lambda honest, work: (work(), lambda: None)), graphs=True)


def _loads_plain_tensors():
    def plain(*args, **options):
        return {name: each.detach() for name, each in load(*args, **options).items()}

    load = torch.load
    return patch.object(torch, "load", plain)


_note("tensors_that_are_loaded_without_their_kind", "TestRuntime.test_tensors_are_saved", "parameter is (torch.float32",
      {"way": "loaded"}, _loads_plain_tensors)  # fmt: skip


@lie("TestRuntime.test_capture_after_an_error", says="queued on the stream of the capture")
def graph_whose_error_keeps_the_stream(backend):
    def capture(honest, work):
        stream = torch.cpu.stream(torch.cpu.Stream())
        stream.__enter__()
        returned = work()
        stream.__exit__(None, None, None)
        return returned, work

    return declaring(replaced(backend, "runtime", capture=capture), graphs=True)


@lie("TestRuntime.test_capture", says="unexpected success: graphs")
def graph_that_is_not_declared(backend):
    return replaced(backend, "runtime", capture=lambda honest, work: (work(), work))


class _Strange(Backend):
    def loading(self):
        return {}

    def __reduce__(self):
        return str, ("cpu",)


@lie("TestBackend.test_travels", says="what is unpickled is no backend")
def backend_that_is_pickled_as_its_name(backend):
    return _Strange(**{field.name: getattr(backend, field.name) for field in dataclasses.fields(backend)})


@lie("TestBackend.test_loading", says="not pinned as declared")
def loading_that_does_not_pin(backend):
    backend = declaring(backend, pinned_memory=True)
    return _Strange(**{field.name: getattr(backend, field.name) for field in dataclasses.fields(backend)})


@lie("TestRuntime.test_random_state_can_be_saved", says="changes the numbers that are drawn next")
def state_that_draws_when_it_is_read(backend):
    def rng_state(honest):
        torch.rand(1)
        return honest.rng_state()

    return replaced(backend, "runtime", rng_state=rng_state)
