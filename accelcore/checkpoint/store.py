"""Checkpoints on disk.

    checkpoints/
      step-00001200/              appears by one rename, when all in it is written and flushed
        manifest.json             sizes and SHA-256 of the files, world size, versions
        model.safetensors         readable by any safetensors tool, under the names of the model's state_dict
        training.safetensors      optimizer, scaler, schedule, what a script adds
        rank-00000.safetensors    each rank's random state and position in the data
      .incomplete/                left behind by a process that was killed; cleared by the next save

A file is one state tree: its tensors, and the rest as JSON in the safetensors header.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from accelcore.checkpoint.codec import decode, encode
from accelcore.errors import CheckpointError

__all__ = [
    "MANIFEST",
    "Checkpoint",
    "alone",
    "begin",
    "checkpoints",
    "clear",
    "finish",
    "is_checkpoint_name",
    "keep_newest",
    "path_of",
    "place_of",
    "write_part",
    "writing",
]

FORMAT = 2
READABLE = (1, FORMAT)
_LARGEST_MANIFEST = 1 << 26
_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_PART = re.compile(r"[a-z]+(-\d{5,})?")
_INCOMPLETE = ".incomplete"
MANIFEST = "manifest.json"
# What reading a file of somebody else's making can raise.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if is_checkpoint_name(path)), key=place_of)


def is_checkpoint_name(path: Path) -> bool:
    """Whether a path is named as checkpoints are."""
    return _NAME.fullmatch(path.name) is not None


def place_of(path: Path) -> tuple[int, int]:
    """The steps of a checkpoint, by its name, and its number among those of as many steps."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn what the file system refuses (no room, no permission) into a CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"no checkpoint could be saved in {folder}",
            why=str(error),
            available="the checkpoints that were there before are as they were",
            remedy="make room, or see that the folder may be written to",
        ) from error


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder for one save; raises CheckpointError where another process or thread is saving there."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is saving a checkpoint in {folder}",
                why="two runs that save to one folder would overwrite each other",
                remedy="give each run a folder of its own; in a job of several ranks, use accel.distributed()",
            ) from error
        yield
    finally:
        os.close(descriptor)


def begin(folder: Path) -> None:
    """Make room for a new checkpoint in `folder`; one process does this, before any part is written."""
    clear(folder)
    (folder / _INCOMPLETE).mkdir(parents=True)


def clear(folder: Path) -> None:
    """Remove what a save that failed, or was killed, has left behind."""
    shutil.rmtree(folder / _INCOMPLETE, ignore_errors=True)


def write_part(folder: Path, part: str, tree: Any) -> None:
    """Write one file of the checkpoint that `begin` made room for."""
    data, tensors = encode(tree)
    save_file(tensors, folder / _INCOMPLETE / f"{part}.safetensors", metadata={"tree": json.dumps(data)})


def finish(folder: Path, steps: int, facts: dict[str, Any]) -> int:
    """Make the parts written one checkpoint, `path_of(folder, steps, number)`; one process does this, after all parts.

    Returns:
        The number that tells it from others saved at the same step.
    """
    incomplete = folder / _INCOMPLETE
    files = {}
    for path in sorted(incomplete.iterdir()):
        _flush(path)
        files[path.stem] = {"bytes": path.stat().st_size, "sha256": _digest(path)}
    manifest = {"format": FORMAT, "steps": steps, **facts, "files": files}
    text = json.dumps({**manifest, "sha256": _manifest_digest(manifest)}, indent=1)
    (incomplete / MANIFEST).write_text(text, encoding="utf-8")
    _flush(incomplete / MANIFEST)
    _flush(incomplete)
    # Of those that were saved at this step none is replaced, and the newest has the highest number, also where older
    # ones were deleted.
    before = [place_of(path) for path in checkpoints(folder)]
    number = max((number + 1 for at, number in before if at == steps), default=0)
    incomplete.rename(path_of(folder, steps, number))
    _flush(folder)
    return number


def path_of(folder: Path, steps: int, number: int) -> Path:
    """Where a checkpoint is."""
    return folder / (f"step-{steps:08d}-{number}" if number else f"step-{steps:08d}")


