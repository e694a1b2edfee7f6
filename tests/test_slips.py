"""Slips of people who know torch and are new here: what is taken, and what an error tells them to write."""

from __future__ import annotations

import copy
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import accelcore
from accelcore.errors import CheckpointError, ConfigurationError, TrainingError, UnknownBackendError


def test_a_device_of_torchs_is_taken():
    assert accelcore.select(torch.device("cpu")).device == torch.device("cpu")
    assert accelcore.select(torch.device("cpu", 0)).index == 0


@pytest.mark.parametrize("asked", ["gadget", "gadget:1", "Widget"])
def test_another_word_for_a_device_suggests_its_backend_and_loads_none(fakes, asked):
    fakes.install("raise SystemExit('it was loaded')", backends=["mydevice"], keywords="pytorch,gadget,widget")
    with pytest.raises(UnknownBackendError, match="did you mean 'mydevice'"):
        accelcore.select(asked)


@pytest.mark.parametrize(("plugin", "word"), [("cuda", "gpu"), ("cuda", "nvidia"), ("npu", "ascend")])
def test_the_plugins_metadata_has_other_words_for_their_devices(plugin, word):
    text = (Path(__file__).parents[1] / "plugins" / plugin / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"{word}"' in re.search(r"^keywords = (.+)$", text, re.M)[1]


@pytest.mark.parametrize("seed", ["0", 1.5, None, True, 2**64, -(2**63) - 1])
def test_a_seed_that_is_none_is_refused_and_draws_nothing(accel, seed):
    before = torch.get_rng_state()
    with pytest.raises(ConfigurationError, match=f"{seed!r} is not a seed"):
        accel.runtime.seed(seed)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [0, -1, 2**64 - 1, -(2**63)])
def test_every_seed_of_torchs_is_taken(accel, seed):
    accel.runtime.seed(seed)
    first = torch.rand(3)
    torch.manual_seed(seed)
    assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize(
    ("settings", "word", "meant"),
    [
        (accelcore.Policy, "dtype", "model_dtype"),
        (accelcore.Policy, "auto_cast", "autocast"),
        (accelcore.LossScale, "init_scale", "init"),
        (accelcore.LossScale, "growth_interval", "interval"),
        (accelcore.FSDP, "reshard", "reshard_after_forward"),
        (accelcore.Recompute, "part", "parts"),
    ],
)
def test_an_unknown_setting_suggests_a_known_one(settings, word, meant):
    with pytest.raises(ConfigurationError, match=f"no setting '{word}'(?s:.*)did you mean '{meant}'"):
        settings(**{word: 1})


@pytest.mark.parametrize("timeout", [15, 15.0, timedelta(seconds=15)])
def test_a_timeout_may_be_a_number_of_seconds(accel, monkeypatch, timeout):
    waits = []
    monkeypatch.setattr(type(accel.collectives), "init", lambda self, launch, *, timeout: waits.append(timeout))
    with accel.distributed(timeout=timeout):
        assert waits == [timedelta(seconds=15)]


@pytest.mark.parametrize("timeout", ["15", 0, -1, True, float("inf"), float("nan"), timedelta()])
def test_another_timeout_is_refused(accel, timeout):
    with pytest.raises(ConfigurationError, match="number of seconds"):
        accel.distributed(timeout=timeout)


@pytest.mark.parametrize("dtype", ["fp32", "float32", torch.float32, 32])
def test_autocast_to_fp32_switches_autocast_off(accel, dtype):
    one = torch.randn(3, 3)
    with accel.autocast("bf16"):
        assert (one @ one).dtype is torch.bfloat16
        with accel.autocast(dtype):
            assert (one @ one).dtype is torch.float32
        assert (one @ one).dtype is torch.bfloat16


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_setting_of_torchs_scaler_suggests_ours(accel, dynamic):
    with pytest.raises(ConfigurationError, match=r"'init_scale'(?s:.*)did you mean 'init'"):
        accel.scaler.create(init_scale=8.0, dynamic=dynamic)


def test_the_factory_of_scalers_says_how_one_is_made(accel):
    with pytest.raises(ConfigurationError, match=r"accel\.scaler\.create\(\)"):
        accel.scaler()


