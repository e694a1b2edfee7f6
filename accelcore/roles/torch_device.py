"""`from_torch`: a backend for a device that torch supports and that has no plugin.

Small computations find out what the device can do; each result is compared with the CPU's. A trial that raises, or
computes something else, is a reason not to declare a feature. No trial draws random numbers.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from datetime import timedelta
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelcore.backend import Backend
from accelcore.devices import SHARDED, Capabilities
from accelcore.errors import BackendUnavailableError, ConfigurationError, logger
from accelcore.jobs.collectives import NoCollectives, TorchCollectives
from accelcore.jobs.launchers import Launch
from accelcore.optim.registry import Optimizers
from accelcore.optim.torch_routes import FUSED, register_torch_optimizers
from accelcore.precision.o1.autocast import torch_operators
from accelcore.precision.o1.table import O1
from accelcore.precision.role import TorchPrecision
from accelcore.roles.compiler import NoCompiler, TorchCompiler
from accelcore.roles.runtime import AcceleratorRuntime, TorchRuntime
from accelcore.scaling.dynamic import Scalers
from accelcore.torch_internals import device_dispatch_key, has_kernel, inductor_generates_code
from accelcore.util.text import first_line

_LONGEST = 200  # characters of an error that the log shows
_LOW = ("bfloat16", "float16")
_MODELS = ("float32", "float64", *_LOW)
_FOR_RANKS = ("ddp", "combine_ddp", "zero1", *SHARDED)


def from_torch(
    device: str, index: int = 0, *, name: str | None = None, capabilities: Capabilities | None = None
) -> Backend:
    """Compose a backend from what torch says of a device: its module, its kernels, its process group.

    Import the vendor's package first if torch needs one. To replace a role, use
    `dataclasses.replace(from_torch(...), runtime=...)`.

    Args:
        device: torch's name of the device, as in `torch.ones(1, device="xpu")`.
        index: the number of the device.
        name: the backend's name, by which users select it; None means `device`.
        capabilities: the declaration. None means that it is found by trials, each time; the log has the reason for
            each feature that is missing. Print the `capabilities` of the result to write them down.

    Raises:
        ConfigurationError: `device` has an index.
        BackendUnavailableError: torch does not know the device, or cannot compute on it.
    """
    module = _module(device)
    place = _usable(module, device, index)
    declared = _try_capabilities(place) if capabilities is None else capabilities
    optimizers = Optimizers()
    register_torch_optimizers(optimizers, fused=declared.native_optimizers, prefers_foreach=_is_accelerator(device))
    return Backend(
        name=name or device,
        index=index,
        emulated=False,
        capabilities=declared,
        precision=TorchPrecision(device, declared, _autocast_key(device)),
        scaler=Scalers(place),
        optimizers=optimizers,
        collectives=_Collectives(place) if declared.process_groups else NoCollectives(),
        compiler=TorchCompiler() if declared.compilers else NoCompiler(),
        runtime=_runtime(place, declared),
    )


def _module(device: str) -> Any:
    if ":" in device:
        raise ConfigurationError(f"{device!r} has an index", remedy="give the name and the index apart")
    try:
        return torch.get_device_module(device)
    except RuntimeError as error:
        raise BackendUnavailableError(
            f"torch {torch.__version__} has no device {device!r}",
            why=first_line(error),
            available=_what_torch_has(),
            remedy="import the vendor's package before from_torch, or use the name that it gives the device in torch",
        ) from error


def _usable(module: Any, device: str, index: int) -> torch.device:
    """Return the device after a first computation on it, and make it the current one."""
    count = module.device_count() if module.is_available() else 0
    if index >= count:
        raise BackendUnavailableError(
            f"there is no device {device}:{index}",
            why=f"torch.{device}.is_available() is {module.is_available()}, and torch sees {count} of them",
            available=_what_torch_has(),
            remedy="install a build of torch for the device, and its driver" if not count else "choose a lower index",
        )
    place = torch.device(device, index) if _is_accelerator(device) else torch.device(device)
    try:
        if _is_accelerator(device):
            torch.accelerator.set_device_index(index)
        torch.ones(3, device=place).sum().item()
    except Exception as error:
        raise BackendUnavailableError(
            f"torch cannot compute on {place}",
            why=f"{type(error).__name__}: {first_line(error)}",
            available=_what_torch_has(),
            remedy="see whether torch.ones(3, device=...) works in this environment",
        ) from error
    return place


def _is_accelerator(device: str) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device


def _what_torch_has() -> str:
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return "cpu; this torch has no accelerator"
    count = torch.get_device_module(accelerator).device_count()  # torch.accelerator's raises if there is no driver
    return f"cpu; torch's accelerator is {accelerator.type}, with {count} device{'s' * (count != 1)}"


class _Collectives(TorchCollectives):
    """Process group that torch registers for a device, with that for CPU tensors beside it."""

    def __init__(self, device: torch.device) -> None:
        kind, host, own = device.type, _process_group("cpu"), _process_group(device.type)
        super().__init__(device, str(own) if own == host else f"cpu:{host},{kind}:{own}", host=host)

    def init(self, launch: Launch | None, *, timeout: timedelta | None = None) -> None:
        if (launch is not None or dist.is_initialized()) and _is_accelerator(self.device.type):
            torch.accelerator.set_device_index(self.device.index)  # libraries bind a rank to the current device
        super().init(launch, timeout=timeout)


def _runtime(device: torch.device, declared: Capabilities) -> TorchRuntime:
    if not _has_generator(device):
        return TorchRuntime(device)
    graph = _graph_class(torch.get_device_module(device)) if declared.graphs else None
    return AcceleratorRuntime(device, streams=declared.streams, graph=graph)


def _try_capabilities(device: torch.device) -> Capabilities:
    """Return what a device can do according to trials. The log has the reason for each feature that is missing.

    What one process cannot try is taken from torch's registry: process groups, the strategies that need them, and
    inductor. `accelcore verify backend` tests these.
    """
    kind = device.type
    missing: dict[str, str] = {}

    def works(feature: str, trial: Callable[..., None], *arguments: Any) -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of a dtype without autocast, which the trial finds out
            try:
                trial(device, *arguments)
            except Exception as error:  # noqa: BLE001  # a vendor's operator may raise anything
                missing[feature] = shorten(str(error), _LONGEST) or type(error).__name__
                return False
        return True

    group, on_host = _process_group(kind), _process_group("cpu")
    preferred = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    low = sorted(_LOW, key=lambda name: name != preferred)
    autocast = tuple(name for name in low if works(f"autocast to {name}", _try_autocast, name))
    tables = ("torch", "O1") if autocast and works("table O1", _try_o1, autocast) else ("torch",)
    capabilities = Capabilities(
        autocast_dtypes=autocast,
        autocast_tables=tables,
        model_dtypes=tuple(name for name in _MODELS if works(f"models in {name}", _try_model, name)),
        native_optimizers=tuple(sorted(name for name in FUSED if works(f"fused {name}", _try_fused, name))),
        # Triton first, because importing inductor takes seconds.
        compilers=("inductor",) if importlib.util.find_spec("triton") and inductor_generates_code(kind) else (),
        process_groups=tuple(dict.fromkeys((group, on_host))) if group and on_host else (),
        parallel=("none", *_FOR_RANKS) if group and on_host else ("none",),
        sync_batchnorm=bool(group) and has_kernel(torch.ops.aten.batch_norm_stats.default, device_dispatch_key(kind)),
        streams=works("streams", _try_streams),
        graphs=works("graphs", _try_graph),
        pinned_memory=works("pinned memory", _try_pinned),
    )
    for feature, reason in missing.items():
        logger.info("%s: %s is not declared: %s", device, feature, reason)
    return capabilities


def _autocast_key(kind: str) -> str:
    """Return the dispatcher's key of a device type's autocast, such as `"AutocastPrivateUse1"`."""
    return f"Autocast{device_dispatch_key(kind)}"


def _has_generator(device: torch.device) -> bool:
    """Return whether torch's module of the device has the state of a random generator for each device."""
    module = torch.get_device_module(device)
    try:
        module.set_rng_state(module.get_rng_state(device), device)
    except Exception:  # noqa: BLE001  # a vendor's module may raise anything
        return False
    return True


