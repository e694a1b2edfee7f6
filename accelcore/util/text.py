"""Text of messages and files, and checks of numbers that many options share."""

from __future__ import annotations

import errno
import inspect
import os
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

from accelcore.errors import ConfigurationError

if TYPE_CHECKING:
    from typing_extensions import Self

_REMEDIES_OF_WRITING = {
    errno.ENOENT: "create the folder, or see who has removed it",
    errno.ENOTDIR: "name a folder; a part of this path is a file",
    errno.EACCES: "check the permissions of the folder",
    errno.EPERM: "check the permissions of the folder",
    errno.EROFS: "name a folder in a file system that is not mounted read-only",
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space, or raise the quota",
    errno.EFBIG: "raise the limit on the size of a file: ulimit -f",
}


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Return whether a value is an int of at least `least`. A bool is not an int here."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is an int or a float. A bool is neither here."""
    return isinstance(value, int | float) and not isinstance(value, bool)


_WRITE = {
    ("Accelerator", "Fabric", "initialize", "init"): "accel = accelcore.select()",
    ("seed_everything", "set_seed", "seed", "manual_seed"): "accel.runtime.seed(n)",
    ("prepare", "setup", "trainer"): "trainer = accel.trainer(model, optimizer, ...)",
    ("fit", "train", "training_step", "train_step"): "for batch in trainer.batches(loader): trainer(batch)",
    ("validate", "predict", "test"): "trainer.evaluate(loader)",
    ("step", "zero_grad"): "trainer(batch), or trainer.backward(loss) and trainer.update()",
    ("backward",): "trainer.backward(loss)",
    ("rank", "world_size", "is_main", "gather", "all_reduce", "barrier", "print"): "job = accel.join(), which has it",
    ("is_main_process", "is_local_main_process", "is_global_zero"): "job.is_main",
    ("process_index", "global_rank"): "job.rank",
    ("num_processes",): "job.world_size",
    ("wait_for_everyone",): "job.barrier()",
    ("gather_for_metrics", "all_gather"): "job.gather(tensor)",
    ("global_step",): "trainer.steps",
    ("current_epoch",): "trainer.epoch",
    ("sync_gradients",): "trainer.window_closed",
    ("save_state", "save_checkpoint", "state_dict"): "trainer.save(folder)",
    ("load_state", "load_checkpoint", "load_state_dict"): "trainer.resume(folder)",
    ("unwrap_model", "module"): "trainer.model, which is the model as given",
    ("accumulate", "no_sync"): "accel.trainer(..., accumulate=4)",
    ("clip_grad_norm_", "clip_gradients"): "accel.trainer(..., clip_norm=1.0)",
    ("log", "log_dict"): "accel.trainer(..., observers=[accelcore.Log(folder)])",
    ("EarlyStopping", "should_stop"): "break in the loop over trainer.epochs(n)",
    ("ModelCheckpoint",): "trainer.save(folder, best=metric)",
    ("lr", "learning_rate"): 'trainer.optimizer.param_groups[0]["lr"]',
    ("adamw", "AdamW", "adam", "Adam", "sgd", "SGD", "lamb"): 'accel.optimizers.create("adamw", parameters, lr=...)',
    ("save", "load", "resume", "evaluate", "batches", "epochs"): "trainer = accel.trainer(...), which has it",
    ("reduce",): "job.mean(value) or job.all_reduce(tensor)",
    ("device",): "accel.device, of accel = accelcore.select()",
    ("to_device",): "accel.runtime.to_device(batch)",
    ("compile",): "accel.trainer(..., compile=True)",
    ("join", "distributed"): "accel = accelcore.select(), and job = accel.join()",
    ("launch",): "accelcore run --nproc 2 train.py in a shell",
}
_INSTEAD = {name: write for names, write in _WRITE.items() for name in names}
"""Names of accelerate, Fabric, Lightning and torch that accelcore lacks in some place, and what to write."""


def no_attribute(owner: object, name: str) -> NoReturn:
    """Raise AttributeError for `__getattr__`; it says what to write instead of a name that other libraries have."""
    label = f"module {owner.__name__!r}" if isinstance(owner, ModuleType) else type(owner).__name__
    if name in _INSTEAD:
        # Without the owner: Python would add a similar name to this, also a private one.
        raise AttributeError(f"{label} has no attribute {name!r}; write {_INSTEAD[name]}", name=name, obj=None)
    raise AttributeError(f"{label} has no attribute {name!r}", name=name, obj=owner)  # Python adds a similar name


