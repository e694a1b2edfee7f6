"""Known bugs of torch's CPU kernels; does not import torch."""

from __future__ import annotations

from accelcore.known_faults import KnownFault

LOW_PRECISION_SGD = KnownFault(
    kernel="torch._fused_sgd_ on the CPU, bf16 and fp16",
    package="torch",
    versions="<2.14",
    what="torch's fused SGD kernel for the CPU leaves most elements of bf16 and fp16 parameters as they were",
    instead="the route is refused for such parameters, and another one taken",
    reference="https://github.com/pytorch/pytorch/issues/191763",
    seen="torch 2.13.0: of 100 bf16 elements a step changes 4",
)
MEMORY_ORDER = KnownFault(
    kernel="torch._fused_adam_, _fused_adamw_, _fused_adagrad_, _fused_sgd_ on the CPU",
    package="torch",
    versions=">=2.7",
    what="a gradient whose strides are not the parameter's is read in the wrong order",
    instead="our route to the same kernels lays such a gradient out as its parameter first",
    reference="https://github.com/pytorch/pytorch/issues/110758 (where it is an error, on a GPU)",
    seen="torch 2.13.0: a transposed parameter with a contiguous gradient",
)
REMAINDER = KnownFault(
    kernel="torch.remainder and torch.fmod on the CPU",
    package="torch",
    versions=">=2.7",
    what="the result is NaN where the quotient is too large for the dtype (in bf16, for fp32), though a shorter tensor "
    "gets it right",
    instead="nothing: compute it in float64, whose range is enough for lower dtypes",
    reference="https://github.com/pytorch/pytorch/issues/193753",
    seen="torch 2.7.1, 2.10.0, 2.11.0, 2.13.0, 2.15.0: 6 by 2**-126, in bf16 and fp32",
    findings=r"(remainder|fmod|__rmod__), \w+, .*: result 0 is wrong in .*: nan instead of .*",
)
NARROW_CONVOLUTION = KnownFault(
    kernel="convolution, backward: a kernel of 1 x 1 with a stride, fewer than 8 channels in, channels last, on a "
    "processor with AVX2 and without AVX-512",
    package="torch",
    versions=">=2.7",
    what="oneDNN writes outside its memory: the process crashes, or other tensors change",
    instead="nothing: give such a layer 8 channels or more, or a tensor that is contiguous",
    reference="tests/fault_probes.py",
    seen="torch 2.7.1 and 2.13.0, with 2 to 7 channels and a stride of 2",
)
GELU_OUT = KnownFault(
    kernel="gelu on the CPU, fp32, with out= that is not contiguous",
    package="torch",
    versions=">=2.7",
    what="the tensor given as out= is returned as it was: nothing is written to it",
    instead="nothing: use the result, not out=",
    reference="tests/fault_probes.py",
    seen="torch 2.13.0",
)
GROUPED_VARIANCE = KnownFault(
    kernel="group_norm on the CPU, channels last",
    package="torch",
    versions=">=2.7",
    what="the variance is a difference of two large sums: for values far from 0, as around 256 with a deviation of 1, "
    "the result is off by 0.07, and around 1,024 by 7",
    instead="nothing: give the layer a contiguous tensor",
    reference="tests/fault_probes.py",
    seen="torch 2.13.0",
)
TRIANGULAR_OUT = KnownFault(
    kernel="torch.tril and triu on the CPU, with out= of four or more dimensions that are permuted",
    package="torch",
    versions=">=2.7",
    what="they write outside the memory of the tensor given as out=: the process crashes, or other tensors change",
    instead="nothing: use the result, not out=",
    reference="tests/fault_probes.py",
    seen="torch 2.13.0",
)
DENSE_OUT = KnownFault(
    kernel="torch.narrow_copy and avg_pool3d on the CPU, with out= that is not contiguous",
    package="torch",
    versions=">=2.7",
    what="they write the result as if the tensor given as out= were contiguous, also between its elements",
    instead="nothing: use the result, not out=",
    reference="tests/fault_probes.py",
    seen="torch 2.13.0",
)
COUNTED_EMBEDDING = KnownFault(
    kernel="embedding_bag on the CPU, backward, scale_grad_by_freq=True",
    package="torch",
    versions="<2.14",
    what="a row's gradient may be divided by how often another row occurs",
    instead="nothing: divide the gradients in the script",
    reference="https://github.com/pytorch/pytorch/issues/190063",
    seen="torch 2.13.0",
)
EXPANDED_MEDIAN = KnownFault(
    kernel="torch.median and nanmedian along a dimension on the CPU, of a tensor that is expanded in it",
    package="torch",
    versions=">=2.7",
    what="they return what memory happens to hold, not an element of the tensor",
    instead="nothing: give them x.contiguous()",
    reference="tests/fault_probes.py",
    seen="torch 2.13.0",
)
ROUNDED_ANSWER = KnownFault(
    kernel="torch.any and torch.all on the CPU, of fractions, with out= of whole numbers",
    package="torch",
    versions=">=2.7",
    what="numbers between -1 and 1 count as 0, because they lose their fraction first",
    instead="nothing: give them x != 0",
    reference="tests/fault_probes.py",
    seen="torch 2.13.0",
)
KNOWN_FAULTS = (
    LOW_PRECISION_SGD,
    MEMORY_ORDER,
    REMAINDER,
    NARROW_CONVOLUTION,
    GELU_OUT,
    GROUPED_VARIANCE,
    TRIANGULAR_OUT,
    DENSE_OUT,
    COUNTED_EMBEDDING,
    EXPANDED_MEDIAN,
    ROUNDED_ANSWER,
)
