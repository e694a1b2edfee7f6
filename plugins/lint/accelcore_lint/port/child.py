"""Process in which `accelcore port --check` runs a script, and records the losses that backward is called on.

It is started as a module, and never imported by the command: it replaces functions of torch and accelcore in its own
process.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_SEED = 0


class _EnoughError(BaseException):
    """Ends the script after the last step; a BaseException, so that the script's own handlers let it through."""


def main() -> None:
    """Run a source as if it were a script: `child SOURCE SCRIPT STEPS RESULT [ARGUMENTS...]`."""
    source, script, steps, result, *arguments = sys.argv[1:]
    losses: list[float] = []
    _record(losses, int(steps))
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    module = ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    error = None
    try:
        exec(compile(Path(source).read_bytes(), script, "exec"), module.__dict__)  # noqa: S102  # the user's own script
    except (_EnoughError, SystemExit):
        pass
    except BaseException as raised:  # noqa: BLE001  # reported to the command
        error = f"{type(raised).__name__}: {str(raised).strip().splitlines()[0] if str(raised).strip() else ''}"
    Path(result).write_text(json.dumps({"losses": losses, "error": error}))


def _record(losses: list[float], steps: int) -> None:
    """Seed everything, and let `torch.autograd.backward`, which `Tensor.backward` calls, note its first root.

    Loss scales begin at 1: on a CPU torch disables the original's scaler, and the port's would skip its first steps.
    """
    import torch

    # Before the function is replaced: a trainer calls it only if it is another one than when this is imported.
    import accelcore.torch_internals  # noqa: F401
    from accelcore.scaling import dynamic

    _begin_at_one(torch.amp.GradScaler, "__init__", "init_scale")
    _begin_at_one(dynamic.Scalers, "create", "init")
    random.seed(_SEED)
    torch.manual_seed(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)
    original = torch.autograd.backward

    def backward(tensors: Any, *arguments: Any, **options: Any) -> None:
        root = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors))
        if root.numel() == 1:
            losses.append(float(root.detach()))
        original(tensors, *arguments, **options)
        if len(losses) >= steps:
            raise _EnoughError

    torch.autograd.backward = backward


def _begin_at_one(kind: type, method: str, setting: str) -> None:
    """Let a method of a class take 1 for the loss scale that it was given."""
    original = getattr(kind, method)
    signature = inspect.signature(original)

    def begin(*arguments: Any, **options: Any) -> Any:
        given = signature.bind(*arguments, **options)
        given.arguments[setting] = 1.0
        return original(*given.args, **given.kwargs)

    setattr(kind, method, begin)


if __name__ == "__main__":
    main()
