"""Callbacks that record or replay a training of Hugging Face's Trainer or of Lightning.

The callback watches the library's model and optimizers from the beginning of a training to its end. Neither library is
imported unless its function is called.
"""

from __future__ import annotations

from typing import Any

from accelcore.errors import ConfigurationError
from accelcore.parity.record import Record

__all__ = ["huggingface_callback", "lightning_callback"]


def huggingface_callback(context: Record) -> Any:
    """Return a callback for Hugging Face's Trainer: `Trainer(..., callbacks=[huggingface_callback(Record("ref"))])`.

    Args:
        context: a `Record` or a `Replay`. After the training a `Replay` has its result.

    Raises:
        ConfigurationError: transformers is not installed.
    """
    try:
        from transformers import TrainerCallback  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise _not_installed("transformers", error) from error

    class Callback(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_train_begin(
            self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **more: Any
        ) -> None:
            context.watch(model, getattr(optimizer, "optimizer", optimizer))  # accelerate wraps torch's optimizer

        def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            context.close()

    return Callback()


def lightning_callback(context: Record) -> Any:
    """Return a callback for Lightning: `lightning.Trainer(..., callbacks=[lightning_callback(Record("ref"))])`.

    Args:
        context: a `Record` or a `Replay`. After the training a `Replay` has its result.

    Raises:
        ConfigurationError: neither lightning nor pytorch_lightning is installed.
    """
    try:
        from lightning.pytorch.callbacks import Callback as Base  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        try:
            from pytorch_lightning.callbacks import Callback as Base  # type: ignore[import-not-found,unused-ignore]
        except ImportError as error:
            raise _not_installed("lightning", error) from error

    class Callback(Base):  # type: ignore[misc,unused-ignore]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            context.watch(pl_module, trainer.optimizers)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            context.close()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            context.close(complete=False)

    return Callback()


def _not_installed(package: str, error: ImportError) -> ConfigurationError:
    return ConfigurationError(
        f"this callback needs {package}, which cannot be imported", why=str(error), remedy=f"pip install {package}"
    )
