"""Contexts that do not reach far enough, transfers that lose what is no value, figures that reading changes."""

from __future__ import annotations

import dataclasses
import threading
from contextlib import ExitStack, contextmanager, nullcontext
from typing import ClassVar

import torch

from lies.lie import lie, replaced


class _Elsewhere:
    """An autocast that does nothing where `lost` says so."""

    def __init__(self, context, lost):
        self._context, self._lost, self._entered = context, lost, []

    def __enter__(self):
        self._entered.append(nullcontext() if self._lost() else self._context)
        self._entered[-1].__enter__()

    def __exit__(self, *error):
        self._entered.pop().__exit__(*error)


def _losing(backend, lost):
    return replaced(
        backend,
        "precision",
        autocast=lambda honest, *args, **kwargs: _Elsewhere(honest.autocast(*args, **kwargs), lost),
    )


@lie("TestPrecision.test_autocast_without_gradients", says="under no_grad autocast", table="torch", which=0)
def autocast_that_needs_gradients(backend):
    return _losing(backend, lambda: not torch.is_grad_enabled())


@lie("TestPrecision.test_autocast_in_threads", says="own region does nothing", table="O1", which=0)
def autocast_of_the_main_thread(backend):
    return _losing(backend, lambda: threading.current_thread() is not threading.main_thread())


@lie("TestPrecision.test_autocast_nests", says="wrong order", table="O1", which=-1)
def autocast_of_the_preferred_dtype_behind_a_disabled_region(backend):
    class Off(_Elsewhere):
        def __exit__(self, *error):
            super().__exit__(*error)
            torch.set_autocast_dtype("cpu", torch.bfloat16)

    return replaced(
        backend,
        "precision",
        autocast=lambda honest, *args, enabled=True, **kwargs: (nullcontext if enabled else Off)(
            honest.autocast(*args, enabled=enabled, **kwargs), *(() if enabled else (lambda: False,))
        ),
    )


@lie("TestPrecision.test_autocast_nests", says="wrong order", table="torch", which=0)
def autocast_that_counts_its_regions(backend):
    """Within a disabled region no other is enabled."""
    depth = []

    class Once:
        def __init__(self, context, enabled):
            self._context, self._enabled = context, enabled

        def __enter__(self):
            skipped = self._enabled and "off" in depth
            depth.append("on" if self._enabled else "off")
            self._entered = nullcontext() if skipped else self._context
            self._entered.__enter__()

        def __exit__(self, *error):
            depth.pop()
            self._entered.__exit__(*error)

    def autocast(honest, dtype=None, *, enabled=True, table="torch"):
        return Once(honest.autocast(dtype, enabled=enabled, table=table), enabled)

    return replaced(backend, "precision", autocast=autocast)


class _CastsWeights(torch.overrides.TorchFunctionMode):
    """Keeps a cast copy of each weight for good."""

    kept = {}  # noqa: RUF012

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            rows, weight, bias = args
            version = weight._version if self.counts else 0
            kept = self.kept.setdefault((id(weight), version), weight.detach().bfloat16())
            graph = (weight - weight.detach()).bfloat16() if self.graph else 0
            return function(rows.bfloat16(), kept + graph, bias.bfloat16())
        return function(*args, **(kwargs or {}))


def _by_copies(graph, counts=False):
    def tell(backend):
        kept = {}

        def autocast(honest, dtype=None, *, enabled=True, table="torch"):
            if not enabled:
                return honest.autocast(enabled=False)
            mode = _CastsWeights()
            mode.graph, mode.counts, mode.kept = graph, counts, kept
            return mode

        return replaced(backend, "precision", autocast=autocast)

    return tell


class _KeepsCasts:
    """Autocast that counts an error in its region as a region that goes on, so that torch never clears its casts."""

    regions: ClassVar[list] = []

    def __init__(self, context):
        self._context = context

    def __enter__(self):
        return self._context.__enter__()

    def __exit__(self, *error):
        if error[0] is not None:
            torch.autocast_increment_nesting()
            self.regions.append(error[0])
        return self._context.__exit__(*error)

    @classmethod
    @contextmanager
    def ended(cls):
        """End the regions that go on, for the tests to come."""
        try:
            yield
        finally:
            while cls.regions:
                cls.regions.pop()
                torch.autocast_decrement_nesting()


@lie("TestPrecision.test_weights_that_changed", says="autocast computes with a weight of before", table="torch")
def autocast_that_never_ends_after_an_error(backend):
    def autocast(honest, dtype=None, *, enabled=True, table="torch"):
        return _KeepsCasts(torch.autocast("cpu", dtype, enabled=enabled))

    return replaced(backend, "precision", autocast=autocast)


autocast_that_never_ends_after_an_error.around = _KeepsCasts.ended


@lie("TestPrecision.test_weights_that_changed", says="after a step autocast computes with a weight", table="torch")
def autocast_with_old_weights(backend):
    return _by_copies(graph=True)(backend)


@lie("TestPrecision.test_weights_that_changed", says="after a change by .data autocast computes", table="torch")
def autocast_that_counts_changes_of_weights(backend):
    return _by_copies(graph=True, counts=True)(backend)


@lie("TestPrecision.test_weights_that_were_cast_without_gradients", says="has no gradient", table="torch")
def autocast_that_keeps_weights_of_no_grad(backend):
    return _by_copies(graph=False)(backend)


