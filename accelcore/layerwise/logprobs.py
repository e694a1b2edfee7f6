"""Compare two ways of running one language model: their log-probabilities, and the first module where they diverge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelcore.errors import ConfigurationError
from accelcore.layerwise.layers import ROUNDING, LayerDifference, compare_layers, keep_layers, same_random_numbers
from accelcore.torch_internals import uncompiled
from accelcore.util.rounding import size_of, unit_of
from accelcore.util.text import kind_of

_Way = Callable[[Tensor], Any]


@dataclass(frozen=True)
class LogprobComparison:
    """Result of `compare_logprobs`.

    Attributes:
        agrees: whether all log-probabilities are the same, or, if the two ways compute in different dtypes, whether no
            module parts by more than rounding.
        maximum, mean: of the absolute difference of the log-probabilities of the tokens, in nats.
        ratio: `maximum` in units of rounding: the epsilon of the coarsest dtype times the root mean square of the
            finite logits, but at least of 1.
        kl: estimate of the Kullback-Leibler divergence of the second way from the first: mean of `exp(d) - 1 - d` for
            the difference d, as in http://joschu.net/blog/kl-approx.html.
        token: row and position of the token with the largest difference.
        module, item: the first module whose output parts; None if none does, or if no module was seen. For an input,
            the module whose own code computed it.
        layers: each module in the order of the first way, up to the one that diverges.
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
    a: _Way, b: _Way, tokens: Tensor, *, modules: tuple[nn.Module, nn.Module] | None = None
) -> LogprobComparison:
    """Compare the log-probabilities that two ways of running one model give to the same tokens.

    For example training and rollout, a batch of 8 and 8 batches of 1, compiled and not, or with and without a cache::

        def by_ones(tokens):
            return torch.cat([model(row[None]) for row in tokens])

        print(accelcore.compare_logprobs(model, by_ones, tokens, modules=(model, model)))

    Each way runs twice, from the present state of torch's random generators: once as it is, for the log-probabilities,
    and once with hooks on its modules, whose outputs are kept on the host. A way may call a module several times, for a
    part of the batch or of the positions each: the parts are joined.

    Args:
        a, b: a module or a function of the tokens that returns logits of shape `(rows, positions, vocabulary)`, or an
            object, dict or tuple with these as `logits` or first. Position i predicts token i + 1.
        tokens: whole numbers of shape `(rows, positions)`, at least two positions.
        modules: the models that run in `a` and `b`, to name the module; unless given, `a` and `b` if they are modules.

    Raises:
        ConfigurationError: `tokens`, `modules` or what a way returns is something else.
    """
    if tokens.dim() != 2 or tokens.shape[1] < 2 or tokens.is_floating_point():
        raise ConfigurationError(
            f"tokens of shape {tuple(tokens.shape)} and {tokens.dtype} cannot be compared",
            remedy="give whole numbers of shape (rows, positions), with two positions or more",
        )
    models = modules or [uncompiled(way) if isinstance(way, nn.Module) else None for way in (a, b)]
    if modules and (len(models) != 2 or not all(isinstance(model, nn.Module) for model in models)):
        raise ConfigurationError(f"modules={modules!r} is not a pair of modules", remedy="give (model_a, model_b)")
    notes, seen = [], []
    ways = (_run(a, tokens), _run(b, tokens))
    mine, theirs = (_of_tokens(logits, tokens) for logits in ways)
    for name, way, model, plain in zip("ab", (a, b), models, (mine, theirs), strict=True):
        with keep_layers(model) as parts:
            again = _run(way, tokens)
        seen.append(parts)
        if not torch.equal(_of_tokens(again, tokens), plain):
            notes.append(f"{name} gives other log-probabilities when it runs again, with its modules watched")
        if not parts:
            notes.append(f"no module of {name} was seen: give modules=(model_a, model_b); compiled code is not seen")
    layers, dtypes_differ = compare_layers(*seen)
    allowed = ROUNDING if dtypes_differ else 0.0
    first = next((number for number, each in enumerate(layers) if not each.equal and each.ratio > allowed), None)
    parted = None if first is None else layers[first]
    d = torch.where(theirs == mine, 0.0, theirs - mine)  # a masked token has -inf in both
    difference = d.abs().nan_to_num(math.inf)
    at, maximum = int(difference.argmax()), float(difference.max())
    unit = max(unit_of(each.dtype) for each in (*ways, *(parts[0] for way in seen for parts in way.values())))
    return LogprobComparison(
        agrees=first is None if dtypes_differ else maximum == 0,
        maximum=maximum,
        mean=float(difference.mean()),
        ratio=maximum / (unit * max(1.0, size_of(ways[0]))),
        kl=float((d.exp() - 1 - d).mean()),
        token=(at // mine.shape[1], at % mine.shape[1] + 1),
        module=None if parted is None else parted.computed_by,
        item=None if parted is None else parted.place,
        layers=tuple(layers[: len(layers) if first is None else first + 1]),
        notes=tuple(notes),
    )


def _run(way: _Way, tokens: Tensor) -> Tensor:
    """Run a way from the present state of the random generators, which is restored, and return its logits."""
    with same_random_numbers(tokens.device):
        found = way(tokens)
    found = found.get("logits") if isinstance(found, Mapping) else getattr(found, "logits", found)
    logits = found[0] if isinstance(found, list | tuple) else found
    if not isinstance(logits, Tensor) or logits.shape[:-1] != tokens.shape or not logits.is_floating_point():
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else kind_of(logits)
        raise ConfigurationError(
            f"a way of running the model returns {shape}, not logits of {(*tokens.shape, 'vocabulary')}",
            remedy="return logits of shape (rows, positions, vocabulary) for all tokens",
        )
    return logits.detach()


def _of_tokens(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token but the first of a row, computed from the logits in float64."""
    logprobs = logits[:, :-1].cpu().double().log_softmax(-1)
    return logprobs.gather(-1, tokens[:, 1:, None].cpu().long())[..., 0]
