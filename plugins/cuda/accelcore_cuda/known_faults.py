"""Known bugs of torch's kernels and compilers for the GPU. This module does not import torch."""

from __future__ import annotations

from accelcore.known_faults import KnownFault

MIX_ORDER_REDUCTION = KnownFault(
    kernel="torch.compile (inductor) on a GPU: gradients of a model with chained norms that share one parameter",
    package="torch",
    versions=">=2.10,<2.14",
    what="part of the gradient of a shared scale and shift is never written, so it keeps what the memory held before",
    instead="accelcore compiles with triton.mix_order_reduction=False, unless the options set it",
    reference="https://github.com/pytorch/pytorch/issues/193061",
    seen="",
)
POOLED_GRADIENT = KnownFault(
    kernel="avg_pool2d on a GPU, backward: channels last, with padding",
    package="torch",
    versions=">=2.7,<2.14",
    what="the kernel ignores the padding when it looks for the windows of an element: most of the gradient is wrong",
    instead="nothing: give the layer a contiguous tensor",
    reference="https://github.com/pytorch/pytorch/issues/188344",
    seen="torch 2.11.0, NVIDIA H200",
    findings=r"nn\.functional\.avg_pool2d, \w+, channels last(, behind other elements)?: the gradient \d+ is wrong .*",
)
OUT_WITH_GAPS = KnownFault(
    kernel="avg_pool2d and multinomial on a GPU, with out= that is not contiguous",
    package="torch",
    versions=">=2.7",
    what="the result is written as if the tensor given as out= were contiguous, so that other memory is overwritten",
    instead="nothing: use the result, not out=",
    reference="tests/cuda/fault_probes.py",
    seen="torch 2.11.0, NVIDIA H200 and H100",
    findings=r"(nn\.functional\.avg_pool2d|multinomial|_chunk_cat), \w+, with out=.*: "
    r"(it wrote beside the tensor|result \d+ is wrong in .*)",
)
RUNNING_STATISTICS = KnownFault(
    kernel="batch_norm on a GPU by cuDNN, with a running mean and variance that are not contiguous",
    package="torch",
    versions=">=2.7",
    what="the running mean and variance are not updated: the update goes to a contiguous copy",
    instead="nothing: leave the buffers of the layer contiguous",
    reference="https://github.com/pytorch/pytorch/issues/33867",
    seen="torch 2.11.0, NVIDIA H100",
    findings=r"nn\.functional\.batch_norm, \w+, strided(, of other options)?: argument [12] is wrong in .*",
)
RENORMED_EMBEDDING = KnownFault(
    kernel="embedding on a GPU with max_norm=, of a weight that is not contiguous",
    package="torch",
    versions=">=2.7",
    what="the stride of the rows is taken for their length: rows are scaled by a wrong norm, and others may be changed",
    instead="nothing: make the weight contiguous",
    reference="https://github.com/pytorch/pytorch/pull/195208",
    seen="torch 2.11.0, NVIDIA H100",
    findings=r"nn\.functional\.embedding, \w+, (under no_grad, )?(strided|transposed)\b.*: "
    r"(result|argument) 0 is wrong in .*",
)
_OF_COLUMNS = r" of (columns|planes) of \d+"
_IN_LOW = r", b?float16, (as it is|under no_grad)"
SCANS = KnownFault(
    kernel="cumsum and logcumsumexp on a GPU, bf16 and fp16, along a dimension that is not the last",
    package="torch",
    versions=">=2.7",
    what="the sum so far is kept in the dtype of the input: in bf16 it stands still after some hundred numbers",
    instead="nothing: compute them in fp32",
    reference="https://github.com/pytorch/pytorch/issues/180155",
    seen="torch 2.11.0, NVIDIA H100: 572 instead of 822 after 1,000 numbers in bf16",
    findings=rf"(cumsum|logcumsumexp)({_OF_COLUMNS}{_IN_LOW}, with large numbers|{_IN_LOW},{_OF_COLUMNS}): "
    r".* 0 is (wrong in|[\d.]+ times) .*",
)
COPIED_NEGATIVE = KnownFault(
    kernel="Tensor.copy_ between the host and a GPU, of a view that is conjugate or negative by a mark, and has gaps "
    "or other strides than the target, as x.mH and x.conj().imag",
    package="torch",
    versions=">=2.7",
    what="the copy is not conjugate, or has the opposite sign",
    instead="nothing: copy resolve_conj() or resolve_neg() of it; Tensor.to() and accelcore's transfers are right",
    reference="tests/cuda/fault_probes.py",
    seen="torch 2.11.0, NVIDIA H100",
    findings=r"what is (negative|adjoint) (arrives by copy_|copied to the host by \w+) with .*",
)
EIGENVALUES = KnownFault(
    kernel="torch.linalg.eig and eigvals on a GPU, of a matrix whose columns are contiguous",
    package="torch",
    versions=">=2.10",
    what="the matrix is overwritten",
    instead="nothing: give it contiguous()",
    reference="tests/cuda/fault_probes.py",
    seen="torch 2.11.0, NVIDIA H100",
    findings=r"linalg\.eig(vals)?, \w+, transposed.*: it changes its argument 0",
)
LAYER_NORM_OF_PLANES = KnownFault(
    kernel="layer_norm on a GPU, backward: more than 65,536 rows, each of two or more dimensions",
    package="torch",
    versions=">=2.8",
    what="the kernel writes behind its buffer, which may change other tensors, and torch refuses the gradient's shape",
    instead="nothing: flatten the dimensions that are normalized, those of the parameters too",
    reference="https://github.com/pytorch/pytorch/pull/193016",
    seen="torch 2.11.0, NVIDIA H100",
    unusable="gradients of layer_norm over many planes",
)
MEAN_OF_WHOLE = KnownFault(
    kernel="mean over a dimension on a GPU, of fractions, with out= of whole numbers",
    package="torch",
    versions=">=2.7",
    what="the mean is computed in whole numbers, where the CPU and torch's other operators refuse such an out=",
    instead="nothing: use the result, and convert it",
    reference="tests/cuda/fault_probes.py",
    seen="",
    findings=r"mean, float32, with out= of whole numbers: result 0 is torch\.int64 .*",
)
_BEHIND = r", as it is(, [\w ]+)?, behind other elements"
_UNUSABLE = "after it every call in the process fails (misaligned address)"
FLASH_ATTENTION = KnownFault(
    kernel="scaled_dot_product_attention on a GPU by flash attention, fp16 and bf16",
    package="torch",
    versions=">=2.7",
    what=f"tensors whose address is no multiple of 16 bytes make the device unusable: {_UNUSABLE}",
    instead="nothing: give it a clone() of a tensor that is a view from within another one",
    reference="tests/cuda/fault_probes.py",
    seen="torch 2.11.0, NVIDIA H100",
    unusable=rf"nn\.functional\.scaled_dot_product_attention, (bfloat16|float16){_BEHIND}",
)
EFFICIENT_ATTENTION = KnownFault(
    kernel="scaled_dot_product_attention on a GPU by memory-efficient attention",
    package="torch",
    versions=">=2.7,<2.13",
    what=f"tensors whose address is no multiple of 16 bytes make the device unusable: {_UNUSABLE}",
    instead="nothing: give it a clone() of a tensor that is a view from within another one",
    reference="https://github.com/pytorch/pytorch/issues/183484",
    seen="torch 2.11.0, NVIDIA H100",
    unusable=rf"nn\.functional\.scaled_dot_product_attention, \w+{_BEHIND}",
)
KNOWN_FAULTS = (
    MIX_ORDER_REDUCTION,
    POOLED_GRADIENT,
    OUT_WITH_GAPS,
    RUNNING_STATISTICS,
    RENORMED_EMBEDDING,
    SCANS,
    COPIED_NEGATIVE,
    EIGENVALUES,
    LAYER_NORM_OF_PLANES,
    MEAN_OF_WHOLE,
    FLASH_ATTENTION,
    EFFICIENT_ATTENTION,
)
