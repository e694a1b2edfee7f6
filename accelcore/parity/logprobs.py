"""Compare two ways of running one language model: their log-probabilities, and the first module where they part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelcore.errors import ConfigurationError
from accelcore.torch_internals import uncompiled
from accelcore.training.observers import Hooks
from accelcore.util.containers import tensors
from accelcore.util.text import kind_of

__all__ = ["LayerDifference", "LogprobComparison", "compare_logprobs"]

_ROUNDING = 8.0
"""Units of rounding within which two dtypes agree at a module: rounding adds up over the layers before it."""

_Way = Callable[[Tensor], Any]
_Seen = tuple[str, str]
"""A module's name, and `"input 0"` or `"output 0"`."""


@dataclass(frozen=True)
class LayerDifference:
    """How far the two ways are apart at one input or output of a module.

    Attributes:
        module: its name as in `model.named_modules()`; `""` for the model itself.
        item: `"input 0"`, `"output 0"` and so on.
        equal: whether all values are the same.
        ratio: root mean square of the difference, in units of rounding: the epsilon of the coarsest floating-point
            dtype up to here, times the root mean square of the first way's values.
    """

    module: str
    item: str
    equal: bool
    ratio: float


@dataclass(frozen=True)
class LogprobComparison:
    """Result of `compare_logprobs`.

    Attributes:
        agrees: whether all log-probabilities are the same, or, if the two ways compute in different dtypes, whether no
            module parts by more than rounding.
        maximum, mean: of the absolute difference of the log-probabilities of the tokens, in nats.
        ratio: `maximum` in units of rounding: the epsilon of the coarsest dtype times the root mean square of the
            logits, but at least of 1.
        kl: estimate of the Kullback-Leibler divergence of the second way from the first: mean of `exp(d) - 1 - d` for
            the difference d, as in http://joschu.net/blog/kl-approx.html.
        token: row and position of the token with the largest difference.
        module: the first module where the two ways part; None if they do not, or if no module was seen.
        item: the module's output that parts. For an input, `module` is the module whose own code computed it.
        layers: each module in the order of the first way, up to the one that parts.
        notes: what limits the comparison.
    """

    agrees: bool
    maximum: float
    mean: float
    ratio: float
    kl: float
    token: tuple[int, int]
    module: str | None
    item: str | None
    layers: tuple[LayerDifference, ...]
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the result as a dict for JSON."""
        return {"schema": 1, **asdict(self)}

    def __str__(self) -> str:
        head = (
            f"log-probabilities differ by {self.maximum:.3g} at most and {self.mean:.3g} on average: "
            f"{self.ratio:.3g} units of rounding, KL {self.kl:.2g}"
        )
        lines = [head if self.maximum else "log-probabilities are equal", *(f"note: {note}" for note in self.notes)]
        for layer in self.layers:
            depth, name = layer.module.count(".") + bool(layer.module), layer.module.rpartition(".")[2] or "(model)"
            apart = "equal" if layer.equal else f"{layer.ratio:.3g} units apart"
            lines.append(f"{'  ' * depth}{name} {layer.item}: {apart}")
        if self.module is not None:
            lines.append(f"the two ways part at {self.module or 'the model itself'}, {self.item}")
        return "\n".join(lines)


def compare_logprobs(
    a: _Way,
    b: _Way,
    tokens: Tensor,
    *,
    modules: tuple[nn.Module, nn.Module] | None = None,
) -> LogprobComparison:
    """Compare the log-probabilities that two ways of running one model give to the same tokens.

    Such as training and rollout, a batch of 8 and 8 batches of 1, bf16 and fp32, compiled and not, or all positions at
    once and one after the other from a cache::

        def by_ones(tokens):
            return torch.cat([model(row[None]) for row in tokens])

        print(accelcore.compare_logprobs(model, by_ones, tokens, modules=(model, model)))

    Each way runs twice: once as it is, for the log-probabilities, and once with hooks on its modules. Both times it
    begins with the present state of torch's random generators, so that dropout draws the same. A way may call a
    module several times, for a part of the batch or of the positions each: the parts are joined. Outputs of all
    modules are kept on the host meanwhile.

    Args:
        a, b: a module or a function of the tokens that returns logits of shape `(rows, positions, vocabulary)`, or an
            object, dict or tuple with these as `logits` or first. Position i predicts token i + 1.
        tokens: whole numbers of shape `(rows, positions)`, at least two positions.
        modules: the models that run in `a` and `b`, to name the module; unless given, `a` and `b` if they are modules.

    Raises:
        ConfigurationError: `tokens` or what a way returns has another shape or dtype, or `modules` is no pair of
            modules.
    """
    if tokens.dim() != 2 or tokens.shape[1] < 2 or tokens.is_floating_point():
        raise ConfigurationError(
            f"tokens of shape {tuple(tokens.shape)} and {tokens.dtype} cannot be compared",
            remedy="give whole numbers of shape (rows, positions), with two positions or more",
        )
    models = modules or (_model_of(a), _model_of(b))
    if modules and (len(models) != 2 or not all(isinstance(model, nn.Module) for model in models)):
        raise ConfigurationError(f"modules={modules!r} is not a pair of modules", remedy="give (model_a, model_b)")
    notes: list[str] = []
    ways = (_run(a, tokens), _run(b, tokens))
    mine, theirs = (_of_tokens(logits, tokens) for logits in ways)
    seen = [_watched(way, tokens, model) for way, model in zip((a, b), models, strict=True)]
    for name, way, logits in zip("ab", seen, ways, strict=True):
        if not torch.equal(_of_tokens(way.logits, tokens), _of_tokens(logits, tokens)):
            notes.append(f"{name} gives other log-probabilities when it runs again, with its modules watched")
        if not way.parts:
            notes.append(f"no module of {name} was seen: give modules=(model_a, model_b); compiled code is not seen")
    layers, dtypes_differ = _layers(seen[0].parts, seen[1].parts)
    first = _first_apart(layers, _ROUNDING if dtypes_differ else 0.0)
    difference = (theirs - mine).abs().nan_to_num(math.inf)
    at = int(difference.argmax())
    maximum = float(difference.max())
    unit = max(torch.finfo(logits.dtype).eps for logits in ways)
    unit = max([unit, *(_unit(parts) for way in seen for parts in way.parts.values())])
    size = max(1.0, float(ways[0].double().square().mean().sqrt()))
    parted = None if first is None else layers[first]
    d = theirs - mine
    return LogprobComparison(
        agrees=first is None if dtypes_differ else maximum == 0,
        maximum=maximum,
        mean=float(difference.mean()),
        ratio=maximum / (unit * size),
        kl=float((d.exp() - 1 - d).mean()),
        token=(at // mine.shape[1], at % mine.shape[1] + 1),
        module=None if parted is None else _computed_by(parted),
        item=None if parted is None else _place(parted),
        layers=tuple(layers[: len(layers) if first is None else first + 1]),
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Watched:
    logits: Tensor
    parts: Mapping[_Seen, list[Tensor]]


def _model_of(way: _Way) -> nn.Module | None:
    return uncompiled(way) if isinstance(way, nn.Module) else None


def _run(way: _Way, tokens: Tensor) -> Tensor:
    """Run a way from the present state of the random generators, which is restored, and return its logits."""
    with _same_random_numbers(tokens.device):
        found = way(tokens)
    logits = getattr(found, "logits", None)
    if logits is None and isinstance(found, Mapping):
        logits = found.get("logits")
    if logits is None:
        logits = found[0] if isinstance(found, Sequence) else found
    if not isinstance(logits, Tensor) or logits.shape[:-1] != tokens.shape or not logits.is_floating_point():
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else kind_of(logits)
        raise ConfigurationError(
            f"a way of running the model returns {shape}, not logits of {(*tokens.shape, 'vocabulary')}",
            remedy="return logits of shape (rows, positions, vocabulary) for all tokens",
        )
    return logits.detach()


@contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[None]:
    """Restore the random generators of the host and of a device at the end."""
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            yield
    else:
        with torch.random.fork_rng(device_type=device.type):
            yield


def _of_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token but the first of a row, computed from the logits in float64."""
    logprobs = logits[:, :-1].cpu().double().log_softmax(-1)
    return logprobs.gather(-1, tokens[:, 1:, None].cpu().long())[..., 0]


