"""Write, find and verify checkpoints on disk.

    checkpoints/
      step-00001200/              appears by one rename, after everything in it is written and flushed
        manifest.json             sizes and SHA-256 of the files, world size, versions; by rank 0, last
        model.safetensors         the model's state_dict, by rank 0; any safetensors tool reads it
        shared.safetensors        masters, schedule, optimizer, trained names, options, scaler, extra; by rank 0
        rank-00000.safetensors    by each rank: open window, positions in the data, random states; under zero1 also
                                  the optimizer state of the parameters that it updates
        model-00000.safetensors   by each rank, under fsdp only: its rows of the model, which the manifest lists
        shared-00000...           likewise of the masters and the optimizer state
      .incomplete/                left behind by a killed process; the next save clears it

If several trainers are saved together, each has a folder: generator/model.safetensors.

A file holds one state tree: its tensors, and the rest as JSON in the safetensors header. `TrainerState.parts` lists
the parts that make up the trees.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from accelcore.checkpoint.codec import LikeOf, Pieces, StoredRows, StoredTensors, decode, encode
from accelcore.checkpoint.folders import NAME, checkpoints, order_of
from accelcore.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    RANK,
    UNREADABLE,
    digest_of,
    digest_of_manifest,
    read_manifest,
    verify,
)
from accelcore.errors import CheckpointError, ConfigurationError
from accelcore.util.files import remedy_of_writing
from accelcore.util.text import is_number

_INCOMPLETE, _FACTS = ".incomplete", ".facts"
BEST: dict[str, Callable[..., Path]] = {"min": min, "max": max}
"""Which of several metrics is the best, by the word for it, as torch's `ReduceLROnPlateau` has it."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Convert errors of the file system (no space, no permission) to a CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        file = next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None)
        raise CheckpointError(
            f"no checkpoint could be saved in {folder}",
            why=f"{file} is a file" if file else str(error),
            remedy="give a folder" if file else remedy_of_writing(error),
        ) from error


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock the folder for one save, and create the temporary folder of the new checkpoint; one process does this."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            remedy = "give each run its own folder; in a job of several ranks, use accel.distributed()"
            raise CheckpointError(f"another process is saving a checkpoint in {folder}", remedy=remedy) from error
        shutil.rmtree(folder / _INCOMPLETE, ignore_errors=True)  # left by a process that was killed
        (folder / _INCOMPLETE).mkdir()
        try:
            yield
        finally:
            shutil.rmtree(folder / _INCOMPLETE, ignore_errors=True)  # if saving failed
    finally:
        os.close(descriptor)


def write_file(folder: Path, name: str, tree: Any, *, rank: int = 0) -> None:
    """Write a state tree: rank 0 writes the file `name`; each rank writes its shards, if any, to its own file."""
    pieces: Pieces = {}
    data, tensors = encode(tree, pieces)
    if rank == 0:
        _write(folder, name, tensors, {"tree": json.dumps(data)}, {})
    if pieces:
        shards = {key: own for key, (own, _, _) in pieces.items()}
        _write(folder, f"{name}-{rank:05d}", shards, {}, {key: rows for key, (_, *rows) in pieces.items()})


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file with the permissions of the umask; `save_file` alone makes it private to its owner."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata=metadata)
    path.chmod(mode)


def _write(
    folder: Path, name: str, tensors: dict[str, Tensor], metadata: dict[str, str], rows: dict[str, list[int]]
) -> None:
    """Write a file and, beside it, its entry for the manifest, so that no rank has to read the files of others."""
    path = folder / _INCOMPLETE / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    write_tensors(tensors, path, metadata)
    _flush(path)
    facts = {"bytes": path.stat().st_size, "sha256": digest_of(path), "rows": rows}
    path.with_suffix(_FACTS).write_text(json.dumps(facts), encoding="utf-8")


def finish(folder: Path, steps: int, facts: dict[str, Any]) -> str:
    """Publish the files as a checkpoint, with `facts` in its manifest; return its name. One process does this, last."""
    incomplete = folder / _INCOMPLETE
    files: dict[str, Any] = {}
    pieces: dict[str, dict[str, list[StoredRows]]] = defaultdict(lambda: defaultdict(list))
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
    before = [order_of(path) for path in checkpoints(folder)]
    number = max((number + 1 for at, number in before if at == steps), default=0)
    name = f"step-{steps:08d}-{number}" if number else f"step-{steps:08d}"
    incomplete.rename(folder / name)
    _flush(folder)
    return name


def keep_newest(newest: Path, keep: int | None, spared: Path | None = None) -> list[Path]:
    """Delete all but `keep` of its run's checkpoints up to `newest`; return the checkpoints of other runs.

    The best one and the `spared` one are never deleted; None keeps all.
    """
    run = _recorded(newest, "run")
    found = checkpoints(newest.parent)
    own = [path for path in found if _recorded(path, "run") in (run, None)]
    end, best = own.index(newest) + 1, _best_of(own)
    for path in own[: max(0, end - (keep or end))]:
        if path == best or (spared is not None and path.resolve() == spared.resolve()):
            continue
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
    return [path for path in found if path not in own[:end]]


def check_mode(folder: Path, run: str, mode: str) -> None:
    """Raise ConfigurationError if a checkpoint of this run has a metric of another mode."""
    for path in checkpoints(folder):
        _, before = _metric_of(path) or (None, mode)
        if before != mode and _recorded(path, "run") == run:
            raise ConfigurationError(
                f"this save has mode={mode!r}, and this run saved {path.name} with mode={before!r}",
                why="the best checkpoint so far might be deleted",
                remedy=f"write mode={before!r} in every save of the run, or save in another folder",
            )