@pytest.mark.parametrize(
    ("precision", "remedy"),
    [("auto", "available: fp32, bf16"), (None, "available: fp32, bf16"), ("BF16", "did you mean 'bf16'"),
     ("mixed_bfloat16", "did you mean 'bf16'"), (torch.float64, "choose one"), ("float8_e4m3fn", "choose one")],
)  # fmt: skip
def test_a_precision_that_is_none_says_what_to_write(accel, precision, remedy):
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigurationError, match=f"there is no precision(?s:.*){remedy}"):
        accel.trainer(model, torch.optim.SGD(model.parameters()), precision=precision)


def test_a_learning_rate_may_be_given_as_to_torchs_classes(accel):
    parameters = list(torch.nn.Linear(2, 1).parameters())
    assert accel.optimizers.create("adamw", parameters, 0.5).param_groups[0]["lr"] == 0.5


def test_the_class_of_an_observer_says_to_make_one(accel):
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigurationError, match=r"Progress\(\.\.\.\)"):
        accel.trainer(model, torch.optim.SGD(model.parameters()), observers=[accelcore.Progress])


def test_a_trainer_may_be_copied_and_a_subclass_may_take_other_arguments(accel):
    class OfModel(accelcore.Trainer):
        def __init__(self, model):
            super().__init__(accel, model, torch.optim.SGD(model.parameters()))

    trainer = OfModel(torch.nn.Linear(2, 1))
    model = torch.nn.Linear(2, 1)
    for made in (trainer, accelcore.Trainer(accel, model, torch.optim.SGD(model.parameters()))):
        assert type(copy.deepcopy(made)) is type(copy.copy(made)) is type(made)


def test_a_name_that_is_close_to_several_suggests_them(accel):
    with pytest.raises(accelcore.UnsupportedError, match="did you mean 'adamax' or 'adam' or 'adamw'"):
        accel.optimizers.create("adamx", torch.nn.Linear(2, 1).parameters())


