"""Compiled models that are not the same model."""

from __future__ import annotations

import copy

from accelcore.roles.compiler import Compiled
from lies.lie import declaring, lie, replaced


@lie("TestCompiler.test_compiled_is_the_same")
def compiler_that_trains_a_copy(backend):
    return replaced(
        backend, "compiler", compile=lambda honest, module, options: Compiled(copy.deepcopy(module), compiled=True)
    )


@lie("TestCompiler.test_compiled_is_the_same")
def compiler_that_changes_results(backend):
    def compile(honest, module, options):
        return Compiled(lambda rows: module(rows) * 1.01, compiled=True)

    return replaced(backend, "compiler", compile=compile)


@lie("TestCompiler.test_failure_falls_back_once")
def compiler_that_fails_in_silence(backend):
    return replaced(
        backend, "compiler", compile=lambda honest, module, options: Compiled(module, compiled=True)
    )  # fmt: skip


@lie("TestCompiler.test_compiled_is_the_same")
def compiler_that_is_not_declared(backend):
    return declaring(backend, compilers=())


@lie("TestCompiler.test_compiled_follows_its_module")
def compiler_that_drops_named_arguments(backend):
    def compile(honest, module, options):
        return Compiled(lambda rows, **named: module(rows), compiled=True)

    return replaced(backend, "compiler", compile=compile)


@lie("TestTraining.test_compile")
def compiler_whose_gradients_are_overwritten_unsaid(backend):
    def compile(honest, module, options):
        def run(rows):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
            return module(rows)

        return Compiled(run, compiled=True)

    return replaced(backend, "compiler", compile=compile)