def _process_group(kind: str) -> str | None:
    """Return torch.distributed's backend for a device type; None if this build of torch has no such backend."""
    name = dist.Backend.default_device_backend_map.get(kind)
    return name if name is not None and dist.is_backend_available(name) else None


def _graph_class(module: Any) -> Callable[[], Any] | None:
    """Return the class of captured graphs in torch's module of a device; None if there is not exactly one."""
    found = [name for name in dir(module) if name.endswith("Graph") and not name.startswith("_")]
    return getattr(module, found[0]) if len(found) == 1 and hasattr(module, "graph") else None


def _ramp(*shape: int) -> Tensor:
    """Return numbers from -1 to 1 in fp32."""
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)


def _compare(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Raise if a result is farther from the CPU's than a few roundings to `dtype`."""
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.cpu().double(), wanted.double(), rtol=tolerance, atol=tolerance)


def _require(condition: object, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def _try_autocast(device: torch.device, name: str) -> None:
    dtype, matrix = getattr(torch, name), _ramp(4, 4)
    with torch.autocast(device.type, dtype):
        product = matrix.to(device) @ matrix.to(device)
    _require(product.dtype == dtype, f"a product under autocast is in {product.dtype}")
    _compare(product, matrix @ matrix, dtype)


def _try_o1(device: torch.device, names: tuple[str, ...]) -> None:
    """Require a treatment for each operator that the device's autocast intercepts, and try two of them."""
    key = _autocast_key(device.type)
    intercepted = {name.partition("::")[2].partition(".")[0] for name in torch_operators(key)}
    unknown = ", ".join(sorted(intercepted - O1.keys()))
    _require(not unknown, f"Precision.treatments() must list {unknown}")
    precision = TorchPrecision(device.type, Capabilities(autocast_dtypes=names, autocast_tables=("O1",)), key)
    dtype, matrix = getattr(torch, names[0]), _ramp(4, 4).to(device)
    with precision.autocast(dtype, table="O1"):
        product = matrix @ matrix
        shares = product.softmax(1)
    _require(product.dtype == dtype and shares.dtype == torch.float32, "its dtypes are not those of the table")


def _try_model(device: torch.device, name: str) -> None:
    dtype, gradients = getattr(torch, name), []
    host = torch.device("cpu")
    for place in (device, host):
        own = torch.float64 if place is host else dtype
        weight = _ramp(3, 4).to(place, own).requires_grad_()
        loss = nn.functional.linear(_ramp(2, 4).to(place, own), weight).square().mean()
        (gradient,) = torch.autograd.grad(loss, [weight])
        gradients.append(gradient)
    _compare(gradients[0], gradients[1].cpu(), dtype)


def _try_fused(device: torch.device, name: str) -> None:
    """Step twice by the fused kernel; an overflow must skip the first step."""
    operator = getattr(torch.ops.aten, f"_fused_{name}_").default
    _require(has_kernel(operator, device_dispatch_key(device.type)), "there is no kernel")
    kind: Any = FUSED[name]
    plain = kind.__bases__[-1]  # torch's class
    found, wanted = _ramp(5).to(device).requires_grad_(), _ramp(5).requires_grad_()
    optimizer, reference = kind([found], lr=0.1), plain([wanted], lr=0.1, foreach=False)
    found.grad, wanted.grad = 2 * _ramp(5).to(device), _ramp(5)
    with torch.no_grad():
        for overflow in (1.0, 0.0):
            optimizer.update(torch.full((), overflow, device=device), torch.full((), 2.0, device=device))
    reference.step()
    _compare(found.detach(), wanted.detach(), torch.float32)


def _try_streams(device: torch.device) -> None:
    event = torch.get_device_module(device).current_stream(device).record_event()
    _require(event is not None, "the streams of torch's module of the device do nothing")
    runtime, numbers = AcceleratorRuntime(device), _ramp(1000)
    arrived = runtime.prefetch(numbers)()
    with runtime.side_stream():
        doubled = arrived + arrived
    _compare(runtime.fetch(doubled)(), numbers + numbers, torch.float32)


def _try_graph(device: torch.device) -> None:
    new_graph = _graph_class(torch.get_device_module(device))
    _require(new_graph, "torch's module of the device has no class of graphs")
    runtime, total = AcceleratorRuntime(device, graph=new_graph), torch.zeros(4, device=device)
    _, replay = runtime.capture(lambda: total.add_(1))
    _compare(total, torch.zeros(4), torch.float32)
    replay()
    replay()
    _compare(total, torch.full((4,), 2.0), torch.float32)


def _try_pinned(device: torch.device) -> None:
    _require(_is_accelerator(device.type), "it is not torch's accelerator")
    numbers = _ramp(8)
    pinned = numbers.pin_memory()
    _require(pinned.is_pinned(), "pin_memory returns memory that is not pinned")
    _compare(pinned.to(device, non_blocking=True), numbers, torch.float32)
