"""What is refused when a trainer is made leaves model and optimizer as they were."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import pytest
import torch
import toys
from torch import nn
from toys import OPTIMIZERS, loss_of

import accelcore
from accelcore.precision.policy import Policy


def model_of_three():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(first=nn.Linear(3, 4), middle=nn.Linear(4, 4), last=nn.Linear(4, 2)))


data = partial(toys.data, shape=(4, 3, 2))


def everything(model, optimizer):
    """What a refused option must leave as it is."""
    parameters = [
        (name, id(p), p.dtype, p.device, p.data_ptr(), p.stride(), p.requires_grad, p.grad, p.detach().tolist())
        for name, p in model.named_parameters()
    ]
    groups = [{**group, "params": [id(p) for p in group["params"]]} for group in optimizer.param_groups]
    state = {id(p): {k: (id(v), str(v)) for k, v in entry.items()} for p, entry in dict(optimizer.state).items()}
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    return parameters, groups, state, hooks


REFUSED = [
    ({"precision": "fp8"}, "fp32, bf16, fp16"),
    ({"precision": []}, "fp32, bf16, fp16"),
    ({"precision": Policy(autocast="float64")}, "float64"),
    ({"loss_scale": "high"}, "loss_scale"),
    ({"loss_scale": -1.0}, "loss scale"),
    ({"loss_scale": float("nan")}, "loss scale"),
    ({"loss_scale": True}, "loss scale"),
    ({"fp32": "turbo"}, "ieee"),
    ({"accumulate": 0}, "accumulate=0"),
    ({"accumulate": True}, "accumulate=True"),
    ({"accumulate": 1.5}, "accumulate=1.5"),
    ({"clip_norm": True}, "clip_norm=True"),
    ({"clip_norm": -1}, "clip_norm=-1"),
    ({"clip_norm": "1"}, "clip_norm='1'"),
    ({"clip_norm": float("nan")}, "clip_norm=nan"),
    ({"weight": 3}, "weight=3"),
    ({"parallel": "sharded"}, "parallel='none', parallel='ddp'"),
    ({"comm_dtype": "float16"}, "comm_dtype"),
    ({"flat": "yes"}, "flat='yes'"),
    ({"compile": "max-autotune"}, "compile"),
    ({"compile": {"mode": "no such mode"}}, "no such mode"),
    ({"compile": {"no_such_option": 1}}, "no_such_option"),
    ({"graph": True}, "graph"),
    ({"observers": [print]}, "observers"),
    ({"observers": [accelcore.Observer()]}, "overrides no event"),
    ({"observers": accelcore.Observer()}, r"observers=\[\.\.\.\]"),
    ({"observers": iter([accelcore.Observer()])}, "not a list"),
    ({"observer": []}, "'observer'"),
]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(("option", "says"), REFUSED, ids=[f"{next(iter(o))} {n}" for n, (o, _) in enumerate(REFUSED)])
def test_a_refused_option_leaves_model_and_optimizer_as_they_were(accel, kind, option, says):
    model = model_of_three()
    optimizer = OPTIMIZERS[kind](accel, model.parameters())
    loss_of(model, data(1)[0]).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = everything(model, optimizer)
    # With options that would change both, were they carried out.
    options = {"precision": Policy(model_dtype="bfloat16"), "flat": True, **option}
    with pytest.raises((accelcore.ConfigurationError, accelcore.UnsupportedError), match=says):
        accel.trainer(model, optimizer, loss=loss_of, **options)
    assert everything(model, optimizer) == before


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("other model", "not in the model"),
        ("wrapped", "bare module"),
        ("scheduler", "another optimizer"),
        ("metric", "metric"),
        ("shared memory", "flat=True"),
        ("all frozen", "all 6 parameters of the model are frozen"),
    ],
)
def test_a_refused_model_optimizer_or_schedule_is_left_as_it_was(accel, what, says):
    model = model_of_three()
    optimizer = accel.optimizers.create("adamw", model.parameters())
    given, options = model, {"precision": Policy(model_dtype="bfloat16"), "flat": True}
    if what == "other model":
        given = model_of_three()
    elif what == "wrapped":
        given = nn.DataParallel(model)
    elif what == "scheduler":
        other = torch.optim.SGD(model.parameters())
        options["scheduler"] = torch.optim.lr_scheduler.StepLR(other, 1)
    elif what == "metric":
        options["scheduler"] = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    elif what == "shared memory":
        model.middle.bias.data = model.first.bias.data
    else:
        model.requires_grad_(False)
    before = everything(model, optimizer), everything(given, optimizer)
    with pytest.raises(accelcore.ConfigurationError, match=says):
        accel.trainer(given, optimizer, **options)
    assert (everything(model, optimizer), everything(given, optimizer)) == before
