"""Steps of the trainer: what they wait for, and what they do when fp16 overflows."""

from __future__ import annotations

import gc
import itertools
import math

import pytest
import torch
from accelcore_cuda.compiler import missing_for_inductor
from torch.utils.data import DataLoader, TensorDataset

from accelcore.testing.support.oracles import batches, error, network, weights

FUSED = ("adam", "adamw", "sgd")


def make(accel, optimizer="adamw", **options):
    model = network()
    made = accel.optimizers.create(optimizer, model.parameters(), lr=0.01)
    return accel.trainer(model, made, loss=lambda model, batch: cross_entropy(model, batch), **options)


def cross_entropy(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_waiting_is_noticed(accel, no_waiting):
    total = torch.ones(3, device=accel.device).sum()
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        total.item()


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1}, {"accumulate": 2}], ids=["plain", "clip", "accumulate"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", FUSED)
def test_a_step_waits_for_nothing(accel, optimizer, precision, options, no_waiting):
    needed = {"bf16": "bfloat16", "fp16": "float16"}.get(precision)
    if needed and needed not in accel.capabilities.autocast_dtypes:
        pytest.skip(f"not declared: {needed}")
    trainer = make(accel, optimizer, precision=precision, **options)
    data = [accel.runtime.to_device(batch) for batch in batches(8)]
    for batch in data[:4]:  # libraries are loaded, state is made
        trainer(batch)
    with no_waiting():
        losses = [trainer(batch) for batch in data]
    assert all(math.isfinite(loss.item()) for loss in losses)
    assert trainer.skipped == 0


@pytest.mark.parametrize("optimizer", FUSED)
def test_a_kernel_skips_an_overflow_without_waiting(accel, optimizer, no_waiting):
    if "float16" not in accel.capabilities.autocast_dtypes:
        pytest.skip("not declared: float16")
    trainer = make(accel, optimizer, precision="fp16")
    good, bad = (accel.runtime.to_device(batch) for batch in batches(2))
    bad = (bad[0] * math.inf, bad[1])
    trainer(good)
    before, scale = weights(trainer.model), trainer.scaler.state_dict()["scale"]
    with no_waiting():
        trainer(bad)
    assert all(torch.equal(a, b) for a, b in zip(weights(trainer.model), before, strict=True))
    assert (trainer.skipped, trainer.scaler.state_dict()["scale"]) == (1, scale / 2)
    trainer(good)
    assert all(bool(weight.isfinite().all()) for weight in weights(trainer.model))


def test_training_is_compiled_where_it_can_be(accel, caplog):
    """The conformance suite takes an eager model and the reason: here there must be none."""
    missing = missing_for_inductor(torch.cuda.get_device_capability(), rocm=torch.version.hip is not None)
    trainer = make(accel, compile=True)
    for batch in batches(3):
        trainer(accel.runtime.to_device(batch))
    assert trainer.compiled.reason == (missing or "")
    assert trainer.compiled.compiled is (missing is None)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("options", [{"mode": "reduce-overhead"}, {"backend": "cudagraphs"}], ids=["inductor", "eager"])
def test_graphs_of_the_compiler_train_as_without_them(accel, options, accumulate):
    """Losses that are read later, and gradients that add up: both would be in memory that the next step overwrites."""
    if options.get("mode") and missing_for_inductor(
        torch.cuda.get_device_capability(), rocm=torch.version.hip is not None
    ):
        pytest.skip("inductor cannot compile here")
    data = [accel.runtime.to_device(batch) for batch in batches(12)]
    found = []
    for compile_ in (False, options):
        trainer = make(accel, accumulate=accumulate, compile=compile_)
        found.append((torch.stack([trainer(batch) for batch in data]), weights(trainer.model)))
    assert trainer.compiled.compiled, trainer.compiled.reason
    (eager, eager_weights), (compiled, compiled_weights) = found
    assert error(compiled, eager) < 1e-4
    assert all(error(a, b) < 1e-3 for a, b in zip(compiled_weights, eager_weights, strict=True))


def test_an_optimizer_without_a_kernel_waits_once_a_step(accel, no_waiting):
    trainer = make(accel, "nadam", precision="fp16")
    data = [accel.runtime.to_device(batch) for batch in batches(3)]
    trainer(data[0])
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        trainer(data[1])


@pytest.mark.parametrize("optimizer", [*FUSED, "rmsprop"])
def test_scaling_is_torchs(accel, optimizer):
    """Weights, scale and count of a run with overflows equal those of torch.amp.GradScaler."""
    steps, init = 12, 2.0**15
    ours, theirs = network().to(accel.device), network().to(accel.device)
    mine = accel.optimizers.create(optimizer, ours.parameters(), lr=0.01)
    yours = accel.optimizers.create(optimizer, theirs.parameters(), lr=0.01)
    scaler = accel.scaler.create(init=init, interval=3)
    oracle = torch.amp.GradScaler("cuda", init_scale=init, growth_interval=3)
    for number, batch in enumerate(batches(steps)):
        rows, classes = accel.runtime.to_device(batch)
        rows = rows * (math.nan if number in (2, 7) else 1.0)
        for model, chosen, scaling in ((ours, mine, scaler), (theirs, yours, oracle)):
            chosen.zero_grad()
            with accel.autocast(torch.float16):
                loss = cross_entropy(model, (rows, classes))
            scaling.scale(loss).backward()
            scaling.step(chosen)
            scaling.update()
    assert scaler.skipped == 2
    assert scaler.state_dict()["scale"] == oracle.get_scale()
    assert scaler.state_dict()["_growth_tracker"] == oracle.state_dict()["_growth_tracker"]
    assert all(error(a, b) < 1e-5 for a, b in zip(weights(ours), weights(theirs), strict=True))


def test_an_endless_overflow_leaves_the_weights_alone(accel):
    trainer = make(accel, precision="fp16")
    rows, classes = accel.runtime.to_device(batches(1)[0])
    before = weights(trainer.model)
    for _ in range(200):
        trainer((rows * math.inf, classes))
    assert trainer.scaler.state_dict()["scale"] == 1.0
    trainer((rows, classes))
    after = weights(trainer.model)
    assert all(bool(weight.isfinite().all()) for weight in after)
    assert not torch.equal(after[0], before[0])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_captured_steps_are_the_eager_ones(accel, optimizer, precision, no_waiting):
    """Loss, weights and skipped updates, scaling and clipping included; a replay waits for nothing."""
    needed = {"bf16": "bfloat16", "fp16": "float16"}.get(precision)
    if needed and needed not in accel.capabilities.autocast_dtypes:
        pytest.skip(f"not declared: {needed}")
    data = [accel.runtime.to_device(batch) for batch in batches(12)]
    if precision == "fp16":
        data[9] = (data[9][0] * math.inf, data[9][1])
    found = []
    for graph in (False, True):
        trainer = make(accel, optimizer, precision=precision, clip_norm=0.5, graph=graph)
        losses = [trainer(batch) for batch in data[:6]]  # warm-up, and capture
        with no_waiting():
            losses += [trainer(batch) for batch in data[6:]]
        finite = torch.stack(losses)[torch.tensor([number != 9 for number in range(12)], device=accel.device)]
        found.append((finite, weights(trainer.model), trainer.skipped))
    (eager, eager_weights, eager_skipped), (captured, captured_weights, captured_skipped) = found
    assert error(captured, eager) < 1e-3
    assert all(error(a, b) < 1e-2 for a, b in zip(captured_weights, eager_weights, strict=True))
    assert captured_skipped == eager_skipped == (precision == "fp16")


@pytest.mark.parametrize("graph", [False, True])
def test_overflows_in_a_row_are_reported(accel, caplog, graph):
    model = network()
    optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.01)
    trainer = accel.trainer(
        model, optimizer, loss=lambda *given: cross_entropy(*given) * math.inf, precision="fp16", graph=graph
    )
    for batch in batches(22):  # the host learns of an overflow some steps later
        trainer(batch)
        accel.runtime.synchronize()
    assert "updates in a row were skipped" in caplog.text
    assert ("graph=True" in caplog.text) == graph


