"""Probes: whether the installed torch still has the known faults of its general and its CPU kernels."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_WITH_EPSILON: tuple[Any, ...] = (
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)
_FUSED: tuple[Any, ...] = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD)
_HERMITIAN: tuple[Any, ...] = (torch.fft.ihfftn, torch.fft.ihfft2)
_GELU: Any = torch._C._nn.gelu
_ELU: Any = torch.nn.functional.elu
_TRIANGLE: Any = torch.tril
_LAYER_NORM: Any = torch.nn.functional.layer_norm
_EMBEDDINGS: tuple[Any, ...] = (torch.nn.functional.embedding, torch.nn.functional.embedding_bag)
_TO_PLACES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, places: x.index_select(0, places),
    lambda x, places: x.take(places),
    lambda x, places: torch.nn.functional.adaptive_avg_pool2d(x[:1, None, None], (len(places) // 64, 64)),
    lambda x, places: torch.nn.functional.pad(x[None, None], (len(places), 0), "replicate"),
)
_NARROW_COPY: Any = partial(torch.narrow_copy, dim=1, start=0, length=3)
_AVG_POOL: Any = partial(torch._C._nn.avg_pool3d, kernel_size=2)
_MEDIAN: Any = torch.median
_ANSWERS: Any = (torch.any, torch.all)
_EMBEDDING_BAG: Any = torch.nn.functional.embedding_bag
_LAYOUTS = (torch.contiguous_format, torch.channels_last)
_REMAINDERS: tuple[Any, ...] = (torch.remainder, torch.fmod)
_FAR_APART = (6.0, 2.0**-126)  # the quotient is too large for fp32


def steps(make: Callable[[list[Tensor]], torch.optim.Optimizer], start: Tensor, gradients: list[Tensor]) -> Tensor:
    """Return `start` after a step of this optimizer with each gradient."""
    parameter = nn.Parameter(start.clone())
    optimizer = make([parameter])
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def fp16_epsilon() -> bool:
    """Check that no class leaves a parameter finite in some steps with gradients of 1e-5 in fp16."""
    small = torch.full((8,), 1e-5, dtype=torch.float16)
    return not any(
        bool(steps(partial(kind, foreach=foreach), small, [small] * 6).isfinite().all())
        for kind in _WITH_EPSILON
        for foreach in (False, True)
    )


def skipped_first_step() -> bool:
    """Check if momentum begins with memory that was never written, which is made NaN."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, fused=True)
    with _unwritten_is_nan():
        for overflow in (1.0, 0.0):
            parameter.grad = torch.ones(4)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(overflow)  # type: ignore[attr-defined]
            optimizer.step()
    return bool(parameter.isnan().any())


def backward_under_autocast() -> bool:
    """Check if the gradient of a part that forward computes in fp32 has fewer bits if the model is compiled."""
    torch.manual_seed(0)
    weight, rows = torch.randn(16, 16), torch.randn(8, 16)

    def exact(weight: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return (rows @ weight).square().sum()

    gradients: list[Tensor] = []
    for forward in (exact, torch.compile(exact, backend="aot_eager")):
        leaf = weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = forward(leaf)
        gradients += torch.autograd.grad(loss, [leaf])
    return not torch.allclose(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)


def autocast_in_cache() -> bool:
    """Check if a model that is compiled under autocast in two dtypes computes in one of them both times."""
    compiled, found = torch.compile(nn.Linear(4, 2)), []
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype), torch.no_grad():
            found.append(compiled(torch.ones(1, 4)).dtype)
    return found != [torch.bfloat16, torch.float16]


def guards_by_dict() -> bool:
    """Check if a parameter that was frozen in the first call of a compiled model has no gradient after its release."""
    model = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2))
    compiled = torch.compile(model, backend="aot_eager")
    for is_trained in (False, True):
        model[0].weight.requires_grad_(is_trained)
        compiled(torch.ones(1, 4)).sum().backward()
    return model[0].weight.grad is None


