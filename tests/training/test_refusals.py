"""What cannot be trained is refused, by a message that says what could be."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from toys import data, loss_of, net

import accelcore


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (lambda m, b: m(b[0]), "shape"),
        (lambda m, b: 3.0, "float"),
        (lambda m, b: loss_of(m, b).detach(), "depends on no trained parameter"),
        (lambda m, b: None, "the loss is None"),
        (lambda m, b: (m(b[0]) > 0).sum(), "int64.*no gradient"),
    ],
)
def test_what_is_no_loss_is_refused_and_nothing_changes(accel, loss, says):
    model = net()
    before = copy.deepcopy(list(model.parameters()))
    trainer = accel.trainer(model, accel.optimizers.create("sgd", model.parameters()), loss=loss)
    with pytest.raises(accelcore.TrainingError, match=says):
        trainer(data(1)[0])
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert trainer.steps == 0


@pytest.mark.parametrize("options", [{"clip": torch.nn.utils.clip_grad_norm_}, {"weight": lambda model, batch: 1.0}])
def test_a_function_of_other_arguments_is_refused_when_the_trainer_is_made(accel, options):
    model = net()
    with pytest.raises(accelcore.ConfigurationError, match="is not a function of the"):
        accel.trainer(model, accel.optimizers.create("sgd", model.parameters()), loss=loss_of, **options)


def test_one_process_trains_a_model_with_statistics_over_ranks_on_any_device(accel):
    model = torch.nn.Sequential(net(), torch.nn.SyncBatchNorm(2))
    trainer = accel.trainer(model, accel.optimizers.create("sgd", model.parameters()), loss=loss_of, parallel="ddp")
    assert trainer(data(1)[0]).isfinite()


def test_a_window_without_any_gradient_is_refused_and_the_next_one_is_right(accel):
    model = net()
    trainer = accel.trainer(model, accel.optimizers.create("sgd", model.parameters()), loss=loss_of, accumulate=2)
    with pytest.raises(accelcore.TrainingError, match=r"trainer\.backward\(loss\) was not"):
        trainer.update()
    assert trainer.steps == 0
    for batch in data(2):
        trainer(batch)
    assert trainer.steps == 1


def test_a_micro_batch_without_a_gradient_is_refused_and_the_next_window_is_right(accel):
    """Counted, it would halve the gradient of a window of two."""
    models = [net(), net()]
    models[1].load_state_dict(models[0].state_dict())
    odd, even = (
        accel.trainer(each, accel.optimizers.create("sgd", each.parameters(), lr=0.1), accumulate=2) for each in models
    )
    first, second, third = data(3)
    odd.backward(loss_of(odd.forward, first))
    odd.update()
    with pytest.raises(accelcore.TrainingError, match="since the last update"):
        odd.update()
    for trainer in (odd, even):
        for batch in (second, third):
            trainer.backward(loss_of(trainer.forward, batch))
            trainer.update()
        assert trainer.steps == 1
    for ours, expected in zip(*(each.parameters() for each in models), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loss_that_called_backward_itself_is_refused(precision, accel):
    """Its gradients are not scaled: with a loss scale, the update would divide by what nothing was multiplied by."""
    model = net()
    trainer = accel.trainer(model, accel.optimizers.create("sgd", model.parameters()), precision=precision)
    before = [parameter.clone() for parameter in model.parameters()]
    with trainer.autocast():
        loss = loss_of(trainer.forward, data(1)[0])
    loss.backward()
    with pytest.raises(accelcore.TrainingError, match=r"trainer\.backward\(loss\) instead of loss\.backward"):
        trainer.update()
    for parameter, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter, old, rtol=0, atol=0)


def test_a_dtype_that_is_not_declared_is_refused(accel):
    model = net().half()
    fewer = dataclasses.replace(accel.capabilities, model_dtypes=("float32",))
    with pytest.raises(accelcore.UnsupportedError, match="float16"):
        dataclasses.replace(accel, capabilities=fewer).trainer(
            model, accel.optimizers.create("sgd", model.parameters())
        )


def test_ranks_that_have_not_met_are_refused(accel, monkeypatch):
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    model = net()
    with pytest.raises(accelcore.DistributedError, match=r"accel\.distributed"):
        accel.trainer(model, accel.optimizers.create("sgd", model.parameters()), parallel="ddp")


def test_a_job_of_several_ranks_without_a_strategy_says_which_to_take(accel, monkeypatch):
    monkeypatch.setattr(type(accel.collectives), "world_size", 2)
    model = net()
    with pytest.raises(accelcore.ConfigurationError, match=r'parallel=None(.|\n)*give "ddp" if (.|\n)*"fsdp" if not'):
        accel.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_setting_by_which_torch_replaces_moved_parameters_is_refused(accel, monkeypatch):
    monkeypatch.setattr("torch.__future__._overwrite_module_params_on_conversion", True)
    model = net()
    with pytest.raises(accelcore.ConfigurationError, match="set_overwrite_module_params_on_conversion"):
        accel.trainer(model, accel.optimizers.create("sgd", model.parameters()), loss=loss_of)