def _best_of(paths: list[Path]) -> Path | None:
    """Return the first checkpoint with the best metric; None if none has one.

    If runs in one folder have different modes, only the metrics of the newest mode count.
    """
    found = {path: metric for path in paths if (metric := _metric_of(path)) is not None}
    if not found:
        return None
    *_, (_, newest) = found.values()
    metrics = {path: metric for path, (metric, mode) in found.items() if mode == newest}
    return BEST[newest](metrics, key=metrics.__getitem__)


def _metric_of(path: Path) -> tuple[float, str] | None:
    match _recorded(path, "metric"):
        case [metric, str(mode)] if is_number(metric) and math.isfinite(metric) and mode in BEST:
            return metric, mode
    return None


def _recorded(path: Path, fact: str) -> Any:
    """Return an entry of a checkpoint's manifest; None if the manifest lacks it, or cannot be read."""
    with suppress(*UNREADABLE):
        return read_manifest(path).get(fact)
    return None


class Checkpoint:
    """Verified checkpoint: every file is there and has the size and digest of the manifest.

    If not, CheckpointError names the newest older checkpoint that is whole. `share`: rank and number of the ranks that
    verify the sharded files between them.
    """

    def __init__(self, path: Path, share: tuple[int, int] = (0, 1)) -> None:
        self.path = path
        if not path.is_dir():
            siblings = ", ".join(sibling.name for sibling in checkpoints(path.parent)[-3:])
            remedy = "" if siblings else "give the folder of an earlier save, or restore it from a copy"
            raise CheckpointError(f"there is no checkpoint {path}", available=siblings, remedy=remedy)
        try:
            self.manifest = verify(path, share)
        except UNREADABLE as error:
            before = older(path)
            plain = isinstance(error, OSError | ValueError)
            raise CheckpointError(
                f"the checkpoint {path} is damaged",
                why=str(error) if plain else f"{MANIFEST} does not have the form of a manifest: {error!r}",
                available=f"an older one is whole: {before}" if before else "no older one beside it is whole",
                remedy=f'give that one: trainer.resume("{before}"), or accelcore export {before} FILE'
                if before
                else "restore it from a copy",
            ) from error

    def read(self, file: str, like_of: LikeOf = lambda name, shape: None) -> Any:
        """Return the state tree of a file with CPU tensors; `like_of` selects this rank's rows of sharded ones."""
        try:
            if file not in self.manifest["files"]:
                raise ValueError(f"it has only {', '.join(self.manifest['files'])}")
            with closing(StoredTensors(self.path, file, self.manifest["pieces"].get(file, {}), like_of)) as tensors:
                return decode(json.loads(tensors.metadata["tree"]), tensors)
        except (*UNREADABLE, SafetensorError) as error:
            raise CheckpointError(
                f"{file} of the checkpoint {self.path} cannot be read",
                why=str(error),
                remedy="restore it from a copy, or give an older checkpoint",
            ) from error


def older(path: Path, suits: Callable[[Path], bool] = lambda path: True) -> Path | None:
    """Return the newest whole checkpoint before `path` that suits; None if there is none."""
    siblings = checkpoints(path.parent)
    before = siblings[: siblings.index(path)] if path in siblings else []
    for candidate in reversed(before):
        with suppress(CheckpointError, *UNREADABLE):
            verify(candidate)
            if suits(candidate):
                return candidate
    return None


def _flush(path: Path) -> None:
    """Flush a file or folder to disk, so that a rename never becomes durable before what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find(folder: Path, share: tuple[int, int] = (0, 1), *, best: bool = False) -> Checkpoint | None:
    """Return `folder` if it is a checkpoint, else the newest in it, or the one with the best metric if `best`."""
    if (folder / MANIFEST).exists() or NAME.fullmatch(folder.name):
        return Checkpoint(folder, share)
    if not folder.exists():
        return None
    if not folder.is_dir():
        remedy = "give the folder of the checkpoints; load another program's file by trainer.load(...)"
        raise CheckpointError(f"{folder} is a file", remedy=remedy)
    if any(folder.glob(f"{RANK}*.safetensors")):
        raise CheckpointError(
            f"{folder} is one trainer's folder in a checkpoint, or a checkpoint without its {MANIFEST}",
            remedy="resume trainers that were saved together by "
            f"accelcore.Together(...).resume({str(folder.parent)!r}), or export the model of one: "
            f"accelcore export --trainer {folder.name} {folder.parent} FILE",
        )
    found = checkpoints(folder)[-1:]
    for path in sorted(folder.iterdir()):
        renamed = not NAME.fullmatch(path.name) and not path.name.startswith(".")
        if renamed and (path / MANIFEST).is_file() and any(path.rglob("*.safetensors")):
            found.append(path)
    if best and found:
        chosen = _best_of([*checkpoints(folder)[:-1], *found])
        if chosen is None:
            raise CheckpointError(
                f"no checkpoint in {folder} has a metric",
                why="a checkpoint has one if trainer.save(folder, best=metric) saved it, and the metric was finite",
                remedy="leave best (or --best) out, to take the newest",
            )
        return Checkpoint(chosen, share)
    return Checkpoint(max(found, key=_steps_of), share) if found else None  # of equal steps the one that kept its name


def _steps_of(path: Path) -> int:
    """Return a checkpoint's steps; -1 if neither name nor manifest has them, so that any other one is preferred."""
    if NAME.fullmatch(path.name):
        return order_of(path)[0]
    steps = _recorded(path, "steps")
    return steps if type(steps) is int else -1
