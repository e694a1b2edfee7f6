"""Generic kernel: run an operator's CPU kernel on host views of its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelcore_npu_emulator.kernels.element_types import dtype_check
from accelcore_npu_emulator.kernels.generators import host_generator, seeded
from accelcore_npu_emulator.kernels.host_memory import CPU, current_device, place, tensors_in, view
from accelcore_npu_emulator.kernels.indices import with_wide_indices
from accelcore_npu_emulator.kernels.room import room_finder, tell_device_out_of_memory
from accelcore_npu_emulator.kernels.signature import Signature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accelcore_npu_emulator.kernels.machine import Machine


def host_kernel(
    operator: torch._ops.OpOverload, machine: Machine, function: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return a device kernel for `operator` that runs `function`, by default the operator, on the host."""
    made: list[Callable[..., Any]] = []

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # Made at the first call: a process uses few of thousands of registered operators.
        if not made:
            made.append(_made(operator, machine, function))
        return made[0](*args, **kwargs)

    return kernel


def _made(operator: torch._ops.OpOverload, machine: Machine, function: Callable[..., Any] | None) -> Callable[..., Any]:
    signature = Signature(operator)
    on_host = _into_outs(function, signature.outs) if function else with_wide_indices(operator, signature.base)
    run = _execution(signature, machine, on_host)
    name, aliases, outs = signature.name, signature.aliases, signature.outs
    alias = aliases[0] if len(aliases) == 1 else None
    launches = not signature.is_view
    makes_tensors = launches and (None in aliases or bool(outs))
    find_room = room_finder(operator, signature, machine.settings.memory)
    check_dtypes = dtype_check(name, signature.base)
    recorder, count_launch = machine.recorder, machine.count_launch

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if launches:
            count_launch(name)
        values, keywords, device = _on_host(signature, args, kwargs)
        if check_dtypes is not None:
            check_dtypes(values)
        if makes_tensors and not any(out.numel() for key in outs for out in tensors_in(kwargs.get(key))):
            find_room(values, keywords, device)
        try:
            result = run(values, keywords, device)
        except RuntimeError as error:
            tell_device_out_of_memory(error, device)
            raise
        for key in outs:
            if key in kwargs:
                _store(keywords[key], kwargs[key])
        final: Any
        if len(aliases) == 1:
            final = _placed(result, device) if alias is None else signature.argument(alias, args, kwargs)
        else:
            final = tuple(
                _placed(value, device) if key is None else signature.argument(key, args, kwargs)
                for key, value in zip(aliases, result or (), strict=True)
            )
        if (tape := recorder.tape) is not None:
            # Write an aliased result in place again.
            results = (final,) if len(aliases) == 1 else final
            targets = [_views(kwargs[key] for key in outs if key in kwargs)]
            targets += [[] if key else _views([value]) for key, value in zip(aliases, results, strict=True)]
            tape.append(lambda: _rerun(signature, run, values, keywords, device, targets))
        return final if aliases else None

    return kernel


def _on_host(
    signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any], torch.device]:
    """Return the arguments of the host's call, and the device of its results."""
    values = list(args)
    given = len(values)
    device: torch.device | None = None
    index = -1
    stranger: Tensor | None = None
    for i in signature.tensors:
        # torch passes the number in `tensor + 1` as a number, not as a tensor.
        if i < given and isinstance(value := values[i], Tensor):
            found = value.get_device()
            if found < 0:
                if value.dim():  # a host tensor of one value works with every device
                    stranger = value
                continue
            values[i] = view(value)
            if device is None:
                device, index = value.device, found
            elif found != index:
                stranger = value
    for i in signature.lists:
        if i < given and (many := values[i]) is not None:
            values[i] = [None if value is None else view(value) for value in many]
            device = device or _device_of(many)
            if stranger is None:
                stranger = next((t for t in many if t is not None and t.is_cpu and t.dim()), None)
    keywords = kwargs.copy()
    if kwargs:
        for key in signature.keyword_tensors:
            if isinstance(value := kwargs.get(key), Tensor):
                keywords[key] = view(value)
                device = device or _device_of([value])
        for key in signature.keyword_lists:
            if (many := kwargs.get(key)) is not None:
                keywords[key] = [view(value) for value in many]
                device = device or _device_of(many)
        for key in signature.outs:
            if (out := kwargs.get(key)) is not None:
                keywords[key] = _fresh(out)
                device = device or _device_of(out if isinstance(out, (list, tuple)) else [out])
    if stranger is not None and device is not None and not signature.takes_host_tensors:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {device} and "
            f"{stranger.device}! (EMULATED: npu operator {signature.name})"
        )
    if signature.has_device:
        wanted = signature.argument("device", args, kwargs)
        device = device if wanted is None else torch.device(wanted)
        signature.replace("device", CPU, values, keywords)
        signature.replace("pin_memory", None, values, keywords)
    if device is None or device.index is None:
        device = current_device()
    return values, keywords, device


