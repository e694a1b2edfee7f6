"""What shows in a whole training, or in the declaration."""

from __future__ import annotations

from lies.lie import declaring, lie, replaced
from lies.optimizers import adam_for_adamw, registry


@lie("TestTraining.test_parallel", parallel="fsdp")
def strategy_that_does_not_exist(backend):
    return declaring(backend, parallel=("none", "ddp", "fsdp"))


@lie("TestTraining.test_fp32", options={})
def device_that_computes_wrongly(backend):
    return registry(adamw=adam_for_adamw)(backend)


@lie("TestTraining.test_resume_goes_on_alike", precision="fp32")
def resume_that_forgets_random_numbers(backend):
    return replaced(backend, "runtime", set_rng_state=lambda honest, state: [])


@lie("TestBackend.test_declaration_is_readable")
def declaration_that_nobody_can_read(backend):
    return declaring(backend, autocast_dtypes=("bf16",))
