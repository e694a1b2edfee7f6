"""apex's levels in a trainer: O0, O2 and O3 against loops written by hand, in every dtype, with everything else."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from thinned import diagonals
from torch import nn
from torch.nn.functional import cross_entropy

import accelcore
from accelcore import Policy

FLAT = pytest.mark.parametrize("flat", [True, False], ids=["flat", "per tensor"])
LOW = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


class Net(nn.Module):
    """A convolution, BatchNorm with and without weights, LayerNorm, and a counter that is no floating-point number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.plain = nn.BatchNorm2d(4, affine=False)
        self.hidden = nn.Linear(4, 8)
        self.layer_norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x, *, gain=None):
        x = self.plain(self.norm(self.conv(x))).relu().mean((2, 3))
        x = self.last(self.layer_norm(self.hidden(x)).relu())
        return {"logits": x if gain is None else x * gain}


def data(count=6):
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(8, 1, 6, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(count)
    ]


def loss_of(model, batch):
    return cross_entropy(model(batch[0])["logits"], batch[1])


def make(accel, precision, *, model=None, optimizer="sgd", **options):
    model = model or Net()
    made = accel.optimizers.create(optimizer, model.parameters(), lr=0.1) if isinstance(optimizer, str) else optimizer
    return accel.trainer(model, made, loss=loss_of, precision=precision, **options)


def by_hand(dtype, *, scale, masters, keep_batchnorm, accumulate=1, clip=None, batches=None):
    """Mixed precision as in a textbook, in plain torch: the model, and its losses."""
    model = Net()
    low = getattr(torch, dtype)
    model.to(low)
    if keep_batchnorm:
        model.norm.load_state_dict(Net().norm.float().state_dict())
        model.norm.float()
    trained = [p.detach().float() if masters else p for p in model.parameters()]
    optimizer = torch.optim.SGD(trained, lr=0.1, foreach=False)
    losses = []
    for number, (x, y) in enumerate(batches or data(), 1):
        loss = cross_entropy(model(x.to(low))["logits"].float(), y)
        (loss * scale / accumulate).backward()
        losses.append(loss.item())
        if number % accumulate:
            continue
        if masters:
            for master, parameter in zip(trained, model.parameters(), strict=True):
                master.grad = parameter.grad.float() / scale
        if clip is not None:
            nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        if masters:
            with torch.no_grad():
                for master, parameter in zip(trained, model.parameters(), strict=True):
                    parameter.copy_(master)
        model.zero_grad()
        optimizer.zero_grad()
    return model, losses


def assert_same_model(found, expected, **tolerance):
    ours, theirs = dict(found.named_parameters()), dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, value in {**theirs, **dict(expected.named_buffers())}.items():
        mine = {**ours, **dict(found.named_buffers())}[name]
        assert mine.dtype == value.dtype, name
        torch.testing.assert_close(mine, value, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@FLAT
@LOW
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "clip_norm": 0.3}], ids=["plain", "accumulated and clipped"])
def test_a_level_is_the_loop_written_by_hand(accel, level, dtype, flat, options):
    two = level == "O2"
    scale = 128.0 if two else 1.0
    expected, losses = by_hand(
        dtype, scale=scale, masters=two, keep_batchnorm=two,
        accumulate=options.get("accumulate", 1), clip=options.get("clip_norm"),
    )  # fmt: skip
    trainer = make(accel, Policy.preset(level, dtype=dtype), loss_scale=scale if two else None, flat=flat, **options)
    found = [trainer(batch).item() for batch in data()]
    eps = torch.finfo(getattr(torch, dtype)).eps
    step = {"rtol": eps, "atol": 1e-4} if two else {"rtol": 8 * eps, "atol": 2 * eps}  # O3 rounds what it adds up
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), **step)
    assert_same_model(trainer.model, expected, **step)


