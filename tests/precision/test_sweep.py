"""Every operator of O1 that torch has samples of, with each of them: the dtypes of its results and its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from accelcore import precision
from accelcore.precision import O1, Treatment
from accelcore.testing.support.samples import operators

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore"),  # of torch, about its deprecated operators
]

LOW = torch.bfloat16
SAMPLES = 12
# What torch says where an operator or its gradient does not exist: not about dtypes.
EXCUSES = ("not implemented", "not differentiable", "istft requires a complex-valued input")


@pytest.fixture(autouse=True)
def _reset():
    yield
    precision.reset()


def samples(info, dtype):
    for sample in list(info.sample_inputs("cpu", torch.float32))[:SAMPLES]:

        def of_dtype(value):
            wanted = isinstance(value, Tensor) and value.dtype is torch.float32
            return value.detach().to(dtype).requires_grad_() if wanted else value

        arguments, options = tree_map(of_dtype, ((sample.input, *sample.args), sample.kwargs))
        leaves = tree_leaves((arguments, options))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if inputs and not any(isinstance(leaf, torch.dtype) for leaf in leaves):
            yield inputs, arguments, options


def wrong(region, info, treatment, dtype):
    """What is not as the table says."""
    expected = {Treatment.LOW: LOW, Treatment.FP32: torch.float32}.get(treatment, dtype)
    for inputs, arguments, options in samples(info, dtype):
        try:
            with region:
                results = tree_leaves(info.op(*arguments, **options))
            results = [result for result in results if isinstance(result, Tensor) and result.is_floating_point()]
            yield from (f"{dtype} gives {result.dtype}" for result in results if result.dtype is not expected)
            roots = [result for result in results if result.requires_grad]
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            grads = [(tensor.grad.dtype, tensor.dtype) for tensor in inputs if tensor.grad is not None]
            yield from (f"a gradient of {grad} for {tensor}" for grad, tensor in grads if grad is not tensor)
        except Exception as error:  # noqa: BLE001  # torch's operators raise what they like
            if not any(excuse in str(error) for excuse in EXCUSES):
                yield f"{dtype}: {error}"


def test_each_sample_of_each_operator(accel):
    region = accel.autocast(LOW, table="O1")
    found, seen = {}, set()
    for info in operators().values():
        if info.name.startswith(("masked.", "sparse.", "special.")):  # compositions, and other operators
            continue
        name = next((it for it in (info.aten_name, info.name.rpartition(".")[2]) if it in O1), None)
        if name is not None and O1[name] is not Treatment.REFUSED:
            seen.add(name)
            faults = {fault for dtype in (LOW, torch.float32) for fault in wrong(region, info, O1[name], dtype)}
            if faults:
                found[info.full_name] = sorted(faults)
    assert found == {}
    assert len(seen) > 150
