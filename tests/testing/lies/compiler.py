"""Compiled models that are not the same model."""

from __future__ import annotations

import copy

import torch

from accelcore.roles.compiler import Compiled
from lies.lie import LIES, Lie, declaring, lie, replaced
from lies.operators import WrongFunction


def traced(backend):
    """The backend with a compiler that traces a model, and runs torch's kernels rather than C++ of its own."""

    def compile(honest, module, options):
        return honest.compile(module, {"backend": "aot_eager", **options})

    return replaced(backend, "compiler", compile=compile)


@lie("TestCompiler.test_compiled_is_the_same", says="something else than its module was compiled")
def compiler_that_trains_a_copy(backend):
    return replaced(
        backend, "compiler", compile=lambda honest, module, options: Compiled(copy.deepcopy(module), compiled=True)
    )


@lie("TestCompiler.test_compiled_is_the_same", says="a parameter has no gradient")
def compiler_that_keeps_what_was_frozen(backend):
    def compile(honest, module, options):
        frozen = []

        def run(rows):
            frozen.append({name: each.detach() for name, each in module.named_parameters() if not each.requires_grad})
            return torch.func.functional_call(module, frozen[0], (rows,))

        return Compiled(run, compiled=True)

    return replaced(backend, "compiler", compile=compile)


@lie("TestCompiler.test_compiled_is_the_same", says="computes something else")
def compiler_that_changes_results(backend):
    def compile(honest, module, options):
        return Compiled(lambda rows: module(rows) * 1.01, compiled=True)

    return replaced(backend, "compiler", compile=compile)


@lie("TestCompiler.test_compiled_is_the_same", says="computes something else")
def compiler_of_the_first_size(backend):
    def compile(honest, module, options):
        sizes = []

        def run(rows):
            sizes.append(len(rows))
            return torch.nn.functional.pad(module(rows[: sizes[0]]), (0, 0, 0, max(0, len(rows) - sizes[0])))

        return Compiled(run, compiled=True)

    return replaced(backend, "compiler", compile=compile)


@lie("TestCompiler.test_compiled_follows_its_module", says="what became of the module")
def compiler_of_the_first_evaluated_weights(backend):
    def compile(honest, module, options):
        frozen = []

        def run(rows, *given, **named):
            if module.training or torch.is_grad_enabled():
                return module(rows, *given, **named)
            frozen[:] = frozen or [copy.deepcopy(module)]
            return frozen[0](rows, *given, **named)

        return Compiled(run, compiled=True)

    return replaced(backend, "compiler", compile=compile)


@lie("TestCompiler.test_compiled_follows_its_module", says="what became of the module")
def compiler_that_evaluates_for_ever(backend):
    def compile(honest, module, options):
        evaluated = []

        def run(rows, *given, **named):
            mode = module.training
            if not mode:
                evaluated.append(True)
            module.train(mode and not evaluated)
            found = module(rows, *given, **named)
            module.train(mode)
            return found

        return Compiled(run, compiled=True)

    return replaced(backend, "compiler", compile=compile)


@lie("TestCompiler.test_compiled_branches", says="it kept a branch")
def compiler_of_the_first_branch(backend):
    def compile(honest, module, options):
        kept = []

        def run(rows):
            kept[:] = kept or [bool(rows.sum() > 0)]
            return rows * 2 if kept[0] else rows - 1

        return Compiled(run, compiled=True)

    return replaced(backend, "compiler", compile=compile)


def _with_constants(chosen):
    def compile(honest, module, options):
        constants = {}

        def run(rows, *given, **named):
            pairs = [(each, constants.setdefault(name, each.detach().clone())) for name, each in chosen(module)]
            now = [each.data for each, _ in pairs]
            for each, value in pairs:
                each.data = value
            found = module(rows, *given, **named)
            for (each, _), value in zip(pairs, now, strict=True):
                each.data = value
            return found

        return Compiled(run, compiled=True)

    return compile


@lie("TestCompiler.test_compiled_follows_its_module", says="what became of the module")
def compiler_of_the_first_frozen_weights(backend):
    frozen = _with_constants(lambda module: [pair for pair in module.named_parameters() if not pair[1].requires_grad])
    return replaced(backend, "compiler", compile=frozen)


