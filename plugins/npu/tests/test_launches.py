"""The cost of a training step on the emulated NPU, counted; by the benchmark beside the loop written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelcore_npu.optimizers import FUSED
from accelcore_npu_emulator import counters
from torch import nn

# Of an update in fp32, as the README has them.
LAUNCHES = {
    "sgd": 4,
    "rmsprop": 6,
    "rmsproptf": 7,
    "adam": 9,
    "adamw": 10,
    "adadelta": 12,
    "bertadam": 23,
    "lamb": 35,
    "adamp": 82,
}
SCALED = 16  # more with a dynamic loss scale and clipping
OF_EACH_KIND = ("adamw", "lamb")  # torch_npu's, and a formula on flat memory


COUNT = """
import sys, warnings

warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch_npu's optimizer, by hand
sys.path.insert(0, {root!r})
from benchmarks.__main__ import main

sys.exit(main(["launches", "--output", {output!r}]))
"""


@pytest.fixture(scope="module")
def tables(fork, tmp_path_factory):
    folder = tmp_path_factory.mktemp("launches")
    script, output = folder / "count.py", folder / "launches.json"
    script.write_text(COUNT.format(root=str(Path(__file__).parents[3]), output=str(output)))
    done = fork(script).finish(240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EMULATED" in done.stdout
    return json.loads(output.read_text())["tables"]


@pytest.mark.full  # the update alone, which the trainer adds: below
def test_a_step_never_costs_more_than_by_hand(tables):
    assert len(tables) == 2
    for table in tables:
        assert len(table["goals"]) == 10
        assert all(goal["met"] for goal in table["goals"])


@pytest.mark.full  # below, too
def test_what_follows_backward_does_not_grow_with_the_parameters(tables):
    """A layer more is a few operators in forward and backward, the same under every task; the update adds none."""
    small, large = ({row["case"]: row["counts"] for row in table["rows"]} for table in tables)

    def growth(case):
        return large[f"{case}: trainer"]["launches"] - small[f"{case}: trainer"]["launches"]

    assert growth("fp32, clipped") == growth("fp32")
    assert growth("fp16, dynamic loss scale") == growth("fp16, dynamic loss scale, clipped")
    assert growth("fp16, dynamic loss scale") <= growth("bf16")
    assert [large[f"{case}: trainer"]["synchronizations"] for case in ("fp32", "fp32, clipped", "bf16")] == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "precision", "clip_norm", "waits"),
    [
        ("adamw", "fp32", 1.0, 0),
        ("adamw", "bf16", 1.0, 0),
        ("adamw", "fp16", None, 1),
        *(
            pytest.param(name, *options, marks=() if name in OF_EACH_KIND else pytest.mark.full)
            for options in (("fp32", None, 0), ("fp16", 1.0, 1))
            for name in FUSED
        ),
    ],
)
def test_an_update_launches_as_much_for_20_parameters_as_for_200(accel, name, precision, clip_norm, waits):
    """Gathering, unscaling, clipping, the optimizer and the scaler."""

    def cost(parameters):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(parameters // 2)))
        optimizer = accel.optimizers.create(
            name, model.parameters(), lr=1e-3, **({"momentum": 0.9} if name == "sgd" else {})
        )
        trainer = accel.trainer(model, optimizer, precision=precision, clip_norm=clip_norm)
        for _ in range(3):
            with trainer.autocast():
                loss = trainer.forward(torch.ones(4, 8, device=accel.device)).square().mean()
            trainer.backward(loss)
            with counters.count() as counted:
                trainer.update()
        assert len(list(model.parameters())) == parameters
        assert optimizer.route == "npu_fused"
        return counted.launches.total(), counted.synchronizations.total()

    small, large = cost(20), cost(200)
    assert small == large
    assert LAUNCHES[name] <= small[0] <= LAUNCHES[name] + SCALED
    if clip_norm is None and precision == "fp32":
        assert small[0] == LAUNCHES[name]
    if clip_norm is not None and precision == "fp16":
        assert small[0] == LAUNCHES[name] + SCALED
    assert small[1] == waits


def test_a_step_with_every_option_waits_for_nothing(accel):
    """Norms of all gradients, channels, views, schedules: what torch_npu's own read on the host."""
    cases = {
        "adamp": {"weight_decay": 0.1, "nesterov": True},
        "bertadam": {"t_total": 10, "warmup": 0.1, "max_grad_norm": 1.0},
        "lamb": {"weight_decay": 0.1, "use_global_grad_norm": True},
    }

    def cost(name, parameters):
        made = [nn.Parameter(torch.ones(3 + number % 5, 4, device=accel.device)) for number in range(parameters)]
        groups = [{"params": made[: parameters // 2]}, {"params": made[parameters // 2 :], "lr": 0.2}]
        optimizer = accel.optimizers.create(name, groups, lr=0.1, **cases[name])
        for parameter in made:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with counters.count() as counted:
            optimizer.step()
        assert counted.synchronizations.total() == 0, counted
        return counted.launches

    for name in cases:
        few, many = cost(name, 10), cost(name, 300)
        assert few == many


@pytest.mark.parametrize("name", sorted(FUSED))
def test_a_group_for_each_parameter_costs_what_its_different_options_cost(accel, name):
    """As some recipes make them; BertAdam clips each group by itself, which has to be a launch for each."""

    def cost(parameters):
        made = [nn.Parameter(torch.ones(4, 4, device=accel.device)) for _ in range(parameters)]
        groups = [{"params": [one], "weight_decay": 0.1 * (number % 2)} for number, one in enumerate(made)]
        optimizer = accel.optimizers.create(name, groups, lr=0.1)
        for parameter in made:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        with counters.count() as counted:
            optimizer.step()
        assert optimizer.route == "npu_fused"
        return counted.launches.total()

    if name == "bertadam":
        assert cost(20) > 2 * cost(4)
    else:
        assert cost(4) == cost(20)
