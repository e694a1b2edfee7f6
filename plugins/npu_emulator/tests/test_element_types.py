"""The device's operators take fewer element types than the CPU's, and so do the emulated ones."""

import pytest

jobs = pytest.importorskip("kernel_jobs", reason="torch_npu is not installed", exc_type=ImportError)

import torch
from torch.nn import functional

OF_FLOATS = {
    "mm": lambda x: x @ x,
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "addmm": lambda x: torch.addmm(x, x, x),
    "mv": lambda x: x @ x[0],
    "conv2d": lambda x: functional.conv2d(x[None, None], x[None, None]),
    "layer_norm": lambda x: functional.layer_norm(x, (4,)),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "gelu": functional.gelu,
    "mse_loss": lambda x: functional.mse_loss(x, x + 1),
    "kl_div": lambda x: functional.kl_div(x, x, reduction="sum"),
    "max_pool2d": lambda x: functional.max_pool2d(x[None], 2),
    "std": torch.std,
    "vector_norm": torch.linalg.vector_norm,
}


@pytest.mark.filterwarnings("ignore:Cannot create tensor with intern?al format")
@pytest.mark.parametrize("operator", OF_FLOATS.values(), ids=OF_FLOATS)
def test_what_takes_floats_alone(emulated_npu, operator):
    floats = torch.rand(4, 4).to(emulated_npu)
    for dtype in (torch.float32, torch.bfloat16):
        assert operator(floats.to(dtype)).isfinite().all()
    with pytest.raises(RuntimeError, match=r"EMULATED: npu operator aten::\S+ takes bfloat16, float16, float32, not"):
        operator(torch.rand(4, 4, dtype=torch.float64).to(emulated_npu))


@pytest.mark.parametrize(
    ("operator", "taken", "refused"),
    [
        (torch.mm, torch.float16, torch.int32),
        (torch.tanh, torch.int16, torch.float64),
        (lambda x: functional.l1_loss(x, x, reduction="sum"), torch.int64, torch.float64),
        (torch.exp, torch.float64, torch.int32),
        (torch.round, torch.int64, torch.uint8),
        (torch.relu_, torch.uint8, torch.int16),
        (lambda x: x.masked_fill_(x > 0, 0), torch.int8, torch.uint8),
        (lambda x: x.index_fill(0, torch.tensor([0], device="npu"), 1), torch.bool, torch.uint8),
    ],
    ids=["mm", "tanh", "l1_loss", "exp", "round", "relu_", "masked_fill_", "index_fill"],
)
def test_what_takes_others(emulated_npu, operator, taken, refused):
    def run(dtype):
        values = torch.ones(2, 2, dtype=dtype).to(emulated_npu)
        return operator(values, values) if operator is torch.mm else operator(values)

    assert run(taken).device == emulated_npu
    with pytest.raises(RuntimeError, match=rf"EMULATED: npu operator .*, not {str(refused)[6:]} \(on a device EZ1001"):
        run(refused)


def test_the_first_tensor_counts_where_the_others_are_of_other_types(emulated_npu):
    values, targets = torch.rand(4, 4).to(emulated_npu), torch.arange(4).to(emulated_npu)
    assert functional.cross_entropy(values, targets).item() > 0


def test_a_part_without_bfloat16_refuses_it(results):
    [error] = results(jobs.product_of_bfloat16, ACCEL_EMULATED_SOC="Ascend910A")
    assert "takes float16, float32, not bfloat16" in error


@pytest.fixture
def jit_compile():
    torch.npu.set_compile_mode(jit_compile=True)
    yield
    torch.npu.set_compile_mode(jit_compile=False)


@pytest.mark.parametrize("operator", [torch.addcmul, torch.addcdiv])
def test_what_is_compiled_is_of_one_type(emulated_npu, jit_compile, operator):
    whole, floats = torch.tensor([2, 3]).to(emulated_npu), torch.tensor([2.0, 3.0]).to(emulated_npu)
    assert operator(floats, floats, floats).tolist() == operator(floats.cpu(), floats.cpu(), floats.cpu()).tolist()
    with pytest.raises(RuntimeError, match=r"EMULATED: .* takes tensors of one dtype, not float32, int64 .*EZ9999"):
        operator(floats, whole, floats)


def test_what_is_not_compiled_is_promoted(emulated_npu):
    whole, floats = torch.tensor([2, 3]).to(emulated_npu), torch.tensor([2.5, 3.5]).to(emulated_npu)
    assert torch.addcmul(floats, whole, floats).tolist() == [7.5, 14.0]
