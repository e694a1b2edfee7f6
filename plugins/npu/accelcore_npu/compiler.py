"""Compilation on the NPU: torch.compile with the best backend of torch_npu that passes a trial."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from accelcore.devices.plugins import describe_error
from accelcore.errors import logger
from accelcore.roles.compiler import Compiled, TorchCompiler
from accelcore_npu.detection import installed_version

# Best first, each with the distribution that it needs and torch_npu does not install.
_BACKENDS = {"npugraph_ex": None, "npugraphs": None, "npu": "protobuf", "inductor": "triton-ascend"}
_GRAPHS = ("npugraph_ex", "npugraphs")  # their results lie in memory that the next run overwrites
# The copy lets users keep an output.
_OPTIONS: dict[str, dict[str, Any]] = {"npugraph_ex": {"options": {"clone_output": True}}}


def installed_compilers() -> tuple[str, ...]:
    """Return the backends of torch.compile whose packages are installed, best first."""
    return tuple(name for name, needs in _BACKENDS.items() if needs is None or installed_version(needs))


class NpuCompiler(TorchCompiler):
    """Compiler that uses the first backend that trains a small network correctly, or the one that `options` names.

    An installed backend may not work. Each needs other parts of CANN and raises errors of any kind, some of them only
    when it replays a captured graph.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def check(self, options: Mapping[str, Any]) -> None:
        super().check({"backend": next(iter(installed_compilers()), "eager"), **options})

    def compile(self, module: nn.Module, options: Mapping[str, Any] = MappingProxyType({})) -> Compiled:
        wanted = options.get("backend")
        if wanted is not None and wanted not in _BACKENDS:
            return super().compile(module, options)
        faults = []
        for name in (wanted,) if wanted else installed_compilers():
            own = {} if "mode" in options else _OPTIONS.get(name, {})  # torch takes a mode or options
            compiled = super().compile(module, {**own, **options, "backend": name})  # refuses unknown options
            fault = _fault(name, self._device)
            if fault is None:
                compiled.overwrites = name in _GRAPHS
                return compiled
            faults.append(f"{name}: {fault}")
        reason = "; ".join(faults)
        logger.warning("the model runs eagerly, not compiled: %s", reason)
        return Compiled(module, compiled=False, reason=reason)


@cache
def _fault(backend: str, device: torch.device) -> str | None:
    """Train a small network with a backend until its graphs are replayed. Return why it does not work, or None."""
    needs = _BACKENDS[backend]
    if needs is not None and not installed_version(needs):
        return f"{needs} is not installed"
    network = nn.Sequential(
        nn.Linear(8, 16, device="meta"),
        nn.Tanh(),
        nn.Linear(16, 16, device="meta"),
        nn.Tanh(),
        nn.Linear(16, 1, device="meta"),
    ).to_empty(device=device)
    with torch.no_grad():
        for parameter in network.parameters():  # draws no random numbers
            parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))
    inputs = torch.linspace(-1, 1, 32, device=device).view(4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # compilers warn of their own code
        try:
            compiled = torch.compile(network, backend=backend, **_OPTIONS.get(backend, {}))
            kept = []
            for run in range(1, 6):  # the first warms up, the second is captured, those after it are replayed
                (output, found), (_, wanted) = (_results(call, network, inputs / run) for call in (compiled, network))
                if not torch.allclose(found, wanted, rtol=1e-3, atol=1e-5):
                    return f"run {run} computes other values than the eager model"
                kept.append((output, output.clone()))
            if not all(torch.equal(output, copy) for output, copy in kept):
                return "a run overwrites the results of earlier runs, such as a stored loss"
        except Exception as error:  # noqa: BLE001  # reported in place of the compiled model
            return describe_error(error)
    return None


def _results(call: Callable[[Tensor], Tensor], network: nn.Module, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of a forward and backward pass, and a copy of it with the gradients."""
    network.zero_grad()
    output = call(inputs)
    output.square().sum().backward()
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    return output.detach(), torch.cat([tensor.detach().flatten() for tensor in (output, *gradients)])