class Suggests:
    """Base of classes that say what to write instead of a name that other libraries have: see `no_attribute`."""

    if not TYPE_CHECKING:  # a type checker would take every name for one that exists

        def __getattr__(self, name: str) -> None:
            if hasattr(type(self), name):  # a property raised AttributeError: raise that again
                object.__getattribute__(self, name)
            no_attribute(self, name)


def bound(function: Callable[..., Any], *arguments: Any, **named: Any) -> inspect.BoundArguments | None:
    """Bind arguments to the parameters of a function; return None if it cannot be called with them."""
    try:
        return inspect.signature(function).bind(*arguments, **named)
    except TypeError:
        return None
    except ValueError:  # a builtin has no signature
        return inspect.signature(lambda *_, **__: None).bind(*arguments, **named)


def kind_of(value: object) -> str:
    """Return the name of a value's class with its article, `an int` or `a list`; or `None`."""
    name = type(value).__name__
    if value is None:
        return "None"
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def repr_of(value: object) -> str:
    """Return a value's repr without addresses, so that equal values have equal texts in every process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def first_line(text: object) -> str:
    """Return the first line of an error or another text that is not blank, or nothing."""
    return str(text).strip().split("\n", 1)[0]


def shown(text: str, limit: int = 60) -> str:
    """Quote a text for a message: printable whatever it holds, and short."""
    return ascii(text) if len(text) <= limit else f"{text[:limit]!a}... ({len(text)} characters)"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word most similar to an unknown one, or None.

    Both begin with the same letter, or one contains the other: between other short words, common letters mean nothing.
    """
    lower = {name.lower(): name for name in known}
    word = word.lower()
    alike = get_close_matches(word, [name for name in lower if name[:1] == word[:1]], n=1)
    within = [name for name in lower if min(len(name), len(word)) > 3 and (name in word or word in name)]
    return next((lower[name] for name in (*alike, *get_close_matches(word, within, n=1, cutoff=0.3))), None)


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a remedy for an unknown word: the most similar known one, if there is one, and what else to do."""
    near = nearest(word, known := list(known))
    if near is None:
        return otherwise
    close = [near, *get_close_matches(word, [name for name in known if name[:1] == word[:1] and name != near], 2, 0.8)]
    return f"did you mean {' or '.join(map(repr, close))}?" + (f" Else {otherwise}" if otherwise else "")


def ranks(numbers: Iterable[int]) -> str:
    """Return ranks as text: `rank 1`, `ranks 0, 2 and 3`."""
    *rest, last = map(str, sorted(numbers))
    return f"ranks {', '.join(rest)} and {last}" if rest else f"rank {last}"


class Settings:
    """Base of classes whose constructors raise ConfigurationError for a setting of an unknown name."""

    def __new__(cls, *_: object, **given: object) -> Self:
        parameters = inspect.signature(cls.__init__).parameters
        known = [name for name in parameters if name != "self"]
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        for name in () if takes_any else given:
            if name not in known:
                raise ConfigurationError(
                    f"{cls.__name__} has no setting {name!r}",
                    available=", ".join(known),
                    remedy=did_you_mean(name, known) or "remove it, or use an available name",
                )
        return super().__new__(cls)


def remedy_of_writing(error: Exception) -> str:
    """Return what to do about an error of the file system; safetensors tells its number only in the message."""
    told = re.search(r"\(os error (\d+)\)", str(error))
    number = error.errno if isinstance(error, OSError) else int(told[1]) if told else None
    return _REMEDIES_OF_WRITING.get(number or 0, "check the disk, or name another folder")


def beside(folder: Path, ending: str) -> Path:
    """Return the path beside `folder` with its name and this ending; "." and ".." have the names of their folders."""
    named = folder if folder.name.strip(".") else folder.resolve()
    return named.with_name(f"{named.name}{ending}")


def replace_file(path: Path, content: bytes) -> None:
    """Write a file at once: a kill leaves an older one or the new one."""
    beside = path.with_name(f".{path.name}.incomplete")
    beside.write_bytes(content)
    os.replace(beside, path)


def write_output(path: Path, content: bytes) -> None:
    """Write the file that a user has named, and its folder; raise ConfigurationError if this fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be written", why=str(error), remedy=remedy_of_writing(error)
        ) from error