@lie("TestCompiler.test_compiled_follows_its_module", says="what became of the module")
def compiler_of_the_first_evaluated_buffers(backend):
    evaluated = _with_constants(lambda module: [] if module.training else module.named_buffers())
    return replaced(backend, "compiler", compile=evaluated)


@lie("TestCompiler.test_compiled_follows_its_module", says="what became of the module")
def compiler_that_pads_batches(backend):
    def compile(honest, module, options):
        def run(rows, *given, **named):
            if not module.training:
                return module(rows, *given, **named)
            padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 16))
            found = module(padded, *given, **named)[: len(rows)]
            rows.copy_(padded[: len(rows)])
            return found

        return Compiled(run, compiled=True)

    return replaced(backend, "compiler", compile=compile)


def writing_into_the_last_output(backend, gradients):
    """The backend with a compiler whose outputs with, or without, gradients share memory if they have one shape."""

    def compile(honest, module, options):
        memory = {}

        def run(rows, *given, **named):
            output = module(rows, *given, **named)
            if output.requires_grad == gradients:
                output.data = memory.setdefault(output.shape, torch.empty_like(output)).copy_(output.detach())
            return output

        return Compiled(run, compiled=True)

    return replaced(backend, "compiler", compile=compile)


@lie("TestCompiler.test_compiled_is_the_same", says="a later call overwrites an output")
def compiler_that_overwrites_outputs_unsaid(backend):
    return writing_into_the_last_output(backend, gradients=True)


@lie("TestCompiler.test_compiled_follows_its_module", says="without gradients a later call overwrites an output")
def compiler_that_overwrites_evaluations_unsaid(backend):
    return writing_into_the_last_output(backend, gradients=False)


@lie("TestCompiler.test_compiled_follows_its_module", says="what became of the module")
def compiler_of_the_first_order_of_names(backend):
    def compile(honest, module, options):
        names = {}

        def run(*given, **named):
            first = names.setdefault((len(given), frozenset(named)), [*named])
            return module(*given, **dict(zip(first, named.values(), strict=True)))

        return Compiled(run, compiled=True)

    return replaced(backend, "compiler", compile=compile)


@lie("TestCompiler.test_failure_falls_back_once", says="with a compiler that failed")
def compiler_that_fails_in_silence(backend):
    return replaced(
        backend, "compiler", compile=lambda honest, module, options: Compiled(module, compiled=True)
    )  # fmt: skip


@lie("TestCompiler.test_compiled_is_the_same", says="unexpected success: a compiler")
def compiler_that_is_not_declared(backend):
    return declaring(traced(backend), compilers=())


@lie("TestCompiler.test_compiled_follows_its_module", says="does not count")
def compiler_that_keeps_buffers(backend):
    """From its second call on, it writes statistics into memory of its own."""

    def compile(honest, module, options):
        calls = []

        def run(rows, *given, **named):
            kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
            output = module(rows, *given, **named)
            for buffer, value in kept if calls else ():
                buffer.copy_(value)
            calls.append(1)
            return output

        return Compiled(run, compiled=True)

    return replaced(backend, "compiler", compile=compile)


def _keeping(name):
    """Tell a compiler that computes with the attribute that the module had when it was called first."""

    def compile(honest, module, options):
        kept = {}

        def run(rows, *given, **named):
            now = getattr(module, name)
            setattr(module, name, kept.setdefault(name, now))
            try:
                return module(rows, *given, **named)
            finally:
                setattr(module, name, now)

        return Compiled(run, compiled=True)

    return lambda backend: replaced(backend, "compiler", compile=compile)


for _name in ("factor", "share", "signs", "way"):
    LIES[f"compiler_that_keeps_its_{_name}"] = Lie(
        f"compiler_that_keeps_its_{_name}", _keeping(_name), "TestCompiler.test_compiled_follows_its_module",
        "does not count",
    )  # fmt: skip


