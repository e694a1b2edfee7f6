"""The table of known wrong kernels against the kernels themselves, and what is made of it."""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.known_faults import (
    AUTOCAST_IN_CACHE,
    BACKWARD_UNDER_AUTOCAST,
    FP16_EPSILON,
    GUARDS_BY_DICT,
    TORCH_FAULTS,
    KnownFault,
)
from accelcore.optim.registry import Optimizers
from accelcore.precision import reset
from accelcore.roles import compiler
from accelcore.roles.compiler import TorchCompiler
from accelcore.torch_features import BACKWARD_PASS_AUTOCAST
from tests import fault_probes

PAGE = Path(__file__).parents[1] / "docs" / "known_faults.md"
RELEASE = torch.__version__.partition("+")[0]
TABLES = {"": TORCH_FAULTS}
TABLES |= {name: import_module(f"accelcore_{name}.known_faults").KNOWN_FAULTS for name in ("cpu", "cuda", "npu")}
FAULT = KnownFault(
    kernel="a kernel", package="torch", versions=">=2", what="it adds wrongly", instead="a loop",
    reference="https://example.org/1", seen="",
)  # fmt: skip


PROBES = dict(
    zip(
        (*TORCH_FAULTS, *TABLES["cpu"]),
        (
            fault_probes.fp16_epsilon, fault_probes.skipped_first_step, fault_probes.backward_under_autocast,
            fault_probes.autocast_in_cache, fault_probes.guards_by_dict, fault_probes.cast_without_gradient,
            fault_probes.hermitian_out,
            fault_probes.unseen_update, fault_probes.gelu_of_infinity, fault_probes.attention_of_nan,
            fault_probes.sums_of_rows, fault_probes.sums_at_places, fault_probes.elu_of_small,
            fault_probes.low_precision_sgd, fault_probes.memory_order, fault_probes.remainder,
            fault_probes.narrow_convolution, fault_probes.gelu_out, fault_probes.grouped_variance,
            fault_probes.triangular_out, fault_probes.dense_out, fault_probes.counted_embedding,
            fault_probes.expanded_median, fault_probes.rounded_answer,
        ),
        strict=True,
    )
)  # fmt: skip


@pytest.fixture
def compiles_alone():
    """Torch compiles the same code for at most 8 cases in a process: those of a test are not left for others."""
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("fault", PROBES, ids=lambda fault: fault.kernel)
@pytest.mark.usefixtures("compiles_alone")
def test_each_entry_is_still_true_of_the_installed_version(fault):
    """Both ways: a kernel that was mended is no longer refused, and one that is wrong again is."""
    reset()  # of torch's own kernels, whichever a test before has replaced
    found = PROBES[fault]()
    if found is None:
        pytest.skip("it is one of other processors")
    assert found == fault.applies, f"out of date for {fault.package} {fault.installed}: {fault}"


