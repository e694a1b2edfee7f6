"""The oracle of the operators' tests: torch's own formula on the host, and its gradients."""

import torch


def same(on_npu, on_cpu, inputs, tolerance=1e-5):
    """Compare values and gradients of two functions of the same tensors."""
    host = [value.clone().requires_grad_() for value in inputs]
    device = [value.npu().requires_grad_() for value in inputs]
    expected, found = on_cpu(*host), on_npu(*device)
    torch.testing.assert_close(found.cpu(), expected, rtol=tolerance, atol=tolerance)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (found * weight.npu()).sum().backward()
    for one, other in zip(device, host, strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=tolerance, atol=tolerance)
