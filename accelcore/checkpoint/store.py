"""Checkpoints on disk.

    checkpoints/
      step-00001200/              appears by one rename, after everything in it is written and flushed
        manifest.json             sizes and SHA-256 of the files, world size, versions
        model.safetensors         the model's state_dict; any safetensors tool reads it
        training.safetensors      optimizer, scaler, schedule, extra
        model-00000.safetensors   sharded training only: the rows of rank 0, as listed in the manifest;
        training-00000...         likewise of the optimizer state
        rank-00000.safetensors    random states and data position of one rank
      .incomplete/                left behind by a killed process; the next save clears it

If several trainers are saved together, each has a folder: generator/model.safetensors.

A file holds one state tree: its tensors, and the rest as JSON in the safetensors header.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from accelcore.checkpoint.codec import Layout, Pieces, Place, StoredTensors, decode, encode
from accelcore.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    RANK,
    UNREADABLE,
    digest_of,
    digest_of_manifest,
    read_manifest,
    unique_keys,
    verify,
)
from accelcore.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "alone",
    "checkpoints",
    "find",
    "finish",
    "keep_newest",
    "path_of",
    "write_part",
    "write_tensors",
    "writing",
]

_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_INCOMPLETE, _FACTS = ".incomplete", ".facts"


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _is_named(path)), key=_place_of)


def _is_named(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None


def _place_of(path: Path) -> tuple[int, int]:
    """Return the steps in a checkpoint's name, and its number among the checkpoints of the same steps."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Convert errors of the file system (no space, no permission) to a CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        file = next((path for path in (folder, *folder.parents) if path.is_file()), None)
        raise CheckpointError(
            f"no checkpoint could be saved in {folder}",
            why=f"{file} is a file" if file else str(error),
            remedy="give a folder" if file else "free disk space, or check the permissions of the folder",
        ) from error


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock the folder for one save, and create the temporary folder of the new checkpoint; one process does this.

    Raises:
        CheckpointError: another process or thread is saving there; its files are not touched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is saving a checkpoint in {folder}",
                why="two runs that save to one folder would overwrite each other",
                remedy="give each run its own folder; in a job of several ranks, use accel.distributed()",
            ) from error
        shutil.rmtree(folder / _INCOMPLETE, ignore_errors=True)  # of a process that was killed
        (folder / _INCOMPLETE).mkdir()
        try:
            yield
        finally:
            shutil.rmtree(folder / _INCOMPLETE, ignore_errors=True)  # if saving failed
    finally:
        os.close(descriptor)


def write_part(folder: Path, part: str, tree: Any, *, rank: int = 0) -> None:
    """Write one part: `rank` 0 writes the whole tree without shards of other ranks, others only their shards."""
    pieces: Pieces = {}
    data, tensors = encode(tree, pieces)
    if rank == 0:
        _write(folder, part, tensors, {"tree": json.dumps(data)}, {})
    if pieces:
        held = {name: piece for name, (piece, _, _) in pieces.items()}
        rows = {name: (first, count) for name, (_, first, count) in pieces.items()}
        _write(folder, f"{part}-{rank:05d}", held, {}, rows)


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file with the permissions of the umask; `save_file` alone makes it private to its owner."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata=metadata)
    path.chmod(mode)


def _write(
    folder: Path, name: str, tensors: dict[str, Tensor], metadata: dict[str, str], rows: dict[str, tuple[int, int]]
) -> None:
    """Write a file and, beside it, its entry for the manifest, so that no rank has to read the files of others."""
    path = folder / _INCOMPLETE / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    write_tensors(tensors, path, metadata)
    _flush(path)
    facts = {"bytes": path.stat().st_size, "sha256": digest_of(path), "rows": rows}
    path.with_suffix(_FACTS).write_text(json.dumps(facts), encoding="utf-8")


