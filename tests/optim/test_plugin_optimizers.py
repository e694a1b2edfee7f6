"""Optimizers that a plugin, or an extension, brings."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch

import accelcore
from accelcore.errors import PluginError

EXAMPLES = Path(__file__).parents[2] / "examples"
HANG = "import threading\nRELEASE = threading.Event()\n"
REGISTER = """
    from accelcore import hookimpl

    @hookimpl
    def accelcore_register_optimizers(backend, registry):
        import torch

        {before}
        registry.register({name!r}, "theirs", torch.optim.SGD, priority=50)
"""
LION = """
    from accelcore import hookimpl

    @hookimpl
    def accelcore_register_optimizers(backend, registry):
        from accelcore_hostchip.lion import Lion

        registry.register("lion", "foreach", Lion, priority=10, memory="any")
"""


def parameter():
    return torch.nn.Parameter(torch.ones(2))


def test_a_backend_plugin_registers_its_own_optimizers(fakes):
    fakes.backend("gifted", after=REGISTER.format(name="lion", before=""))
    backend = accelcore.select("gifted")
    assert type(backend.optimizers.create("lion", [parameter()], lr=0.1).implementation) is torch.optim.SGD
    assert "lion" not in accelcore.select("cpu").optimizers.names()


def test_a_backend_plugin_that_cannot_register_its_optimizers_is_broken(fakes):
    fakes.backend("clumsy", after=REGISTER.format(name="lion", before="raise KeyError('x')"))
    with pytest.raises(PluginError, match="could not register its optimizers") as caught:
        accelcore.select("clumsy")
    assert isinstance(caught.value.__cause__, KeyError)
    assert accelcore.select("clumsy,cpu").name == "cpu"


def test_a_backend_has_trainers_refuse_a_vendors_own_class_and_its_subclasses(fakes):
    refuse = "registry.refuse(torch.optim.ASGD, 'it keeps old gradients')"
    fakes.install(REGISTER.format(name="lion", before=refuse), extensions=["careful"])
    accel, model = accelcore.select("cpu"), torch.nn.Linear(2, 1)

    class Later(torch.optim.ASGD):
        pass

    for kind in (torch.optim.ASGD, Later):
        with pytest.raises(accelcore.ConfigurationError, match=rf"{kind.__name__}(.|\n)*it keeps old gradients"):
            accel.trainer(model, kind(model.parameters(), lr=0.1))
    assert accel.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1)).steps == 0


def test_an_extension_adds_a_faster_route_to_somebody_elses_backend(fakes):
    fakes.install(REGISTER.format(name="adamw", before=""), extensions=["faster"])
    optimizers = accelcore.select("cpu").optimizers
    assert optimizers.explain("adamw")[0] == accelcore.optim.registry.ExplainedRoute("theirs", chosen=True)
    assert type(optimizers.create("adamw", [parameter()], lr=0.1).implementation) is torch.optim.SGD
    assert type(optimizers.create("adamw", [parameter()], lr=0.1, route="loop").implementation) is torch.optim.AdamW


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_kernel_of_a_third_party_trains_skips_and_is_resumed(fakes, import_from, tmp_path, flat, precision):
    import_from(EXAMPLES / "third_party")
    fakes.install(LION, extensions=["lion"])
    accel = accelcore.select("cpu")

    options = {"loss_scale": accelcore.LossScale(init=16.0)} if precision == "fp16" else {}

    def trainer():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        optimizer = accel.optimizers.create("lion", model.parameters(), lr=0.01, decay=0.1)
        loss = lambda model, batch: model(batch).square().mean()  # noqa: E731
        return model, accel.trainer(model, optimizer, loss=loss, flat=flat, precision=precision, **options)

    batches = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(1))
    model, whole = trainer()
    start = [parameter.detach().clone() for parameter in model.parameters()]
    for batch in batches[:2]:
        whole(batch)
    if precision == "fp16":
        whole(batches[0] * float("inf"))
        assert whole.skipped == 1
    else:  # the first step of Lion is lr in the direction of the sign
        first = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        first.load_state_dict(dict(zip(model.state_dict(), start, strict=True)))
        first(batches[0]).square().mean().backward()
        other, stepped = trainer()
        stepped(batches[0])
        for ours, theirs in zip(other.parameters(), first.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs * 0.999 - 0.01 * theirs.grad.sign())
    whole.save(tmp_path)
    resumed_model, resumed = trainer()
    resumed.resume(tmp_path)
    for each in (whole, resumed):
        for batch in batches[2:]:
            each(batch)
    assert all(map(torch.equal, model.parameters(), resumed_model.parameters()))


def test_an_extension_is_told_which_backend_it_extends(fakes):
    fakes.install(REGISTER.format(name="lion", before="if backend.name != 'host': return"), extensions=["choosy"])
    fakes.backend("host")
    assert "lion" in accelcore.select("host").optimizers.names()
    assert "lion" not in accelcore.select("cpu").optimizers.names()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise ImportError('no libfast.so')", "no libfast.so"),
        ("raise SystemExit(3)", "sys.exit(3)"),
        (REGISTER.format(name="lion", before="raise KeyError('x')"), "KeyError"),
        (REGISTER.format(name="lion", before="raise SystemExit(3)"), "sys.exit(3)"),
        (REGISTER.format(name="lion", before="raise KeyError('x' * 1_000_000)"), "KeyError"),
        (REGISTER.format(name="adamw", before="registry.register('adamw', 'loop', None)"), "already has a route"),
    ],
)
def test_a_broken_extension_is_left_out_and_logged(fakes, caplog, code, says):
    fakes.install(code, extensions=["frail"])
    fakes.install(REGISTER.format(name="sturdy", before=""), extensions=["sturdy"])
    backend = accelcore.select("cpu")
    assert "sturdy" in backend.optimizers.names()
    assert "lion" not in backend.optimizers.names()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert says in record.getMessage()
    assert len(record.getMessage()) < 1000


def test_an_extension_whose_import_hangs_is_left_out_in_time(fakes, monkeypatch, caplog):
    monkeypatch.setenv("ACCEL_PROBE_TIMEOUT", "0.3")
    fakes.install(HANG + "RELEASE.wait()", extensions=["sleepy"])
    fakes.install(REGISTER.format(name="sturdy", before=""), extensions=["sturdy"])
    start = time.perf_counter()
    assert "sturdy" in accelcore.select("cpu").optimizers.names()
    assert time.perf_counter() - start < 2
    assert "ACCEL_PROBE_TIMEOUT" in caplog.text


def test_what_a_failed_registration_registers_counts_for_nothing(fakes):
    """In its registry or in its backend's."""
    fakes.install(
        """
        import torch

        from accelcore import hookimpl

        @hookimpl
        def accelcore_register_optimizers(backend, registry):
            registry.register("early", "theirs", torch.optim.SGD)
            backend.optimizers.register("adamw", "theirs", torch.optim.SGD, priority=50)
            raise OSError("no power")
        """,
        extensions=["half"],
    )
    optimizers = accelcore.select("cpu").optimizers
    assert "early" not in optimizers.names()
    assert "theirs" not in [choice.route for choice in optimizers.explain("adamw")]