def _loss(model, batch):
    return model(batch).sum()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda accel, trainer: trainer.evaluate([torch.ones(2, 2)]).mean(_loss), "_loss(.|\n)*lambda batch: "),
        (lambda accel, trainer: trainer.evaluate([torch.ones(2, 2)]).mean("loss"), "a str(.|\n)*lambda batch: "),
        (lambda accel, trainer: trainer.evaluate([torch.ones(2, 2)]).mean(lambda batch: None), "returned None"),
        (lambda accel, trainer: trainer.evaluate([torch.ones(2, 2)]).mean(lambda batch: "0.5"), "returned a str "),
        (lambda accel, trainer: trainer.evaluate([torch.ones(2, 2)]).mean(lambda batch: {"a": [1.0]}), "a list "),
        (
            lambda accel, trainer: trainer.evaluate([torch.ones(2, 2)]).mean(lambda batch: batch.numpy()),
            r"ndarray(.|\n)*a tensor, without \.numpy\(\)",
        ),
        (lambda accel, trainer: trainer(torch.ones(2, 2), torch.ones(2)), r"one batch(.|\n)*trainer\(\(inputs, "),
        (lambda accel, trainer: next(trainer.batches("data")), "a str is not a loader"),
        (lambda accel, trainer: trainer.epochs("5"), r"'5'(.|\n)*int\('5'\)"),
        (
            lambda accel, trainer: accelcore.Log("outputs").write(acc=torch.ones(3)),
            r"acc=(?!(.|\n)*name)(.|\n)*\.mean\(",
        ),
        (lambda accel, trainer: trainer.resume("no/step-00000042"), r"step-00000042(?!(.|\n)*replay)"),
        (lambda accel, trainer: accel.trainer(trainer.model), r"optimizer is None(.|\n)*optimizers\.create\("),
        (lambda accel, trainer: accelcore.Trainer(trainer.model, trainer.optimizer), r"accel\.trainer\(model, "),
        (
            lambda accel, trainer: accel.trainer(trainer.model, trainer.optimizer, clip_norm="1"),
            r"'1'(.|\n)*int\('1'\)",
        ),
        (lambda accel, trainer: accel.trainer(trainer.model, trainer.optimizer, _loss), r"by name(.|\n)*loss="),
        (lambda accel, trainer: accelcore.Log("outputs").write(loss=0.5), r"itself(?!(.|\n)*number)(.|\n)*valid_loss="),
        (lambda accel, trainer: accelcore.Log("outputs").write({"score": 0.5}), r"by name(.|\n)*\*\*"),
        (lambda accel, trainer: accel.optimizers.create(trainer.model.parameters(), "adamw"), r"name first: create\("),
        (
            lambda accel, trainer: accel.optimizers.create("muon", trainer.model.parameters()),
            "2D(.|\n)*parameters that",
        ),
        (lambda accel, trainer: accel.join().mean([1, 2, 3]), r"a list(.|\n)*torch\.tensor\("),
        (lambda accel, trainer: accel.optimizers.fastest("adamw"), r"'adamw'(.|\n)*create\("),
        (lambda accel, trainer: accel.trainer(trainer.model, trainer.optimizer, total_steps=5), "total_steps=5.*sched"),
        (lambda accel, trainer: accel.trainer(trainer.model, trainer.optimizer, parallel="lr"), "available: .*'ddp'"),
    ],
)
def test_a_call_of_another_form_says_what_to_write(accel, tmp_path, monkeypatch, call, says):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 1)
    trainer = accel.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=_loss)
    with pytest.raises((CheckpointError, ConfigurationError, TrainingError, accelcore.UnsupportedError), match=says):
        call(accel, trainer)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda accel, trainer: trainer.fit, r"'fit': write .*trainer\.epochs\(n\)"),
        (lambda accel, trainer: trainer.step, r"trainer\.backward\(loss\) and trainer\.update"),
        (lambda accel, trainer: trainer.state_dict, r"trainer\.save"),
        (lambda accel, trainer: trainer.global_step, r"trainer\.steps"),
        (lambda accel, trainer: trainer.current_epoch, r"trainer\.epoch$"),
        (lambda accel, trainer: trainer.lr, r"trainer\.optimizer\.param_groups"),
        (lambda accel, trainer: trainer.device, r"accel\.device"),
        (lambda accel, trainer: trainer.log, r"accelcore\.Log\(.*log\.write\("),
        (lambda accel, trainer: trainer.clip_grad_norm_, "clip_norm=1.0"),
        (lambda accel, trainer: trainer.other, "no attribute 'other'$"),
        (lambda accel, trainer: accel.prepare, r"accel\.trainer\(model"),
        (lambda accel, trainer: accel.setup, r"accel\.trainer\(model"),
        (lambda accel, trainer: accel.launch, "accelcore run --nproc"),
        (lambda accel, trainer: accel.seed, r"accel\.runtime\.seed\("),
        (lambda accel, trainer: accel.to_device, r"accel\.runtime\.to_device\("),
        (lambda accel, trainer: accelcore.Accelerator, r"accelcore\.select\(\).*accel\.trainer\("),
        (lambda accel, trainer: accelcore.trainer, r"accelcore\.select\(\).*accel\.trainer\("),
        (lambda accel, trainer: accelcore.join, r"accelcore\.select\(\).*accel\.join\("),
        (lambda accel, trainer: accelcore.distributed, r"accelcore\.select\(\).*accel\.distributed\("),
        (lambda accel, trainer: accel.world_size, r"with accel\.distributed\(\) as job:"),
        (lambda accel, trainer: accel.distributed().is_main, r"as job:.*job = accel\.join\(\).*job\.is_main"),
    ],
)
def test_an_attribute_of_other_libraries_says_what_to_write(accel, call, says):
    model = torch.nn.Linear(2, 1)
    trainer = accel.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=_loss)
    with pytest.raises(AttributeError, match=says):
        call(accel, trainer)


def test_a_function_may_be_a_job_more_than_once(accel):
    @accel.distributed()
    def work(depth):
        return [accel.collectives.world_size, *(work(depth - 1) if depth else [])]

    assert [work(0), work(1)] == [[1], [1, 1]]


def test_the_number_of_updates_alone_is_for_observers(accel):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert accel.trainer(model, optimizer, total_steps=5, observers=[accelcore.Progress()]).total_steps == 5


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ({"inputs": torch.ones(2, 2)}, r"'inputs'(.|\n)*these items; or .*batch\[\"x\"\]"),
        ({"x": torch.ones(2, 2)}, r"no \"loss\"(.|\n)*'logits'(.|\n)*labels"),
    ],
)
def test_a_model_called_by_names_that_gives_no_loss_says_which_names_there_are(accel, batch, says):
    class Named(torch.nn.Linear):
        def forward(self, x, labels=None):
            return {"logits": super().forward(x)}

    model = Named(2, 1)
    with pytest.raises(TrainingError, match=says):
        accel.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))(batch)


def test_a_compiler_needs_no_options(accel):
    assert callable(accel.compiler.compile(torch.nn.Linear(2, 1)).module)
