"""What the operator sweep finds: what excuses a number, what a known bug hides, and what a lost device does."""

from __future__ import annotations

import math
import re
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelcore_cpu.backend import create
from torch.utils._python_dispatch import TorchDispatchMode

from accelcore import testing as suite
from accelcore.known_faults import KnownFault
from accelcore.testing.support import usable
from accelcore.testing.support.case import Case
from accelcore.testing.support.found import Found, Variant
from accelcore.testing.support.samples import operators, samples

HERE = Path(__file__).parent
sys.path.append(str(HERE))
lies = import_module("lies")
sys.path.remove(str(HERE))


@pytest.mark.parametrize(
    ("findings", "left"),
    [
        ("tanh, .*: the (gradient|second derivative) 0 is wrong in .*", ""),
        ("tanh, float32, as it is: the gradient 0 is wrong in .*", "tanh, float32, strided"),
        ("tanh", "tanh, float32, as it is"),
        ("tan, .*", "tanh, float32, as it is"),
    ],
)
def test_a_known_bug_is_named_and_hides_no_other(findings, left, monkeypatch):
    """Only findings that the bug's pattern matches as a whole are the bug."""
    bug = KnownFault("tanh", "torch", ">=2", "its gradient is off", "nothing", "a reference", "", findings)
    plugin = SimpleNamespace(faults=(bug,))
    monkeypatch.setattr("accelcore.testing.support.found.find", lambda name: plugin)
    said = {}
    with lies.LIES["gradient_that_is_a_little_off"].around():
        if not left:
            suite.TestOperators().test_operator(create(), "tanh", said.__setitem__)
        else:
            with pytest.raises(AssertionError, match=left) as failure:
                suite.TestOperators().test_operator(create(), "tanh", said.__setitem__)
            assert not re.search(f"^{findings}$", str(failure.value), re.M)
    assert said == ({} if left else {"known_bug": f"tanh: {bug}"})
    said.clear()
    suite.TestOperators().test_operator(create(), "tanh", said.__setitem__)
    assert said == {}, "a bug that does not show is not reported"


def said_of(name, dtype, what, given, planted=None):
    """What the sweep finds wrong with an operator on the host, with kernels that are planted."""
    found = Found()
    given = [
        each.to(dtype).requires_grad_() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for each in given
    ]
    with lies.operators.Wrong(planted or {}):
        Case(found, torch.device("cpu"), name, Variant(operators()[name], dtype, (tuple(given), {}), what)).run()
    assert found.compared
    return found.wrong


def test_a_number_that_leaves_the_range_within_a_calculation_may_make_inf():
    """The gradient of a remainder is a weight times a quotient: here an eighth of 4.5e38, which bf16 cannot hold."""
    large, small = torch.full((8,), 2.0**127), torch.full((8,), 0.375)
    assert said_of("remainder", torch.bfloat16, "", (large, small)) == []
    infinite = {"div": lambda func, *args, **kwargs: func(*args, **kwargs) * math.inf}
    assert said_of("remainder", torch.bfloat16, "", (large / 2**20, small)) == []
    assert "inf instead of" in said_of("remainder", torch.bfloat16, "", (large / 2**20, small), infinite)[0]


def test_a_number_that_leaves_the_range_excuses_no_zero_elsewhere():
    given = torch.tensor([2.0**127, 5.0, 3.0, 7.0]), torch.full((4,), 0.375)
    assert said_of("remainder", torch.bfloat16, "", given) == []
    kept = torch.tensor([1.0, 0.0, 1.0, 1.0]).bfloat16()
    lost = {"div": lambda func, *args, **kwargs: func(*args, **kwargs) * kept}
    assert (
        "the gradient 1 is wrong in 1 of 4 elements: -0 instead of"
        in said_of("remainder", torch.bfloat16, "", given, lost)[0]
    )


def test_rounding_errors_that_all_happened_to_be_harmless_set_no_limit():
    """The gradient is of exp(x - result), and 1e4 in bf16 is off by up to 32: a few draws may all have made it 0."""
    sample = samples(operators()["logcumsumexp"], torch.bfloat16)[1]
    assert float(sample.input.detach().max()) > 9000
    assert said_of("logcumsumexp", torch.bfloat16, "", (sample.input.detach(), *sample.args)) == []


def test_a_loss_of_almost_nothing_may_be_off_by_what_fp32_rounds_at_1():
    """The loss is 1.18e-6, and its kernel subtracts numbers around 1."""
    given = torch.tensor([[0.0, 13.65]]), torch.tensor([1])
    assert said_of("nn.functional.cross_entropy", torch.float32, "", given) == []
    off = {"_log_softmax": lambda func, *args: func(*args) - 1e-5}
    assert "result 0 is wrong" in said_of("nn.functional.cross_entropy", torch.float32, "", given, off)[0]


def test_numbers_whose_fourth_power_vanishes_are_compared():
    assert said_of("exp", torch.bfloat16, "", (torch.tensor([-250.0, -240.0]),)) == []


@pytest.mark.parametrize(
    ("error", "outcome", "says"),
    [
        (NotImplementedError("no rounding here"), pytest.skip.Exception, "which is allowed: .*no rounding here"),
        (RuntimeError("round is not supported"), pytest.skip.Exception, "which is allowed: .*round is not"),
        (RuntimeError("does not support this dtype"), pytest.skip.Exception, "which is allowed: .*not support"),
        (RuntimeError("out of resources"), RuntimeError, "^out of resources"),
    ],
)
def test_a_known_result_that_the_device_refuses_is_not_tried(error, outcome, says):
    def refuse(*args, **kwargs):
        raise error

    with lies.operators.Wrong({"round": refuse}), pytest.raises(outcome, match=says):
        suite.TestOperators().test_known_result(create(), "round")


class Misaligned(TorchDispatchMode):
    """No kernel runs any more after a tanh of memory that begins elsewhere."""

    lost = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.lost |= func.name() == "aten::tanh" and args[0].storage_offset() > 0 and args[0].is_contiguous()
        if self.lost:
            raise RuntimeError("misaligned address")
        return func(*args, **(kwargs or {}))


def test_a_kernel_that_makes_the_device_unusable_is_named_once_and_not_run_if_known(monkeypatch):
    monkeypatch.setattr(usable, "_lost", {})
    samples = r"tanh, \w+, (as it is|transposed|in place as it is).*"
    bug = KnownFault("tanh", "torch", ">=2", "it is lost", "nothing", "a reference", "", unusable=samples)
    monkeypatch.setattr("accelcore.testing.support.found.find", lambda name: SimpleNamespace(faults=(bug,)))
    said = {}
    with Misaligned():
        suite.TestOperators().test_operator(create(), "tanh", said.__setitem__)
    assert "not run" in said["known_bug"]
    assert str(bug) in said["known_bug"]
    assert not usable.why_unusable()

    monkeypatch.setattr("accelcore.testing.support.found.find", lambda name: None)
    with (
        Misaligned(),
        pytest.raises(pytest.fail.Exception, match=r"since tanh, float32, as it is, .*behind other elements, every"),
    ):
        suite.TestOperators().test_operator(create(), "tanh", said.__setitem__)
    with pytest.raises(pytest.skip.Exception, match="not run: since tanh"):
        next(suite.TestOperators._usable_device.__wrapped__(None, None))
