"""Run one model in two ways, side by side, and name the first module that computes something else.

`compare_logprobs` compares two ways of running a language model; `compare_batch_sizes` runs a batch whole and some rows
at a time (`accelcore replay --batch 1`). Whole trainings are compared in `accelcore.parity`, also by `distance`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.torch_internals import uncompiled
from accelcore.training.data.evaluation import evaluating
from accelcore.training.observers import Hooks
from accelcore.util.containers import tensors, with_tensors
from accelcore.util.text import kind_of

ROUNDING = 8.0
"""Units of rounding within which two dtypes agree at a module: rounding adds up over the layers before it."""

Parts = Mapping[tuple[str, str], list[Tensor]]
"""Values of each call, on the host, by a module's name and `"input 0"` or `"output 0"`, in the order of first calls."""

_Way = Callable[[Tensor], Any]


@dataclass(frozen=True)
class LogprobComparison:
    """Result of `compare_logprobs`.

    Attributes:
        agrees: whether all log-probabilities are the same, or, if the two ways compute in different dtypes, whether no
            module parts by more than rounding.
        maximum: largest absolute difference of the log-probabilities of the tokens, in nats.
        mean: mean of these differences.
        ratio: `maximum` in units of rounding: the epsilon of the coarsest dtype times the root mean square of the
            finite logits, but at least of 1.
        kl: estimate of the Kullback-Leibler divergence of the second way from the first: mean of `exp(d) - 1 - d` for
            the difference d, as in http://joschu.net/blog/kl-approx.html.
        token: row and position of the token with the largest difference.
        module: the first module whose output differs; None if all agree, or if no module was seen. For an input,
            the module whose own code computed it.
        item: the output or input of this module.
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
    ways = (_logits(a, tokens), _logits(b, tokens))
    mine, theirs = (_of_tokens(logits, tokens) for logits in ways)
    for name, way, model, plain in zip("ab", (a, b), models, (mine, theirs), strict=True):
        with keep_layers(model) as parts:
            again = _logits(way, tokens)
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


def _logits(way: _Way, tokens: Tensor) -> Tensor:
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


@dataclass(frozen=True)
class LayerDifference:
    """Difference of the two ways at one input or output of a module.

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

    @property
    def computed_by(self) -> str:
        """Module that computed what differs. An input is computed by the code of the module around it."""
        return self.module if self.item.startswith("output") else self.module.rpartition(".")[0]

    @property
    def place(self) -> str:
        """The item, and for an input its module, too."""
        return self.item if self.item.startswith("output") else f"{self.item} of {self.module}"


@contextmanager
def keep_layers(model: nn.Module | None) -> Iterator[Parts]:
    """Keep the floating-point inputs and outputs of each module that is called in this context."""
    parts: dict[tuple[str, str], list[Tensor]] = {}

    def keep(name: str, kind: str) -> Callable[..., None]:
        def hook(module: nn.Module, *given: object) -> None:  # arguments and options, or arguments and output
            if torch.compiler.is_compiling():
                return
            for number, tensor in enumerate(tensors(given if kind == "input" else given[-1])):
                if tensor.is_floating_point():
                    parts.setdefault((name, f"{kind} {number}"), []).append(tensor.detach().cpu().clone())

        return hook

    with Hooks() as hooks:
        for name, module in () if model is None else model.named_modules():
            hooks.add(
                module.register_forward_pre_hook(keep(name, "input"), with_kwargs=True),
                module.register_forward_hook(keep(name, "output")),
            )
        yield parts


def compare_layers(mine: Parts, theirs: Parts) -> tuple[list[LayerDifference], bool]:
    """Return the difference at each input and output that both ways have, and whether their dtypes differ anywhere."""
    found: list[LayerDifference] = []
    unit, differ = 0.0, False
    for key, parts in mine.items():
        joined = _joined(parts, theirs.get(key, []))
        if joined is None:
            continue
        differ = differ or joined[0].dtype != joined[1].dtype
        unit = max(unit, *(unit_of(each.dtype) for each in joined))
        apart = distance(*(each.double() for each in joined))
        found.append(LayerDifference(*key, apart.equal, apart.ratio(unit)))
    return found, differ


