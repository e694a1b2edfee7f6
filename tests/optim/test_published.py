"""The formulas against the packages that they are told from, where those are installed; see tox.ini."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from accelcore.optim.formulas import FORMULAS
from accelcore.testing.support.options import LR, STEPS, gradients, oracle, parameters

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


def part_of(package, name):
    """One module of a package, without the rest, which needs more than torch."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f"{package} is not installed: tox installs it")
    (folder, *_) = spec.submodule_search_locations
    alone, _, module = name.rpartition(".")
    stand_in = f"{package}_{alone or 'alone'}"
    if stand_in not in sys.modules:
        sys.modules[stand_in] = ModuleType(stand_in)
        sys.modules[stand_in].__path__ = [f"{folder}/{alone}"]
    return importlib.import_module(f"{stand_in}.{module}")


def adamp():
    return pytest.importorskip("torch_optimizer").AdamP


def lamb():
    kind = pytest.importorskip("torch_optimizer").Lamb
    return lambda members, **options: kind(members, debias=False, **options)


def other_lamb():
    kind = pytest.importorskip("pytorch_optimizer").Lamb
    return lambda members, **options: kind(members, weight_decouple=False, adam_debias=True, **options)


def rmsproptf():
    kind = part_of("timm", "optim.rmsprop_tf").RMSpropTF

    def make(members, *, weight_decay=0.0, decoupled_decay=False, **options):
        scaled = weight_decay / options["lr"] if decoupled_decay else weight_decay  # timm's is scaled by lr
        return kind(members, weight_decay=scaled, decoupled_decay=decoupled_decay, **options)

    return make


def bertadam():
    kind = part_of("pytorch_pretrained_bert", "optimization").BertAdam
    return lambda members, **options: kind(members, **options)


CASES = [
    *(("adamp", adamp, options, 1e-12) for options in (
        {}, {"weight_decay": 0.1}, {"nesterov": True}, {"delta": 0.9, "weight_decay": 0.1},
        {"delta": 3.0, "weight_decay": 0.1, "wd_ratio": 0.5}, {"betas": (0.5, 0.7), "eps": 0.5},
    )),
    *(("lamb", lamb, options, 1e-12) for options in (
        {}, {"weight_decay": 0.1}, {"adam": True}, {"betas": (0.5, 0.7), "eps": 0.5},
    )),
    ("lamb", other_lamb, {"weight_decay": 0.1}, 1e-6),
    *(("rmsproptf", rmsproptf, options, 1e-12) for options in (
        {}, {"alpha": 0.5, "eps": 0.1}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_decay": True},
        {"momentum": 0.9}, {"momentum": 0.9, "lr_in_momentum": False}, {"centered": True, "momentum": 0.5},
    )),
    *(("bertadam", bertadam, {"max_grad_norm": -1.0, **options}, 1e-12) for options in (
        {}, {"warmup": 0.2, "t_total": 20}, {"warmup": 0.0, "t_total": 20},
        {"warmup": 0.3, "t_total": 20, "schedule": "warmup_constant"},
        {"b1": 0.5, "b2": 0.7, "e": 0.5, "weight_decay": 0.0},
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "published", "options", "tolerance"), CASES)
def test_the_formula_and_the_suites_oracle_are_the_published_one(name, published, options, tolerance):
    makers = (published(), FORMULAS[name], lambda members, **given: oracle(name, members, **given))
    found = []
    for make in makers:
        members = [nn.Parameter(each.detach().contiguous()) for each in parameters(torch.device("cpu"), torch.float64)]
        optimizer = make(members, lr=LR, **options)
        for number in range(STEPS):
            for member, gradient in zip(members, gradients(number), strict=True):
                member.grad = gradient.double()
            optimizer.step()
        found.append(members)
    for ours in found[1:]:
        for mine, theirs in zip(ours, found[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
