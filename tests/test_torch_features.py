"""Parts of torch that older versions lack: found, and done without."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
from accelcore_cpu import precision

import accelcore
from accelcore.cli.doctor import deep
from accelcore.precision.o1.table import O1_REPLACES, Treatment, torch_treatment
from accelcore.roles import compiler
from accelcore.torch_features import BACKWARD_PASS_AUTOCAST, GET_KERNEL, TorchFeature
from accelcore.torch_internals import operators_registered_at


@pytest.mark.parametrize(
    ("module", "attribute", "present"),
    [
        ("torch.library", "Library", True),
        ("torch.library", "Library.impl", True),
        ("torch.library", "Library.no_such_method", False),
        ("torch.library", "no_such_function", False),
        ("torch.nn", "no_such_name", False),
        ("torch.no_such_module", "name", False),
        ("torch._functorch.config", "functionalize_rng_ops", True),
        ("torch._functorch.config", "functionalize", False),
    ],
)
def test_a_feature_is_present_or_not(module, attribute, present):
    assert TorchFeature(module, attribute, "nothing").present is present


@pytest.fixture
def without(monkeypatch):
    """Make torch seem to lack a feature."""

    def lack(feature):
        __import__(feature.module)
        owner, _, name = feature.attribute.rpartition(".")
        module = sys.modules[feature.module]
        monkeypatch.delattr(getattr(module, owner) if owner else module, name, raising=False)

    return lack


def test_doctor_shows_what_torch_lacks(without, monkeypatch, capsys):
    without(BACKWARD_PASS_AUTOCAST)
    monkeypatch.setattr(sys, "argv", ["doctor"])
    assert deep.main() == 0
    assert f"{BACKWARD_PASS_AUTOCAST}: {BACKWARD_PASS_AUTOCAST.instead}" in capsys.readouterr().err


def test_the_same_numbers_everywhere_are_refused_without_the_kernels_that_draw(accel, without):
    without(GET_KERNEL)
    with pytest.raises(accelcore.UnsupportedError, match="everywhere") as caught:
        accel.runtime.seed(1, same="everywhere")
    assert str(GET_KERNEL) in caught.value.why
    accel.runtime.seed(1)


def test_kernels_that_are_only_quicker_are_left_out_with_a_warning(accel, without, caplog):
    without(GET_KERNEL)
    precision._warn_of_slow_kernels.cache_clear()
    accelcore.precision.reset()
    with accel.autocast(torch.bfloat16):
        heads = torch.ones(1, 2, 4, 8)
        assert torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).dtype == torch.bfloat16
    assert "slower" in caplog.text


LOW = torch.full((2, 2, 2, 2), 0.5, dtype=torch.bfloat16)
INPUTS = {
    "adaptive_avg_pool3d": (LOW, [1, 1, 1]),
    "adaptive_max_pool3d": (LOW, [1, 1, 1]),
    "binary_cross_entropy": (LOW, LOW),
    "grid_sampler": (LOW, LOW, 0, 0, False),
    "linalg_vecdot": (LOW.float(), LOW.float()),
    "max_pool3d": (LOW, [1, 1, 1]),
    "reflection_pad1d": (LOW[0], [1, 1]),
    "replication_pad3d": (LOW, [1, 1, 1, 1, 1, 1]),
}


@pytest.mark.parametrize("name", INPUTS)
def test_the_copy_of_torchs_table_is_torchs(name):
    """torch's own kernel on the CPU and the copy cast the inputs alike."""
    with torch.autocast("cpu", torch.bfloat16):
        found = getattr(torch.ops.aten, name)(*INPUTS[name])
    dtype = (found[0] if isinstance(found, tuple) else found).dtype
    assert name in O1_REPLACES
    expected = torch_treatment(name, operators_registered_at("AutocastCPU"))
    assert dtype == {Treatment.FP32: torch.float32, Treatment.LOW: torch.bfloat16}[expected]


def test_a_short_list_takes_the_widest_dtype_of_several_tensors():
    short = frozenset({"aten::dot", "aten::lstm_cell", "aten::binary_cross_entropy"})
    assert torch_treatment("dot", short) is Treatment.WIDEST
    assert torch_treatment("lstm_cell", short) is Treatment.LOW
    assert torch_treatment("binary_cross_entropy", short) is Treatment.REFUSED


def test_outside_of_o1_torchs_table_holds_without_its_kernels(accel, without):
    without(GET_KERNEL)
    accelcore.precision.reset()
    pooled = torch.rand(1, 2, 4, 4, 4, dtype=torch.bfloat16)
    with accel.autocast(torch.bfloat16, table="O1"):
        assert torch.nn.functional.max_pool3d(pooled, 2).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.max_pool3d(pooled, 2).dtype == torch.float32
    accelcore.precision.reset()


def test_a_model_that_would_lose_precision_when_compiled_runs_eagerly(without, monkeypatch, caplog):
    without(BACKWARD_PASS_AUTOCAST)
    monkeypatch.setattr(compiler, "backward_outside_autocast", contextlib.nullcontext)
    module = torch.nn.Linear(2, 2)
    result = compiler.TorchCompiler().compile(module, {"backend": "eager"})
    result.module(torch.ones(1, 2))
    assert result.compiled
    with torch.autocast("cpu", torch.bfloat16):
        assert result.module(torch.ones(1, 2)).dtype == torch.bfloat16
    assert not result.compiled
    assert result.module is module
    assert str(BACKWARD_PASS_AUTOCAST) in result.reason
    assert str(BACKWARD_PASS_AUTOCAST) in caplog.text
