"""O1's kernels on the CPU: each operator is in the table, and torch is left as it was."""

from __future__ import annotations

import gc
import threading
import weakref
from uuid import uuid4

import pytest
import torch
from torch import nn
from torch.nn import functional

from accelcore import Policy, precision
from accelcore.precision import O1, Treatment
from accelcore.torch_features import BACKWARD_PASS_AUTOCAST

LOW, FP32 = torch.bfloat16, torch.float32
KEY = "AutocastCPU"


def registered():
    return set(torch._C._dispatch_get_registrations_for_dispatch_key(KEY))


@pytest.fixture(autouse=True)
def _reset():
    precision.reset()
    yield
    precision.reset()


@pytest.fixture
def o1(accel):
    return accel.autocast(LOW, table="O1")


def test_each_operator_that_torchs_autocast_knows_here_is_classified(accel):
    unclassified = {name.split("::")[1].split(".")[0] for name in registered()} - O1.keys()
    assert unclassified == accel.precision.treatments().keys()


def test_the_table_lists_what_it_intercepts(accel):
    table = accel.precision.table("O1")
    assert {"aten::mm", "aten::softmax.int", "aten::pow.Tensor_Scalar", "aten::binary_cross_entropy"} <= table
    assert not any(O1[name.split("::")[1].split(".")[0]] is Treatment.AS_IS for name in table)
    assert not {"aten::relu", "aten::max_pool3d", "aten::softmax.Dimname", "aten::mm.out", "aten::exp_"} & table


def test_torch_is_as_it_was_until_a_region_and_after_a_reset(accel):
    before, dump = registered(), torch._C._dispatch_dump("aten::softmax.int")
    region = accel.autocast(LOW, table="O1")
    assert registered() == before
    for _ in range(2):  # a region that was made before a reset puts the kernels back
        with region:
            assert functional.softmax(torch.ones(2, 2, dtype=LOW), 1).dtype is FP32
        assert registered() > before
        assert accel.precision.table("torch") == before
        precision.reset()
        assert registered() == before
        assert torch._C._dispatch_dump("aten::softmax.int") == dump


def plain():
    """What torch's own autocast makes of operators with a kernel of ours, where torch has one and where it has none."""
    x = torch.linspace(0.5, 2, 16).view(4, 4)
    with torch.autocast("cpu", LOW):
        y = x @ x
        return [
            functional.softmax(y, 1), functional.gelu(y), y.norm(), y.std(), y.sum(0), y.exp(), torch.vdot(y[0], y[0]),
            torch.linalg.vecdot(x, y), torch.einsum("ij,jk->ik", x, y), torch.tensordot(x, x, 1),
            functional.grid_sample(y[None, None], torch.zeros(1, 2, 2, 2, dtype=LOW), align_corners=False),
            functional.pad(y[None, None], (1, 1, 1, 1), "reflect"), functional.binary_cross_entropy(x / 3, x / 3),
            torch.gru_cell(x, x, torch.ones(12, 4), torch.ones(12, 4)), torch.cat([x, y]),
        ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_plain_autocast_is_torchs_also_while_our_kernels_are_in_place(o1):
    before = plain()
    with o1:
        pass
    after = plain()
    assert [result.dtype for result in after] == [result.dtype for result in before]
    assert all(map(torch.equal, after, before))


def test_a_region_is_its_own_threads(o1):
    seen = []

    def elsewhere():
        with torch.autocast("cpu", LOW):
            seen.append(functional.gelu(torch.ones(2, dtype=LOW)).dtype)

    with o1:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert functional.gelu(torch.ones(2, dtype=LOW)).dtype is FP32
    assert seen == [LOW]


def test_a_plain_autocast_without_torchs_cache_is_no_region(o1):
    with o1:
        pass
    with torch.autocast("cpu", LOW, cache_enabled=False):
        assert functional.gelu(torch.ones(2, dtype=LOW)).dtype is LOW


def test_an_explicit_dtype_is_kept(o1):
    x = torch.ones(2, 2, dtype=LOW)
    with o1:
        assert x.sum(dtype=LOW).dtype is LOW
        assert functional.softmax(x, 1, dtype=torch.float64).dtype is torch.float64
        assert x.double().exp().dtype is torch.float64
        assert x.norm(dtype=torch.float64).dtype is torch.float64


def test_a_matrix_norm_of_low_precision_is_taken_in_fp32(o1):
    x = torch.linspace(0.5, 2, 16).view(4, 4).bfloat16()
    with o1:
        found = torch.linalg.matrix_norm(x)
    assert found.dtype is FP32
    assert torch.allclose(found.double(), torch.linalg.matrix_norm(x.double()), rtol=1e-6)


def test_weights_of_a_recurrent_cell_are_cast_once_in_a_region(o1):
    cell, steps, kept = nn.GRUCell(4, 4), torch.ones(5, 2, 4, requires_grad=True), []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor),
        o1,
    ):
        hidden = None
        for step in steps:
            hidden = cell(step, hidden)
    weights = {tensor.data_ptr() for tensor in kept if tensor.dtype is LOW and 12 in tensor.shape and 4 in tensor.shape}
    assert len(weights) == 2, "the input's and the hidden state's, once each"
    hidden.float().sum().backward()
    assert all(parameter.grad.dtype is FP32 for parameter in cell.parameters())


def test_a_region_keeps_nothing_when_it_was_left(o1):
    cell = nn.GRUCell(4, 4)
    with o1:
        cell(torch.ones(2, 4))
    gone = weakref.ref(cell.weight_hh)
    del cell
    gc.collect()
    assert gone() is None


@pytest.fixture
def own_cache_keys():
    """Compiled code is looked up, but not that of an earlier run, only its C++: to compile that takes longest."""
    with torch.compiler.config.patch(cache_key_tag=str(uuid4())):
        yield


@pytest.mark.skipif(not BACKWARD_PASS_AUTOCAST.present, reason=f"torch has no {BACKWARD_PASS_AUTOCAST}")
@pytest.mark.usefixtures("own_cache_keys")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled_is_eager(accel, backend):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            hidden = self.layer(x)
            return hidden, functional.softmax(hidden, 1), functional.gelu(hidden)

    torch.manual_seed(0)
    model = Model()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    x = torch.randn(3, 4)
    regions = {"O1": accel.autocast(LOW, table="O1"), "torch": torch.autocast("cpu", LOW)}
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        for table in ("O1", "torch", "O1"):  # compiled code of one is not taken for the other
            gradients = []
            for run in (model, compiled):
                with regions[table]:
                    hidden, *exact = run(x)
                assert hidden.dtype is LOW
                assert {result.dtype for result in exact} == {FP32 if table == "O1" else LOW}
                model.zero_grad()
                sum(result.float().square().sum() for result in exact).backward()
                gradients.append(model.layer.weight.grad.clone())
            assert torch.allclose(*gradients, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("policy", "low"), [("O1", torch.float16), (Policy(autocast="bfloat16", table="O1"), LOW)], ids=["preset", "policy"]
)
def test_a_trainer_takes_o1(accel, policy, low):
    model, seen = nn.Linear(4, 4), []

    def loss(model, batch):
        hidden = model(batch)
        seen.append((hidden.dtype, functional.gelu(hidden).dtype))
        return functional.gelu(hidden).square().mean()

    trainer = accel.trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, precision=policy)
    first = trainer(torch.ones(2, 4))
    for _ in range(20):
        last = trainer(torch.ones(2, 4))
    assert set(seen) == {(low, FP32)}
    assert last < first
    assert ("scale" in trainer.scaler.state_dict()) == (low is torch.float16)
