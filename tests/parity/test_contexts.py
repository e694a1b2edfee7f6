"""Record and Replay around a loop of one's own: what they name, and that they change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import accelcore


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 12),
        nn.LayerNorm(12),
        nn.Dropout(0.2),
        nn.Sequential(nn.Linear(12, 12), nn.ReLU()),
        nn.Linear(12, 2),
    )


def train(net, change=lambda step, net, optimizer: None, steps=4):
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(1, steps + 1):
        change(step, net, optimizer)
        inputs = torch.randn(8, 6)
        optimizer.zero_grad()
        mse_loss(net(inputs), inputs[:, :2]).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


@pytest.fixture
def reference(tmp_path):
    with accelcore.Record(tmp_path / "ref", operators=[1]):
        train(model())
    return tmp_path / "ref"


def replayed(reference, change=lambda step, net, optimizer: None, seed=0, **options):
    with accelcore.Replay(reference, **options) as replay:
        train(model(seed), change)
    return replay.result


def test_a_recorded_and_a_replayed_run_have_the_bits_of_a_plain_one(tmp_path):
    plain = train(model())
    with accelcore.Record(tmp_path / "ref", operators=[2]):
        recorded = train(model())
    with accelcore.Replay(tmp_path / "ref") as replay:
        again = train(model())
    for others in (recorded, again):
        assert all(torch.equal(one, other) for one, other in zip(plain, others, strict=True))
    assert replay.result.agrees
    assert replay.result.exact
    assert replay.result.steps == 4


def test_other_initial_weights_are_named_and_the_recorded_ones_taken(reference):
    def change(step, net, optimizer):
        if step == 1:
            with torch.no_grad():
                net[3][0].weight[0, 0] += 1

    found = replayed(reference, change)
    assert (found.phase, found.step, found.module, found.is_cause) == ("weights", 1, "3.0", True)
    assert replayed(reference, change, weights="take").agrees


def test_weights_that_change_between_two_steps_are_named(reference):
    def change(step, net, optimizer):
        if step == 3:
            with torch.no_grad():
                net[4].bias += 1e-6

    found = replayed(reference, change)
    assert (found.phase, found.step, found.module) == ("weights", 3, "4")


def test_a_wrong_eps_is_named_by_module_and_operator_and_among_the_settings(reference):
    def change(step, net, optimizer):
        net[1].eps = 1e-3

    found = replayed(reference, change)
    assert (found.phase, found.step, found.module) == ("forward", 1, "1")
    assert found.operator == "aten::native_layer_norm"
    assert [each.name for each in found.settings] == ["module 1"]


@pytest.mark.parametrize("operators", [[1], []])
@pytest.mark.parametrize("other", [nn.GELU, nn.Tanh])
def test_another_activation_is_another_module_and_no_other_random_numbers(tmp_path, other, operators):
    with accelcore.Record(tmp_path / "ref", operators=operators):
        train(model())

    def change(step, net, optimizer):
        net[3][1] = other()

    found = replayed(tmp_path / "ref", change)
    assert (found.phase, found.step, found.module) == ("forward", 1, "3.1")
    assert found.next.startswith("module 3.1 is another module: ReLU() → " + other.__name__)


def test_a_relu_with_other_zeros_is_wrong_and_a_dropout_with_other_zeros_is_random(reference, monkeypatch):
    relu, dropout = nn.ReLU.forward, nn.Dropout.forward

    def flipped(self, inputs):
        return torch.where(dropout(self, torch.ones_like(inputs)).flip(0) > 0, inputs / 0.8, 0.0)

    with monkeypatch.context() as patch:
        patch.setattr(nn.ReLU, "forward", lambda self, inputs: relu(self, -inputs))
        found = replayed(reference)
        assert (found.phase, found.module) == ("forward", "3.1")
    monkeypatch.setattr(nn.Dropout, "forward", flipped)
    found = replayed(reference)
    assert (found.phase, found.module) == ("random", "2")


def test_a_lost_state_of_the_optimizer_is_an_update(reference):
    def change(step, net, optimizer):
        if step == 3:
            optimizer.state[net[1].weight]["exp_avg"].zero_()

    found = replayed(reference, change)
    assert (found.phase, found.step, found.module) == ("update", 3, "1")


def test_an_extra_random_number_is_named(reference):
    found = replayed(reference, lambda step, net, optimizer: torch.rand(1) if step == 2 else None)
    assert (found.phase, found.step) == ("random", 2)


def test_another_model_is_refused(reference):
    with pytest.raises(accelcore.RecordingError, match=r"only here: 0\.0\.bias"), accelcore.Replay(reference):
        train(nn.Sequential(nn.Sequential(nn.Linear(6, 2))))


def test_a_context_without_a_training_says_that_nothing_was_recorded(tmp_path):
    with pytest.raises(accelcore.RecordingError, match="nothing was recorded"), accelcore.Record(tmp_path / "ref"):
        pass


def test_a_folder_of_others_is_not_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(accelcore.RecordingError, match="not a recording"), accelcore.Record(tmp_path):
        train(model())
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_rank_of_any_launcher_is_compared_with_its_own_recording(tmp_path, monkeypatch):
    for rank in ("0", "1"):
        for name in ("SLURM_PROCID", "SLURM_LOCALID"):
            monkeypatch.setenv(name, rank)
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
        monkeypatch.setenv("SLURM_STEP_NODELIST", "host")
        monkeypatch.setenv("MASTER_PORT", "29500")
        with accelcore.Record(tmp_path / "ref"):
            train(model(seed=int(rank)))
    with accelcore.Replay(tmp_path / "ref") as replay:
        train(model(seed=1))
    assert replay.result.agrees
    assert replay.result.exact
    assert sorted(path.name for path in (tmp_path / "ref").iterdir()) == ["rank-00000", "rank-00001"]


def test_nested_tensors_are_recorded_by_their_values(tmp_path):
    def run():
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            rows = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)
            optimizer.zero_grad()
            net(rows).values().square().mean().backward()
            optimizer.step()
        return net.weight

    plain = run()
    with accelcore.Record(tmp_path):
        recorded = run()
    with accelcore.Replay(tmp_path) as replay:
        run()
    assert torch.equal(plain, recorded)
    assert replay.result.exact


def test_calls_within_a_transform_are_left_alone(tmp_path):
    def run():
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            rows = torch.randn(5, 4)
            optimizer.zero_grad()
            torch.func.vmap(lambda row: net(row).square().sum())(rows).mean().backward()
            net(rows).sum().backward()
            optimizer.step()
        return net.weight

    plain = run()
    with accelcore.Record(tmp_path):
        assert torch.equal(plain, run())
