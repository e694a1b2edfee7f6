"""Checkpoints on disk.

    checkpoints/
      step-00001200/              appears by one rename, when all in it is written and flushed
        manifest.json             sizes and SHA-256 of the files, world size, versions
        model.safetensors         readable by any safetensors tool, under the names of the model's state_dict
        training.safetensors      optimizer, scaler, schedule, what a script adds
        model-00000.safetensors   where ranks divide the model among themselves: the rows that each has, as listed in
        training-00000...         the manifest, of the model and of the optimizer's state
        rank-00000.safetensors    each rank's random state and position in the data
      .incomplete/                left behind by a process that was killed; cleared by the next save

Of several trainers that are saved together, each has its files in a folder of its name: generator/model.safetensors.

A file is one state tree: its tensors, and the rest as JSON in the safetensors header.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from accelcore.checkpoint.codec import Pieces, decode, encode
from accelcore.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    UNREADABLE,
    WITH_PIECES,
    WITH_TRAINERS,
    digest_of,
    digest_of_manifest,
    read_manifest,
    verify,
    without_twins,
)
from accelcore.checkpoint.tensors import Layout, Place, StoredTensors
from accelcore.errors import CheckpointError

__all__ = [
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

_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_INCOMPLETE, _FACTS = ".incomplete", ".facts"


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
        file = next((path for path in (folder, *folder.parents) if path.is_file()), None)
        raise CheckpointError(
            f"no checkpoint could be saved in {folder}",
            why=str(error) if file is None else f"{file} is a file",
            available="the checkpoints that were there before are as they were" if file is None else "",
            remedy="make room, or see that the folder may be written to" if file is None else "give a folder",
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


def write_part(folder: Path, part: str, tree: Any, *, rank: int = 0) -> None:
    """Write one part of the checkpoint that `begin` made room for; `rank` 0 all of it, but for others' shards."""
    pieces: Pieces = {}
    data, tensors = encode(tree, pieces)
    if rank == 0:
        _write(folder, part, tensors, {"tree": json.dumps(data)}, {})
    if pieces:
        held = {name: piece for name, (piece, _, _) in pieces.items()}
        rows = {name: (first, count) for name, (_, first, count) in pieces.items()}
        _write(folder, f"{part}-{rank:05d}", held, {}, rows)


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file that whoever may read other new files may read: safetensors' own is for its owner."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata=metadata)
    path.chmod(mode)


def _write(
    folder: Path, name: str, tensors: dict[str, Tensor], metadata: dict[str, str], rows: dict[str, tuple[int, int]]
) -> None:
    """Write a file, and beside it what the manifest is to say of it, so that no rank has to read what others wrote."""
    path = folder / _INCOMPLETE / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    write_tensors(tensors, path, metadata)
    _flush(path)
    facts = {"bytes": path.stat().st_size, "sha256": digest_of(path), "rows": rows}
    path.with_suffix(_FACTS).write_text(json.dumps(facts), encoding="utf-8")


def finish(folder: Path, steps: int, facts: dict[str, Any]) -> int:
    """Make the parts written one checkpoint, `path_of(folder, steps, number)`; one process does this, after all parts.

    Returns:
        The number that tells it from others saved at the same step.
    """
    incomplete = folder / _INCOMPLETE
    files: dict[str, Any] = {}
    pieces: dict[str, dict[str, list[Place]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(incomplete.rglob(f"*{_FACTS}")):
        told = json.loads(path.read_text(encoding="utf-8"))
        file = path.relative_to(incomplete).with_suffix("").as_posix()
        files[file] = {"bytes": told["bytes"], "sha256": told["sha256"]}
        for name, (first, count) in told["rows"].items():
            pieces[file.rpartition("-")[0]][name].append((file, first, count))
        path.unlink()
        _flush(path.parent)
    format_ = WITH_TRAINERS if "trainers" in facts else WITH_PIECES if pieces else FORMAT
    manifest = {"format": format_, "steps": steps, **facts, "files": files}
    if pieces:
        manifest["pieces"] = pieces
    text = json.dumps({**manifest, "sha256": digest_of_manifest(manifest)}, indent=1)
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
        run = read_manifest(path).get("run")
    except UNREADABLE:
        return None
    return run if isinstance(run, str) else None


class Checkpoint:
    """A checkpoint that was verified: every file is there and has the size and digest of the manifest.

    Args:
        path: its folder.
        share: which of how many ranks this is that verify the pieces of ranks among themselves.

    Raises:
        CheckpointError: on construction, where that is not so; it names the newest older one that is whole.
    """

    def __init__(self, path: Path, share: tuple[int, int] = (0, 1)) -> None:
        self.path = path
        if not path.is_dir():
            siblings = ", ".join(sibling.name for sibling in checkpoints(path.parent)[-3:])
            raise CheckpointError(f"there is no checkpoint {path}", available=siblings or "none beside it")
        try:
            self.manifest = verify(path, share)
        except UNREADABLE as error:
            older = _older(path)
            raise CheckpointError(
                f"the checkpoint {path} is damaged",
                why=str(error)
                if isinstance(error, OSError | ValueError)
                else f"{MANIFEST} is not of a manifest's form: {error!r}",
                available=f"an older one is whole: {older}" if older else "no older one beside it is whole",
                remedy=f"give that one: {older}" if older else "restore it from a copy",
            ) from error

    @property
    def fingerprint(self) -> int:
        """A number, above 0 and below 2**60, that tells it from others."""
        return 1 + int(digest_of_manifest(self.manifest)[:14], 16)

    def part(self, name: str, layout: Layout = lambda name, shape: None) -> Any:
        """The state tree of one part, its tensors on the CPU: whole, but for those that `layout` divides."""
        if name not in self.manifest["files"]:
            raise CheckpointError(
                f"the checkpoint {self.path} has no {name}", available=", ".join(self.manifest["files"])
            )
        try:
            pieces = self.manifest.get("pieces", {}).get(name, {})
            with StoredTensors(self.path, name, pieces, layout) as tensors:
                return decode(json.loads(tensors.metadata["tree"], object_pairs_hook=without_twins), tensors)
        except (*UNREADABLE, SafetensorError) as error:
            raise CheckpointError(f"{name} of the checkpoint {self.path} cannot be read", why=str(error)) from error


def _older(path: Path) -> Path | None:
    siblings = checkpoints(path.parent)
    before = siblings[: siblings.index(path)] if path in siblings else []
    for candidate in reversed(before):
        try:
            verify(candidate)
        except UNREADABLE:
            continue
        return candidate
    return None


def _flush(path: Path) -> None:
    """See that a file or folder is on the disk, so that a rename never survives what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