class _Changes(torch.overrides.TorchFunctionMode):
    """Changes the operands of products."""

    def __init__(self, change):
        super().__init__()
        self._change = change

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.matmul, torch.Tensor.__matmul__):
            args = tuple(map(self._change, args))
        return function(*args, **(kwargs or {}))


class _Both:
    """A region, and something more that is entered with it."""

    def __init__(self, region, more):
        self._region, self._more, self._entered = region, more, []

    def __enter__(self):
        self._entered.append(ExitStack())
        self._entered[-1].enter_context(self._region)
        self._entered[-1].enter_context(self._more())

    def __exit__(self, *error):
        self._entered.pop().__exit__(*error)


def _changing(backend, change):
    def autocast(honest, dtype=None, *, enabled=True, table="torch"):
        return _Both(honest.autocast(dtype, enabled=enabled, table=table), lambda: _Changes(change))

    return replaced(backend, "precision", autocast=autocast)


@lie("TestPrecision.test_autocast_keeps_tensors", says="a product of whole numbers was cast", table="torch")
def autocast_of_whole_numbers(backend):
    return _changing(backend, lambda value: value if value.is_floating_point() else value.float())


@lie("TestPrecision.test_weights_and_their_transposes", says="with the transpose is that with another", table="torch")
def autocast_that_finds_weights_by_address(backend):
    kept = {}

    def first_cast(value):
        return kept.setdefault((value.data_ptr(), value.shape), value) if value.requires_grad else value

    return _changing(backend, first_cast)


@lie("TestPrecision.test_weights_in_regions_of_two_dtypes", says="inside of it, one of", table="O1")
def autocast_that_leaves_the_usual_dtype(backend):
    class Leaves:
        def __init__(self, region):
            self._region = region

        def __enter__(self):
            self._region.__enter__()

        def __exit__(self, *error):
            self._region.__exit__(*error)
            if torch.is_autocast_enabled("cpu"):
                torch.set_autocast_dtype("cpu", torch.bfloat16)

    def autocast(honest, *args, **kwargs):
        return Leaves(honest.autocast(*args, **kwargs))

    return replaced(backend, "precision", autocast=autocast)


def _moving(change):
    return lambda backend: replaced(
        backend, "runtime", to_device=lambda honest, batch: change(honest.to_device(batch)),
        prefetch=lambda honest, batch: lambda: change(honest.to_device(batch)),
    )  # fmt: skip


@lie("TestRuntime.test_graph_travels", says="requires_grad was lost", way="to_device")
def transfer_that_detaches(backend):
    return _moving(lambda tensor: tensor.detach())(backend)


@lie("TestRuntime.test_graph_travels", says="a leaf lost its requires_grad", way="prefetch")
def prefetch_that_detaches_leaves(backend):
    return _moving(lambda tensor: tensor.detach() if tensor.is_leaf else tensor)(backend)


@lie("TestRuntime.test_every_dtype_travels", says="channels last has the strides", name="float32", way="to_device")
def transfer_that_is_contiguous(backend):
    return _moving(lambda tensor: tensor.contiguous())(backend)


@lie("TestRuntime.test_every_dtype_travels", says="has the strides", name="float32", way="prefetch")
def prefetch_that_is_contiguous(backend):
    return _moving(lambda tensor: tensor.contiguous())(backend)


@lie("TestRuntime.test_batches_of_many_kinds", says="special arrived as", way="to_device")
def transfer_that_flushes_small_numbers(backend):
    def flush(batch):
        return {**batch, "special": torch.where(batch["special"].abs() < 1e-38, 0, batch["special"])}

    return _moving(flush)(backend)


@lie("TestRuntime.test_reading_keeps_the_peak", says="reading reset the peak")
def peak_that_reading_resets(backend):
    """A reading does that is the first after memory was seen and freed."""
    seen = [0]

    def memory(honest):
        found = honest.memory()
        seen.append(max(seen[-1], found.used))
        fell = seen[-1] - found.used > 2**25
        return dataclasses.replace(found, peak=found.used) if fell else found

    return replaced(backend, "runtime", memory=memory)


@lie("TestRuntime.test_reading_keeps_the_peak", says="freed before a reading is not in the peak")
def peak_that_is_what_is_used(backend):
    def memory(honest):
        found = honest.memory()
        return dataclasses.replace(found, peak=found.used)

    return replaced(backend, "runtime", memory=memory)


@lie("TestRuntime.test_state_at_any_point", says="drawing does not change the state", draw="randn")
def random_state_of_the_beginning(backend):
    """What is saved is the seed, and not how many numbers were drawn since."""

    def rng_state(honest):
        seeded = torch.Generator().manual_seed(torch.initial_seed())
        return {**honest.rng_state(), "torch": seeded.get_state()}

    return replaced(backend, "runtime", rng_state=rng_state)


@lie("TestRuntime.test_state_at_any_point", says="gives other numbers", draw="randn")
def random_state_without_its_position(backend):
    """Half of the state is restored: the words of the generator, and not where in them it is."""

    def set_rng_state(honest, state):
        now = torch.get_rng_state()
        now[24:5016] = state["torch"][24:5016]
        return honest.set_rng_state({**state, "torch": now})

    return replaced(backend, "runtime", set_rng_state=set_rng_state)


@lie("TestRuntime.test_later_changes_stay_apart", says="filled again")
def transfer_that_knows_the_buffer(backend):
    sent = {}

    def to_device(honest, batch):
        known = sent.setdefault(batch.data_ptr(), batch.clone())
        return honest.to_device(batch) if batch.equal(known) else known

    return replaced(backend, "runtime", to_device=to_device)