class Right(torch.optim.Optimizer):
    """A class that computes as it should, for any option that a probe gives it."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        if getattr(self, "found_inf", torch.zeros(())) == 0:
            for parameter in self.param_groups[0]["params"]:
                parameter -= self.param_groups[0]["lr"] * parameter.grad


def test_a_probe_finds_what_is_right_to_be_right(monkeypatch):
    """A probe that calls everything wrong would prove nothing."""
    monkeypatch.setattr(fault_probes, "_WITH_EPSILON", (Right,))
    monkeypatch.setattr(fault_probes, "_FUSED", (Right,))
    monkeypatch.setattr(torch.optim, "SGD", Right)
    assert not fault_probes.fp16_epsilon()
    assert not fault_probes.skipped_first_step()
    assert not fault_probes.low_precision_sgd()
    assert not fault_probes.memory_order()
    monkeypatch.setattr(fault_probes, "_REMAINDERS", (lambda one, other: one * 0,))
    assert not fault_probes.remainder()
    monkeypatch.setattr(
        fault_probes, "_HERMITIAN", (lambda given, dim, **out: torch.fft.ihfft(given, dim=dim[0], **out),)
    )
    assert not fault_probes.hermitian_out()
    monkeypatch.setattr(fault_probes, "_GELU", torch.exp)
    assert not fault_probes.gelu_out()
    with monkeypatch.context() as patched:
        patched.setattr(fault_probes, "_ELU", lambda given: given.exp() - 1)
        assert fault_probes.elu_of_small()
    monkeypatch.setattr(fault_probes, "_TRIANGLE", torch.neg)
    assert not fault_probes.triangular_out()
    in_fp32 = lambda rows, *given: torch.nn.functional.layer_norm(rows.float(), *given)  # noqa: E731
    monkeypatch.setattr(fault_probes, "_LAYER_NORM", in_fp32)
    assert not fault_probes.sums_of_rows()
    monkeypatch.setattr(fault_probes, "_TO_PLACES", (lambda x, places: x.float()[places],))
    assert not fault_probes.sums_at_places()
    monkeypatch.setattr(fault_probes, "_MEDIAN", lambda x, dim: x.contiguous().median(dim))
    assert not fault_probes.expanded_median()
    monkeypatch.setattr(fault_probes, "_ANSWERS", (lambda x, *, out: torch.any(x != 0, out=out),))
    assert not fault_probes.rounded_answer()
    monkeypatch.setattr(fault_probes, "_AVG_POOL", torch.neg)
    assert not fault_probes.dense_out()
    monkeypatch.setattr(fault_probes, "_LAYOUTS", (torch.contiguous_format,) * 2)
    assert not fault_probes.grouped_variance()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "no_grad", contextlib.nullcontext)
        assert not fault_probes.cast_without_gradient()
    if BACKWARD_PASS_AUTOCAST.present:
        torch._dynamo.reset()  # what was compiled with the other setting is kept
        with torch._functorch.config.patch({"backward_pass_autocast": "off"}):
            assert not fault_probes.backward_under_autocast()
        torch._dynamo.reset()


@pytest.mark.parametrize(("versions", "applies"), [(">=2,<3", True), ("<1", False), (f">={RELEASE}", True)])
def test_a_fault_applies_to_its_versions(versions, applies):
    assert replace(FAULT, versions=versions).applies is applies


def test_a_fault_of_what_is_not_installed_does_not_apply():
    fault = replace(FAULT, package="no-such-distribution")
    assert (fault.installed, fault.applies) == (None, False)


# The registry.


def registry():
    found = Optimizers()
    found.register("sgd", "wrong", torch.optim.SGD, priority=1, supports=lambda request: request.options.get("reason"))
    found.register("sgd", "right", torch.optim.SGD)
    return found


def test_a_route_that_is_distrusted_is_refused_with_the_faults_words_and_reference():
    optimizers = registry()
    optimizers.distrust("SGD", "wrong", FAULT)
    first, second, *_ = optimizers.explain("sgd")
    assert (first.route, first.chosen, second.chosen) == ("wrong", False, True)
    assert first.reason == "it adds wrongly (torch >=2: https://example.org/1)"
    weight = torch.nn.Parameter(torch.ones(1))
    assert optimizers.create("sgd", [weight], lr=0.1).route == "right"
    with pytest.raises(UnsupportedError, match="it adds wrongly"):
        optimizers.create("sgd", [weight], lr=0.1, route="wrong")


def test_a_route_is_distrusted_for_the_requests_that_it_serves_wrongly_and_no_others():
    optimizers = registry()
    optimizers.distrust("sgd", "wrong", FAULT, when=lambda request: bool(request.options.get("nesterov")))
    assert optimizers.explain("sgd")[0].chosen
    assert optimizers.explain("sgd", nesterov=True)[1].chosen
    assert optimizers.explain("sgd", reason="its own")[0].reason == "its own"


def test_a_version_without_the_fault_is_trusted():
    optimizers = registry()
    optimizers.distrust("sgd", "wrong", replace(FAULT, versions="<1"))
    assert optimizers.explain("sgd")[0].chosen


def test_distrust_of_a_copy_leaves_the_registry_as_it_was():
    optimizers = registry()
    optimizers.copy().distrust("sgd", "wrong", FAULT)
    assert optimizers.explain("sgd")[0].chosen


@pytest.mark.parametrize(("name", "route"), [("sgd", "wrogn"), ("sdg", "wrong")])
def test_what_is_not_registered_cannot_be_distrusted(name, route):
    with pytest.raises(ConfigurationError, match="has no route"):
        registry().distrust(name, route, FAULT)


@pytest.mark.parametrize("name", ["adagrad", "adam", "adamw", "nadam", "radam", "rmsprop"])
def test_eps_that_is_nothing_in_fp16_is_refused_where_it_is_added_in_fp16(accel, name):
    weight = torch.nn.Parameter(torch.ones(8, dtype=torch.float16))
    for route in ("loop", "foreach"):
        with pytest.raises(UnsupportedError, match=re.escape(FP16_EPSILON.reference)):
            accel.optimizers.create(name, [weight], route=route)
    weight.grad = torch.full_like(weight, 1e-5)
    optimizer = accel.optimizers.create(name, [weight], route="loop", eps=1e-4)
    optimizer.step()
    assert weight.isfinite().all()


def test_gradients_in_another_order_than_their_parameter_are_read_rightly(accel):
    def trained(route):
        weight = torch.nn.Parameter(torch.arange(6.0).reshape(3, 2).t())
        optimizer = accel.optimizers.create("adam", [weight], lr=0.1, route=route)
        for _ in range(2):
            weight.grad = torch.arange(-6.0, 0.0).reshape(2, 3)
            optimizer.step()
        return weight.detach()

    torch.testing.assert_close(trained("fused"), trained("loop"))


# The compiler.


def test_a_compiled_model_says_what_is_avoided():
    compiled = TorchCompiler(avoids=(FAULT, replace(FAULT, versions="<1"))).compile(
        torch.nn.Linear(2, 2), {"backend": "eager"}
    )
    of_torch = [fault for fault in (BACKWARD_UNDER_AUTOCAST, AUTOCAST_IN_CACHE, GUARDS_BY_DICT) if fault.applies]
    assert [fault.kernel for fault in compiled.avoids] == [*(fault.kernel for fault in of_torch), "a kernel"]


@pytest.mark.skipif(not BACKWARD_PASS_AUTOCAST.present, reason="this torch runs such a model eagerly")
@pytest.mark.parametrize("versions", [">=2", "<1"])
def test_a_cache_that_does_not_know_the_dtype_of_autocast_is_not_used_under_it(monkeypatch, versions):
    monkeypatch.setattr(compiler, "AUTOCAST_IN_CACHE", replace(AUTOCAST_IN_CACHE, versions=versions))
    used = []

    def backend(graph, inputs):
        used.append(torch._functorch.config.enable_autograd_cache)
        return graph.forward

    compiled = TorchCompiler().compile(torch.nn.Linear(2, 2), {"backend": backend})
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            compiled.module(torch.ones(1, 2))
    usual = torch._functorch.config.enable_autograd_cache
    assert used == [usual and versions == "<1", usual]


@pytest.mark.parametrize("versions", [">=2", "<1"])
@pytest.mark.usefixtures("compiles_alone")
def test_a_parameter_that_is_released_is_trained_by_compiled_code(monkeypatch, versions):
    monkeypatch.setattr(compiler, "GUARDS_BY_DICT", replace(GUARDS_BY_DICT, versions=versions))
    model, settings, found = torch.nn.Linear(2, 2), [], []

    def backend(graph, inputs):
        settings.append(torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags)
        return graph.forward

    compiled = TorchCompiler().compile(model, {"backend": backend})
    for is_trained in (False, True, True, False, True):
        model.weight.requires_grad_(is_trained)
        model.zero_grad()
        compiled.module(torch.ones(1, 2)).sum().backward()
        found.append(model.weight.grad is not None)
    assert found == [False, True, True, False, True] or (versions == "<1" and GUARDS_BY_DICT.applies)
    usual = torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags
    assert set(settings) == {usual and versions == "<1"}


# The page.


def rows(text):
    """The rows of a page's tables without their headings."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [line for line in lines if not line.startswith(("| kernel", "|---"))]


def row(fault):
    link = re.sub(r"https://github\.com/(\S+?)/(?:issues|pull)/(\d+)", r"[\1#\2](\g<0>)", fault.reference)
    seen = fault.seen or "not yet by us"
    return f"| {fault.kernel} | {fault.package} {fault.versions} | {fault.what} | {fault.instead} | {link} | {seen} |"


def test_the_page_has_every_entry_and_no_other():
    expected = [row(fault) for table in TABLES.values() for fault in table]
    written = rows(PAGE.read_text(encoding="utf-8"))
    assert written == expected, "the tables of docs/known_faults.md should be:\n" + "\n".join(expected)
