"""Random numbers that are the same on every device: those of the emulated NPU are the CPU's."""

from __future__ import annotations

import pytest
import torch
import torch_npu
from draws import CALLS
from torch.nn import functional
from torch.utils import _pytree as pytree

import accelcore
from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.torch_features import GET_KERNEL

pytestmark = [
    pytest.mark.skipif(not GET_KERNEL.present, reason=f"refused: torch has no {GET_KERNEL}"),
    pytest.mark.filterwarnings(
        "ignore:Cannot create tensor with intern?al format",
        "ignore:AutoNonVariableTypeMode is deprecated",
    ),
]


@pytest.fixture(autouse=True)
def _apart_again(accel):
    state = torch.get_rng_state()
    yield
    accel.runtime.seed(0)
    torch.set_rng_state(state)


def tensors(result):
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def test_every_operator_draws_what_it_draws_on_the_cpu(accel):
    different = []
    accel.runtime.seed(0, same="everywhere")
    for name, call in CALLS.items():
        found = []
        for device in (accel.device, torch.device("cpu")):
            torch.manual_seed(5)
            found.append([tensor.cpu() for tensor in (*tensors(call(device)), torch.rand(3))])
        exact = not name.startswith(("lstm", "gru", "rnn_", "scaled_dot", "_scaled_dot"))  # which compute, too
        close = torch.equal if exact else torch.allclose
        if not all(map(close, *found)):
            different.append(name)
    assert not different


def run(accel, *, compile=False):
    """The losses of a small convolutional network with dropout, and of a perceptron, from their initialisation on."""
    accel.runtime.seed(4, same="everywhere")
    device = accel.device
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, device=device), torch.nn.ReLU(), torch.nn.Dropout2d(0.25),
        torch.nn.Flatten(), torch.nn.Linear(4 * 36, 32, device=device), torch.nn.LeakyReLU(), torch.nn.Dropout(0.5),
        torch.nn.Linear(32, 10, device=device),
    )  # fmt: skip
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.rand(32, 1, 8, 8), torch.randint(0, 10, (32,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    trainer = accel.trainer(
        model, optimizer, loss=lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        checkpoint=torch.nn.Dropout, compile=compile,
    )  # fmt: skip
    return torch.tensor([trainer(batch).item() for _ in range(3) for batch in trainer.batches(loader)])


def test_a_training_with_dropout_has_the_losses_of_the_cpu(accel):
    expected = run(accelcore.select("cpu"))
    for compile in (False, True):
        torch.testing.assert_close(run(accel, compile=compile), expected, rtol=1e-5, atol=1e-6)


def test_a_run_that_moves_to_another_device_goes_on_with_its_random_numbers(accel, tmp_path, caplog):
    def trainer_on(backend):
        model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))
        optimizer = backend.optimizers.create("sgd", model.parameters(), lr=0.01)
        return backend.trainer(model, optimizer, loss=lambda model, batch: model(batch).square().mean())

    def step(trainer):
        return trainer(torch.ones(4, 8, device=next(trainer.model.parameters()).device)).item()

    accel.runtime.seed(1, same="everywhere")
    first = trainer_on(accel)
    step(first)
    first.save(tmp_path)
    expected = [step(first) for _ in range(3)]
    cpu = accelcore.select("cpu")
    cpu.runtime.seed(2, same="everywhere")
    second = trainer_on(cpu)
    second.resume(tmp_path)
    assert [step(second) for _ in range(3)] == pytest.approx(expected, rel=1e-5)
    assert "random" not in caplog.text
    cpu.runtime.seed(2)
    trainer_on(cpu).resume(tmp_path)
    assert 'seed(same="everywhere")' in caplog.text


def test_what_draws_by_itself_is_refused(accel):
    accel.runtime.seed(0, same="everywhere")
    query = torch.ones(1, 1, 4, 8, device=accel.device, dtype=torch.half)
    for call in (
        lambda: torch_npu._npu_dropout(query, 0.5),
        lambda: torch_npu.npu_fusion_attention(query, query, query, 1, "BNSD", keep_prob=0.5),
        lambda: torch.ops.npu.npu_fusion_attention_v3(query, query, query, 1, "BNSD", keep_prob=0.5),
    ):
        with pytest.raises(UnsupportedError, match="draws random numbers of its own"):
            call()
    torch_npu.npu_fusion_attention(query, query, query, 1, "BNSD")
    with pytest.raises(ConfigurationError, match=r"torch.Generator\(\)"):
        torch.rand(3, device=accel.device, generator=torch.Generator(accel.device))
