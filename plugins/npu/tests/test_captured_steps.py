"""`trainer(graph=True)`, on the emulated NPU's graphs.

The NPU backend does not declare graphs, because its fused optimizers count steps on the host. The emulated device can
capture and replay all the same, so what the trainer does with graphs on any backend is tried here.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import accelcore
from accelcore.errors import TrainingError, UnsupportedError
from accelcore.optim.formulas import FLAT_FORMULAS
from accelcore.roles.runtime import AcceleratorRuntime
from accelcore.testing.suite.training import loss_of
from accelcore.testing.support.oracles import batches, network, weights

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch_npu's deepcopy


@pytest.fixture
def graphs(accel):
    """The backend, as one that declares graphs."""
    return dataclasses.replace(
        accel,
        runtime=AcceleratorRuntime(accel.device, graph=torch.npu.NPUGraph),
        capabilities=dataclasses.replace(accel.capabilities, graphs=True),
    )


def make(accel, *, route="foreach", model=None, loss=loss_of, schedule=None, lr=0.05, **options):
    model = model or network()
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=lr, route=route)
    scheduler = None if schedule is None else LambdaLR(optimizer, schedule)
    return accel.trainer(model, optimizer, loss=loss, scheduler=scheduler, **options)


def train(accel, trainer, data):
    return [trainer(accel.runtime.to_device(batch)).item() for batch in data]


def both(graphs, data, **options):
    """Losses and weights of the same training, eager and captured."""
    found = []
    for graph in (False, True):
        trainer = make(graphs, graph=graph, **options)
        found.append((train(graphs, trainer, data), weights(trainer.model)))
    return found


def assert_alike(found):
    (losses, eager), (graphed, captured) = found
    assert graphed == pytest.approx(losses, abs=1e-4)
    for mine, theirs in zip(captured, eager, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_a_batch_with_what_cannot_be_looked_up_is_refused(graphs):
    def loss(model, batch):
        return loss_of(model, batch[:2])

    trainer = make(graphs, graph=True, loss=loss)
    with pytest.raises(TypeError, match="unhashable"):
        train(graphs, trainer, [(*batches(1)[0], bytearray(b"a"))])


def test_nan_in_a_captured_step_is_found_and_named(graphs):
    good = batches(12)
    bad = [tensor * float("nan") if tensor.is_floating_point() else tensor for tensor in good[0]]
    trainer = make(graphs, graph=True)
    with pytest.raises(TrainingError, match=r"the parameter '.*NaN(.|\n)*step 7: nan"):
        train(graphs, trainer, [*good[:6], tuple(bad), *good[:12]])


def test_a_schedule_reaches_the_captured_step(graphs):
    assert_alike(both(graphs, batches(12), schedule=lambda step: 0.0 if step >= 6 else 1.0))


def test_a_schedule_that_the_trainer_makes_reaches_the_captured_step_and_the_log(graphs, tmp_path):
    found, logs = [], []
    for graph in (False, True):
        model, log = network(), accelcore.Log(tmp_path / str(graph), every=1, plot=False)
        optimizer = graphs.optimizers.create("adamw", model.parameters(), lr=0.05, route="foreach")
        trainer = graphs.trainer(
            model, optimizer, loss=loss_of, scheduler="cosine", warmup=4, clip_norm=0.1, graph=graph,
            observers=[log, accelcore.Progress()],
        )  # fmt: skip
        data = batches(6)
        losses = [trainer(batch).item() for _ in trainer.epochs(2) for batch in trainer.batches(data)]
        found.append((losses, weights(trainer.model)))
        log.close()
        logs.append([json.loads(line) for line in (tmp_path / str(graph) / "log.jsonl").read_text().splitlines()])
    assert_alike(found)
    for figure in ("loss", "lr"):
        eager, captured = ([line[figure] for line in lines] for lines in logs)
        assert len(eager) == 12
        assert captured == pytest.approx(eager, abs=1e-4)
    assert ["gradient_norm" in line for lines in logs for line in lines] == [True] * 12 + [False] * 12


@pytest.mark.parametrize("name", ["adamp", "bertadam", "lamb", "rmsprop"])
def test_a_formula_that_counts_on_the_device_is_captured(graphs, name):
    """What other devices compile: here its operators are captured as they are."""
    registry = graphs.optimizers.copy()
    kind = partial(FLAT_FORMULAS[name], asynchronous=True)
    registry.register(name, "counts there", kind, priority=30, memory="flat")
    backend = dataclasses.replace(graphs, optimizers=registry)
    options = {"t_total": 20, "warmup": 0.5} if name == "bertadam" else {"weight_decay": 0.1}
    found = []
    for graph in (False, True):
        model = network()
        optimizer = registry.create(name, model.parameters(), lr=0.02, **options)
        trainer = backend.trainer(
            model, optimizer, loss=loss_of, scheduler=LambdaLR(optimizer, lambda step: 1 / (1 + step)), graph=graph
        )
        found.append((train(backend, trainer, batches(10)), weights(model)))
        assert optimizer.route == "counts there"
    assert_alike(found)


def test_each_shape_is_captured_and_used_again(graphs):
    data = [batch for pair in zip(batches(8), batches(8, 6), strict=True) for batch in pair]
    assert_alike(both(graphs, data))


@pytest.mark.parametrize(("option", "value"), [("weight_decay", 5.0), ("lr", 0.5), ("lr", torch.tensor(0.5))])
def test_an_option_that_changes_is_not_baked_in(graphs, option, value):
    found = []
    for graph in (False, True):
        trainer = make(graphs, graph=graph)
        losses = train(graphs, trainer, batches(6))
        group = trainer.optimizer.param_groups[0]
        group[option] = value.to(graphs.device) if graph and isinstance(value, torch.Tensor) else float(value)
        found.append((losses + train(graphs, trainer, batches(6)), weights(trainer.model)))
    assert_alike(found)


def test_what_stays_equal_is_captured_once(graphs, monkeypatch):
    captured = []
    capture = graphs.runtime.capture
    monkeypatch.setattr(
        graphs.runtime, "capture", lambda work, **named: captured.append(work) or capture(work, **named)
    )
    trainer = make(graphs, graph=True)
    group = trainer.optimizer.param_groups[0]
    for batch in batches(8):
        group["betas"] = (group["betas"][0] + 0.0, group["betas"][1] + 0.0)  # as a cyclic schedule sets them
        train(graphs, trainer, [batch])
    assert len(captured) == 1


@pytest.mark.parametrize("pack", [list, lambda batch: {"rows": [batch[0]], "classes": batch[1], "name": "a"}])
def test_a_batch_is_of_any_structure(graphs, pack):
    def loss(model, batch):
        rows, classes = (batch["rows"][0], batch["classes"]) if isinstance(batch, dict) else batch
        return loss_of(model, (rows, classes))

    assert_alike(both(graphs, [pack(batch) for batch in batches(8)], loss=loss))


def test_a_resumed_run_goes_on_alike(graphs, tmp_path):
    data = batches(12)
    trainer = make(graphs, graph=True, accumulate=2)
    train(graphs, trainer, data[:9])  # captured by then, and in the middle of a window
    trainer.save(tmp_path)
    expected = train(graphs, trainer, data[9:])
    twin = make(graphs, graph=True, accumulate=2, model=network(seed=5))
    train(graphs, twin, data[:8])
    twin.resume(tmp_path)
    assert train(graphs, twin, data[9:]) == pytest.approx(expected, abs=1e-5)
    assert twin.steps == trainer.steps
    eager = make(graphs, accumulate=2)
    eager.resume(tmp_path)
    assert train(graphs, eager, data[9:]) == pytest.approx(expected, abs=1e-5)
    assert isinstance(eager.optimizer.param_groups[0]["lr"], float)


def test_parameters_that_never_had_a_gradient_stay_as_they_are(graphs):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = network(), nn.Linear(3, 3)

        def forward(self, rows):
            return self.used(rows)

    model = Half()
    before = weights(model.unused)
    train(graphs, make(graphs, model=model, graph=True), batches(8))
    assert all(torch.equal(a, b) for a, b in zip(weights(model.unused), before, strict=True))


def test_a_parameter_that_comes_late_is_refused(graphs):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.late = network(), nn.Linear(8, 4)

        def forward(self, rows):
            return self.always(rows) + (self.late(rows) if len(rows) == 6 else 0)

    for accumulate in (1, 2):
        trainer = make(graphs, model=Late(), graph=True, accumulate=accumulate)
        train(graphs, trainer, batches(8))
        with pytest.raises(TrainingError, match="first gradient"):
            train(graphs, trainer, batches(1, 6))


def test_accumulation_and_clipping_are_inside(graphs):
    assert_alike(both(graphs, batches(18), accumulate=3, clip_norm=0.1))
    assert_alike(both(graphs, batches(9), clip_norm=0.1))


def test_what_the_host_would_wait_for_cannot_be_captured(graphs):
    def loss(model, batch):
        return loss_of(model, batch) * (1 + 0 * batch[0].sum().item())

    trainer = make(graphs, graph=True, loss=loss)
    data = batches(4)
    train(graphs, trainer, data[:3])
    with pytest.raises(TrainingError, match="cannot be captured"):
        train(graphs, trainer, data[3:])


def test_an_optimizer_that_counts_on_the_host_is_refused(graphs):
    trainer = make(graphs, graph=True, route="npu_fused")
    train(graphs, trainer, batches(3))
    with pytest.raises(UnsupportedError, match="counts its steps on the host"):
        train(graphs, trainer, batches(1))


def test_endless_shapes_are_refused(graphs):
    trainer = make(graphs, graph=True)
    train(graphs, trainer, batches(3))
    for rows in range(17, 32):
        train(graphs, trainer, batches(2, rows))  # eager, then captured
    with pytest.raises(TrainingError, match="17th kind of batch"):
        train(graphs, trainer, batches(1, 40))


def test_endless_shapes_that_come_once_are_refused(graphs):
    trainer = make(graphs, graph=True)
    once = [batch for rows in range(2, 20) for batch in batches(1, rows)]
    with pytest.raises(TrainingError, match="17th kind of batch"):
        train(graphs, trainer, once)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Rprop])
def test_a_learning_rate_that_is_read_on_the_host_is_refused(graphs, kind):
    model = network()
    optimizer = kind(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match="reads its learning rate on the host"):
        graphs.trainer(model, optimizer, graph=True)


def test_a_trainer_that_is_dropped_is_gone(graphs):
    gc.disable()  # what only the collector finds holds the device's memory until then
    try:
        trainer = make(graphs, graph=True)
        train(graphs, trainer, batches(5))
        gone = weakref.ref(trainer)
        del trainer
        assert gone() is None
    finally:
        gc.enable()


def test_it_is_refused_where_it_is_not_declared(accel):
    for backend in (accel, accelcore.select("cpu")):
        with pytest.raises(UnsupportedError, match="cannot capture steps"):
            make(backend, graph=True)


def test_batches_on_the_host_are_moved(graphs):
    data = batches(7)
    one, other = (make(graphs, graph=True) for _ in range(2))
    assert [one(batch).item() for batch in data] == train(graphs, other, data)
    assert_alike([([], weights(trainer.model)) for trainer in (one, other)])


def test_an_optimizer_with_a_zero_grad_of_its_own_is_refused(graphs):
    class Clearing(torch.optim.AdamW):
        def zero_grad(self, set_to_none=True):
            super().zero_grad(set_to_none)

    model = graphs.runtime.to_device(network())
    for kind in (torch.optim.AdamW, Clearing):
        optimizer = kind(model.parameters(), foreach=True, capturable=True)
        if kind is Clearing:
            with pytest.raises(UnsupportedError, match=r"Clearing cannot be captured(.|\n)*zero_grad"):
                graphs.trainer(model, optimizer, loss=loss_of, graph=True)
        else:
            graphs.trainer(model, optimizer, loss=loss_of, graph=True)