@FLAT
@LOW
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_what_is_held_passed_and_returned_in_which_dtype(accel, level, dtype, flat):
    """Outputs, gradients, masters and moments; seen from within and from without."""
    fp32, low = torch.float32, torch.float32 if level == "O0" else getattr(torch, dtype)
    of_norm = low if level == "O3" else fp32
    policy = Policy.preset(level) if level == "O0" else Policy.preset(level, dtype=dtype)
    model, seen, gradients = Net(), {}, {}
    trainer = make(accel, policy, model=model, optimizer="adamw", flat=flat)
    for name, module in model.named_children():
        module.register_forward_hook(lambda m, given, out, name=name: seen.update({name: (given[0].dtype, out.dtype)}))
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: gradients.update({name: gradient.dtype}))
    x = torch.randn(8, 1, 6, 6, dtype=torch.float64, requires_grad=True)
    logits = trainer.forward(x, gain=torch.ones(8, 1))["logits"]
    assert logits.dtype == fp32
    trainer.backward(cross_entropy(logits, torch.zeros(8, dtype=torch.long)))
    assert x.grad.dtype == x.dtype
    trainer.update()
    assert seen == dict.fromkeys(seen, (low, low))
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in held.items():
        if name.endswith("num_batches_tracked"):
            assert tensor.dtype == torch.int64, name
        else:
            assert tensor.dtype == (of_norm if name.startswith("norm.") else low), name
    assert gradients == {name: parameter.dtype for name, parameter in model.named_parameters()}
    state = trainer.optimizer.state
    moments = {p.dtype: state[p]["exp_avg"].dtype for p in state}
    assert level == "O3" or set(moments.values()) == {fp32}
    assert {value.dtype for value in model.state_dict().values()} == {fp32, torch.int64}


def test_the_scale_of_each_preset(accel):
    def scale(name, dtype=None):
        state = make(accel, Policy.preset(name, dtype=dtype)).scaler.state_dict()
        return state.get("scale", 1.0)

    levels = ("fp32", "bf16", "fp16", "O0", "O1", "O2", "O3")
    assert [scale(name) for name in levels] == [1.0, 1.0, 65536.0, 1.0, 65536.0, 65536.0, 1.0]
    assert [scale(name, "bfloat16") for name in ("O1", "O2", "O3")] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "dtype"), [("O4", None), ("o2", None), ("fp16", "bfloat16"), ("O0", "float16"), ("O2", "float32")]
)
def test_a_preset_that_does_not_exist_is_refused(name, dtype):
    with pytest.raises(accelcore.ConfigurationError, match="there is no precision") as caught:
        Policy.preset(name, dtype=dtype)
    assert "O2" in caught.value.available


@pytest.mark.parametrize("option", ["keep_batchnorm_fp32", "cast_boundary"])
def test_what_needs_a_dtype_of_the_model_is_refused_without(option):
    with pytest.raises(accelcore.ConfigurationError, match=option):
        Policy(**{option: True})


@FLAT
def test_an_overflow_is_skipped_and_training_goes_on(accel, flat):
    trainer = make(accel, "O2", optimizer="adamw", flat=flat)
    x, y = data(1)[0]
    trainer((x, y))
    before = copy.deepcopy(dict(trainer.model.named_parameters()))
    trainer((x * 1e30, y))
    assert trainer.skipped == 1
    assert trainer.scaler.state_dict()["scale"] == 32768.0
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it, but as error
@pytest.mark.parametrize(("level", "dtype"), diagonals(("O2", "O3"), ("float16", "bfloat16")))
def test_compiled_is_eager(accel, level, dtype):
    losses = []
    for compile in (False, {"backend": "aot_eager"}):
        trainer = make(accel, Policy.preset(level, dtype=dtype), compile=compile)
        losses.append([trainer(batch).item() for batch in data(3)])
        assert not compile or trainer.compiled.compiled, trainer.compiled.reason
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=torch.finfo(getattr(torch, dtype)).eps, atol=0)


def test_the_model_is_a_plain_one_when_its_trainer_is_gone(accel):
    model = Net()
    trainer = make(accel, "O2", model=model)
    assert trainer.forward(data(1)[0][0])["logits"].dtype == torch.float32
    del trainer
    assert model.state_dict()["last.weight"].dtype == torch.float16
    with pytest.raises(RuntimeError, match=r"dtype|type"):
        model(data(1)[0][0])
    again = make(accel, "O0", model=model)
    again(data(1)[0])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_a_part_that_is_added_later_is_held_alike(accel):
    model = Net()
    trainer = make(accel, "O2", model=model)
    trainer(data(1)[0])
    model.last.more = nn.Linear(8, 3)
    model.last.register_forward_hook(lambda m, given, out: out + m.more(given[0]))
    trainer.optimizer.add_param_group({"params": list(model.last.more.parameters())})
    trainer.refresh()
    trainer(data(1)[0])
    assert model.last.more.weight.dtype == torch.float16
    assert model.state_dict()["last.more.weight"].dtype == torch.float32


def test_o3_says_once_what_it_loses(accel, caplog):
    with caplog.at_level(logging.WARNING, "accelcore"):
        make(accel, Policy.preset("O3", dtype="bfloat16"))
    assert sum("without fp32 masters" in record.message for record in caplog.records) == 1
