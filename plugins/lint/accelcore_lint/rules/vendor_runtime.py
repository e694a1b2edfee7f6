"""Calls of one vendor's runtime: `torch.cuda.synchronize()`, `torch.npu.set_device(0)`."""

from __future__ import annotations

from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script
from accelcore_lint.vendors import runtime_call

_INSTEAD = {
    "set_device": "accelcore.select() sets the rank's device; or write torch.accelerator.set_device_index(index).",
    "current_device": "Pass accel.device on; or write torch.accelerator.current_device_index().",
    "device": "Pass accel.device on; or write torch.accelerator.device_index(index).",
    "device_count": "Write torch.accelerator.device_count().",
    "synchronize": "Write accel.runtime.synchronize(), or torch.accelerator.synchronize().",
    "manual_seed": "Write torch.manual_seed(seed), which seeds every device; or accel.runtime.seed(seed).",
    "manual_seed_all": "Write torch.manual_seed(seed), which seeds every device; or accel.runtime.seed(seed).",
    "seed": "Write torch.seed(), which seeds every device.",
    "seed_all": "Write torch.seed(), which seeds every device.",
    "Stream": "Write torch.Stream(device).",
    "Event": "Write torch.Event(device).",
    "current_stream": "Write torch.accelerator.current_stream().",
    "set_stream": "Write torch.accelerator.set_stream(stream).",
    "stream": "Write `with stream:` with a torch.Stream.",
}
_MEMORY = "Write torch.accelerator.{name}(), or ask accel.runtime for memory."
_ON_ACCELERATOR = {
    "empty_cache",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
}
_OTHERWISE = (
    "Ask the backend (accel.runtime), or guard it with an else branch that says what is missing on other devices."
)
# Of these other rules speak.
_OTHERS = {"is_available", "GradScaler", "autocast"}


def _check(script: Script) -> Iterator[Mark]:
    for call, name in script.calls(lambda name: runtime_call(name) is not None):
        device, function = runtime_call(name) or ("", "")
        if function in _OTHERS or function.startswith("amp.") or function.endswith("Tensor"):
            continue
        last = function.rpartition(".")[2]
        instead = _MEMORY.format(name=last) if last in _ON_ACCELERATOR else _INSTEAD.get(last, _OTHERWISE)
        yield Mark(call, f"`torch.{device}.{function}` calls one vendor's runtime.", instead)


RULE = Rule(
    code="ACC105",
    name="vendor-runtime",
    about="Calls into `torch.cuda`, `torch.npu` and other vendors' runtimes: the current device, synchronization, "
    "seeds, memory, streams, graphs. `torch.accelerator` and accelcore's `runtime` role have most of them for every "
    "device.",
    check=_check,
    general=True,
    found="import torch\ntorch.cuda.set_device(0)",
    clean="import torch\ntorch.manual_seed(1)\ntorch.accelerator.synchronize()",
)