def _watched(way: _Way, tokens: Tensor, model: nn.Module | None) -> _Watched:
    """Run a way, and keep the inputs and outputs of each module of `model`, in the order in which they come."""
    parts: dict[_Seen, list[Tensor]] = {}

    def keep(name: str, kind: str, value: object) -> None:
        if not torch.compiler.is_compiling():
            for number, tensor in enumerate(tensors(value)):
                if tensor.is_floating_point():
                    parts.setdefault((name, f"{kind} {number}"), []).append(tensor.detach().cpu().clone())

    def before(name: str) -> Callable[..., None]:
        return lambda module, arguments, options: keep(name, "input", [arguments, options])

    def after(name: str) -> Callable[..., None]:
        return lambda module, arguments, output: keep(name, "output", output)

    hooks = Hooks()
    try:
        for name, module in () if model is None else model.named_modules():
            hooks.add(
                module.register_forward_pre_hook(before(name), with_kwargs=True),
                module.register_forward_hook(after(name)),
            )
        logits = _run(way, tokens)
    finally:
        hooks.close()
    return _Watched(logits, parts)


def _layers(
    mine: Mapping[_Seen, list[Tensor]], theirs: Mapping[_Seen, list[Tensor]]
) -> tuple[list[LayerDifference], bool]:
    """Return the difference at each input and output that both ways have, and whether their dtypes differ anywhere."""
    found: list[LayerDifference] = []
    unit, differ = 0.0, False
    for key, parts in mine.items():
        joined = _joined(parts, theirs.get(key, []))
        if joined is None:
            continue
        differ = differ or parts[0].dtype != theirs[key][0].dtype
        unit = max(unit, _unit(parts), _unit(theirs[key]))
        a, b = (each.double() for each in joined)
        equal = bool(((a == b) | (a.isnan() & b.isnan())).all())
        apart, size = ((value.square().mean().sqrt().item()) if value.numel() else 0.0 for value in (a - b, a))
        ratio = 0.0 if equal else apart / (unit * size) if size else math.inf
        found.append(LayerDifference(*key, equal, math.inf if math.isnan(ratio) else ratio))
    return found, differ


def _unit(parts: Sequence[Tensor]) -> float:
    return torch.finfo(parts[0].dtype).eps


def _joined(mine: list[Tensor], theirs: list[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Join the parts of both ways along the dimension that gives them one shape; None if there is none."""
    if not mine or not theirs:
        return None
    for dim in range(max(1, mine[0].dim())):
        try:
            a, b = (parts[0] if len(parts) == 1 else torch.cat(parts, dim) for parts in (mine, theirs))
        except RuntimeError:  # the parts do not fit together along this dimension
            continue
        if a.shape == b.shape:
            return a, b
    return None


def _first_apart(layers: Sequence[LayerDifference], allowed: float) -> int | None:
    """Return the index of the first difference above `allowed` units of rounding."""
    return next((number for number, layer in enumerate(layers) if not layer.equal and layer.ratio > allowed), None)


def _computed_by(parted: LayerDifference) -> str:
    """Return the module that computed what differs: an input is computed by the code of the module around."""
    return parted.module if parted.item.startswith("output") else parted.module.rpartition(".")[0]


def _place(parted: LayerDifference) -> str:
    return parted.item if parted.item.startswith("output") else f"{parted.item} of {parted.module}"
