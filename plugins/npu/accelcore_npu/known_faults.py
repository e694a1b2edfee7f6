"""Known bugs of torch_npu's kernels and optimizers. This module does not import torch.

Listed are wrong results without an error. If torch_npu's classes raise, no entry is needed.
"""

from __future__ import annotations

from functools import partial

from accelcore.known_faults import KnownFault

_SOURCE = "torch_npu/optim in the wheel of torch-npu 2.13.0"
_OURS = "accelcore's classes collect gradients at each step and keep their own state"
_Fault = partial(KnownFault, package="torch-npu", versions=">=2.7,<2.15")
_SEEN = "torch-npu 2.7.1.post11, 2.10.0.post7, 2.13.0, 2.14.0, EMULATED"
_Emulated = partial(_Fault, reference=_SOURCE, instead=_OURS, seen=_SEEN)

KNOWN_FAULTS = (
    _Fault(
        kernel="torch._fused_adamw_ on an NPU",
        versions=">=2.10,<2.14",
        what="it accepts grad_scale and found_inf and ignores both: it applies scaled gradients and overflows",
        instead="the scaler unscales gradients and skips steps itself, for every kernel of an NPU",
        reference="op-plugin, FusedAdamwKernelNpu, as published",
        seen="",
    ),
    _Emulated(
        kernel="torch_npu.optim.NpuFusedSGD, NpuFusedBertAdam",
        what="a parameter whose first gradient comes after the first step is never updated",
    ),
    _Emulated(
        kernel="torch_npu.optim.NpuFused* except AdamP",
        what="after zero_grad() sets gradients to None, steps reuse the gradients of the first step",
    ),
    _Emulated(
        kernel="torch_npu.optim.NpuFused*",
        what="a state that is loaded after a step is ignored",
    ),
    _Emulated(
        kernel="torch_npu.optim.NpuFusedBertAdam",
        what="its state does not count steps, so a resumed run starts its schedule again",
    ),
    _Emulated(
        kernel="torch_npu.optim.NpuFusedBertAdam with several groups",
        what="every group is clipped by the max_grad_norm of the first group",
    ),
    _Emulated(
        kernel="torch_npu.optim.NpuFusedAdam, NpuFusedAdamW, fp16",
        what="moments are fp16, where an eps of 1e-8 is 0: parameters become inf in one step",
        instead="moments of low-precision parameters are fp32, or the route is refused",
    ),
    _Fault(
        kernel="torch.linalg.det, slogdet and torch.logdet on an NPU",
        what="the gradient of a matrix with gaps between its elements is wrong: the CPU, which computes for the NPU, "
        "factorizes the transposed matrix, and backward takes it for the matrix",
        instead="nothing: give them matrix.contiguous()",
        reference="plugins/npu/tests/npu_fault_probes.py",
        seen="torch-npu 2.7.1.post11, 2.13.0, 2.14.0, EMULATED",
        findings=r"(linalg\.(det|slogdet)|logdet), float32, strided.*: the gradient 0 is wrong in .*",
    ),
    _Fault(
        kernel="torch._foreach_add_, _foreach_mul_ and others in place, on an Ascend 910B",
        what="they leave the version of the tensors, so that backward through values of before them is a wrong "
        "gradient instead of an error",
        instead="optimizers of the route foreach increment the version after each step",
        reference="op-plugin, ForeachAddScalarKernelNpuOpApi, as published",
        seen="torch-npu 2.13.0, EMULATED",
    ),
    _Fault(
        kernel="torch.nn.functional.l1_loss and kl_div on an NPU, gradients of their gradients",
        what="their backward pass has no derivative: torch warns once and takes it for a constant, so that a gradient "
        "penalty has no effect",
        instead="nothing: write the loss by other operators, as (input - target).abs().mean()",
        reference="plugins/npu/tests/npu_fault_probes.py",
        seen="torch-npu 2.13.0, EMULATED",
    ),
)