def test_a_capture_that_breaks_says_what_broke_it(run_python):
    """In a process of its own: torch's random generator is not what it was afterwards."""
    script = """
        import accelcore, torch
        from accelcore.errors import TrainingError
        accel = accelcore.select("cuda")
        model = torch.nn.Linear(4, 1)
        optimizer = accel.optimizers.create("adamw", model.parameters(), lr=0.1)
        loss = lambda model, rows: model(rows).sum() * (1 + 0 * rows.sum().item())
        trainer = accel.trainer(model, optimizer, loss=loss, graph=True)
        try:
            for _ in range(4):
                trainer(torch.ones(2, 4, device=accel.device))
        except TrainingError as error:
            assert trainer.steps == 3
            print(error.why)
    """
    assert "captur" in run_python(script)


@pytest.mark.parametrize("workers", [0, 1])
def test_pinned_batches_arrive_without_waiting(accel, workers, no_waiting):
    rows, classes = (torch.cat(parts) for parts in zip(*batches(8), strict=True))
    loader = DataLoader(TensorDataset(rows, classes), batch_size=16, pin_memory=True, num_workers=workers)
    trainer = make(accel)
    stream = trainer.batches(loader)
    trainer(next(stream))
    count = 1
    with no_waiting():
        for batch in itertools.islice(stream, 7):  # the end of an epoch looks at the parameters, and waits
            assert batch[0].device == accel.device
            trainer(batch)
            count += 1
    assert count == 8
    assert next(stream, None) is None


def test_a_pinned_batch_moves_on_a_side_stream(accel, no_waiting):
    pinned = torch.arange(2.0**20).pin_memory()
    with no_waiting(), accel.runtime.side_stream():
        moved = accel.runtime.to_device(pinned)
    doubled = moved * 2  # the later work waits for the side stream
    assert torch.equal(doubled.cpu(), torch.arange(2.0**20) * 2)


def test_training_holds_no_more_memory_from_step_to_step(accel):
    trainer = make(accel, precision="fp16", clip_norm=1.0)
    data = [accel.runtime.to_device(batch) for batch in batches(20)]
    for batch in itertools.islice(itertools.cycle(data), 140):  # the trainer keeps the last 128 losses
        trainer(batch)
    gc.collect()  # what other tests left must not go meanwhile
    held = accel.runtime.memory().used
    for batch in data:
        trainer(batch)
    assert accel.runtime.memory().used == held


def test_offloaded_activations_come_back_in_time_without_waiting(accel, no_waiting):
    data = accel.runtime.to_device(batches(12))
    found = []
    for options in ({}, {"offload": torch.nn.Linear}):
        trainer = make(accel, **options)
        losses = [trainer(batch) for batch in data[:4]]  # pinned memory is allocated
        with no_waiting():
            losses += [trainer(batch) for batch in data[4:]]
        found.append((torch.stack(losses), weights(trainer.model)))
    (plain, plain_weights), (offloaded, offloaded_weights) = found
    assert torch.equal(offloaded, plain)
    assert all(torch.equal(a, b) for a, b in zip(offloaded_weights, plain_weights, strict=True))
