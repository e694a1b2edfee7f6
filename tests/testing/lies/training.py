"""What shows in a whole training, or in the declaration."""

from __future__ import annotations

import dataclasses

import torch

from accelcore import Backend
from lies.lie import declaring, lie, replaced
from lies.optimizers import adam_for_adamw, registry


@lie("TestTraining.test_parallel", says="parallel='fsdp' does not exist here", parallel="fsdp")
def strategy_that_does_not_exist(backend):
    return declaring(backend, parallel=("none", "ddp", "fsdp"))


@lie("TestTraining.test_fp32", says="error(", options={})
def device_that_computes_wrongly(backend):
    return registry(adamw=adam_for_adamw)(backend)


@lie("TestTraining.test_resume_goes_on_alike", says="assert [", precision="fp32")
def resume_that_forgets_random_numbers(backend):
    return replaced(backend, "runtime", set_rng_state=lambda honest, state: [])


@lie("TestBackend.test_declaration_is_readable", says="autocast_dtypes declares bf16")
def declaration_that_nobody_can_read(backend):
    return declaring(backend, autocast_dtypes=("bf16",))


class _NeverMoves(Backend):
    def trainer(self, model, optimizer, **options):
        model.to = lambda *args, **kwargs: model
        return super().trainer(model, optimizer, **options)


@lie("TestTraining.test_fp32", says="a loss was computed elsewhere", options={})
def model_that_is_never_moved(backend):
    """Its device is another than the host, and everything stays on the host."""
    backend = replaced(backend, "runtime", to_device=lambda honest, batch: batch)
    backend.runtime.device = torch.device("meta")
    return _NeverMoves(**{field.name: getattr(backend, field.name) for field in dataclasses.fields(backend)})


@lie("TestBackend.test_declaration_is_readable", says="autocast_dtypes declares float32")
def low_precision_that_is_fp32(backend):
    return declaring(backend, autocast_dtypes=("bfloat16", "float32"))


@lie("TestBackend.test_declaration_is_readable", says="model_dtypes declares float8_e4m3fn")
def model_dtype_that_nobody_tests(backend):
    return declaring(backend, model_dtypes=("float32", "float8_e4m3fn"))


@lie("TestBackend.test_declaration_is_readable", says="fast_fp32 declares 'zf32'")
def fast_fp32_that_nobody_knows(backend):
    return declaring(backend, fast_fp32="zf32")


@lie("TestBackend.test_declaration_is_readable", says="streams is 'yes', neither True nor False")
def streams_that_are_a_word(backend):
    return declaring(backend, streams="yes")