def _device_of(tensors: Iterable[Tensor | None]) -> torch.device | None:
    return next((tensor.device for tensor in tensors if tensor is not None and not tensor.is_cpu), None)


def _execution(
    signature: Signature, machine: Machine, function: Callable[..., Any]
) -> Callable[[list[Any], dict[str, Any], torch.device], Any]:
    """Wrap `function` for host arguments, with random numbers, float status and waiting if it needs them."""

    def plain(values: list[Any], keywords: dict[str, Any], device: torch.device) -> Any:
        return function(*values, **keywords)

    def random(values: list[Any], keywords: dict[str, Any], device: torch.device) -> Any:
        wanted = signature.argument("generator", values, keywords)
        generator = host_generator(*machine.generators.draw(device, wanted))
        if not signature.has_generator:
            with seeded(generator):
                return function(*values, **keywords)
        values, keywords = values.copy(), keywords.copy()
        signature.replace("generator", generator, values, keywords)
        return function(*values, **keywords)

    def waiting(values: list[Any], keywords: dict[str, Any], device: torch.device) -> Any:
        size_is_told = signature.argument("output_size", values, keywords) is not None
        if signature.waits_for_masks_only:
            size_is_told = not any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(values[1]))
        if not size_is_told:
            machine.synchronize(signature.name)
        return function(*values, **keywords)

    run = random if signature.random else waiting if signature.waits else plain
    if not machine.float_status.saturates:
        return run

    def saturating(values: list[Any], keywords: dict[str, Any], device: torch.device) -> Any:
        finite = machine.float_status.finite([*values, *keywords.values()])
        result = run(values, keywords, device)
        written = [signature.argument(key, values, keywords) for key in (*signature.written, *signature.outs)]
        machine.float_status.saturate([result, *written], device.index, inputs_finite=finite)
        return result

    return saturating


def _into_outs(function: Callable[..., Any], outs: tuple[str, ...]) -> Callable[..., Any]:
    """Wrap a function to also write its results to `out` arguments."""
    if not outs:
        return function

    def call(*values: Any, **keywords: Any) -> Any:
        fresh = [keywords.pop(name) for name in outs]
        results = function(*values, **keywords)
        for target, result in zip(tensors_in(fresh), tensors_in(results), strict=True):
            target.resize_(result.shape).copy_(result)
        return results

    return call


def _views(values: Iterable[Any]) -> list[Tensor]:
    return [view(tensor) for value in values for tensor in tensors_in(value)]


def _fresh(out: Any) -> Any:
    """Return a host tensor of that shape to write to, because resizing a host view does not resize the tensor."""
    if isinstance(out, Tensor):
        return torch.empty(out.shape, dtype=out.dtype, device=CPU)
    return [_fresh(item) for item in out]


def _store(fresh: Any, out: Any) -> None:
    for source, target in zip(tensors_in(fresh), tensors_in(out), strict=True):
        if target.shape != source.shape:
            target.resize_(source.shape)
        if source.numel():
            view(target).copy_(source)


def _placed(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return place(value, device)
    if isinstance(value, (list, tuple)):
        return [_placed(item, device) for item in value]
    return value


def _rerun(
    signature: Signature,
    run: Callable[[list[Any], dict[str, Any], torch.device], Any],
    values: list[Any],
    keywords: dict[str, Any],
    device: torch.device,
    targets: list[list[Tensor]],
) -> None:
    """Return one step of a replay: the same arguments, and results in the capture's memory."""
    result = run(values, keywords, device)
    outs = [keywords[key] for key in signature.outs if key in keywords]
    results = (result,) if len(signature.aliases) == 1 else result or ()
    for target, value in zip(targets, (outs, *results), strict=True):
        for place_, source in zip(target, tensors_in(value) if target else (), strict=True):
            if source.numel():
                place_.copy_(source)