def keep_newest(newest: Path, keep: int) -> list[Path]:
    """Delete all but `keep` of the checkpoints up to `newest` that are of its run; returns those of other runs."""
    run = _run_of(newest)
    found = checkpoints(newest.parent)
    own = [path for path in found if _run_of(path) in (run, None)]
    end = own.index(newest) + 1
    for path in own[: max(0, end - keep)]:
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
    return [path for path in found if path not in own[:end]]


def _run_of(path: Path) -> str | None:
    """Which run saved a checkpoint; None where it does not say, or cannot be read."""
    try:
        run = _read_manifest(path).get("run")
    except _UNREADABLE:
        return None
    return run if isinstance(run, str) else None


class Checkpoint:
    """A checkpoint that was verified: every file is there and has the size and digest of the manifest.

    Raises:
        CheckpointError: on construction, where that is not so; it names the newest older one that is whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            siblings = ", ".join(sibling.name for sibling in checkpoints(path.parent)[-3:])
            raise CheckpointError(f"there is no checkpoint {path}", available=siblings or "none beside it")
        try:
            self.manifest = _verify(path)
        except _UNREADABLE as error:
            older = _older(path)
            raise CheckpointError(
                f"the checkpoint {path} is damaged",
                why=str(error),
                available=f"an older one is whole: {older}" if older else "no older one beside it is whole",
                remedy=f"go on from it: trainer.resume({str(older)!r})" if older else "restore it from a copy",
            ) from error

    @property
    def fingerprint(self) -> int:
        """A number, above 0 and below 2**60, that tells it from others."""
        return 1 + int(_manifest_digest(self.manifest)[:14], 16)

    def part(self, name: str) -> Any:
        """The state tree of one file, its tensors on the CPU."""
        if name not in self.manifest["files"]:
            raise CheckpointError(
                f"the checkpoint {self.path} has no {name}", available=", ".join(self.manifest["files"])
            )
        try:
            with safe_open(self.path / f"{name}.safetensors", framework="pt") as file:
                data = json.loads(file.metadata()["tree"], object_pairs_hook=_without_twins)
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # not a dict
            return decode(data, tensors)
        except (*_UNREADABLE, SafetensorError) as error:
            raise CheckpointError(f"{name} of the checkpoint {self.path} cannot be read", why=str(error)) from error


def _verify(path: Path) -> dict[str, Any]:
    manifest = _read_manifest(path)
    digest = manifest.pop("sha256")
    if digest != _manifest_digest(manifest):
        raise ValueError(f"{MANIFEST} was changed after it was written")
    if type(manifest["format"]) is not int or manifest["format"] not in READABLE:
        raise ValueError(f"its format is {manifest['format']}; this accelcore reads formats 1 to {FORMAT}")
    for number in ("steps", "world_size"):
        if type(manifest[number]) is not int or manifest[number] < 0:
            raise ValueError(f"{MANIFEST} says {number}={manifest[number]!r}")
    for name, facts in manifest["files"].items():
        if not _PART.fullmatch(name):
            raise ValueError(f"{MANIFEST} names the file {name!r}")
        file = path / f"{name}.safetensors"
        if not file.is_file():
            raise ValueError(f"{file.name} is missing, or no file")
        if file.stat().st_size != facts["bytes"]:
            raise ValueError(f"{file.name} has {file.stat().st_size} of {facts['bytes']} bytes")
        if _digest(file) != facts["sha256"]:
            raise ValueError(f"{file.name} was changed after it was written")
    return manifest


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not file.is_file() or file.stat().st_size > _LARGEST_MANIFEST:  # a device would be read for ever
        raise ValueError(f"{MANIFEST} is missing, or no file of a manifest's size")
    manifest = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_without_twins)
    if not isinstance(manifest, dict):
        raise TypeError(f"{MANIFEST} holds no object")
    return manifest


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; where two readers could take a key for two values, an error."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _older(path: Path) -> Path | None:
    siblings = checkpoints(path.parent)
    before = siblings[: siblings.index(path)] if path in siblings else []
    for candidate in reversed(before):
        try:
            _verify(candidate)
        except _UNREADABLE:
            continue
        return candidate
    return None


def _manifest_digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    """See that a file or folder is on the disk, so that a rename never survives what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