def cast_without_gradient() -> bool:
    """Check if a weight that autocast first cast under no_grad has no gradient later in the same region."""
    weight, rows = torch.ones(4, 4, requires_grad=True), torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            torch.mm(rows, weight)
        return not torch.mm(rows, weight).requires_grad


def unseen_update() -> bool:
    """Check if backward through a square gives a gradient after every kind of fused step changed the value."""
    for kind in _FUSED:
        weight = nn.Parameter(torch.ones(3))
        loss = weight.square().sum()
        loss.backward(retain_graph=True)
        kind([weight], lr=0.1, fused=True).step()
        try:
            loss.backward()
        except RuntimeError:
            return False
    return True


def low_precision_sgd() -> bool:
    """Check if a step of 1 from 1 does not end at 0 everywhere, in bf16 or fp16."""
    make = partial(torch.optim.SGD, lr=1.0, fused=True)
    ones = [torch.ones(100, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]
    return any(bool(steps(make, one, [one]).any()) for one in ones)


def memory_order() -> bool:
    """Check if a kernel differs from the loop for a transposed parameter with a contiguous gradient."""
    start, gradient = torch.arange(6.0).reshape(3, 2).t(), torch.arange(-6.0, 0.0).reshape(2, 3)
    return any(
        not torch.allclose(
            steps(partial(kind, lr=0.1, fused=True), start, [gradient] * 2),
            steps(partial(kind, lr=0.1, foreach=False), start, [gradient] * 2),
        )
        for kind in _FUSED
    )


def remainder() -> bool:
    """Check if the remainder is NaN in a long tensor where the quotient overflows, and right in a short one."""
    return any(
        kernel(one, other).item() == 0 and bool(kernel(one.repeat(64), other.repeat(64)).isnan().any())
        for kernel in _REMAINDERS
        for one, other in (torch.tensor(_FAR_APART, dtype=dtype).split(1) for dtype in (torch.float32, torch.bfloat16))
    )


def hermitian_out() -> bool:
    """Check if an inverse Hermitian transform of one dimension leaves `out=` unwritten."""
    given = torch.ones(2, 4)
    results = [(kernel, torch.full_like(kernel(given, dim=(1,)), 77)) for kernel in _HERMITIAN]
    return any(kernel(given, dim=(1,), out=out).eq(77).all() for kernel, out in results)


def gelu_out() -> bool:
    """Check if gelu leaves `out=` with gaps unwritten, and writes it without."""
    with_gaps, dense = torch.full((8, 2), 77.0)[:, 1], torch.full((8,), 77.0)
    for out in (with_gaps, dense):
        _GELU(torch.ones(8), out=out)
    return bool(with_gaps.eq(77).all()) and not bool(dense.eq(77).any())


def grouped_variance() -> bool:
    """Check if a group norm of values far from 0 is right in contiguous memory, and wrong with channels last."""
    images = 1024 + torch.linspace(-600, 600, 1024).sin().reshape(2, 8, 8, 8)
    right = torch.nn.functional.group_norm(images.double(), 4)
    found = (torch.nn.functional.group_norm(images.contiguous(memory_format=each), 4) for each in _LAYOUTS)
    dense, channels_last = (float((each.double() - right).abs().max()) for each in found)
    return dense < 1e-3 and channels_last > 0.1


def triangular_out() -> bool:
    """Check if a triangle of permuted batches is written beside its place, in memory that is large enough for that."""
    memory = torch.full((3, 1000), 77.0)
    _TRIANGLE(torch.ones(2, 3, 4, 5), out=memory[1, :120].view(5, 4, 3, 2).permute(3, 2, 1, 0))
    memory[1, :120] = 77
    return bool(memory.ne(77).any())


def sums_of_rows() -> bool:
    """Check if gradients that are sums of ones are smaller than their number."""
    rows = torch.linspace(-1, 1, 2**14).bfloat16().reshape(-1, 2)
    weight, bias = torch.ones(2), torch.zeros(2, requires_grad=True)
    table = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
    places = torch.zeros(len(rows), dtype=torch.long)
    sums = [(_LAYER_NORM(rows, (2,), weight, bias), bias)]
    sums += [(lookup(places[:, None], table), table) for lookup in _EMBEDDINGS]
    sums.append((table[places], table))
    filters = torch.ones(1, 1, 1, dtype=torch.half, requires_grad=True)
    sums += [(torch.conv1d(torch.ones(len(rows), 1, 1, dtype=torch.half), filters), filters)]
    gradients = (torch.autograd.grad(output.sum(), leaf)[0] for output, leaf in sums)
    return all(float(found.max()) < len(rows) / 2 for found in gradients)


def sums_at_places() -> bool:
    """Check if thousands of gradients of 1 of one element are less together."""
    places = torch.zeros(2**14, dtype=torch.long)
    for function in _TO_PLACES:
        vector = torch.ones(2, dtype=torch.half, requires_grad=True)
        (found,) = torch.autograd.grad(function(vector, places).sum(), vector)
        if float(found[0]) > len(places) / 2:
            return False
    return True


def dense_out() -> bool:
    """Check if a part of a matrix, and a pool, are written between the elements of `out=` with gaps."""
    for kernel, given in ((_NARROW_COPY, torch.ones(2, 4)), (_AVG_POOL, torch.ones(1, 2, 4, 4, 4))):
        memory = torch.full((*kernel(given).shape, 2), 77.0)
        kernel(given, out=memory[..., 0])
        if bool(memory[..., 1].eq(77).all()):
            return False
    return True


def counted_embedding() -> bool:
    """Check if the gradient of a row that occurs once is halved because another one occurs twice."""
    table, rows, bag = torch.ones(4, 1, requires_grad=True), torch.tensor([1, 1, 3]), torch.tensor([0])
    _EMBEDDING_BAG(rows, table, bag, mode="sum", scale_grad_by_freq=True).sum().backward()
    return table.grad is not None and float(table.grad[3]) == 0.5


def expanded_median() -> bool:
    """Check if the median of a number that an expanded tensor repeats is another number."""
    numbers = torch.arange(1.0, 65.0)[:, None]
    return any(not torch.equal(_MEDIAN(numbers.expand(64, 5), 1)[0], numbers[:, 0]) for _ in range(4))


def rounded_answer() -> bool:
    """Check if a half is no true number where the answer is written as a whole number."""
    answers = [torch.full((), 7, dtype=torch.uint8) for _ in _ANSWERS]
    return any(int(each(torch.full((2,), 0.5), out=out)) == 0 for each, out in zip(_ANSWERS, answers, strict=True))


def gelu_of_infinity() -> bool | None:
    """Check if gelu of +inf is NaN in many elements, and +inf in one; None on processors that have other kernels."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    many, one = (_GELU(torch.full((size,), torch.inf)) for size in (16, 1))
    return bool(many.isnan().all()) and bool(one.isposinf().all())


def attention_of_nan() -> bool:
    """Check if attention of a NaN to one key is 0."""
    query, key = torch.full((1, 1, 1, 8), torch.nan), torch.ones(1, 1, 1, 8)
    return bool((torch.nn.functional.scaled_dot_product_attention(query, key, key) == 0).all())


def elu_of_small() -> bool:
    """Check if elu of a small negative number has lost digits."""
    return abs(float(_ELU(torch.full((16,), -1e-7))[0]) + 1e-7) > 1e-9


def narrow_convolution() -> bool | None:
    """Check if a process that trains a narrow, strided layer crashes; None on processors that have other kernels."""
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return None
    return subprocess.run([sys.executable, "-c", _NARROW], capture_output=True).returncode < 0


_NARROW = """
import torch
for channels in range(2, 8):
    layer = torch.nn.Conv2d(channels, 8, 1, stride=2)
    images = torch.ones(2, channels, 32, 32).to(memory_format=torch.channels_last).requires_grad_()
    for _ in range(100):
        layer(images).sum().backward()
"""


@contextmanager
def _unwritten_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
