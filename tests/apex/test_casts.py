"""O1 for a whole script: what is cast, where, and what torch is afterwards."""

from __future__ import annotations

import pickle
import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import accelcore
from accelcore.apex import amp, optimizers


def made(model=None, **options):
    model = model or nn.Linear(4, 3)
    optimizer = optimizers.NpuFusedSGD(model.parameters(), lr=0.5)
    return amp.initialize(model, optimizer, opt_level="O1", loss_scale=8.0, verbosity=0, **options)


def step(model, optimizer, loss):
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def test_what_is_computed_outside_of_the_model_is_cast_as_in_it():
    model, _ = made()
    x = torch.randn(5, 4)
    output = model(x)
    assert output.dtype == torch.float16
    assert torch.mm(x, x.t()).dtype == torch.float16
    assert functional.cross_entropy(output, torch.zeros(5, dtype=torch.long)).dtype == torch.float32
    assert output.softmax(-1).dtype == output.norm().dtype == output.sum().dtype == torch.float32
    assert torch.cat([output, x[:, :3]]).dtype == torch.float32
    with pytest.raises(accelcore.TrainingError, match="binary_cross_entropy"):
        functional.binary_cross_entropy(output.sigmoid(), torch.zeros(5, 3, dtype=torch.float16))
    with torch.no_grad():
        assert model(x).dtype == torch.float16


def test_a_loss_behind_the_model_is_that_of_table_o1_within_the_rounding_of_fp16():
    torch.manual_seed(0)
    model = nn.Linear(16, 400)
    x, target = torch.randn(8, 16) * 20, torch.randint(400, (8,))
    exact = functional.cross_entropy(model(x).double(), target).item()
    model, _ = made(model)
    found = functional.cross_entropy(model(x), target)
    assert found.item() == pytest.approx(exact, rel=1e-3)
    assert found.item() != pytest.approx(exact, rel=1e-9)


def test_casts_can_be_disabled_and_backward_and_step_run_without_them():
    model, optimizer = made()
    seen = []
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(torch.is_autocast_enabled("cpu")))
    optimizer.register_step_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    x = torch.randn(5, 4)
    with amp.disable_casts():
        assert model(x).dtype == torch.float32
    step(model, optimizer, model(x).sum())
    assert seen == [False, False]
    assert model(x).dtype == torch.float16


def test_a_weight_is_cast_anew_when_it_was_written_to():
    model, optimizer = made(nn.RNNCell(1, 1, bias=False, nonlinearity="relu"))  # whose weights are cast once a pass
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    x = h = torch.ones(1, 1)
    assert model(x, h).item() == 2.0
    step(model, optimizer, model(x, h).sum())
    assert model(x, h).item() == 1.0
    model.load_state_dict({name: torch.full((1, 1), 4.0) for name in model.state_dict()})
    assert model(x, h).item() == 8.0


def test_the_users_word_on_a_function_comes_before_the_table():
    class Mine:
        @staticmethod
        def plus_one(x):
            return x + 1

        @staticmethod
        def square(x):
            return x * x

    amp.register_half_function(Mine, "plus_one")
    amp.register_float_function(torch, "bmm")
    with pytest.raises(ValueError, match="bmmm"):
        amp.register_float_function(torch, "bmmm")
    square, half = amp.float_function(Mine.square), amp.half_function(Mine.square)
    both = amp.promote_function(lambda a, b: a + b)
    x, low = torch.ones(1, 2, 2), torch.ones(1, 2, 2, dtype=torch.float16)
    assert Mine.plus_one(x).dtype == torch.float32
    made(user_cast_preferred=True)
    assert Mine.plus_one(x).dtype == half(x).dtype == torch.float16
    assert torch.bmm(x, x).dtype == torch.bmm(low, low).dtype == square(low).dtype == torch.float32
    assert torch.matmul(x, x).dtype == torch.float16
    assert both(x, low).dtype == torch.float32


def test_a_checkpointed_model_gives_the_gradients_of_one_that_is_not():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    model, optimizer = made(model)
    x = torch.randn(5, 4)
    gradients = []
    for forward in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        optimizer.zero_grad()
        with amp.scale_loss(forward(x).square().mean(), optimizer) as scaled:
            scaled.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


def test_torch_is_as_it_was_after_a_reset():
    names = [(torch, "matmul"), (functional, "linear"), (torch.Tensor, "__matmul__"), (functional, "softmax")]
    replicate = nn.DataParallel.replicate
    before = [getattr(module, name) for module, name in names]
    made()
    made()
    assert [getattr(module, name) for module, name in names] == before
    amp.reset()
    assert nn.DataParallel.replicate is replicate
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_autocast_cache_enabled()
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
    amp.reset()


class Dtypes(nn.Module):
    """Returns the dtypes of what it computes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        y = self.linear(x)
        return y.dtype, functional.gelu(y).dtype


def in_thread(function, *, autocast):
    """Call a function as DataParallel calls a replica: on CUDA autocast is on there, on other devices it is off."""

    def run():
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            seen.append(function(torch.ones(2, 2)))

    seen = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen[0]


@pytest.mark.parametrize("autocast", [True, False])
def test_replicas_of_data_parallel_are_cast_by_table_o1_in_their_threads(autocast, monkeypatch):
    def replicas_here(module, devices, detach):
        return [module._replicate_for_data_parallel() for _ in devices]

    monkeypatch.setattr(sys.modules["torch.nn.parallel.data_parallel"], "replicate", replicas_here)
    model, _ = made(Dtypes())
    for each in (model, nn.Sequential(model), Dtypes()):
        parallel = nn.DataParallel(each)
        replicas = parallel.replicate(each, [0, 1])
        assert [type(replica) for replica in replicas] == [type(each)] * 2
        for replica in replicas:
            assert in_thread(replica, autocast=autocast) == (torch.float16, torch.float32)
    with amp.disable_casts():
        replica, _ = parallel.replicate(model, [0, 1])
    assert in_thread(replica, autocast=False) == (torch.float32, torch.float32)
    amp.reset()
    replica, _ = parallel.replicate(model, [0, 1])
    assert in_thread(replica, autocast=False) == (torch.float32, torch.float32)


def test_a_model_that_is_saved_whole_loads_without_accelcore():
    model, _ = made()
    assert b"accelcore" not in pickle.dumps(model)


def test_other_threads_and_other_levels_cast_nothing():
    made()
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype))
    thread.start()
    thread.join()
    assert seen == [torch.float32]
    amp.reset()
    for level in ("O0", "O2", "O3"):
        amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
