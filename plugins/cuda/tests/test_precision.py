"""The switches are torch's own and can be set on any build; what they do is for a GPU to show."""

from __future__ import annotations

import logging

import pytest
import torch
from accelcore_cuda.declaration import declare
from accelcore_cuda.precision import CudaPrecision, _warn_of_emulation

from accelcore.errors import UnsupportedError

NEW_SETTINGS = pytest.mark.skipif(
    not hasattr(torch.backends.cudnn, "conv"), reason="this torch has the legacy settings of fp32 alone"
)


def role(compute=(9, 0), *, emulated=False):
    return CudaPrecision(declare(compute, rocm=False, nccl=True, fused=()), emulated_bfloat16=emulated)


def switches():
    return torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.fixture(autouse=True)
def _as_torch_starts():
    before = switches()
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[2]
    assert switches() == before


@pytest.fixture
def usable(monkeypatch):
    """torch.autocast looks for a GPU when it is made."""
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    _warn_of_emulation.cache_clear()


@pytest.mark.parametrize("matmul", ["highest", "high"])
@pytest.mark.parametrize("cudnn", [True, False])
@pytest.mark.parametrize(("mode", "inside"), [("ieee", ("highest", False, False)), ("fast", ("high", True, True))])
def test_both_switches_are_set_and_put_back(mode, inside, matmul, cudnn):
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn
    before = switches()
    with role().fp32(mode):
        assert switches() == inside
    assert switches() == before
    with pytest.raises(ZeroDivisionError), role().fp32(mode):
        raise ZeroDivisionError
    assert switches() == before


def test_regions_nest():
    before = switches()
    with role().fp32("fast"):
        with role().fp32("ieee"):
            assert switches() == ("highest", False, False)
        assert switches() == ("high", True, True)
    assert switches() == before


def test_asking_alone_changes_nothing():
    before = switches()
    role().fp32("fast")
    assert switches() == before


@NEW_SETTINGS
def test_the_setting_can_be_read_both_ways_inside():
    """inductor reads the legacy switches while it compiles; a write through the new API would make that fail."""
    with role().fp32("fast"):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.cudnn.conv.fp32_precision == "tf32"


@pytest.mark.parametrize("compute", [(6, 0), (7, 0), (7, 5)])
def test_before_sm_80_there_is_no_fast_fp32(compute):
    with pytest.raises(UnsupportedError):
        role(compute).fp32("fast")
    with role(compute).fp32("ieee"):
        pass


@NEW_SETTINGS
def test_a_setting_that_torch_cannot_read_back_is_refused():
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    try:
        with pytest.raises(RuntimeError, match="legacy and new APIs"):
            role().fp32("fast")
    finally:
        torch.backends.cudnn.allow_tf32 = True


def test_bf16_without_units_is_said_once(usable, caplog):
    with caplog.at_level(logging.WARNING, logger="accelcore"):
        for _ in range(2):
            precision = role((7, 5), emulated=True)
            precision.autocast(torch.float16)
            precision.autocast()
            precision.autocast(torch.bfloat16, enabled=False)
            assert not caplog.records
        for _ in range(2):
            role((7, 5), emulated=True).autocast(torch.bfloat16)
    assert len(caplog.records) == 1
    assert "no bf16 units" in caplog.text


def test_bf16_with_units_is_not_spoken_of(usable, caplog):
    with caplog.at_level(logging.WARNING, logger="accelcore"):
        role().autocast(torch.bfloat16)
    assert not caplog.records


@pytest.mark.parametrize(("compute", "dtype"), [((9, 0), torch.bfloat16), ((7, 5), torch.float16)])
def test_the_preferred_dtype_is_the_one_with_units(usable, compute, dtype):
    with role(compute).autocast():
        assert torch.get_autocast_dtype("cuda") is dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_where_neither_is_declared_both_are_refused(dtype):
    with pytest.raises(UnsupportedError, match="autocast"):
        role((5, 0)).autocast(dtype)


def test_the_table_is_the_one_of_cuda():
    only_cuda = "aten::layer_norm"  # the CPU's table leaves it in low precision
    assert {"aten::mm", "aten::addmm", only_cuda} <= role().table()
