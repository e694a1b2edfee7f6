"""Callbacks that record or replay a training of Hugging Face's Trainer or of Lightning.

The callback watches the library's model and optimizers from the beginning of a training to its end. Neither library is
imported unless its function is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from accelcore.errors import ConfigurationError
from accelcore.parity.record import Record


def huggingface_callback(context: Record) -> Any:
    """Return a callback for Hugging Face's Trainer: `Trainer(..., callbacks=[huggingface_callback(Record("ref"))])`.

    `context` is a `Record` or a `Replay`. After the training a `Replay` has its result.

    Raises:
        ConfigurationError: transformers is not installed.
    """

    class Callback(_class_in("TrainerCallback", "transformers")):  # type: ignore[misc]
        def on_train_begin(self, *given: Any, model: Any, optimizer: Any, **more: Any) -> None:
            context.watch(model, getattr(optimizer, "optimizer", optimizer))  # accelerate wraps torch's optimizer

        def on_train_end(self, *given: Any, **more: Any) -> None:
            context.close()

    return Callback()


def lightning_callback(context: Record) -> Any:
    """Return a callback for Lightning: `lightning.Trainer(..., callbacks=[lightning_callback(Record("ref"))])`.

    `context` is a `Record` or a `Replay`. After the training a `Replay` has its result.

    Raises:
        ConfigurationError: neither lightning nor pytorch_lightning is installed.
    """

    class Callback(_class_in("Callback", "lightning.pytorch.callbacks", "pytorch_lightning.callbacks")):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            context.watch(pl_module, trainer.optimizers)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            context.close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            context.close(complete=False)

    return Callback()


def _class_in(name: str, *modules: str) -> Any:
    """Return a class of the first module that can be imported."""
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except ImportError as error:
            missing = error
    package = modules[0].partition(".")[0]
    raise ConfigurationError(
        f"this callback needs {package}, which cannot be imported", why=str(missing), remedy=f"pip install {package}"
    ) from missing
