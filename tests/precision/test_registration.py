"""Functions that a user registers: under O1 they run as he says, and nothing is left of it afterwards."""

from __future__ import annotations

import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import functional

import accelcore
from accelcore import precision

LOW, FP32 = torch.bfloat16, torch.float32
REGISTER = {
    "half": precision.register_half_function,
    "float": precision.register_float_function,
    "promote": precision.register_promote_function,
}
DECORATORS = {
    "half": precision.half_function,
    "float": precision.float_function,
    "promote": precision.promote_function,
}


@pytest.fixture(autouse=True)
def _reset():
    yield
    precision.reset()


@pytest.fixture
def o1(accel):
    return accel.autocast(LOW, table="O1")


def own_module():
    module = ModuleType("own")
    module.add = lambda a, b=None, *, others=(): a if b is None else a + b
    module.multiply = lambda a, b: a @ b
    return module


@pytest.mark.parametrize(
    ("kind", "first", "second", "expected"),
    [
        ("half", FP32, FP32, LOW),
        ("float", LOW, LOW, FP32),
        ("promote", LOW, FP32, FP32),
        ("promote", LOW, LOW, LOW),
        ("promote", LOW, torch.float16, FP32),
        ("half", torch.float64, torch.float64, torch.float64),
        ("float", torch.int64, torch.int64, torch.int64),
    ],
)
def test_a_function_runs_as_it_was_registered(o1, kind, first, second, expected):
    a, b, module = torch.ones(2, dtype=first), torch.ones(2, dtype=second), own_module()
    decorated = DECORATORS[kind](own_module().add)
    REGISTER[kind](module, "add")
    assert module.add(a, b).dtype == a.add(b).dtype, "it is treated outside O1"
    with o1:
        assert module.add(a, b).dtype == expected
        assert decorated(a, b=b).dtype == expected
        with torch.autocast("cpu", enabled=False):
            assert module.add(a, b).dtype == a.add(b).dtype, "it is treated where autocast is off"
    with torch.autocast("cpu", LOW):
        assert module.add(a, b).dtype == a.add(b).dtype, "it is treated by torch's table"


@pytest.mark.parametrize(
    ("register", "module", "name", "run", "expected"),
    [
        (precision.register_float_function, torch, "matmul", lambda x: torch.matmul(x, x), FP32),
        (precision.register_float_function, functional, "linear", torch.nn.Linear(2, 2), FP32),
        (precision.register_float_function, torch.Tensor, "__matmul__", lambda x: x @ x, FP32),
        (precision.register_half_function, functional, "softmax", torch.nn.Softmax(1), LOW),
        (precision.register_half_function, functional, "gelu", torch.nn.GELU(), LOW),
    ],
)
def test_the_users_word_wins_over_the_table(o1, register, module, name, run, expected):
    x = torch.ones(2, 2, requires_grad=True)
    with o1:
        by_table = run(x).dtype
        register(module, name)
        result = run(x)
    precision.reset()
    with o1:
        assert run(x).dtype == by_table
    assert result.dtype == expected != by_table
    result.sum().backward()
    assert x.grad.dtype is FP32


def test_inside_a_function_nothing_is_cast_again(o1):
    module = own_module()
    precision.register_float_function(module, "multiply")
    with o1:
        assert module.multiply(torch.ones(2, 2, dtype=LOW), torch.ones(2, 2)).dtype is FP32


def test_what_was_there_is_back(o1):
    softmax, matmul = (
        functional.softmax,
        vars(torch.Tensor).get("__matmul__"),
    )
    precision.register_half_function(functional, "softmax")
    precision.register_float_function(torch.Tensor, "__matmul__")
    wrapper = functional.softmax
    assert wrapper is not softmax
    precision.reset()
    precision.reset()  # once more
    assert functional.softmax is softmax
    assert vars(torch.Tensor).get("__matmul__") is matmul
    with o1:
        assert wrapper(torch.ones(2, 2), 1).dtype is FP32, "a wrapper that was kept goes on"


def test_somebody_elses_wrapper_stays(o1):
    module = own_module()
    precision.register_half_function(module, "add")
    ours = module.add
    module.add = theirs = lambda *arguments: ours(*arguments)
    precision.reset()
    assert module.add is theirs
    with o1:
        assert module.add(torch.ones(1), torch.ones(1)).dtype is FP32


@pytest.mark.parametrize("register", REGISTER.values())
def test_a_name_that_is_no_function_is_refused(register):
    with pytest.raises(ValueError, match="'sofmax'") as caught:
        register(functional, "sofmax")
    assert isinstance(caught.value, accelcore.ConfigurationError)
    assert "'softmax'" in caught.value.remedy
    with pytest.raises(accelcore.ConfigurationError, match="no function 'value'"):
        register(SimpleNamespace(value=1), "value")


def test_a_function_is_registered_once_at_a_time():
    module = own_module()
    precision.register_half_function(module, "add")
    with pytest.raises(accelcore.ConfigurationError, match="'add' is registered already"):
        precision.register_float_function(module, "add")
    precision.reset()
    precision.register_float_function(module, "add")


def test_another_thread_is_not_in_the_region(o1):
    module, seen = own_module(), []
    precision.register_half_function(module, "add")
    with o1:
        thread = threading.Thread(target=lambda: seen.append(module.add(torch.ones(1), torch.ones(1)).dtype))
        thread.start()
        thread.join()
    assert seen == [FP32]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_is_computed_anew_goes_by_the_users_word(o1, use_reentrant):
    seen = []

    def part(x):
        seen.append(functional.softmax(x, 1).dtype)
        return functional.softmax(x @ x, 1)

    x = torch.ones(2, 2, requires_grad=True)
    precision.register_half_function(functional, "softmax")
    with o1:
        result = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=use_reentrant)
    result.sum().backward()
    assert seen == [LOW, LOW]
