"""compare_logprobs names the first module where two ways of running one model part."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import accelcore
from accelcore.errors import ConfigurationError

WIDTH, WORDS = 16, 40


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cache=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        if cache is not None:
            cache.append((k, v))
            k, v = (torch.cat(each, 1) for each in zip(*cache, strict=True))
        scores = q @ k.mT / WIDTH**0.5
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        return self.out(scores.masked_fill(~mask, -math.inf).softmax(-1) @ v)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.drop = nn.LayerNorm(WIDTH), Attention(), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x, cache=None):
        x = x + self.drop(self.attention(self.norm(x), cache))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, caches=(None, None)):
        x = self.tokens(tokens)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache)
        return self.head(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture
def tokens():
    return torch.randint(WORDS, (8, 12), generator=torch.Generator().manual_seed(1))


def by_ones(model):
    return lambda tokens: torch.cat([model(row[None]) for row in tokens])


def incremental(model):
    def run(tokens):
        caches = ([], [])
        return torch.cat([model(tokens[:, now : now + 1], caches) for now in range(tokens.shape[1])], 1)

    return run


def oracle(a, b, tokens):
    """The largest difference of log-probabilities, by cross entropy in float64."""
    found = [
        F.cross_entropy(way(tokens)[:, :-1].detach().double().mT, tokens[:, 1:], reduction="none") for way in (a, b)
    ]
    return (found[0] - found[1]).abs()


def test_one_way_agrees_with_itself(model, tokens):
    found = accelcore.compare_logprobs(model, model, tokens)
    assert (found.agrees, found.maximum, found.module, found.ratio) == (True, 0.0, None, 0.0)
    assert {layer.module for layer in found.layers} >= {"tokens", "blocks.1.attention.qkv", "head", ""}


def test_masked_words_are_equal_in_both_ways(model, tokens):
    def masked(factor):
        return lambda tokens: (factor * model(tokens)).index_fill(-1, torch.tensor([int(tokens[0, 1])]), -math.inf)

    assert accelcore.compare_logprobs(masked(1), masked(1), tokens).agrees
    found = accelcore.compare_logprobs(masked(1), masked(1.5), tokens)
    assert math.isfinite(found.maximum)
    assert found.ratio > 1e4


@pytest.mark.parametrize("way", [by_ones, incremental])
def test_parts_of_a_batch_are_joined(model, tokens, way):
    found = accelcore.compare_logprobs(model, way(model), tokens, modules=(model, model))
    apart = oracle(model, way(model), tokens)
    assert found.maximum == pytest.approx(apart.max().item(), abs=1e-12)
    assert found.mean == pytest.approx(apart.mean().item(), abs=1e-12)
    assert found.ratio < 100
    assert not found.notes
    assert found.layers[0].module == "tokens"
    assert (found.module is None) == found.agrees


def test_a_module_that_is_not_batch_invariant_is_named(model, tokens):
    def handle(module, arguments, output):
        return output * (1 + 1e-5 * (output.shape[0] == 1))

    model.blocks[1].up.register_forward_hook(handle)
    found = accelcore.compare_logprobs(model, by_ones(model), tokens, modules=(model, model))
    assert not found.agrees
    exact = [layer for layer in found.layers[:-1] if layer.ratio > 50]
    assert found.module == "blocks.1.up" or not exact


@pytest.mark.parametrize("name", ["tokens", "blocks.0.attention.out", "blocks.1.down", "head"])
def test_the_layer_with_other_weights_is_named(model, tokens, name):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_submodule(name).weight[3] *= 1.001
    found = accelcore.compare_logprobs(model, other, torch.where(tokens == 5, 3, tokens))
    assert (found.agrees, found.module, found.item) == (False, name, "output 0")
    assert found.layers[-1].module == name
    assert all(layer.equal for layer in found.layers[:-1])
    assert name in str(found)


def test_what_a_module_computes_between_its_parts_is_its_own(model, tokens):
    other = copy.deepcopy(model)
    kept = other.blocks[1].attention

    class Wrong(Attention):
        def forward(self, x, cache=None):
            q, k, v = self.qkv(x).chunk(3, -1)
            return self.out((q @ k.mT / WIDTH**0.5 * 1.01).softmax(-1) @ v)

    wrong = Wrong()
    wrong.load_state_dict(kept.state_dict())
    other.blocks[1].attention = wrong
    found = accelcore.compare_logprobs(model, other, tokens)
    assert (found.module, found.item) == ("blocks.1.attention", "input 0 of blocks.1.attention.out")


def test_bf16_agrees_with_fp32_up_to_rounding_and_a_wrong_layer_is_still_named(model, tokens):
    low = copy.deepcopy(model).bfloat16()
    found = accelcore.compare_logprobs(model, low, tokens)
    assert found.agrees
    assert 0 < found.maximum < 1
    assert found.ratio < 16
    with torch.no_grad():
        low.blocks[1].down.weight.mul_(2)
    found = accelcore.compare_logprobs(model, low, tokens)
    assert (found.agrees, found.module) == (False, "blocks.1.down")


def test_training_mode_parts_at_its_dropout(model, tokens):
    training = copy.deepcopy(model).train()
    found = accelcore.compare_logprobs(model, training, tokens)
    assert found.module == "blocks.0.drop"
    assert found.maximum > 0.01
    assert accelcore.compare_logprobs(training, training, tokens).agrees  # both draw the same


def test_random_generators_and_hooks_are_left_as_they_were(model, tokens):
    state = torch.get_rng_state()
    accelcore.compare_logprobs(model.train(), model, tokens)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.full  # to import torch's compiler takes seconds
def test_a_compiled_model_says_that_its_modules_are_not_seen(model, tokens):
    compiled = torch.compile(model, backend="eager")
    found = accelcore.compare_logprobs(model, compiled, tokens)
    assert found.maximum == pytest.approx(0, abs=1e-5)
    assert json.dumps(found.as_json())


def test_logits_come_in_other_forms(model, tokens):
    for form in (lambda t: {"logits": model(t)}, lambda t: (model(t), None)):
        assert accelcore.compare_logprobs(model, form, tokens, modules=(model, model)).agrees


def test_a_way_without_modules_is_reported(model, tokens):
    found = accelcore.compare_logprobs(model, lambda tokens: model(tokens) * 1.001, tokens)
    assert found.module is None
    assert not found.agrees
    assert any("modules=" in note for note in found.notes)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": torch.zeros(3, dtype=torch.long)}, "tokens of shape"),
        ({"tokens": torch.zeros(3, 3)}, "float32"),
        ({"a": lambda tokens: tokens.float()}, "not logits"),
        ({"a": lambda tokens: "x"}, "a str"),
        ({"modules": (1, 2)}, "pair of modules"),
    ],
)
def test_what_cannot_be_compared_is_refused(model, tokens, change, why):
    given = {"a": model, "b": model, "tokens": tokens} | change
    with pytest.raises(ConfigurationError, match=why):
        accelcore.compare_logprobs(**given)
