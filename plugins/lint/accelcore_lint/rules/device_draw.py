"""Random numbers drawn on the device after a seed."""

from __future__ import annotations

from collections.abc import Iterator

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, argument
from accelcore_lint.vendors import is_device_text

_DRAWS = {f"torch.{name}" for name in ("rand", "randn", "randint", "randperm", "normal")}
_SEEDS = ("manual_seed", "manual_seed_all", "seed_everything", "set_seed", "fix_random_seed")


def _check(script: Script) -> Iterator[Mark]:
    if not any(name.endswith(_SEEDS) for _, name in script.calls(bool)):
        return
    for call, name in script.calls(lambda name: name in _DRAWS):
        if argument(call, "generator") is None and is_device_text(argument(call, "device")):
            yield Mark(
                call,
                f"The script sets a seed, and {name} draws on the device: the same seed gives other numbers on other "
                "devices.",
                'Draw on the CPU and move the result, or write accel.runtime.seed(n, same="everywhere").',
            )


RULE = Rule(
    code="ACC116",
    name="device-draw",
    about='`torch.randn(..., device="cuda")` in a script that sets a seed. Each kind of device has its own '
    "generator, so the same seed gives other numbers. A comparison of two devices then differs from the first step.",
    check=_check,
    found='import torch\ntorch.manual_seed(0)\nnoise = torch.randn(4, device="cuda")',
    clean="import torch\ntorch.manual_seed(0)\nnoise = torch.randn(4)",
)
