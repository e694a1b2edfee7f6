"""Indices and targets of 32 bits, which the device takes also where the CPU takes 64 bits alone."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_npu", exc_type=ImportError)

from torch.nn import functional

pytestmark = pytest.mark.usefixtures("emulated_npu")

OPERATIONS = {
    "cross_entropy": lambda x, i: functional.cross_entropy(x, i),
    "cross_entropy of images": lambda x, i: functional.cross_entropy(x[..., None, None], i[:, None, None]),
    "index_copy": lambda x, i: x.index_copy(0, i, x * 2),
    "index_copy_": lambda x, i: x.clone().index_copy_(1, i, x * 2),
    "index_fill": lambda x, i: x.index_fill(0, i[:2], 3.0),
    "put": lambda x, i: x.put(i, x[0]),
    "take": lambda x, i: x.take(i),
    "max_unpool2d": lambda x, i: functional.max_unpool2d(x.view(1, 4, 2, 2), i.view(1, 1, 2, 2).expand(1, 4, 2, 2), 2),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_narrow_indices_are_as_good_as_wide_ones(operation):
    values, indices = torch.randn(4, 4), torch.tensor([2, 0, 3, 1])
    host, device = values.clone().requires_grad_(), values.npu().requires_grad_()
    expected, found = operation(host, indices), operation(device, indices.int().npu())
    torch.testing.assert_close(found.cpu(), expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(device.grad.cpu(), host.grad)


def test_one_hot_of_narrow_classes():
    classes = torch.tensor([2, 0, 1])
    found = functional.one_hot(classes.int().npu(), 4)
    assert torch.equal(found.cpu(), functional.one_hot(classes, 4).int())  # of the type of the classes


def test_narrow_targets_of_a_margin_loss():
    values, targets = torch.randn(2, 4), torch.tensor([[3, 0, -1, 1], [2, -1, 0, 1]])
    found = functional.multilabel_margin_loss(values.npu(), targets.int().npu())
    torch.testing.assert_close(found.cpu(), functional.multilabel_margin_loss(values, targets))
