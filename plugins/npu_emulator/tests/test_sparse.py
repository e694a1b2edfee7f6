"""Sparse tensors, whose indices and values torch_npu's own code works on."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_npu", exc_type=ImportError)

from accelcore_npu_emulator import counters

pytestmark = pytest.mark.usefixtures("emulated_npu")

INDICES = torch.tensor([[1, 0, 1, 1], [2, 0, 2, 0]])
VALUES = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])


def repeated(dtype=torch.float32):
    """Two of its four elements lie at one place."""
    return torch.sparse_coo_tensor(INDICES, VALUES.to(dtype), (2, 3, 2), check_invariants=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32], ids=str)
@pytest.mark.parametrize("index", [0, 1])
def test_elements_at_one_place_are_added_up(dtype, index):
    with torch.npu.device(index):
        device = repeated(dtype).npu()
        with counters.count() as cost:
            found = device.coalesce()
    assert found.is_coalesced()
    assert found.device == found.values().device == torch.device("npu", index)
    assert cost.synchronizations["aten::_coalesce"] == 1  # how many elements are left
    expected = repeated(dtype).coalesce()
    assert torch.equal(found.indices().cpu(), expected.indices())
    assert torch.equal(found.values().cpu(), expected.values())
    assert found.values().dtype == dtype


def test_low_precision_is_rounded_once():
    ones = torch.full((300,), 1.0, dtype=torch.bfloat16)
    device = torch.sparse_coo_tensor(torch.zeros(1, 300, dtype=torch.int64), ones, (1,), check_invariants=True).npu()
    assert device.coalesce().values().tolist() == [300.0]  # bfloat16 would count to 256


def test_the_gradient_of_a_sparse_embedding():
    embedding = torch.nn.Embedding(5, 3, sparse=True).npu()
    embedding(torch.tensor([1, 1, 2], device="npu")).sum().backward()
    gradient = embedding.weight.grad
    assert gradient.coalesce().indices().tolist() == [[1, 2]]
    assert gradient.to_dense().sum(1).tolist() == [0.0, 6.0, 3.0, 0.0, 0.0]


def test_torch_npu_makes_a_sparse_tensor_on_the_current_device_alone():
    indices, values = INDICES.to("npu:1"), VALUES.to("npu:1")
    with pytest.raises(RuntimeError, match=r"device\(\) == values_.device\(\)"):
        torch.sparse_coo_tensor(indices, values, (2, 3, 2), check_invariants=False)
    with torch.npu.device(1):
        assert torch.sparse_coo_tensor(indices, values, (2, 3, 2), check_invariants=False).device == torch.device(
            "npu:1"
        )