def _joined(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Join the parts of both ways along the dimension that gives them one shape; None if there is none."""
    if not mine or not theirs:
        return None
    for dim in range(max(1, mine[0].dim())):
        try:
            a, b = (parts[0] if len(parts) == 1 else torch.cat(list(parts), dim) for parts in (mine, theirs))
        except RuntimeError:  # the parts do not fit together along this dimension
            continue
        if a.shape == b.shape:
            return a, b
    return None


def same_random_numbers(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that restores the random generators of the host and of a device at its end."""
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def compare_batch_sizes(model: nn.Module, given: tuple[Any, Any], size: int) -> list[LayerDifference]:
    """Run a model on a batch, and again on `size` rows of it at a time, and compare its layers.

    It runs in evaluation mode, because dropout and BatchNorm depend on the batch otherwise. Of the arguments `given`,
    tensors as long as the first one are divided; others are given whole.
    """
    own = tensors(given)
    count = next((tensor.shape[0] for tensor in own if tensor.dim()), 0)
    if count <= size:
        raise ConfigurationError(
            f"a batch of {count} rows cannot be divided into batches of {size}",
            remedy="give a smaller number of rows, or run the script with larger batches",
        )
    divided = [
        with_tensors(
            given, [each[begin : begin + size] if each.dim() and each.shape[0] == count else each for each in own]
        )
        for begin in range(0, count, size)
    ]
    layers, _ = compare_layers(_run(model, [given]), _run(model, divided))
    if not layers:
        raise UnsupportedError(
            "batches of two sizes cannot be compared", why="no module has inputs or outputs with a dimension of rows"
        )
    return layers


def _run(model: nn.Module, batches: list[tuple[Any, Any]]) -> Parts:
    """Run a model on batches in evaluation mode, and leave it and the random generators as they were."""
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    try:
        with evaluating(model), torch.no_grad(), same_random_numbers(device), keep_layers(model) as parts:
            for arguments, options in batches:
                model(*arguments, **options)
    finally:
        torch.clear_autocast_cache()  # it has casts of the weights without their gradients
    return parts


class Distance(NamedTuple):
    """Distance of two samples."""

    equal: bool  # whether all bits are the same
    error: float  # root mean square of the difference
    size: float  # root mean square of the recorded sample
    masks: bool = False  # whether the difference is that other elements are zero, as after another dropout

    def ratio(self, unit: float, scale: float = 0.0) -> float:
        """Return the error in units of rounding of the larger of `size` and `scale`."""
        if self.equal or self.error == 0:
            return 0.0
        below = unit * max(self.size, scale)
        return self.error / below if below > 0 and math.isfinite(self.error) else math.inf


def distance(recorded: Tensor, replayed: Tensor) -> Distance:
    """Compare two samples. NaN equals NaN."""
    if recorded.shape != replayed.shape:
        return Distance(equal=False, error=math.inf, size=0.0)
    a, b = recorded.double(), replayed.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return Distance(recorded.dtype == replayed.dtype, 0.0, size_of(a))
    zeros, far = (a == 0) != (b == 0), (a - b).abs() > 0.1 * torch.maximum(a.abs(), b.abs())
    masks = int(zeros.sum()) > int(far.sum()) // 2
    error = torch.where(same, 0.0, a - b).square().mean().sqrt().item()  # infinite if an inf or NaN differs
    return Distance(False, error if math.isfinite(error) else math.inf, size_of(a), masks)


def size_of(values: Tensor) -> float:
    """Return the root mean square of the finite elements of a sample: masks are often -inf."""
    values = values[values.isfinite()]
    return values.double().square().mean().sqrt().item() if values.numel() else 0.0


def unit_of(dtype: torch.dtype) -> float:
    """Return the rounding of a dtype relative to its values; 0 for whole numbers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