def finish(folder: Path, steps: int, facts: dict[str, Any]) -> int:
    """Publish the parts written as one checkpoint; one process does this, after all parts.

    Return the number that distinguishes it from others of the same steps; see `path_of`. `facts` are further entries
    of the manifest.
    """
    incomplete = folder / _INCOMPLETE
    files: dict[str, Any] = {}
    pieces: dict[str, dict[str, list[Place]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(incomplete.rglob(f"*{_FACTS}")):
        entry = json.loads(path.read_text(encoding="utf-8"))
        file = path.relative_to(incomplete).with_suffix("").as_posix()
        files[file] = {"bytes": entry["bytes"], "sha256": entry["sha256"]}
        for name, (first, count) in entry["rows"].items():
            pieces[file.rpartition("-")[0]][name].append((file, first, count))
        path.unlink()
        _flush(path.parent)
    manifest = {"format": FORMAT, "steps": steps, **facts, "files": files, "pieces": pieces}
    text = json.dumps({**manifest, "sha256": digest_of_manifest(manifest)}, indent=1)
    (incomplete / MANIFEST).write_text(text, encoding="utf-8")
    _flush(incomplete / MANIFEST)
    _flush(incomplete)
    # A checkpoint of the same steps is not replaced; the newest has the highest number, even if others were deleted.
    before = [_place_of(path) for path in checkpoints(folder)]
    number = max((number + 1 for at, number in before if at == steps), default=0)
    incomplete.rename(path_of(folder, steps, number))
    _flush(folder)
    return number


def path_of(folder: Path, steps: int, number: int) -> Path:
    """Return the path of a checkpoint."""
    return folder / (f"step-{steps:08d}-{number}" if number else f"step-{steps:08d}")


def keep_newest(newest: Path, keep: int) -> list[Path]:
    """Delete all but `keep` of its run's checkpoints up to `newest`; return the checkpoints of other runs."""
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
    """Return the run that saved a checkpoint; None if its manifest cannot be read."""
    with suppress(*UNREADABLE):
        run = read_manifest(path)["run"]
        return run if isinstance(run, str) else None
    return None


class Checkpoint:
    """Verified checkpoint: every file is there and has the size and digest of the manifest.

    Args:
        path: its folder.
        share: rank and number of the ranks that verify the sharded files between them.

    Raises:
        CheckpointError: on construction, if a file is damaged or missing; it names the newest older whole checkpoint.
    """

    def __init__(self, path: Path, share: tuple[int, int] = (0, 1)) -> None:
        self.path = path
        if not path.is_dir():
            siblings = ", ".join(sibling.name for sibling in checkpoints(path.parent)[-3:])
            raise CheckpointError(f"there is no checkpoint {path}", available=siblings or "no other one beside it")
        try:
            self.manifest = verify(path, share)
        except UNREADABLE as error:
            older = _older(path)
            plain = isinstance(error, OSError | ValueError)
            raise CheckpointError(
                f"the checkpoint {path} is damaged",
                why=str(error) if plain else f"{MANIFEST} does not have the form of a manifest: {error!r}",
                available=f"an older one is whole: {older}" if older else "no older one beside it is whole",
                remedy=f"give that one: {older}" if older else "restore it from a copy",
            ) from error

    @property
    def fingerprint(self) -> int:
        """Number above 0 and below 2**60 that identifies the checkpoint."""
        return 1 + int(digest_of_manifest(self.manifest)[:14], 16)

    def part(self, name: str, layout: Layout = lambda name, shape: None) -> Any:
        """Return the state tree of one part with CPU tensors; a sharded `layout` selects this rank's rows."""
        if name not in self.manifest["files"]:
            raise CheckpointError(
                f"the checkpoint {self.path} has no {name}", available=", ".join(self.manifest["files"])
            )
        try:
            with closing(StoredTensors(self.path, name, self.manifest["pieces"].get(name, {}), layout)) as tensors:
                return decode(json.loads(tensors.metadata["tree"], object_pairs_hook=unique_keys), tensors)
        except (*UNREADABLE, SafetensorError) as error:
            raise CheckpointError(f"{name} of the checkpoint {self.path} cannot be read", why=str(error)) from error


def _older(path: Path) -> Path | None:
    """Return the newest whole checkpoint before `path`."""
    siblings = checkpoints(path.parent)
    before = siblings[: siblings.index(path)] if path in siblings else []
    for candidate in reversed(before):
        with suppress(CheckpointError, *UNREADABLE):
            verify(candidate)
            return candidate
    return None


def _flush(path: Path) -> None:
    """Flush a file or folder to disk, so that a rename never becomes durable before what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find(folder: Path, share: tuple[int, int] = (0, 1)) -> Checkpoint | None:
    """Return `folder` if it is a checkpoint, else the newest checkpoint in it, even if it was renamed.

    Raises:
        CheckpointError: `folder` is a file, or the checkpoint is damaged or incomplete.
    """
    if (folder / MANIFEST).exists() or _is_named(folder):
        return Checkpoint(folder, share)
    if not folder.exists():
        return None
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is a file",
            remedy="give the folder of the checkpoints; load another program's file by trainer.load(...)",
        )
    if any(folder.glob(f"{RANK}*.safetensors")):
        raise CheckpointError(
            f"{folder} is a part of a checkpoint, or a checkpoint without its {MANIFEST}",
            remedy="resume trainers that were saved together by "
            f"accelcore.Together(...).resume({str(folder.parent)!r}), or export the model of one: "
            f"accelcore export --trainer {folder.name} {folder.parent} FILE",
        )
    found = {path: _place_of(path)[0] for path in checkpoints(folder)[-1:]}
    for path in sorted(folder.iterdir()):
        tensors = (file for pattern in ("*.safetensors", "*/*.safetensors") for file in path.glob(pattern))
        renamed = not _is_named(path) and not path.name.startswith(".")
        if renamed and (path / MANIFEST).is_file() and any(tensors):
            found[path] = _steps_in(path)
    if not found:
        return None
    return Checkpoint(max(found, key=found.__getitem__), share)  # of equal steps the first one, which kept its name


def _steps_in(path: Path) -> int:
    """Return the steps in a manifest; -1 if it cannot be read, so that any other checkpoint is preferred."""
    with suppress(*UNREADABLE):
        steps = read_manifest(path)["steps"]
        return steps if type(steps) is int else -1
    return -1
