"""What amp.initialize takes, what it refuses, and how it leaves what it refused."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import accelcore
from accelcore.apex import amp, optimizers

APEXS = """
    models optimizers enabled opt_level cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights
    loss_scale cast_model_outputs num_losses verbosity dynamic_init_scale scale_growth_factor scale_backoff_factor
    scale_window min_loss_scale max_loss_scale combine_grad combine_ddp ddp_replica_count user_cast_preferred
    check_combined_tensors
"""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.seen = []

    def forward(self, x):
        self.seen.append(x.dtype)
        return {"out": self.last(self.norm(self.first(x)))}


def made():
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_arguments_are_apexs_in_apexs_order():
    signature = inspect.signature(amp.initialize)
    assert list(signature.parameters) == APEXS.split()
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    given = ("O1", 1, 1, 2.0**16, 2.0, 0.5, 2000, 2.0**24, 4)
    names = ("opt_level", "num_losses", "verbosity", "dynamic_init_scale", "scale_growth_factor",
             "scale_backoff_factor", "scale_window", "max_loss_scale", "ddp_replica_count")  # fmt: skip
    assert tuple(defaults[name] for name in names) == given
    assert list(inspect.signature(amp.scale_loss).parameters) == [
        "loss", "optimizers", "loss_id", "model", "delay_unscale", "delay_overflow_check",
    ]  # fmt: skip


def test_one_comes_back_as_one_and_a_list_as_a_list():
    (model, optimizer), (other, another) = made(), made()
    assert amp.initialize(model, optimizer, verbosity=0) == (model, optimizer)
    models, trained = amp.initialize([other], [another], verbosity=0)
    assert (models, trained) == ([other], [another])
    assert amp.initialize(model, verbosity=0) is model
    (model, optimizer), (other, another) = made(), made()
    assert amp.initialize([model, other], optimizer, verbosity=0) == ([model, other], optimizer)
    assert amp.initialize(other, [another], verbosity=0) == (other, [another])


@pytest.mark.parametrize(
    ("level", "options", "weight", "norm", "seen", "out"),
    [
        ("O0", {}, "float32", "float32", "float32", "float32"),
        ("O1", {}, "float32", "float32", "float32", "float16"),
        ("O1", {"patch_torch_functions": False}, "float32", "float32", "float32", "float32"),
        ("O1", {"cast_model_outputs": torch.float64}, "float32", "float32", "float32", "float64"),
        ("O2", {}, "float16", "float32", "float16", "float32"),
        ("O2", {"keep_batchnorm_fp32": "False"}, "float16", "float16", "float16", "float32"),
        ("O2", {"cast_model_outputs": torch.float64}, "float16", "float32", "float16", "float64"),
        ("O2", {"cast_model_type": torch.bfloat16}, "bfloat16", "float32", "bfloat16", "float32"),
        ("O3", {}, "float16", "float16", "float16", "float32"),
        ("O3", {"keep_batchnorm_fp32": True}, "float16", "float32", "float16", "float32"),
        ("O3", {"master_weights": True}, "float16", "float16", "float16", "float32"),
    ],
    ids=str,
)
def test_what_is_held_and_cast(level, options, weight, norm, seen, out):
    model, optimizer = made()
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    result = model(torch.randn(3, 4, dtype=torch.float32 if level == "O1" else torch.float64))["out"]
    dtypes = [model.first.weight.dtype, model.norm.running_var.dtype, model.seen[0], result.dtype]
    assert [str(dtype) for dtype in dtypes] == [f"torch.{name}" for name in (weight, norm, seen, out)]
    assert model.norm.num_batches_tracked.dtype == torch.int64
    has_masters = level == "O2" or options.get("master_weights")
    assert str(next(iter(amp.master_params(optimizer))).dtype) == f"torch.{'float32' if has_masters else weight}"
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32, torch.int64}


@pytest.mark.parametrize("combine", [False, True])
def test_masters_start_from_the_given_values(combine):
    model, optimizer = made()
    given = [parameter.tolist() for parameter in model.parameters()]
    amp.initialize(model, optimizer, opt_level="O2", combine_grad=combine, verbosity=0)
    assert sorted((master.tolist() for master in amp.master_params(optimizer)), key=str) == sorted(given, key=str)


REFUSED = [
    ({"opt_level": "O4"}, "opt_level='O4'"),
    ({"opt_level": "o1"}, "opt_level='o1'"),
    ({"opt_level": "O1", "cast_model_type": torch.float16}, "at O1"),
    ({"opt_level": "O1", "keep_batchnorm_fp32": True}, "at O1"),
    ({"opt_level": "O1", "master_weights": False}, "at O1"),
    ({"opt_level": "O2", "patch_torch_functions": True}, "patch_torch_functions=True at O2"),
    ({"opt_level": "O3", "user_cast_preferred": True}, "user_cast_preferred=True at O3"),
    ({"opt_level": "O0", "combine_grad": True}, "at O0"),
    ({"opt_level": "O3", "combine_ddp": True}, "at O3"),
    ({"opt_level": "O2", "combine_ddp": True}, "no process group"),
    ({"opt_level": "O2", "combine_ddp": True, "combine_grad": False}, "combine_grad=False"),
    ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, "keep_batchnorm_fp32='yes'"),
    ({"opt_level": "O2", "cast_model_type": torch.int8}, "floating-point dtype"),
    ({"opt_level": "O2", "cast_model_outputs": "float32"}, "floating-point dtype"),
    ({"loss_scale": "static"}, "not a loss scale"),
    ({"loss_scale": 0}, "not a loss scale"),
    ({"loss_scale": True}, "not a loss scale"),
    ({"loss_scale": float("nan")}, "not a loss scale"),
    ({"num_losses": 0}, "num_losses=0"),
]


@pytest.mark.parametrize(("options", "says"), REFUSED, ids=str)
def test_what_is_invalid_is_refused_and_nothing_has_changed(options, says):
    model, optimizer = made()
    methods, hooks = (optimizer.step, optimizer.zero_grad), (model._forward_hooks, model._forward_pre_hooks)
    with pytest.raises(accelcore.AmpError, match=says) as error:
        amp.initialize(model, optimizer, **options)
    assert isinstance(error.value, RuntimeError)
    assert (optimizer.step, optimizer.zero_grad) == methods
    assert hooks == ({}, {})
    assert model.first.weight.dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    amp.initialize(model, optimizer, opt_level="O2", combine_ddp=False, verbosity=0)  # and so the next works


@pytest.mark.parametrize(
    "options", [{"min_loss_scale": 2.0**17}, {"scale_window": 0}, {"scale_backoff_factor": 2}, {"max_loss_scale": 0}]
)
def test_a_scale_that_cannot_move_so_is_refused(options):
    with pytest.raises(accelcore.ConfigurationError, match="no loss scale can work"):
        amp.initialize(*made(), **options)


def test_models_and_optimizers_that_do_not_fit_are_refused():
    model, optimizer = made()
    with pytest.raises(RuntimeError, match="wrapped in DataParallel"):
        amp.initialize(nn.DataParallel(model), optimizer)
    with pytest.raises(RuntimeError, match=r"first.weight is torch.float16 already"):
        amp.initialize(Net().half())
    with pytest.raises(RuntimeError, match="float was given as model"):
        amp.initialize([model, 1.0], optimizer)
    with pytest.raises(RuntimeError, match="a list of them"):
        amp.initialize(model, [optimizer, None])
    with pytest.raises(accelcore.UnknownBackendError, match="meta"):
        amp.initialize(nn.Linear(1, 1, device="meta"))
    with pytest.raises(RuntimeError, match="cpu and meta"):
        amp.initialize([model, nn.Linear(1, 1, device="meta")])
    amp.initialize(model, optimizer, verbosity=0)
    with pytest.raises(RuntimeError, match="was given to"):
        amp.initialize(model, optimizer)


def test_the_second_of_two_refused_optimizers_leaves_the_first_as_it_was():
    model = Net()
    first = torch.optim.SGD(model.first.parameters(), lr=0.1)
    second = torch.optim.LBFGS(model.last.parameters())
    with pytest.raises(accelcore.UnsupportedError):
        amp.initialize(model, [first, second], opt_level="O2")
    assert "step" not in vars(first)
    assert model.first.weight.dtype == torch.float32
    assert first.param_groups[0]["params"][0] is model.first.weight


def test_scripts_may_call_it_once_for_each_model():
    (model, optimizer), (other, another) = made(), made()
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    amp.initialize(other, another, opt_level="O2", loss_scale=128.0, verbosity=0)
    for each, trained in ((model, optimizer), (other, another)):
        before = each.first.weight.detach().clone()
        with amp.scale_loss(each(torch.randn(3, 4))["out"].square().sum(), trained) as scaled:
            scaled.backward()
        trained.step()
        assert not torch.equal(each.first.weight, before)


@pytest.mark.parametrize("before", [True, False], ids=["scheduler first", "initialize first"])
@pytest.mark.parametrize("kind", ["ours", "torch's"])
def test_a_schedule_may_be_made_before_or_after(before, kind):
    model = Net()
    create = optimizers.NpuFusedAdam if kind == "ours" else torch.optim.Adam
    optimizer = create(model.parameters(), lr=0.5)
    if before:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=128.0, verbosity=0)
    if not before:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.randn(3, 4))["out"].sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.125
