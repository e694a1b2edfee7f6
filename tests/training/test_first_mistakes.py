"""What a person tries first, and gets an answer to; and words that mean one thing."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from collections import UserList

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import accelcore
from accelcore import ConfigurationError, Policy


def net():
    return nn.Linear(4, 2)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda model: (model, "adamw"), r'accel\.optimizers\.create\("adamw", model'),
        (lambda model: (model, torch.optim.AdamW), r"AdamW\(model\.parameters\(\), lr="),
        (lambda model: (model, [sgd(model)]), "several parameter groups"),
        (lambda model: (model, None), "make it"),
        (lambda model: ([model, net()], sgd(model)), r"a list, not .*\n.*ModuleList"),
        (lambda model: ({"g": model}, sgd(model)), "a dict, not"),
        (lambda model: (sgd(model), model), "the model first"),
        (lambda model: (nn.Linear, sgd(model)), "the class Linear"),
        (lambda model: (empty := model.to("meta"), sgd(empty)), r"'weight'.*\bmeta\b(.|\n)*to_empty"),
    ],
)
def test_arguments(accel, make, says):
    with pytest.raises(ConfigurationError, match=says):
        accel.trainer(*make(net()))


@pytest.mark.parametrize(
    "loss",
    [nn.CrossEntropyLoss(), nn.CrossEntropyLoss, nn.functional.mse_loss, torch.sum, 0.5, "l1",
     lambda batch, model: model(batch).sum()],
)  # fmt: skip
def test_a_loss_that_takes_no_model_is_refused_when_the_trainer_is_made(accel, loss):
    model = net()
    before = model.weight
    with pytest.raises(ConfigurationError, match=r"lambda model, batch"):
        accel.trainer(model, sgd(model), loss=loss)
    assert model.weight is before


def test_a_loss_that_is_a_module_of_ones_own_is_none_of_torchs(accel):
    class Own(nn.Module):
        def forward(self, model, batch):
            return model(batch).sum()

    model = net()
    assert accel.trainer(model, sgd(model), loss=Own())(torch.ones(2, 4)).dim() == 0


LOADER = torch.utils.data.DataLoader(torch.ones(2, 4))
WORDS = {
    torch.float32: "fp32", "float32": "fp32", "32-true": "fp32", 32: "fp32", "no": "fp32",
    torch.bfloat16: "bf16", "bfloat16": "bf16", "bf16-mixed": "bf16",
    torch.float16: "fp16", "16-mixed": "fp16", 16: "fp16", "half": "fp16",
    "bf16-true": Policy(model_dtype="bfloat16"), "best": "bf16",
}  # fmt: skip


@pytest.mark.parametrize("word", WORDS, ids=str)
def test_words_for_a_precision_mean_one_thing(accel, word, monkeypatch):
    monkeypatch.setattr(type(accel.precision), "has_units", lambda self, dtype: dtype == torch.bfloat16)
    seen = []
    for precision in (word, WORDS[word]):
        torch.manual_seed(0)
        model = net()
        trainer = accel.trainer(model, sgd(model), loss=lambda m, x: (m(x).square().sum(), m(x)), precision=precision)
        rows = torch.ones(2, 4, dtype=model.weight.dtype)
        seen.append((float(trainer(rows)), trainer.aux.dtype, type(trainer.scaler)))
    assert seen[0] == seen[1]
    with pytest.raises(ConfigurationError, match=r"'bfloat'\n  .*bf16, .*\n.*did you mean 'bf16'\?"):
        accel.trainer(model, sgd(model), precision="bfloat")
    with pytest.raises(ConfigurationError, match=r"there is no precision 'bf17'\n  .*, best\n.*did you mean 'bf16'\?"):
        accel.trainer(model, sgd(model), precision="bf17")
    with pytest.raises(ConfigurationError, match=r"fp32='fats'.*\n.*, fast if possible\n.*did you mean 'fast'\?"):
        accel.trainer(model, sgd(model), fp32="fats")


def test_what_helps_if_it_can_does_nothing_where_it_cannot(accel, monkeypatch):
    slow = dataclasses.replace(
        accel, capabilities=dataclasses.replace(accel.capabilities, autocast_dtypes=(), fast_fp32=None)
    )
    model = net()
    trainer = slow.trainer(model, sgd(model), loss=lambda m, x: m(x).sum(), precision="best", fp32="fast if possible")
    trainer(torch.ones(2, 4))
    with slow.autocast("best"):
        assert model(torch.ones(2, 4)).dtype == torch.float32
    monkeypatch.setattr(type(accel.precision), "has_units", lambda self, dtype: True)
    with accel.autocast("best"):
        assert model(torch.ones(2, 4)).dtype == torch.bfloat16
    for word in ("bf16", "bfloat16", torch.bfloat16):
        with accel.autocast(word):
            assert model(torch.ones(2, 4)).dtype == torch.bfloat16
    with pytest.raises(ConfigurationError, match="'bf17'"):
        accel.autocast("bf17")


def test_a_backend_and_a_trainer_show_in_one_line(accel):
    model = net()
    trainer = accel.trainer(model, accel.optimizers.create("adamw", model.parameters()))
    assert repr(accel) == "<Backend cpu:0>"
    assert repr(trainer) == "<Trainer of Linear by adamw on cpu, 0 steps>"


def test_a_device_that_is_nearly_one():
    with pytest.raises(accelcore.UnknownBackendError, match="did you mean 'cpu'"):
        accelcore.select("cppu")


def test_a_script_asks_for_what_helps_here_without_a_branch(accel):
    data = torch.arange(6.0)
    assert [len(batch) for batch in torch.utils.data.DataLoader(data, 4, **accel.loading())] == [4, 2]


def test_a_backend_lives_in_a_config(accel):
    config = copy.deepcopy({"accel": accel, "lr": 0.1})
    assert config["accel"] is accel is copy.copy(accel)
    twin = pickle.loads(pickle.dumps(accel))
    assert twin is not accel
    assert (twin.name, twin.index, twin.device) == (accel.name, accel.index, accel.device)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mixed_precision": "bf16"}, "'mixed_precision'(.|\n)*did you mean 'precision'"),
        ({"dtype": "bf16"}, "'dtype'(.|\n)*did you mean 'precision'"),
        ({"gradient_accumulation_steps": 4}, "did you mean 'accumulate'"),
        ({"max_grad_norm": 1.0}, "did you mean 'clip_norm'"),
        ({"strategy": "ddp"}, "did you mean 'parallel'"),
        ({"amp": True}, "did you mean 'precision'"),
        ({"max_epochs": 3}, r"no option 'max_epochs'(.|\n)*available(.|\n)*trainer\.epochs\("),
        ({"device": "cuda"}, r"accelcore\.select\("),
        ({"fp16": True}, 'precision="fp16"'),
        ({"callbacks": []}, "did you mean 'observers'"),
        ({"lr": 0.1}, "to the optimizer"),
        ({"fp32": "tf32"}, "did you mean 'fast'"),
        ({"fp32": True}, r"fp32=True(.|\n)*remove fp32"),
        ({"fp32": ["fast"]}, r"fp32=\['fast'\](.|\n)*ieee"),
        ({"clip norm": 1.0}, "did you mean 'clip_norm'"),
        ({"clip": "1.0"}, r"clip='1\.0'(.|\n)*clip_norm="),
        ({"graph": "1"}, r"graph='1'(.|\n)*one of them"),
        ({"clip_norm": "10k"}, "text: write a number"),
        ({"graph": True}, "declares no graphs"),
        ({"accumulate": "4"}, r"accumulate='4'(.|\n)*text(.|\n)*int\('4'\)"),
        ({"total_steps": "9"}, r"int\('9'\)"),
        ({"accumulate": "4.0"}, r"accumulate='4\.0'(?!(.|\n)*float)(.|\n)*a whole number"),
        ({"warmup": "0.1", "scheduler": "cosine"}, r"float\('0\.1'\)"),
        ({"loss_scale": "128"}, r"int\('128'\)"),
        ({"parallel": "DDP"}, "did you mean 'ddp'"),
        ({"precision": {"model_dtype": "bfloat16"}}, r"Policy\(\*\*"),
        ({"precision": "amp"}, r"'amp'\n  available: fp32, (.|\n)*did you mean 'bf16'"),
        ({"precision": "BF16"}, "did you mean 'bf16'"),
        ({"observers": accelcore.Progress()}, r"observers=.*Progress.* is not a list(.|\n)*observers=\[\.\.\.\]"),
    ],
)
def test_words_of_other_libraries(accel, options, says):
    model = net()
    with pytest.raises(accelcore.AccelError, match=says):
        accel.trainer(model, sgd(model), **options)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda accel, of: accel.runtime.prefetch(LOADER), r"DataLoader is not a batch(.|\n)*for batch in loader"),
        (lambda accel, of: accel.runtime.to_device(iter(LOADER)), r"not a batch(.|\n)*for batch in loader"),
        (lambda accel, of: accelcore.Log("outputs", evry=5), "'evry'(.|\n)*did you mean 'every'"),
        (lambda accel, of: accelcore.Progress(second=1), "'second'(.|\n)*did you mean 'seconds'"),
        (lambda accel, of: Policy(model_dtype="bf17"), "did you mean 'bf16'"),
        (lambda accel, of: accel.autocast("bf17"), "did you mean 'bf16'"),
        (lambda accel, of: accelcore.select("cpu:9"), "choose cpu:0"),
        (lambda accel, of: accel.join().mean("0.5"), "a str(.|\n)*give a number"),
    ],
)
def test_slips_outside_of_a_trainer_say_what_was_meant(accel, call, says):
    with pytest.raises(accelcore.AccelError, match=says):
        call(accel, accel.optimizers.create("sgd", net().parameters()))


@pytest.mark.parametrize("flat", [None, True, False])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_within_a_window_is_refused_and_between_two_does_nothing(accel, to_none, flat):
    def train(accumulate, cleared):
        torch.manual_seed(0)
        model = net()
        optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.1)
        trainer = accel.trainer(model, optimizer, loss=lambda m, b: m(b).sum(), accumulate=accumulate, flat=flat)
        for batch in (torch.ones(2, 4), torch.arange(8.0).view(2, 4)):
            if cleared:
                (optimizer if to_none else model).zero_grad(set_to_none=to_none)
            trainer(batch)
        return [parameter.detach().clone() for parameter in model.parameters()]

    torch.testing.assert_close(train(1, cleared=True), train(1, cleared=False), rtol=0, atol=0)
    with pytest.raises(accelcore.TrainingError, match=r"cleared(?s:.*)remove optimizer\.zero_grad\(\)"):
        train(2, cleared=True)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_updates_by_itself_needs_no_update_and_no_step(accel, accumulate):
    model = net()
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.1)
    trainer = accel.trainer(model, optimizer, loss=lambda model, batch: model(batch).sum(), accumulate=accumulate)
    trainer(torch.ones(2, 4))
    with pytest.raises(accelcore.TrainingError, match=r"trainer\.update\(\) was called(.|\n)*after trainer\(batch\)"):
        trainer.update()
    trainer.flush()
    with pytest.raises(accelcore.TrainingError, match=r"remove the call of optimizer\.step\(\): trainer\(batch\)"):
        optimizer.step()
    trainer.backward(model(torch.ones(2, 4)).sum())
    trainer.update()
    trainer.flush()
    with pytest.raises(accelcore.TrainingError, match=r"remove the call of optimizer\.step\(\): trainer\.update\(\)"):
        optimizer.step()


@pytest.mark.parametrize("make", [torch.utils.data.DataLoader, torch.utils.data.TensorDataset, iter])
def test_a_loader_in_place_of_a_batch_is_refused_and_the_next_step_is_right(accel, caplog, make):
    model = net()
    trainer = accel.trainer(model, sgd(model), loss=lambda model, batch: model(batch).sum(), accumulate=2)
    with pytest.raises(ConfigurationError, match=r"not a batch(.|\n)*for batch in loader"):
        trainer(make(torch.ones(2, 4)))
    assert "dropped" not in caplog.text, "the window was empty"
    for _ in range(2):
        trainer(torch.ones(2, 4))
    assert trainer.steps == 1


def test_an_offload_of_a_model_without_parts_says_what_to_do(accel):
    with pytest.raises(ConfigurationError, match=r"chooses no part(.|\n)*remove offload="):
        accel.trainer(model := net(), sgd(model), offload=nn.Linear)


def test_a_model_whose_layers_were_all_replaced_is_named(accel):
    model = nn.Sequential(net())
    trainer = accel.trainer(model, sgd(model), loss=lambda model, batch: model(batch).sum())
    trainer(torch.ones(2, 4))
    model[0] = net()
    with pytest.raises(accelcore.TrainingError, match=r"'0\.weight' was removed or replaced"):
        trainer(torch.ones(2, 4))


@pytest.mark.parametrize("loss", [lambda batch: batch.sum(), lambda model, batch, weight: batch.sum()])
def test_a_loss_of_other_arguments_is_refused_when_the_trainer_is_made(accel, loss):
    model = net()
    with pytest.raises(ConfigurationError, match=r"does not take a model(.|\n)*lambda model, batch: "):
        accel.trainer(model, sgd(model), loss=loss)


def test_a_state_dict_in_place_of_its_file_is_not_printed_as_a_whole(accel):
    model = net()
    with pytest.raises(ConfigurationError, match="is not a path") as refused:
        accel.trainer(model, sgd(model)).load(nn.Linear(40, 40).state_dict())
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("made", ["torch's", "ours"])
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_between_backward_and_update_is_reported_in_the_first_step(accel, to_none, made, caplog):
    model = net()
    optimizer = sgd(model) if made == "torch's" else accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    trainer = accel.trainer(model, optimizer)
    trainer.backward(trainer.forward(torch.ones(2, 4)).mean())
    optimizer.zero_grad(set_to_none=to_none)
    if to_none:
        with pytest.raises(accelcore.TrainingError, match=r"no parameter received(?s:.*)zero_grad\(\)"):
            trainer.update()
        assert not caplog.records
    else:
        trainer.update()
        assert "remove" in caplog.text
        assert "zero_grad(set_to_none=False)" in caplog.text


def test_a_script_may_drop_a_gradient_and_clip_those_that_are_0(accel):
    model, data = nn.Sequential(net(), nn.Linear(2, 1)), torch.ones(2, 4)
    trainer = accel.trainer(model, sgd(model))
    for factor in (0, 1, 0):  # a loss may have no gradient, such as of a triplet, or of equal rewards
        trainer.backward(factor * trainer.forward(data).mean())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if factor:
            model[0].weight.grad = None  # such as of layers that an epoch does not train
        before = model[1].weight.clone()
        trainer.update()
        assert torch.equal(model[1].weight, before) == (factor == 0)


def test_gradients_that_a_script_writes_to_are_not_cleared_if_the_first_is_0(accel):
    model = nn.Sequential(net(), nn.Linear(2, 1))  # such as of LoRA, which begins with a 0
    nn.init.zeros_(model[1].weight)
    before, trainer = model[1].weight.clone(), accel.trainer(model, sgd(model))
    trainer.backward(trainer.forward(torch.ones(2, 4)).mean())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    trainer.update()
    assert not model[0].weight.grad
    assert not torch.equal(model[1].weight, before)


def test_a_step_within_an_evaluation_is_one_error_and_no_warning(accel, caplog):
    model = net()
    trainer = accel.trainer(model, sgd(model), loss=lambda model, batch: model(batch).sum())
    evaluated = iter(trainer.evaluate([torch.ones(2, 4)]))
    with pytest.raises(accelcore.TrainingError, match=r"gradients are off(.|\n)*trainer\.evaluate"):
        trainer(next(evaluated))
    assert not caplog.records


@pytest.mark.parametrize(
    ("batch", "cause"),
    [
        ((torch.ones(2, 4), torch.ones(2)), TypeError),
        ({"x": torch.ones(2, 4), "y": torch.ones(2)}, TypeError),
        (torch.ones(2, 4), None),
    ],
)
def test_a_loss_that_was_forgotten(accel, batch, cause):
    model = net()
    trainer = accel.trainer(model, sgd(model))
    with pytest.raises(accelcore.TrainingError, match="loss= was not given") as found:
        trainer(batch)
    assert type(found.value.__cause__) is (cause or type(None))


def test_backward_on_the_loss_of_a_step_is_refused_and_the_loss_is_plain_elsewhere(accel, tmp_path):
    model = net()
    loss = accel.trainer(model, sgd(model), loss=lambda m, x: m(x).sum())(torch.ones(2, 4))
    for call in (loss.backward, copy.deepcopy(loss).backward, lambda: loss.backward(retain_graph=True)):
        with pytest.raises(accelcore.TrainingError, match=r"remove \.backward"):
            call()
    torch.save([loss], tmp_path / "loss.pt")
    (loaded,) = torch.load(tmp_path / "loss.pt", weights_only=True)
    for plain in (loaded, pickle.loads(pickle.dumps(loss)), copy.copy(loss), loss + 0, loss.clone()):
        assert (type(plain), vars(plain), plain.item()) == (torch.Tensor, {}, loss.item())


def test_a_type_error_within_a_model_stays_what_it_is(accel):
    class Wrong(nn.Linear):
        def forward(self, x):
            return len(x.sum)

    model = Wrong(4, 2)
    with pytest.raises(TypeError, match="len"):
        accel.trainer(model, sgd(model))(torch.ones(2, 4))


@pytest.mark.parametrize("options", [{"lr": "1e-3"}, {"weight_decay": "0.1"}, {"betas": [0.9, "0.95"]}])
def test_a_number_that_yaml_reads_as_text(accel, options):
    with pytest.raises(ConfigurationError, match=r"is not a number(.|\n)*text(.|\n)*(YAML|command line)(.|\n)*float\("):
        accel.optimizers.create("adamw", net().parameters(), **options)
    with pytest.raises(ConfigurationError, match="this is text"):
        accel.optimizers.create("adamw", [{"params": net().parameters(), **options}])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="an error has no notes")
@pytest.mark.parametrize("batch", [["text"], [np.ones((2, 4), "float32")]])
def test_a_batch_without_a_tensor_has_a_note_on_how_to_make_one(accel, batch):
    model = net()
    trainer = accel.trainer(model, sgd(model), loss=lambda model, batch: model(batch[0]).mean())
    with pytest.raises(TypeError) as raised:
        trainer(batch)
    assert any("torch.as_tensor(" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("lr", [None, True, [0.1]])
def test_an_lr_that_a_file_leaves_empty_is_not_the_default(accel, lr):
    with pytest.raises(ConfigurationError, match=r"lr=(.|\n)*remove lr"):
        accel.optimizers.create("adamw", net().parameters(), lr=lr)
    with pytest.raises(ConfigurationError, match="lr="):
        accel.optimizers.create("adamw", [{"params": net().parameters(), "lr": lr}])


@pytest.mark.parametrize("betas", [0.9, UserList([0.9, 0.95])])  # the list class of a configuration is no list
def test_betas_that_are_no_tuple(accel, betas):
    with pytest.raises(ConfigurationError, match=rf"betas=.* is a {type(betas).__name__}(.|\n)*give both.*betas=tuple"):
        accel.optimizers.create("adamw", net().parameters(), betas=betas)


def test_betas_that_are_too_few(accel):
    with pytest.raises(ConfigurationError, match=r"refuses these(.|\n)*out of range"):
        accel.optimizers.create("adamw", net().parameters(), betas=(0.9,))


@pytest.mark.parametrize("options", [{}, {"compile": {"backend": "eager"}}])
def test_a_model_that_is_compiled_already(accel, options, tmp_path, caplog):
    model = torch.compile(net(), backend="eager")
    trainer = accel.trainer(model, sgd(model), loss=lambda m, x: m(x).sum(), **options)
    assert trainer.compiled is not None
    assert ("torch.compile" in caplog.text) == (not options)
    path = trainer.save(tmp_path)
    assert set(trainer.model.state_dict()) == {"weight", "bias"} == set(load_file(path / "model.safetensors"))
    twin = net()
    assert accel.trainer(twin, sgd(twin)).resume(tmp_path) == path
    if options:
        trainer(torch.ones(2, 4))
        assert model(torch.ones(2, 4)).shape == (2, 2)


@pytest.mark.parametrize("module", [net(), nn.Sequential(net())])
def test_a_module_in_place_of_its_parameters_is_refused(accel, module):
    with pytest.raises(ConfigurationError, match=r"is a module(.|\n)*model\.parameters\(\)"):
        accel.optimizers.create("adamw", module)
