"""Words of torch and other libraries, each with the word for it here."""

from __future__ import annotations

from typing import NoReturn

from accelcore.errors import TrainingError
from accelcore.util.text import did_you_mean

__all__ = ["OPTIONS", "refuse_arguments", "refuse_attribute"]

OPTIONS = {
    "mixed_precision": "precision", "autocast": "precision", "dtype": "precision", "use_amp": "precision",
    "accumulate_grad_batches": "accumulate", "gradient_accumulation_steps": "accumulate", "grad_clip": "clip_norm",
    "gradient_clip_val": "clip_norm", "max_grad_norm": "clip_norm", "strategy": "parallel", "lr_scheduler": "scheduler",
    "criterion": "loss", "loss_fn": "loss", "callbacks": "observers", "gradient_checkpointing": "checkpoint",
    "activation_checkpointing": "checkpoint", "recompute": "checkpoint", "torch_compile": "compile",
    "warmup_steps": "warmup", "num_warmup_steps": "warmup", "num_training_steps": "total_steps",
    "amp": "fp16", "mixed": "bf16", "DistributedDataParallel": "ddp", "dp": "ddp", "FullyShardedDataParallel": "fsdp",
}  # fmt: skip
"""Options of a trainer, then values of `precision` and `parallel`."""

_LOOP = "for epoch in trainer.epochs(n): for batch in trainer.batches(loader): trainer(batch)"

_METHODS = {
    "step": "trainer(batch), which also updates; or in a loop of your own trainer.backward(loss), trainer.update()",
    "zero_grad": "nothing: an update clears the gradients",
    "clip_grad_norm_": "accel.trainer(..., clip_norm=1.0)",
    "fit": _LOOP, "train": _LOOP, "train_step": "trainer(batch)", "training_step": "trainer(batch)",
    "eval": "trainer.evaluate(loader)", "validate": "trainer.evaluate(loader)", "test": "trainer.evaluate(loader)",
    "state_dict": "trainer.save(folder)", "load_state_dict": "trainer.resume(folder)",
    "save_checkpoint": "trainer.save(folder)", "load_checkpoint": "trainer.resume(folder)",
    "module": "trainer.model", "unwrap_model": "trainer.model", "device": "accel.device",
    "global_step": "trainer.steps", "current_epoch": "trainer.epoch", "lr_scheduler": "trainer.scheduler",
    "lr": 'trainer.optimizer.param_groups[0]["lr"]', "no_sync": "accel.trainer(..., accumulate=4)",
}  # fmt: skip
"""Methods and attributes of a trainer."""


def refuse_attribute(trainer: object, name: str) -> NoReturn:
    """Raise AttributeError for a name that a trainer does not have, with the word for it here."""
    own = [known for known in dir(type(trainer)) if not known.startswith("_")]
    remedy = f"write {_METHODS[name]}" if name in _METHODS else did_you_mean(name, own)
    # Without an `obj`, Python would suggest a private name.
    raise AttributeError(f"a trainer has no {name!r}" + (f": {remedy}" if remedy else ""), name=name, obj=None)


def refuse_arguments(count: int) -> NoReturn:
    """Raise TrainingError for a trainer that is called with the parts of a batch."""
    raise TrainingError(
        f"a trainer was called with {count} arguments",
        why="it takes one batch, which the loss gets as loss(model, batch)",
        remedy="give one tuple: trainer((inputs, targets))",
    )
