"""Table O1 on CUDA's autocast, which every build of torch has: with fake tensors, and no GPU."""

from __future__ import annotations

import pytest
import torch
from accelcore_cuda.declaration import declare
from accelcore_cuda.precision import CudaPrecision
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from accelcore import precision as o1
from accelcore.precision import O1

LOW, FP32 = torch.float16, torch.float32


@pytest.fixture
def precision(monkeypatch):
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    yield CudaPrecision(declare((8, 0), rocm=False, nccl=True, fused=()), emulated_bfloat16=False)
    o1.reset()


def test_each_operator_of_torchs_table_is_classified(precision):
    bases = {operator.split("::")[1].split(".")[0] for operator in precision.table("torch")}
    assert bases - O1.keys() <= precision.treatments().keys()


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x: x @ x, LOW),
        (lambda x: torch.tensordot(x, x, 1), LOW),
        (lambda x: functional.linear(x, x), LOW),
        (lambda x: torch.einsum("ij,jk->ik", x, x), LOW),
        (functional.gelu, FP32),
        (torch.std, FP32),
        (lambda x: functional.softmax(x, 1), FP32),
        (lambda x: functional.layer_norm(x, (4,)), FP32),
        (lambda x: functional.rms_norm(x, (4,)), FP32),
        (torch.sum, FP32),
        (lambda x: torch.linalg.vecdot(x, x), FP32),
        (torch.exp2, FP32),
        (lambda x: functional.mse_loss(x, x), FP32),
        (lambda x: torch.cat([x, x.float()]), FP32),
        (lambda x: torch.scatter_add(x.float(), 0, torch.zeros(4, 4, dtype=torch.int64, device=x.device), x), FP32),
        (torch.relu, LOW),
        (lambda x: functional.binary_cross_entropy(x.float(), x.float()), FP32),
    ],
)
def test_an_operator_has_the_dtype_that_the_table_says(precision, run, expected):
    with FakeTensorMode():
        x = torch.empty(4, 4, device="cuda", dtype=LOW)
        with precision.autocast(LOW, table="O1"):
            assert run(x).dtype is expected


def test_torchs_own_table_is_as_it_was(precision):
    with FakeTensorMode():
        x = torch.empty(4, 4, device="cuda", dtype=LOW)
        with precision.autocast(LOW, table="O1"):
            assert torch.linalg.vecdot(x, x).dtype is FP32
        with torch.autocast("cuda", LOW):
            assert torch.linalg.vecdot(x, x).dtype is LOW
            assert functional.gelu(x).dtype is LOW
            with pytest.raises(
                RuntimeError, match=r"unsafe to autocast|refuses inputs"
            ):  # the copy of the table says the latter
                functional.binary_cross_entropy(x, x)
