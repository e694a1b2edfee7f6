"""The NPU's optimizers against float64: torch.optim's where torch has the class, else the formula written out here."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

TWINS = {
    "adadelta": torch.optim.Adadelta,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}
SHAPES = [(5, 3), (7,), (), (2, 3, 4), (0, 3)]
STEPS = 12


def start(dtype=torch.float64, shapes=SHAPES):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def gradients(step, shapes=SHAPES):
    """float32 values, so that both sides are given the very same; none for the second parameter at first."""
    generator = torch.Generator().manual_seed(100 + step)
    made = [torch.randn(shape, generator=generator) for shape in shapes]
    return [None if number == 1 and step % 4 < 2 else gradient for number, gradient in enumerate(made)]


def trained(accel, name, groups=lambda parameters: parameters, steps=STEPS, route="npu_fused", **options):
    """The parameters after training on the NPU."""
    parameters = [nn.Parameter(value.to(accel.device)) for value in start(torch.float32)]
    optimizer = accel.optimizers.create(name, groups(parameters), route=route, **options)
    for step in range(steps):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = None if gradient is None else gradient.to(accel.device)
        optimizer.step()
    assert {parameter.device for parameter in parameters} == {accel.device}
    return [parameter.detach().cpu().double() for parameter in parameters]


def by_torch(name, groups=lambda parameters: parameters, steps=STEPS, **options):
    """The same by torch.optim, on the CPU in float64."""
    parameters = [nn.Parameter(value) for value in start()]
    optimizer = TWINS[name](groups(parameters), foreach=False, **options)
    for step in range(steps):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = None if gradient is None else gradient.double()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def by_formula(update, steps=STEPS):
    """The same by `update(parameter, gradient, state, step)`, in float64; steps are counted from 1, each its own."""
    parameters = start()
    states = [{} for _ in parameters]
    counts = [0] * len(parameters)
    for step in range(steps):
        for number, gradient in enumerate(gradients(step)):
            if gradient is not None:
                counts[number] += 1
                parameters[number] = update(parameters[number], gradient.double(), states[number], counts[number])
    return parameters


def check(found, wanted, tolerance=2e-6):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"lr": 0.1}),
        ("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("adam", {"lr": 0.01}),
        ("adam", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6}),
        ("adam", {"lr": 0.01, "amsgrad": True}),
        ("adamw", {"lr": 0.01}),
        ("adamw", {"lr": 0.01, "weight_decay": 0.0, "amsgrad": True}),
        ("adadelta", {}),
        ("adadelta", {"lr": 0.5, "rho": 0.8, "eps": 1e-5, "weight_decay": 0.1}),
        ("rmsprop", {"lr": 0.01}),
        ("rmsprop", {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
        ("rmsprop", {"lr": 0.01, "centered": True, "alpha": 0.9}),
    ],
)
def test_it_trains_as_torch_does_in_float64(accel, name, options):
    check(trained(accel, name, **options), by_torch(name, **options))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_torchs_fused_kernels_train_as_torch_does_in_float64(accel, name):
    check(trained(accel, name, route="fused", lr=0.01), by_torch(name, lr=0.01))


@pytest.mark.parametrize("name", list(TWINS))
def test_groups_keep_to_their_own_options(accel, name):
    def groups(parameters):
        return [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:], "weight_decay": 0.3}]

    check(trained(accel, name, groups, lr=0.01), by_torch(name, groups, lr=0.01))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "nesterov": True, "betas": (0.8, 0.95)},
        {"delta": 5.0, "wd_ratio": 0.3, "weight_decay": 0.2},
    ],
)
def test_adamp(accel, options):
    settings = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "delta": 0.1, "wd_ratio": 0.1, "nesterov": False}
    settings |= options
    (b1, b2), eps, decay = settings["betas"], settings["eps"], settings["weight_decay"]
    lr = 0.05

    def update(p, g, state, t):
        m = state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
        v = state["v"] = b2 * state.get("v", 0) + (1 - b2) * g * g
        denominator = v.sqrt() / math.sqrt(1 - b2**t) + eps
        d = (b1 * m + (1 - b1) * g) / denominator if settings["nesterov"] else m / denominator
        factor = 1.0
        if p.ndim > 1 and p.numel():
            for rows in (p.shape[0], 1):
                weight, gradient = p.reshape(rows, -1), g.reshape(rows, -1)
                norms = (gradient.norm(dim=1) + eps) * (weight.norm(dim=1) + eps)
                cosine = (gradient * weight).sum(1).abs() / norms
                if cosine.max() < settings["delta"] / math.sqrt(weight.shape[1]):
                    unit = weight / (weight.norm(dim=1, keepdim=True) + eps)
                    d = d - (unit * (unit * d.reshape(rows, -1)).sum(1, keepdim=True)).reshape(d.shape)
                    factor = settings["wd_ratio"]
                    break
        return p * (1 - lr * decay * factor) - lr / (1 - b1**t) * d

    check(trained(accel, "adamp", lr=lr, **options), by_formula(update))


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1}, {"adam": True}, {"use_global_grad_norm": True, "betas": (0.8, 0.95)}]
)
def test_lamb(accel, options):
    settings = {"betas": (0.9, 0.999), "weight_decay": 0, "adam": False, "use_global_grad_norm": False, **options}
    (b1, b2), decay, lr = settings["betas"], settings["weight_decay"], 0.05
    norms = [
        torch.cat([gradient.double().flatten() for gradient in gradients(step) if gradient is not None]).norm()
        for step in range(STEPS)
    ]

    def update(p, g, state, t):
        if settings["use_global_grad_norm"]:
            step = next(step for step in range(STEPS) if any(_is(g, other) for other in gradients(step)))
            g = g / max(norms[step], 1)
        m = state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
        v = state["v"] = b2 * state.get("v", 0) + (1 - b2) * g * g
        u = m / (v.sqrt() + 1e-6) + decay * p
        weight_norm, update_norm = p.norm().clamp(0, 10), u.norm()
        ratio = 1.0 if settings["adam"] or weight_norm == 0 or update_norm == 0 else weight_norm / update_norm
        return p - lr * ratio * u

    check(trained(accel, "lamb", lr=lr, **options), by_formula(update))


def _is(gradient, other):
    return other is not None and other.shape == gradient.shape and torch.equal(other.double(), gradient)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.0},
        {"t_total": 10, "warmup": 0.3},
        {"t_total": 10},
        {"t_total": 10, "warmup": 0.3, "schedule": "warmup_constant"},
        {"t_total": 10, "warmup": 0.3, "schedule": "warmup_cosine", "b1": 0.8, "b2": 0.95},
        {"t_total": 10, "warmup": 0.3, "schedule": "warmup_poly", "e": 1e-4},
    ],
)
def test_bertadam(accel, options):
    settings = {"b1": 0.9, "b2": 0.999, "e": 1e-6, "weight_decay": 0.01, "t_total": -1, "warmup": -1} | options
    b1, b2, decay, lr = settings["b1"], settings["b2"], settings["weight_decay"], 0.05
    after_warmup = {
        "warmup_linear": lambda x, w: max((x - 1) / (w - 1), 0),
        "warmup_constant": lambda x, w: 1.0,
        "warmup_cosine": lambda x, w: (1 + math.cos(math.pi * x)) / 2 if x < 1 else 0.0,
        "warmup_poly": lambda x, w: math.sqrt(1 - x) if x < 1 else 0.0,
    }[settings.get("schedule", "warmup_linear")]

    def rate(t):
        if settings["t_total"] == -1:
            return lr
        x, warmup = (t - 1) / settings["t_total"], settings["warmup"]
        return lr * (x / warmup if x < warmup else after_warmup(x, warmup))

    def update(p, g, state, t):
        m = state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
        v = state["v"] = b2 * state.get("v", 0) + (1 - b2) * g * g
        return p - rate(t) * (m / (v.sqrt() + settings["e"]) + decay * p)

    check(trained(accel, "bertadam", lr=lr, max_grad_norm=-1.0, **options), by_formula(update))


def test_bertadam_clips_a_group_by_its_norm(accel):
    parameters = [nn.Parameter(torch.ones(4, device=accel.device)) for _ in range(2)]
    optimizer = accel.optimizers.create("bertadam", parameters, lr=0.1, max_grad_norm=2.0)
    for parameter, value in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = torch.full((4,), value, device=accel.device)
    optimizer.step()
    found = [optimizer.state[parameter]["exp_avg"].cpu() for parameter in parameters]
    factor = 2.0 / (10.0 + 1e-6)  # the norm of both together is 10
    torch.testing.assert_close(found, [torch.full((4,), 0.1 * value * factor) for value in (3.0, 4.0)])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "lr_in_momentum": False, "centered": True},
        {"weight_decay": 0.1, "eps": 1e-3},
        {"weight_decay": 0.01, "decoupled_decay": True, "alpha": 0.8},
    ],
)
def test_rmsproptf(accel, options):
    settings = {"alpha": 0.9, "eps": 1e-10, "weight_decay": 0, "momentum": 0.0, "centered": False}
    settings |= {"decoupled_decay": False, "lr_in_momentum": True} | options
    alpha, decay, momentum, lr = settings["alpha"], settings["weight_decay"], settings["momentum"], 0.01

    def update(p, g, state, t):
        if settings["decoupled_decay"]:
            p = p * (1 - decay)
        else:
            g = g + decay * p
        v = state.get("v", torch.ones_like(p))
        v = state["v"] = v + (1 - alpha) * (g * g - v)
        mean = 0
        if settings["centered"]:
            mean = state["mean"] = state.get("mean", 0) * alpha + (1 - alpha) * g
        average = (v - mean * mean + settings["eps"]).sqrt()
        if not momentum:
            return p - lr * g / average
        if settings["lr_in_momentum"]:
            buffer = state["buffer"] = momentum * state.get("buffer", 0) + lr * g / average
            return p - buffer
        buffer = state["buffer"] = momentum * state.get("buffer", 0) + g / average
        return p - lr * buffer

    check(trained(accel, "rmsproptf", lr=lr, **options), by_formula(update))


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch_npu copies a storage by an old API
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("adadelta", {}),
        ("adam", {"amsgrad": True}),
        ("adamw", {}),
        ("rmsprop", {"momentum": 0.9, "centered": True}),
        ("sgd", {"momentum": 0.9}),
    ],
)
def test_state_has_torchs_layout_and_goes_to_torch_and_back(accel, name, options):
    def train(optimizer, parameters, steps):
        for step in steps:
            for parameter, gradient in zip(parameters, gradients(step), strict=True):
                parameter.grad = None if gradient is None else gradient.to(parameter.device)
            optimizer.step()

    ours = [nn.Parameter(value.to(accel.device)) for value in start(torch.float32)]
    optimizer = accel.optimizers.create(name, ours, lr=0.01, **options)
    train(optimizer, ours, range(4))
    theirs = [nn.Parameter(parameter.detach().cpu()) for parameter in ours]
    twin = TWINS[name](theirs, lr=0.01, **options)
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(twin, theirs, range(4, 8))
    assert twin.param_groups[0].keys() == optimizer.param_groups[0].keys()
    for mine, other in zip(ours, theirs, strict=True):
        assert optimizer.state[mine].keys() == twin.state[other].keys()
        for key, value in optimizer.state[mine].items():
            assert (value.dtype, value.shape) == (twin.state[other][key].dtype, twin.state[other][key].shape)
            assert value.device == (torch.device("cpu") if key == "step" else accel.device)
    back = [nn.Parameter(parameter.detach().to(accel.device)) for parameter in theirs]
    optimizer = accel.optimizers.create(name, back, lr=0.01, **options)
    optimizer.load_state_dict(copy.deepcopy(twin.state_dict()))
    train(optimizer, back, range(8, STEPS))
    check([parameter.detach().cpu().double() for parameter in back], by_torch(name, lr=0.01, **options))
