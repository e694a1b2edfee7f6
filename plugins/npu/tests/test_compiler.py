from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from accelcore.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network(accel):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(accel.device)


def gradient(call, model, accel):
    model.zero_grad()
    call(torch.ones(3, 4, device=accel.device)).sum().backward()
    return model[0].weight.grad.cpu().clone()


pytestmark = [
    # npugraphs' own code generator, of the code it generates.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]


def test_what_is_declared_is_what_is_installed(accel):
    assert {"npugraph_ex", "npugraphs"} <= set(accel.capabilities.compilers) <= set(torch._dynamo.list_backends())


def test_what_it_returns_computes_what_the_model_computes(accel):
    model = network(accel)
    compiled = accel.compiler.compile(model, {})
    wanted = gradient(model, model, accel)
    for _ in range(4):
        torch.testing.assert_close(gradient(compiled.module, model, accel), wanted)
    assert compiled.compiled or all(f"{name}: " in compiled.reason for name in accel.capabilities.compilers)


def test_the_first_backend_that_works_is_taken(accel, monkeypatch):
    from accelcore_npu import compiler

    monkeypatch.setattr(compiler, "_BACKENDS", {"nowhere": None, "wrong": None, "aot_eager": None, "eager": None})
    torch._dynamo.register_backend(lambda graph, inputs: lambda *values: (graph(*values)[0] * 2,), name="wrong")
    faults = {name: compiler._fault(name, accel.device) for name in compiler._BACKENDS}
    assert "nowhere" in faults["nowhere"]
    assert faults["wrong"].startswith("run 1 computes other values")
    assert (faults["aot_eager"], faults["eager"]) == (None, None)
    called = []
    monkeypatch.setattr(torch, "compile", lambda module, **options: called.append(options) or module)
    assert accel.compiler.compile(network(accel), {"dynamic": False}).compiled
    assert called[-1] == {"dynamic": False, "backend": "aot_eager"}


@pytest.mark.parametrize(("backend", "overwrites"), [("npugraph_ex", True), ("npugraphs", True), ("eager", False)])
def test_graphs_say_that_they_overwrite(accel, monkeypatch, backend, overwrites):
    from accelcore_npu import compiler

    monkeypatch.setattr(compiler, "_fault", lambda name, device: None)
    assert accel.compiler.compile(network(accel), {"backend": backend}).overwrites is overwrites


def test_finding_out_draws_no_random_numbers(accel, monkeypatch):
    from accelcore_npu import compiler

    before = accel.runtime.rng_state()
    monkeypatch.setattr(compiler, "_BACKENDS", {"aot_eager": None})
    compiler._fault.__wrapped__("aot_eager", accel.device)
    after = accel.runtime.rng_state()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_backend_of_ones_own_is_passed_through(accel):
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    model = network(accel)
    compiled = accel.compiler.compile(model, {"backend": backend})
    compiled.module(torch.ones(3, 4, device=accel.device))
    assert compiled.compiled
    assert calls


def test_one_that_is_named_and_does_not_work_is_reported_once_and_the_model_runs_eagerly(accel, caplog):
    model = network(accel)
    assert "inductor" not in accel.capabilities.compilers, "triton-ascend is not installed here"
    with caplog.at_level(logging.WARNING, "accelcore"):
        compiled = accel.compiler.compile(model, {"backend": "inductor"})
        gradient(compiled.module, model, accel)
        gradient(compiled.module, model, accel)
    assert (compiled.compiled, compiled.module) == (False, model)
    assert compiled.reason == "inductor: triton-ascend is not installed"
    assert [record.getMessage() for record in caplog.records] == [
        "the model runs eagerly, not compiled: inductor: triton-ascend is not installed"
    ]


def test_where_none_works_every_reason_is_given(accel, caplog, monkeypatch):
    from accelcore_npu import compiler

    monkeypatch.setattr(compiler, "_fault", lambda backend, device: "it is broken")
    compiled = accel.compiler.compile(network(accel), {})
    assert not compiled.compiled
    assert compiled.reason == "; ".join(f"{name}: it is broken" for name in accel.capabilities.compilers)
    assert len(caplog.records) == 1


def test_an_option_that_does_not_exist_is_refused(accel):
    with pytest.raises(ConfigurationError):
        accel.compiler.compile(network(accel), {"bakend": "npugraphs"})


def test_a_trainer_trains_compiled_as_it_does_eagerly(accel):
    def losses(compile):
        model = network(accel)
        optimizer = accel.optimizers.create("adam", model.parameters(), lr=0.01)

        def loss(model, batch):
            return (model(batch) - 1).square().mean()

        trainer = accel.trainer(model, optimizer, loss=loss, compile=compile)
        found = [trainer(torch.ones(3, 4, device=accel.device)).item() for _ in range(5)]
        return trainer.compiled, found

    _, eager = losses(False)
    compiled, found = losses({"backend": "aot_eager"})
    assert compiled.compiled
    assert found == pytest.approx(eager, rel=1e-5)
    assert found[-1] < found[0]
