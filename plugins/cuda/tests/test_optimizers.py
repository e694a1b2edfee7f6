"""The optimizers of CUDA: routes, and on fake tensors that no step mixes devices or waits for the GPU.

torch's classes are the same on the CPU, where foreach is a loop: routes are shown, not speed.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelcore_cuda.optimizers import create_optimizers, fused_kernels
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import accelcore
from accelcore.optim.flat.memory import Layout, Run, Slot
from accelcore.optim.formulas import FLAT_FORMULAS

FUSED = ("adagrad", "adam", "adamw", "sgd")
COMPILED = ("adadelta", "adamp", "bertadam", "lamb", "rmsprop", "rmsproptf")
TORCHS = ("adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")
NINE = {*COMPILED, "adam", "adamw", "sgd"}


def chosen(registry, name, **options):
    return next(choice.route for choice in registry.explain(name, **options) if choice.chosen)


def test_fused_comes_before_foreach_and_foreach_before_the_loop():
    registry = create_optimizers(FUSED)
    torchs = {name: [choice.route for choice in registry.explain(name)] for name in registry.names()}
    for name in TORCHS:
        ours = ["compiled"] if name in COMPILED else []
        theirs = (["fused"] if name in FUSED else []) + ["foreach", "loop"]
        assert torchs[name] == ours + theirs + (["formula"] if name in NINE else [])
    for name in set(COMPILED) - set(TORCHS):
        assert torchs[name] == ["compiled", "formula"]


@pytest.mark.parametrize(("name", "route"), [("adamw", "fused"), ("nadam", "foreach")])
def test_a_kernel_for_many_tensors_leaves_small_models_where_they_are(name, route):
    """Flat memory would add a copy of each gradient, and save no launch."""
    made = create_optimizers(FUSED).create(name, [nn.Parameter(torch.ones(2))], lr=0.1)
    assert made.route_for({torch.float32}, flat=True).scattered
    assert made.route_for({torch.float32}, flat=True).name == route


@pytest.mark.parametrize("name", ["adamw", "rmsprop", "sgd"])
def test_a_differentiable_step_takes_the_loop(name):
    assert chosen(create_optimizers(FUSED), name, differentiable=True) == "loop"


@pytest.mark.parametrize(
    ("options", "route"),
    [
        ({"lr": 0.1}, "foreach"),
        ({"lr": torch.tensor(0.1)}, "loop"),
        ({"lr": torch.tensor(0.1), "capturable": True}, "foreach"),
        ({"betas": (0.9, torch.tensor(0.99))}, "loop"),
    ],
)
def test_options_that_are_tensors_take_the_loop_unless_they_are_captured(options, route):
    assert chosen(create_optimizers(()), "adam", **options) == route


@pytest.mark.parametrize("options", [{"lr": torch.tensor(0.1)}, {"differentiable": True}])
def test_what_the_loop_takes_is_not_lost_to_foreach(options):
    weight = torch.nn.Parameter(torch.ones(3))
    registry = create_optimizers(())
    for name in TORCHS:
        registry.create(name, [weight], **options)


def test_a_route_that_an_extension_registers_keeps_its_priority():
    registry = create_optimizers(())
    registry.register("mine", "foreach", torch.optim.SGD, priority=-3)
    registry.register("mine", "loop", torch.optim.SGD, priority=0)
    assert chosen(registry, "mine") == "loop"


def test_a_kernel_is_offered_only_where_this_build_has_it():
    if torch.backends.cuda.is_built():
        assert {"adam", "adamw", "sgd"} <= set(fused_kernels())
    else:
        assert fused_kernels() == ()


@pytest.mark.parametrize("name", FUSED)
def test_a_kernel_is_offered_only_if_torchs_class_takes_it(monkeypatch, name):
    """Adagrad of an older torch refuses parameters on CUDA although its kernel exists."""
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: key == "CUDA")
    kind = {
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
    }
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(2, device="cuda"))
        weight.grad = torch.empty(2, device="cuda")
        try:
            kind[name]([weight], fused=True).step()
        except (AssertionError, RuntimeError) as error:  # without a GPU, whatever comes after torch's check fails
            refused = "`fused=True` requires" in str(error)
        else:
            refused = False
    assert (name in fused_kernels()) is not refused
    assert name == "adagrad" or not refused


# The compiled formulas.


def test_the_names_are_those_of_the_cpu():
    assert create_optimizers(FUSED).names() == accelcore.select("cpu").optimizers.names()
    assert set(create_optimizers(()).names()) >= NINE


@pytest.mark.parametrize(
    ("options", "route"),
    [
        ({}, "compiled"),
        ({"weight_decay": 0.1, "state_dtype": "bfloat16"}, "compiled"),
        ({"lr": torch.tensor(0.1), "capturable": True}, "compiled"),
        ({"maximize": True}, "compiled"),
        ({"differentiable": True}, "loop"),
        ({"eps": torch.tensor(0.1)}, "loop"),
    ],
)
def test_a_formula_is_compiled_for_what_it_takes(options, route):
    assert chosen(create_optimizers(FUSED), "rmsprop", **options) == route


def test_without_a_compiler_others_are_taken_and_the_reason_is_told():
    registry = create_optimizers(FUSED, no_compiler="there is no Triton")
    assert registry.explain("lamb")[0].reason == "there is no Triton"
    assert [chosen(registry, name) for name in ("lamb", "rmsprop")] == ["formula", "foreach"]


def test_a_model_that_is_still_on_the_host_is_trained_there():
    weight = nn.Parameter(torch.ones(3, 4))
    optimizer = create_optimizers(FUSED).create("lamb", [weight], lr=0.1)
    weight.grad = torch.ones(3, 4)
    optimizer.step()
    assert optimizer.route == "compiled"
    torch.testing.assert_close(weight.detach(), torch.full((3, 4), 0.9))


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("name", COMPILED)
def test_a_step_on_a_gpu_never_waits_for_it(name, scaled, monkeypatch):
    """A fake tensor has no value to wait for, and refuses operators between devices."""
    # Without CUDA, torch copies not even a fake tensor in place.
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: self.mul_(0).add_(other))
    tensors = [torch.empty(4, 5), torch.empty(300), torch.empty(8, 16, 16)]
    layout = Layout(tensors)
    slots = [Slot(str(number), 0, nn.Parameter(tensor), tensor) for number, tensor in enumerate(tensors)]
    options = {"bertadam": {"lr": 0.1, "t_total": 10}, "lamb": {"use_global_grad_norm": True}}.get(name, {})
    with FakeTensorMode(allow_non_fake_inputs=True):
        value, gradient = (torch.zeros(layout.offsets[-1], device="cuda:0") for _ in range(2))
        run = Run(slots, value, gradient, SimpleNamespace(layout=layout))
        engine = FLAT_FORMULAS[name]([value], asynchronous=True, compile=lambda function: function, **options)
        engine.place_runs([run])
        scaling = [torch.zeros((), device="cuda:0"), torch.ones((), device="cuda:0")] if scaled else [None, None]
        value.grad = gradient
        for lr in (0.1, torch.tensor(0.1, device="cuda:0")):
            engine.param_groups[0]["lr"] = lr
            engine.update(*scaling)
        entry = engine.state[value]
        assert {tensor.device.type for tensor in entry.values()} == {"cuda"}
        with pytest.raises(DataDependentOutputException):
            entry["step"].item()
