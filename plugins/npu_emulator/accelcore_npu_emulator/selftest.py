"""The emulator against the CPU: torch's own operator samples, forward and backward, on both.

`python -m accelcore_npu_emulator.selftest` prints how many operators agree and exits with 1 when too few do. The
samples are torch's (`torch.testing`), and need the package `expecttest`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelcore.errors import AccelError
from accelcore_npu_emulator import activate

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

__all__ = ["Report", "main", "sweep"]

GOAL = 0.98
_TOLERANCE = 1e-4
# Operators whose results are random draws, or memory that nobody has written: there is only a shape to compare.
_UNPREDICTABLE = (
    "bernoulli", "cauchy", "dropout", "empty", "exponential", "fractional_max_pool", "geometric", "log_normal",
    "multinomial", "normal", "pca_lowrank", "rand", "rrelu", "svd_lowrank", "uniform",
)  # fmt: skip
_PREDICTABLE = ("normalize", "_normal_", "batch_norm", "layer_norm")
# torch wants the indices of this operator on the host.
_HOST_INDICES = ("tensor_split",)


@dataclass
class Report:
    """What a sweep found; all of it is about the emulator, not about an NPU.

    Attributes:
        agree: the operators that gave on the emulated NPU what they gave on the CPU.
        disagree: the others, each with the reason.
        unknown: operators that the CPU cannot run, which are not counted.
    """

    agree: list[str] = field(default_factory=list)
    disagree: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """How many operators were compared."""
        return len(self.agree) + len(self.disagree)

    @property
    def passed(self) -> bool:
        """Whether at least 98 % agree, of at least one."""
        return self.total > 0 and len(self.agree) >= GOAL * self.total

    def __str__(self) -> str:
        lines = ["EMULATED: torch's operators on the emulated NPU against the CPU; no hardware took part"]
        lines += [f"  {name}: {reason}" for name, reason in sorted(self.disagree.items())]
        lines.append(f"{len(self.agree)} of {self.total} operators agree with the CPU, forward and backward")
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Write the report as JSON; the file is there as a whole or not at all."""
        content = {
            "emulated": True,
            "agree": len(self.agree),
            "total": self.total,
            "disagree": self.disagree,
            "unknown": self.unknown,
        }
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(content, file, indent=1, sort_keys=True)
                file.write("\n")
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


class _HostCannotError(Exception):
    """The CPU has no kernel for a sample, so there is nothing to compare with."""


def sweep(names: Sequence[str] = (), sample_limit: int = 3) -> Report:
    """Compare operators.

    Args:
        names: names of operators as torch's tests spell them, such as `"nn.functional.gelu"`; all when empty.
        sample_limit: how many of an operator's samples to run.

    Raises:
        ValueError: a name is unknown.
    """
    import torch_npu  # noqa: F401  makes "npu" a device, also where torch does not load its backends by itself
    from torch.testing._internal.common_methods_invocations import op_db

    operators = {".".join(filter(None, (info.name, info.variant_test_name))): info for info in op_db}
    unknown = set(names) - set(operators)
    if unknown:
        raise ValueError(f"unknown operators: {', '.join(sorted(unknown))}")
    report = Report()
    for name in names or operators:
        try:
            _compare(name, operators[name], sample_limit)
        except _HostCannotError:
            report.unknown.append(name)
        except Exception as error:  # noqa: BLE001  whatever goes wrong is the finding
            reason = (str(error).strip() or repr(error)).splitlines()
            report.disagree[name] = f"{type(error).__name__}: {' '.join(reason[:3])[:200]}"
        else:
            report.agree.append(name)
    return report


def _compare(name: str, operator: Any, sample_limit: int) -> None:
    import torch

    supported = operator.supported_dtypes("cpu")
    if not supported:
        raise _HostCannotError
    dtype = next(d for d in (torch.float32, torch.int64, torch.bool, torch.complex64, *supported) if d in supported)
    differentiable = operator.supports_autograd and dtype.is_floating_point
    predictable = not any(part in name for part in _UNPREDICTABLE) or any(part in name for part in _PREDICTABLE)
    torch.manual_seed(0)
    samples = operator.sample_inputs("cpu", dtype, requires_grad=differentiable)
    for _, sample in zip(range(sample_limit), samples, strict=False):
        arguments = (sample.input, *sample.args)
        try:
            expected = operator.op(*arguments, **sample.kwargs)
        except Exception as error:
            raise _HostCannotError from error
        on_npu = _on_npu((arguments, sample.kwargs), keep_indices=name in _HOST_INDICES)
        result = operator.op(*on_npu[0], **on_npu[1])
        values = predictable and not _drops_out(name, sample.kwargs)
        _check(_tensors(result), _tensors(expected), values=values)
        if differentiable and values:
            _check(_gradients(result, on_npu), _gradients(expected, (arguments, sample.kwargs)), values=True)


def _drops_out(name: str, options: dict[str, Any]) -> bool:
    return options.get("dropout_p", 0) > 0 or (name.endswith("multi_head_attention_forward") and options["training"])


def _on_npu(value: Any, *, keep_indices: bool) -> Any:
    """The same arguments on the NPU, each tensor with its strides, its offset and the memory around it."""
    import torch
    from torch.utils._pytree import tree_map

    def move(item: Any) -> Any:
        if isinstance(item, torch.device) or item == "cpu":
            return torch.device("npu")
        if not isinstance(item, torch.Tensor) or (keep_indices and not item.is_floating_point()):
            return item
        if item.layout != torch.strided or item.is_conj() or item.is_neg():
            moved = item.detach().to("npu")
        else:
            count = item.untyped_storage().nbytes() // item.element_size()
            memory = item.detach().as_strided((count,), (1,), 0).to("npu")
            moved = memory.as_strided(item.shape, item.stride(), item.storage_offset())
        return moved.requires_grad_(item.requires_grad)

    return tree_map(lambda item: move(item) if not isinstance(item, str) or item == "cpu" else item, value)


def _tensors(value: Any) -> list[Tensor]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _gradients(result: Any, arguments: Any) -> list[Tensor]:
    import torch

    outputs = [tensor.abs().sum() for tensor in _tensors(result) if tensor.requires_grad]
    inputs = [tensor for tensor in _tensors(arguments) if tensor.requires_grad]
    if not outputs or not inputs:
        return []
    found = torch.autograd.grad(outputs, inputs, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def _check(found: Sequence[Tensor], expected: Sequence[Tensor], *, values: bool) -> None:
    import torch

    assert len(found) == len(expected), f"{len(found)} tensors instead of {len(expected)}"
    for one, other in zip(found, expected, strict=True):
        meta = (tuple(one.shape), one.dtype)
        assert meta == (tuple(other.shape), other.dtype), f"{meta} instead of {tuple(other.shape)}, {other.dtype}"
        if values:
            host, other = one.detach().cpu(), other.detach()
            if other.element_size() == 1 and other.is_floating_point():  # eight bits have no arithmetic to compare with
                host, other = host.float(), other.float()
            torch.testing.assert_close(host, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(prog="python -m accelcore_npu_emulator.selftest", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="operators to compare, such as nn.functional.gelu")
    parser.add_argument(
        "--sample-limit", type=int, default=3, metavar="N", help="samples of each operator (default 3); 1 is quick"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON as well")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if options.sample_limit < 1:
        parser.error("--sample-limit must be at least 1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the samples try what is deprecated, too
        try:
            activate()
            report = sweep(options.names, options.sample_limit)
        except (AccelError, ImportError, ValueError) as error:
            parser.error(str(error))
    sys.stdout.write(f"{report}\n")
    if options.json is not None:
        report.write(options.json)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
