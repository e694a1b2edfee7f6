"""What shows in a whole training, or in the declaration."""

from __future__ import annotations

import dataclasses

import torch

from accelcore import Backend, Policy, UnsupportedError
from accelcore.jobs.collectives import NoCollectives, TorchCollectives
from lies.lie import LIES, declaring, lie, replaced
from lies.optimizers import adam_for_adamw, registry


@lie("TestBackend.test_declaration_is_readable", says="parallel declares sharding")
def strategy_that_does_not_exist(backend):
    return declaring(backend, parallel=("none", "ddp", "sharding"))


class _NeverAlone(Backend):
    def trainer(self, model, optimizer, **options):
        if options.get("parallel") not in self.capabilities.parallel:
            raise UnsupportedError("not declared", remedy="declare it")
        return super().trainer(model, optimizer, **options)


@lie("TestTraining.test_parallel", says="not declared", parallel="combine_ddp")
def strategy_that_is_refused_to_one_process(backend):
    backend = declaring(backend, parallel=("none",))
    return _NeverAlone(**{field.name: getattr(backend, field.name) for field in dataclasses.fields(backend)})


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
        return super().trainer(model, optimizer, **options | {"on_nonfinite": None})  # it cannot read that device


@lie("TestTraining.test_fp32", says="a loss was computed elsewhere", options={})
def model_that_is_never_moved(backend):
    """Its device is another than the host, and everything stays on the host."""
    backend = replaced(backend, "runtime", to_device=lambda honest, batch: batch)
    backend.runtime._device = torch.device("meta")
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


class _Apart(Backend):
    """Trains each rank by itself, whatever strategy is asked for."""

    def trainer(self, model, optimizer, **options):
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Backend(**{**fields, "collectives": NoCollectives()}).trainer(
            model, optimizer, **{**options, "parallel": "none"}
        )

    def replicate(self, module, **options):
        return module.to(self.device)


@lie("TestParallel.test_two_ranks_train_one_model", says="the ranks trained apart", strategy="ddp", variant="plain")
def strategy_that_does_nothing(backend):
    return _Apart(**{field.name: getattr(backend, field.name) for field in dataclasses.fields(backend)})


LIES["combined_strategy_that_does_nothing"] = dataclasses.replace(
    strategy_that_does_nothing,
    name="combined_strategy_that_does_nothing",
    arguments={"strategy": "combine_ddp", "variant": "flat"},
    told_by="strategy_that_does_nothing",
)
strategy_that_does_nothing.told_by = "strategy_that_does_nothing"


class _ForgetsBytes(TorchCollectives):
    def broadcast(self, tensor, src=0):
        if tensor.dtype != torch.uint8:
            return super().broadcast(tensor, src)
        return tensor if self.rank == src else tensor.zero_()  # it may be memory that nobody has written to


class _Whole(Backend):
    """Calls it sharding, and leaves each rank the whole model."""

    def trainer(self, model, optimizer, **options):
        return super().trainer(model, optimizer, **{**options, "parallel": "ddp"})


@lie("TestParallel.test_a_rank_holds_its_share", says="elements the ranks hold", strategy="fsdp")
def sharding_that_divides_nothing(backend):
    fields = {field.name: getattr(backend, field.name) for field in dataclasses.fields(backend)}
    return _Whole(**fields | {"collectives": _ForgetsBytes(backend.device, "gloo")})  # a lie of its own, told with it


sharding_that_divides_nothing.told_by = "sharding_that_divides_nothing"
LIES["broadcast_that_forgets_bytes"] = dataclasses.replace(
    sharding_that_divides_nothing,
    name="broadcast_that_forgets_bytes",
    test="TestParallel.test_buffers_are_one",
    says="the ranks' buffers are apart",
    arguments={"strategy": "ddp", "variant": "plain"},
)
LIES["optimizer_state_that_is_whole"] = dataclasses.replace(
    sharding_that_divides_nothing,
    name="optimizer_state_that_is_whole",
    test="TestParallel.test_a_rank_holds_its_share_of_the_moments",
    says="elements of moments the ranks hold",
    arguments={"strategy": "zero1"},
)


LIES["replica_that_is_alone"] = dataclasses.replace(
    strategy_that_does_nothing,
    name="replica_that_is_alone",
    test="TestCollectives.test_replica",
    says="the ranks' gradients are apart",
    arguments={},
)


class _KeepsLow(Backend):
    def trainer(self, model, optimizer, **options):
        policy = options.get("precision")
        if isinstance(policy, Policy):
            options = {**options, "precision": dataclasses.replace(policy, masters=False, loss_scale=None)}
        return super().trainer(model, optimizer, **options)


@lie("TestTraining.test_masters", says="updates are lost", dtype="bfloat16", flat=False)
def masters_that_are_none(backend):
    return _KeepsLow(**{field.name: getattr(backend, field.name) for field in dataclasses.fields(backend)})


@lie("TestTraining.test_every_optimizer_flat", says="is another one in flat memory", name="sgd")
def route_that_is_not_elementwise(backend):
    """It divides each gradient by its norm, which is another one for many parameters together."""

    class ByNorm(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for tensor in group["params"]:
                    if tensor.grad is not None:
                        tensor.grad = tensor.grad / tensor.grad.norm()
            return super().step(closure)

    backend.optimizers.register("sgd", "by_norm", ByNorm, priority=99, memory="any")
    return backend


class _ForgetsStatistics(Backend):
    """BatchNorm normalizes with each batch's statistics, and keeps none."""

    def trainer(self, model, optimizer, **options):
        for module in model.modules():
            if hasattr(module, "momentum"):
                module.momentum = 0.0
        return super().trainer(model, optimizer, **options)


@lie("TestTraining.test_every_kind_of_state", says="is another one than by hand", flat=False, options={})
def statistics_that_are_lost(backend):
    return _ForgetsStatistics(**{field.name: getattr(backend, field.name) for field in dataclasses.fields(backend)})


def _of_another_precision(change):
    """A backend whose trainer computes in another precision than it is asked for."""

    class Other(Backend):
        def trainer(self, model, optimizer, **options):
            precision = options.get("precision", "fp32")
            policy = precision if isinstance(precision, Policy) else Policy.preset(precision)
            return super().trainer(model, optimizer, **{**options, "precision": change(policy)})

    return lambda backend: Other(**{field.name: getattr(backend, field.name) for field in dataclasses.fields(backend)})


@lie("TestTraining.test_level", says="not held in the right dtypes", level="O2", dtype="bfloat16", flat=False)
def model_that_stays_in_fp32(backend):
    return _of_another_precision(lambda policy: Policy(loss_scale=policy.loss_scale))(backend)


@lie("TestTraining.test_level", says="not held in the right dtypes", level="O2", dtype="float16", flat=True)
def batchnorm_in_low_precision(backend):
    return _of_another_precision(lambda policy: dataclasses.replace(policy, keep_batchnorm_fp32=False))(backend)


@lie("TestTraining.test_level", says="returns another dtype", level="O3", dtype="bfloat16", flat=False)
def outputs_in_low_precision(backend):
    class Half(Backend):
        def trainer(self, model, optimizer, **options):
            made = super().trainer(model, optimizer, **options)
            model.register_forward_hook(lambda module, given, output: output.bfloat16())
            return made

    return Half(**{field.name: getattr(backend, field.name) for field in dataclasses.fields(backend)})
