from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional

import accelcore
from accelcore.errors import UnsupportedError
from accelcore.torch_features import GET_KERNEL

pytestmark = pytest.mark.skipif(not GET_KERNEL.present, reason=f"refused: torch has no {GET_KERNEL}")


@pytest.fixture(autouse=True)
def _own_again():
    state = torch.get_rng_state()
    yield
    accelcore.select("cpu").runtime.seed(3)
    torch.set_rng_state(state)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = torch.nn.Linear(8, 16), torch.nn.Dropout(0.4), torch.nn.Linear(16, 1)

    def forward(self, rows):
        hidden = self.drop(self.first(rows).relu())
        query = hidden.view(1, -1, 16)
        attended = functional.scaled_dot_product_attention(query, query, query, dropout_p=0.3).view_as(hidden)
        return self.last(hidden + attended + torch.randn_like(hidden))


def losses(accel, **options):
    accel.runtime.seed(5, same="everywhere")
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = accel.trainer(model, optimizer, loss=lambda model, rows: model(rows).square().mean(), **options)
    return [trainer(torch.linspace(-1, 1, 64).view(8, 8)).item() for _ in range(4)]


def test_what_is_compiled_runs_eagerly_and_says_so(accel, caplog):
    assert losses(accel, compile=True) == losses(accel)
    assert "the model runs eagerly, not compiled: compiled modules draw" in caplog.text
    traced = []

    def compiler(graph, inputs):
        traced.append(graph)
        return graph.forward

    dropped = torch.compile(lambda rows: functional.dropout(rows), backend=compiler)
    dropped(torch.ones(3))
    assert not traced
    accel.runtime.seed(5)
    dropped(torch.ones(3))
    assert traced


def test_what_is_computed_anew_in_backward_has_the_numbers_of_before(accel):
    assert losses(accel, checkpoint=torch.nn.Dropout) == losses(accel)


def test_a_graph_is_refused(accel):
    accel.runtime.seed(5, same="everywhere")
    with_graphs = dataclasses.replace(accel, capabilities=dataclasses.replace(accel.capabilities, graphs=True))
    with pytest.raises(UnsupportedError, match=r"graph=True .*everywhere"):
        losses(with_graphs, graph=True)


def test_numbers_that_were_forked_off_do_not_count(accel):
    accel.runtime.seed(5, same="everywhere")
    expected = torch.rand(3)
    accel.runtime.seed(5, same="everywhere")
    with torch.random.fork_rng():
        torch.manual_seed(6)
        functional.dropout(torch.ones(100))
    assert torch.equal(torch.rand(3), expected)


class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.randn(20), torch.bernoulli(torch.full((20,), 0.5))


def test_workers_of_a_data_loader_draw_as_they_do_otherwise(accel):
    def noise(**options):
        accel.runtime.seed(5, **options)
        loader = torch.utils.data.DataLoader(Noise(), num_workers=1, multiprocessing_context="fork")
        return [torch.cat(batch) for batch in loader]

    assert all(map(torch.equal, noise(same="everywhere"), noise()))


def test_a_resume_that_draws_otherwise_says_so(accel, tmp_path, caplog):
    def trainer():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
        return accel.trainer(model, torch.optim.SGD(model.parameters()), loss=lambda model, rows: model(rows).sum())

    accel.runtime.seed(5, same="everywhere")
    first = trainer()
    first(torch.ones(4, 2))
    first.save(tmp_path)
    caplog.clear()  # the loop reads no data through its trainer
    expected = [first(torch.ones(4, 2)).item() for _ in range(3)]
    accel.runtime.seed(6, same="everywhere")
    second = trainer()
    second.resume(tmp_path)
    assert [second(torch.ones(4, 2)).item() for _ in range(3)] == expected
    assert all("resumed from" in record.getMessage() for record in caplog.records)
    caplog.clear()
    accel.runtime.seed(6)
    trainer().resume(tmp_path)
    assert 'seed(same="everywhere")' in caplog.text
