"""Random numbers drawn on the host: in float64 and in the order of the elements, whatever tensor asks for them.

torch's own kernels draw other numbers for another dtype, memory layout, device, or library that torch was built with.
Here a distribution is a function of uniform float64 numbers, which are the same on every machine: torch's generator of
the CPU is the Mersenne Twister, and one number takes 53 bits of it. What torch computes from these in plain C++ it
computes here, too; dropout's masks, uniform and exponential numbers, for which it may use a vendor's library, follow
below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from accelcore.errors import ConfigurationError

__all__ = ["drawn"]

Kernel = Callable[..., Any]

_aten = torch.ops.aten


def _on_the_host(torchs: Kernel) -> Kernel:
    """Torch's kernel of the CPU, whose generator may be given for a tensor of any device."""

    def call(*arguments: Any, **options: Any) -> Any:
        for value in (*arguments, *options.values()):
            if isinstance(value, torch.Generator) and value.device.type != "cpu":
                raise ConfigurationError(
                    f"a generator of {value.device} draws numbers that only {value.device.type} has",
                    why='runtime.seed(..., same="everywhere") asks for those that all devices have',
                    remedy="pass one of the host: torch.Generator(), for tensors of any device",
                )
        return torchs(*arguments, **options)

    return call


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _filling(torchs: Kernel) -> Kernel:
    """A kernel that fills a tensor: torch's own of the CPU, in float64."""

    def fill(self: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return self.copy_(torchs(torch.empty(self.shape, dtype=_wide(self.dtype)), *arguments, **options))

    return fill


def _filling_as_it_is(torchs: Kernel) -> Kernel:
    """The same for whole numbers, whose range follows from the tensor's own dtype."""

    def fill(self: Tensor, *arguments: Any, **options: Any) -> Tensor:
        return self.copy_(torchs(torch.empty(self.shape, dtype=self.dtype), *arguments, **options))

    return fill


def _computing(torchs: Kernel) -> Kernel:
    """A kernel that draws by what tensors say: torch's own of the CPU, on float64 copies of them."""

    def compute(self: Tensor, *arguments: Any, out: Tensor | None = None, **options: Any) -> Tensor:
        copies = [_copied(argument) if isinstance(argument, Tensor) else argument for argument in arguments]
        drawn: Tensor = torchs(_copied(self), *copies, **options)
        return _given(drawn.to(self.dtype) if drawn.is_floating_point() else drawn, self.device, out)

    return compute


def _copied(tensor: Tensor) -> Tensor:
    host = tensor.detach().cpu().contiguous()
    return host.double() if host.is_floating_point() else host


def _given(drawn: Tensor, device: torch.device, out: Tensor | None) -> Tensor:
    return drawn.to(device) if out is None else out.resize_(drawn.shape).copy_(drawn)


def _uniforms(torchs: Kernel, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
    drawn: Tensor = torchs(torch.empty(shape, dtype=torch.float64), generator=generator)
    return drawn


def _uniform_(torchs: Kernel) -> Kernel:
    def fill(self: Tensor, low: float = 0.0, high: float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
        drawn = torchs(torch.empty(self.shape, dtype=_wide(self.dtype)), generator=generator)
        if not self.is_complex():
            # As many digits as the dtype has: rounding would give 1, which is not among uniform numbers.
            steps = 2 / torch.finfo(self.dtype).eps
            drawn = (drawn * steps).floor_() / steps
        return self.copy_(drawn * (high - low) + low)

    return fill


def _bernoulli_(torchs: Kernel) -> Kernel:
    def fill(self: Tensor, p: float | Tensor = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
        return self.copy_(_uniforms(torchs, self.shape, generator) < _chance(p))

    return fill


def _bernoulli_out(torchs: Kernel) -> Kernel:
    def draw(self: Tensor, *, generator: torch.Generator | None = None, out: Tensor) -> Tensor:
        return out.resize_(self.shape).copy_(_uniforms(torchs, self.shape, generator) < _chance(self))

    return draw


def _chance(p: float | Tensor) -> float | Tensor:
    if isinstance(p, Tensor):
        p = _copied(p)
    if not (torch.as_tensor(p) >= 0).logical_and(torch.as_tensor(p) <= 1).all():
        raise ValueError(f"{p} is no probability: bernoulli takes 0 to 1")
    return p


def _exponential_(torchs: Kernel) -> Kernel:
    def fill(self: Tensor, lambd: float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
        if lambd <= 0:
            raise ValueError(f"exponential_ takes a lambda above 0, not {lambd}")
        return self.copy_(-torch.log1p(-_uniforms(torchs, self.shape, generator)) / lambd)

    return fill


def _normal(torchs: Kernel) -> Kernel:
    def draw(
        mean: float | Tensor,
        std: float | Tensor = 1.0,
        *,
        generator: torch.Generator | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        given = [value for value in (mean, std) if isinstance(value, Tensor)]
        shape = torch.broadcast_tensors(*given)[0].shape  # type: ignore[no-untyped-call]
        drawn: Tensor = torchs(torch.empty(shape, dtype=_wide(given[0].dtype)), generator=generator)
        center, spread = (_copied(value) if isinstance(value, Tensor) else value for value in (mean, std))
        if (torch.as_tensor(spread) < 0).any():
            raise ValueError("normal takes standard deviations of 0 or more")
        return _given((drawn * spread + center).to(given[0].dtype), given[0].device, out)

    return draw


def _rrelu_with_noise(torchs: Kernel) -> Kernel:
    def draw(
        self: Tensor,
        noise: Tensor,
        lower: float = 0.125,
        upper: float = 1 / 3,
        training: bool = False,
        generator: torch.Generator | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        if training:
            # One for each element, also where none is needed: else the last bit of one could shift all others.
            slopes = _uniforms(torchs, self.shape, generator) * (upper - lower) + lower
            noise.copy_(torch.where(self <= 0, slopes.to(self), 1))
            result = self * noise
        else:
            result = torch.nn.functional.leaky_relu(self, (lower + upper) / 2)
        return result if out is None else out.resize_(self.shape).copy_(result)

    return draw


def _rrelu_with_noise_(torchs: Kernel) -> Kernel:
    draw = _rrelu_with_noise(torchs)
    return lambda self, *arguments, **options: self.copy_(draw(self, *arguments, **options))


def _randperm(torchs: Kernel) -> Kernel:
    def draw(n: int, *, generator: torch.Generator | None = None, out: Tensor) -> Tensor:
        drawn = torchs(n, generator=generator, out=torch.empty(n, dtype=torch.int64))
        return out.resize_(n).copy_(drawn)

    return draw


@cache
def drawn() -> dict[OpOverload, Kernel]:
    """The operators that draw, and what they do instead of torch's kernel of a device, whichever device it is.

    To be called first before any kernel of torch's is replaced.
    """
    uniform, normal = _aten.uniform_.default, _aten.normal_.default
    # For each operator: what makes its kernel, and which of torch's for the CPU it is made of.
    made: dict[OpOverload, tuple[Callable[[Kernel], Kernel], OpOverload]] = {
        uniform: (_uniform_, uniform),
        _aten.bernoulli_.float: (_bernoulli_, uniform),
        _aten.bernoulli_.Tensor: (_bernoulli_, uniform),
        _aten.bernoulli.out: (_bernoulli_out, uniform),
        _aten.exponential_.default: (_exponential_, uniform),
        _aten.rrelu_with_noise.default: (_rrelu_with_noise, uniform),
        _aten.rrelu_with_noise.out: (_rrelu_with_noise, uniform),
        _aten.rrelu_with_noise_.default: (_rrelu_with_noise_, uniform),
        _aten.randperm.generator_out: (_randperm, _aten.randperm.generator_out),
        _aten.multinomial.out: (_computing, _aten.multinomial.default),
    }
    for operator in (normal, _aten.cauchy_.default, _aten.geometric_.default, _aten.log_normal_.default):
        made[operator] = (_filling, operator)
    for form in ("default", "from", "to"):
        made[getattr(_aten.random_, form)] = (_filling_as_it_is, getattr(_aten.random_, form))
    for name in ("multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"):
        made[getattr(_aten, name).default] = (_computing, getattr(_aten, name).default)
    for form in ("Tensor_Tensor", "Tensor_float", "float_Tensor"):
        for out in ("", "_out"):
            made[getattr(_aten.normal, form + out)] = (_normal, normal)
    return {operator: make(_cpus(made_of)) for operator, (make, made_of) in made.items()}


def _cpus(operator: OpOverload) -> Kernel:
    kernel = torch.library.get_kernel(operator, "CPU")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    return _on_the_host(lambda *arguments, **options: kernel.call_boxed(keys, *arguments, **options))