@lie("TestCompiler.test_compiled_follows_its_module", says="does not count")
def compiler_that_keeps_strides(backend):
    """It reads an input by the strides of the first one of its shape."""

    def compile(honest, module, options):
        kept = {}

        def run(rows, *given, **named):
            return module(rows.as_strided(rows.shape, kept.setdefault(rows.shape, rows.stride())), *given, **named)

        return Compiled(run, compiled=True)

    return replaced(backend, "compiler", compile=compile)


@lie("TestCompiler.test_compiled_follows_its_module", says="writes to an input is lost")
def compiler_that_copies_inputs(backend):
    def compile(honest, module, options):
        return Compiled(lambda rows, *given, **named: module(rows.clone(), *given, **named), compiled=True)

    return replaced(backend, "compiler", compile=compile)


@lie("TestCompiler.test_compiled_follows_its_module", says="does not count")
def compiler_that_drops_named_arguments(backend):
    def compile(honest, module, options):
        return Compiled(lambda rows, *given, **named: module(rows), compiled=True)

    return replaced(backend, "compiler", compile=compile)


@lie("TestCompiler.test_compiled_follows_its_module", says="a hook of the module")
def compiler_that_calls_forward(backend):
    def compile(honest, module, options):
        return Compiled(module.forward, compiled=True)

    return replaced(backend, "compiler", compile=compile)


def compiled_with_its_first_numbers(backend, seeded):
    def compile(honest, module, options):
        state = torch.get_rng_state()

        def run(rows):
            with torch.random.fork_rng(devices=[]):
                if seeded:
                    torch.set_rng_state(state)
                else:
                    torch.seed()
                return module(rows)

        return Compiled(run, compiled=True)

    return replaced(backend, "compiler", compile=compile)


@lie("TestCompiler.test_compiled_draws_anew", says="the same numbers in each call")
def compiler_that_draws_once(backend):
    return compiled_with_its_first_numbers(backend, seeded=True)


@lie("TestCompiler.test_compiled_draws_anew", says="does not draw by the seed")
def compiler_that_seeds_itself(backend):
    return compiled_with_its_first_numbers(backend, seeded=False)


def _under(wrong):
    """A compiler whose graphs run under a mode that replaces functions."""

    def compile(honest, module, options):
        def run(rows):
            with wrong():
                return module(rows)

        return Compiled(run, compiled=True)

    return compile


@lie("TestCompiler.test_compiled_draws_anew", says="adds 32 ones at an index to")
def compiler_that_stores_where_it_should_add(backend):
    once = {"index_add": lambda function, x, dim, index, source: x.index_copy(dim, index, source)}
    return replaced(backend, "compiler", compile=_under(lambda: WrongFunction(once)))


@lie("TestCompiler.test_compiled_draws_anew", says="two layers of a compiled module draw the same numbers")
def compiler_that_draws_one_mask_for_all_layers(backend):
    def wrong():
        state = torch.get_rng_state()

        def again(function, *args, **options):
            torch.set_rng_state(state)
            return function(*args, **options)

        return WrongFunction({"dropout": again})

    return replaced(backend, "compiler", compile=_under(wrong))


@lie("TestTraining.test_compile", says="error(")
def compiler_whose_gradients_are_overwritten_unsaid(backend):
    def compile(honest, module, options):
        def run(rows):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.neg_()
            return module(rows)

        return Compiled(run, compiled=True)

    return replaced(backend, "compiler", compile=compile)


@lie("TestCompiler.test_every_compiler_is_there", says="compilers declares zzz, which is refused")
def compiler_that_does_not_exist(backend):
    return declaring(backend, compilers=("inductor", "zzz"))


@lie("TestCompiler.test_backward_is_outside_autocast", says="compiled as if it ran under autocast")
def compiler_of_another_backward(backend):
    def compile(honest, module, options):
        return Compiled(torch.compile(module, backend="aot_eager"), compiled=True)

    return replaced(backend, "compiler", compile=compile)


@lie(
    "TestCompiler.test_training_is_eager", says="of 6 windows are skipped, and none where it is eager",
    precision="fp16", dtype="float16",
)  # fmt: skip
def compiler_whose_backward_overflows(backend):
    def compile(honest, module, options):
        return Compiled(torch.compile(module, backend="aot_eager"), compiled=True)

    return replaced(backend, "compiler", compile=compile)
