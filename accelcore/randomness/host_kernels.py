"""Kernels that draw random numbers on the host, in float64 and in the order of a tensor's elements.

torch's own kernels draw other numbers for another dtype, memory layout, device or vendor library. Here a distribution
is a function of uniform float64 numbers, which are the same on every machine: torch's CPU generator is the Mersenne
Twister, and a number takes 53 bits of it. torch's plain C++ computes most distributions from these here, too. For
dropout's masks, uniform and exponential numbers torch may use a vendor's library, so this file has its own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from accelcore.errors import ConfigurationError
from accelcore.precision.dispatcher import Kernel, torch_kernel
from accelcore.torch_internals import OpOverload

_aten = torch.ops.aten


def argument_values(operator: OpOverload, arguments: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all arguments of a call, by name and in order, defaults included."""
    schema = operator._schema.arguments
    by_name = {argument.name: value for argument, value in zip(schema, arguments, strict=False)}
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    values = {**defaults, **by_name, **options}
    return {argument.name: values[argument.name] for argument in schema}


def _draw_by(kernel: Kernel, *arguments: Any, **options: Any) -> Any:
    """Call torch's CPU kernel, which takes a generator of the host for a tensor of any device."""
    for value in (*arguments, *options.values()):
        if isinstance(value, torch.Generator) and value.device.type != "cpu":
            raise ConfigurationError(
                f"a generator of {value.device} draws numbers that only {value.device.type} has",
                why='runtime.seed(..., same="everywhere") asks for numbers that are the same on all devices',
                remedy="pass a generator of the host, torch.Generator(); it serves tensors of any device",
            )
    return kernel(*arguments, **options)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _fill_wide(torchs: Kernel, self: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return self.copy_(torchs(torch.empty(self.shape, dtype=_wide(self.dtype)), *arguments, **options))


def _fill_integers(torchs: Kernel, self: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return self.copy_(torchs(torch.empty(self.shape, dtype=self.dtype), *arguments, **options))  # sets their range


def _compute(torchs: Kernel, self: Tensor, *arguments: Any, out: Tensor | None = None, **options: Any) -> Tensor:
    """Draw by weights or rates in tensors, from their float64 copies on the host."""
    copies = [_copied(argument) if isinstance(argument, Tensor) else argument for argument in arguments]
    drawn: Tensor = torchs(_copied(self), *copies, **options)
    return _given(drawn.to(self.dtype) if drawn.is_floating_point() else drawn, self.device, out)


def _copied(tensor: Tensor) -> Tensor:
    host = tensor.detach().cpu().contiguous()
    return host.double() if host.is_floating_point() else host


def _given(drawn: Tensor, device: torch.device, out: Tensor | None) -> Tensor:
    return drawn.to(device) if out is None else out.resize_(drawn.shape).copy_(drawn)


def _uniforms(torchs: Kernel, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
    drawn: Tensor = torchs(torch.empty(shape, dtype=torch.float64), generator=generator)
    return drawn


def _uniform_(
    torchs: Kernel, self: Tensor, low: float = 0.0, high: float = 1.0, *, generator: torch.Generator | None = None
) -> Tensor:
    drawn = torchs(torch.empty(self.shape, dtype=_wide(self.dtype)), generator=generator)
    if not self.is_complex():
        # As many digits as the dtype has: rounding could give 1, which a uniform number never is.
        steps = 2 / torch.finfo(self.dtype).eps
        drawn = (drawn * steps).floor_() / steps
    return self.copy_(drawn * (high - low) + low)


def _bernoulli_(
    torchs: Kernel, self: Tensor, p: float | Tensor = 0.5, *, generator: torch.Generator | None = None
) -> Tensor:
    return self.copy_(_uniforms(torchs, self.shape, generator) < _chance(p))


def _bernoulli_out(torchs: Kernel, self: Tensor, *, generator: torch.Generator | None = None, out: Tensor) -> Tensor:
    return out.resize_(self.shape).copy_(_uniforms(torchs, self.shape, generator) < _chance(self))


def _chance(p: float | Tensor) -> float | Tensor:
    if isinstance(p, Tensor):
        p = _copied(p)
    if not (torch.as_tensor(p) >= 0).logical_and(torch.as_tensor(p) <= 1).all():
        raise ValueError(f"{p} is not a probability: bernoulli takes 0 to 1")
    return p


def _exponential_(
    torchs: Kernel, self: Tensor, lambd: float = 1.0, *, generator: torch.Generator | None = None
) -> Tensor:
    if lambd <= 0:
        raise ValueError(f"exponential_ takes a lambda above 0, not {lambd}")
    return self.copy_(-torch.log1p(-_uniforms(torchs, self.shape, generator)) / lambd)


def _normal(
    torchs: Kernel,
    mean: float | Tensor,
    std: float | Tensor = 1.0,
    *,
    generator: torch.Generator | None = None,
    out: Tensor | None = None,
) -> Tensor:
    given = [value for value in (mean, std) if isinstance(value, Tensor)]
    shape = torch.broadcast_tensors(*given)[0].shape
    drawn: Tensor = torchs(torch.empty(shape, dtype=_wide(given[0].dtype)), generator=generator)
    center, spread = (_copied(value) if isinstance(value, Tensor) else value for value in (mean, std))
    if (torch.as_tensor(spread) < 0).any():
        raise ValueError("normal takes standard deviations of 0 or more")
    return _given((drawn * spread + center).to(given[0].dtype), given[0].device, out)


def _randperm(torchs: Kernel, n: int, *, generator: torch.Generator | None = None, out: Tensor) -> Tensor:
    drawn = torchs(n, generator=generator, out=torch.empty(n, dtype=torch.int64))
    return out.resize_(n).copy_(drawn)


@cache
def host_kernels() -> dict[OpOverload, Kernel]:
    """Return the operators that draw, each with its kernel for every device.

    The first call must come before any of torch's kernels is replaced.
    """
    uniform, normal = _aten.uniform_.default, _aten.normal_.default
    # For each operator: the function that draws, and the operator whose CPU kernel it gets first.
    drawn: dict[OpOverload, tuple[Kernel, OpOverload]] = {
        uniform: (_uniform_, uniform),
        _aten.bernoulli_.float: (_bernoulli_, uniform),
        _aten.bernoulli_.Tensor: (_bernoulli_, uniform),
        _aten.bernoulli.out: (_bernoulli_out, uniform),
        _aten.exponential_.default: (_exponential_, uniform),
        _aten.randperm.generator_out: (_randperm, _aten.randperm.generator_out),
        _aten.multinomial.out: (_compute, _aten.multinomial.default),
    }
    for operator in (normal, _aten.cauchy_.default, _aten.geometric_.default, _aten.log_normal_.default):
        drawn[operator] = (_fill_wide, operator)
    for form in ("default", "from", "to"):
        drawn[getattr(_aten.random_, form)] = (_fill_integers, getattr(_aten.random_, form))
    for name in ("multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"):
        drawn[getattr(_aten, name).default] = (_compute, getattr(_aten, name).default)
    for form in ("Tensor_Tensor", "Tensor_float", "float_Tensor"):
        for out in ("", "_out"):
            drawn[getattr(_aten.normal, form + out)] = (_normal, normal)
    return {
        operator: partial(draw, partial(_draw_by, torch_kernel(base, "CPU")))
        for operator, (draw, base) in drawn.items()
    }


def _native_dropout(input: Tensor, p: float, train: bool | None = None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    scale = torch.empty_like(input).bernoulli_(1 - p)
    kept = scale != 0
    return input * (scale.div_(1 - p) if p < 1 else scale), kept


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    attention = _aten._scaled_dot_product_attention_math
    output: Tensor = attention(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]
    return output


def _layer_by_layer(operator: OpOverload, *arguments: Any) -> tuple[Tensor, ...]:
    """Run a recurrent network layer by layer: the device's own kernels, with dropout between them."""
    values = argument_values(operator, arguments, {})
    data, states, weights, chance = next(iter(values)), values["hx"], values["params"], values["dropout"]
    layers, directions = values["num_layers"], 2 if values["bidirectional"] else 1
    of_each, ended = len(weights) // layers, []
    values |= {"num_layers": 1, "dropout": 0.0}
    for layer in range(layers):
        rows = slice(layer * directions, (layer + 1) * directions)
        values["hx"] = states[rows] if isinstance(states, Tensor) else [state[rows] for state in states]
        values["params"] = weights[layer * of_each : (layer + 1) * of_each]
        values[data], *end = operator(*values.values())
        ended.append(end)
        if layer < layers - 1:
            values[data] = torch.dropout(values[data], chance, train=True)
    return (values[data], *(torch.cat(states) for states in zip(*ended, strict=True)))


COMPOSED: dict[OpOverload, Callable[..., Any]] = {
    _aten.native_dropout.default: _native_dropout,
    _aten.scaled_dot_product_attention.default: _scaled_dot_product_attention,
    **{
        operator: partial(_layer_by_layer, operator)
        for network in (_aten.lstm, _aten.gru, _aten.rnn_tanh, _aten.rnn_relu)
        for operator in (network.input, network.data)
    },
}
"""Operators that draw in the middle of a computation, composed of operators that draw and operators that compute."""
