"""What the other files of a project say about one: whether they import it, and what they do with its objects."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from accelcore_lint.port import uses
from accelcore_lint.port.defaults import typed_defaults
from accelcore_lint.port.mac import lacks_of_mps
from accelcore_lint.port.own_classes import (
    has_silent_to,
    has_strange_moves,
    movers,
    own_moves,
    returns_something,
    takes_arguments,
    torch_modules,
    without_aliases,
)
from accelcore_lint.port.project_files import IMPORT, folders_above, imported_by, root_of, scripts_in, text_in
from accelcore_lint.port.splits import KEPT
from accelcore_lint.port.torchscript import compiled_in
from accelcore_lint.port.vendors import imports_torch
from accelcore_lint.port.visible import functions_that_hide, hides_by_rank

OTHERS = re.compile(r"[\"'](mps|xpu|xla|hpu|tpu|mlu|musa)\b|\.(mps|xpu|hpu)\b|\btorch_xla\b|\bis_(mps|xpu|xla)\b")
"""Words for accelerators beside those that a port starts from."""

_CHOOSES = re.compile(
    r"\b(set_device|set_device_index)\(|(CUDA|ASCEND_RT)_VISIBLE_DEVICES[\"'](\] *=[^=]| *,)"
    r"|^[ \t]*(?:import|from)[ \t]+(deepspeed|horovod|byteps|colossalai|accelerate|pytorch_lightning|lightning)\b"
    r"|[\"'](deepspeed|horovod(\.torch)?|byteps\.torch)[\"']",
    re.MULTILINE,
)
"""Lines that make a device current or hide some, and libraries that do so."""

_SETTING = re.compile(
    r"\bcudnn(?:\.|[ \t]*,[ \t]*[\"'])(\w+)(?=[^=\n#;]*=(?!=)[ \t]*([^\n#;]*)|[\"'][ \t]*,[ \t]*([^\n)#;]*))"
)
"""`cudnn.benchmark = value`, also one of several targets, and `setattr(cudnn, "benchmark", value)`."""

_ASKED = "{} asks {} above lines for one vendor, and this run does not port that file: port them together"
_OWN = "{} asks {} above a move of the project's own objects, which is left"
_TYPED = "{} names a type of tensor of CUDA by {}: write torch.zeros(..., device=...) or .to(device, dtype) there"
_LOADED = "{} loads a state by {} to where CUDA saved it, or to the CPU: give torch.load the device itself"
_REST = "{} gives a function for the CPU all tensors that are not CUDA's, also those of other devices"
_FLAGGED = "{} chooses the device by {}, which may be off: choose it by that flag here, too"
_BESIDE = "{} (connected with this file by imports)"
_CLASS = re.compile(r"(?m)^class ")
_WORD = re.compile(r"\w+")
_TEST = re.compile(r"(test_.*|.*_test|conftest)\.py")
_TESTS = re.compile(r"(?m)^(?:async )?def test_|^class Test\w*:|^class \w+\((?:\w+\.)*TestCase\)")
"""Tests in a file that is called as one. A script such as `test_net.py` has none."""


@dataclass(frozen=True)
class Known:
    """What a project says about one of its files.

    Attributes:
        imported: whether another file imports it, so that what it does at the top also happens in that program.
        own_moves: last names of objects whose `cuda()` is the project's own method: `to()` may be missing, or do less.
        silent_to: last names of objects whose `to()` is the project's own method and returns nothing.
        movers: classes with a method `cuda`, and their files.
        meets_movers: whether the file, or one that it imports, also through others, has such a class.
        torch_modules: classes of the project that are certainly modules of torch, if it defines a `cuda`.
        strange_moves: whether such a class is no module of torch: an object of an unknown class may lack `to()`.
        moves_take: whether such a `cuda()` takes arguments.
        moves_return: whether such a `cuda()` may return something: what uses the value of one that does not is torch's.
        names_others: whether a file speaks of accelerators beside those that a port starts from, such as `"mps"`.
        settings: settings of cuDNN in the project, such as `("benchmark", "True")`.
        taken: names that other files may take from it, as by `from module import name`.
        modules: the project's own modules and packages, by the first part of their names.
        replaced: a vendor's functions of torch that a test of the project, which may run it, or a script replaces.
        hiders: functions and methods of the project that hide devices by an environment variable.
        hiding: attributes under which a file hides devices; the device that it then names stays.
        steered: whether a file that this one imports, also through others, may make a device current or hide some.
        forks: whether such a file starts processes that may be forks.
        meets_torch: whether the file, or one that it imports, also through others, imports torch.
        keeps_questions: the reason why its questions for a device stay, such as a library that it imports.
        hides_by_rank: the reason why they stay at level TORCH, where a file of its program hides devices by rank; the
            other levels set the variables of all vendors there.
        device_given: whether such a file reads a device as `args.device` that no Python file of the program sets.
        asked: flags above lines for one vendor that its program keeps, also as they are named before they are passed
            on, and why: the file is not ported, or the lines move objects of the project's own.
        typed: functions and their parameters that are always a type of one vendor's tensors.
        uses: what the project needs of the original's objects; the words are those of `uses_in`. "copied": the file's
            program saves or copies an optimizer itself. "scaled_below", "ranked": a file that it imports makes a
            scaler, or numbers processes in its own way. "numbers": its program gives objects numbers of devices, and
            makes no device current. "scripted", "scripted NAME": as `compiled_in` says.
        loads: the words in the conditions above each line of the project that loads the state of a scaler.
    """

    imported: bool = False
    own_moves: frozenset[str] = frozenset()
    silent_to: frozenset[str] = frozenset()
    movers: str = ""
    meets_movers: bool = True
    torch_modules: frozenset[str] = frozenset()
    strange_moves: bool = False
    moves_take: bool = False
    moves_return: bool = False
    names_others: bool = False
    settings: frozenset[tuple[str, str]] = frozenset()
    taken: frozenset[str] = frozenset()
    modules: frozenset[str] = frozenset()
    replaced: frozenset[str] = frozenset()
    hiders: frozenset[str] = frozenset()
    hiding: frozenset[str] = frozenset()
    steered: bool = False
    forks: bool = False
    meets_torch: bool = False
    keeps_questions: str = ""
    hides_by_rank: str = ""
    device_given: bool = False
    asked: Mapping[str, str] = field(default_factory=dict)
    typed: frozenset[tuple[str, str]] = frozenset()
    uses: frozenset[str] = frozenset()
    loads: frozenset[frozenset[str]] = frozenset()


@dataclass(frozen=True)
class Project:
    """Files that are ported, and those beside them.

    Attributes:
        files: what the project says about each file that is ported.
        all: what is the same for all files.
        programs: for each file that is ported those that it imports, and that import it, also through others.
        beside: the same, with those that the scripts which import the file import, too.
        mac: the line of the report that names what they, and the files they import, use and MPS lacks; "" if nothing.
        roots: for each file whose questions stay for that of another one, the latter.
    """

    files: Mapping[Path, Known]
    all: Known
    programs: Mapping[Path, frozenset[Path]]
    beside: Mapping[Path, frozenset[Path]]
    mac: str
    roots: Mapping[Path, Path] = field(default_factory=dict)

    def known(self, path: Path) -> Known:
        """Return what the project says about a file."""
        return self.files.get(path.resolve(), self.all)

    def keeping(self, splits: Collection[Path], script: Path | None = None) -> Project:
        """Return the project after questions that stay in some files: those of their programs stay, too.

        `script`: the one whose program they are in.
        """
        splits = {path.resolve() for path in splits if not _TEST.fullmatch(path.name)}
        files, roots = dict(self.files), dict(self.roots)
        for path, known in files.items():
            found = sorted((splits if script in (path, *self.programs[path]) else self.beside[path] & splits) - {path})
            root = found[0] if found else path
            if not script:
                root = self.roots.get(root, root)
            if root != path and not known.keeps_questions:  # a file that has kept the others keeps its own anyway
                files[path] = replace(known, keeps_questions=KEPT.format(root.name))
                if not script:
                    roots[path] = root
        return replace(self, files=files, roots=roots)


def read_project(paths: Iterable[Path]) -> Project:
    """Read the files that are ported, and the others of their project: what imports them, and what they import."""
    given = {path.resolve() for path in paths}
    files = given | {path.resolve() for root in {root_of(path) for path in given} for path in scripts_in(root)}
    texts = {path: text_in(path) for path in files}
    stems = {path.stem for path in given}
    imports = {path: list(imported_by(path, text, None if path in given else stems)) for path, text in texts.items()}
    for path in given:  # pytest runs it for the tests in its folder
        tests = (each for each in given - {path} if path.name == "conftest.py" and path.parent in each.parents)
        imports[path] += [(each, "") for each in tests if _TEST.fullmatch(each.name)]
    new = reached = set(given)
    while new := {found for path in new for found, _ in imports[path]} - reached:
        reached = reached | new
        texts |= {path: text_in(path) for path in new - set(texts)}
        imports |= {path: list(imported_by(path, texts[path], None)) for path in new - given}
    own = {path: found for path, text in texts.items() if (found := movers(text))}
    plain = list(map(without_aliases, texts.values()))
    modules = {
        part for path in files for part in (path.stem, *(folder.name for folder in (path.parent, *folders_above(path))))
    }
    known = Known(
        own_moves=own_moves(plain),
        silent_to=own_moves(texts.values(), has_silent_to),
        movers=", ".join(sorted(f"{name} in {path.name}" for path, names in own.items() for name in names)[:3]),
        torch_modules=torch_modules(plain),
        strange_moves=any(map(has_strange_moves, plain)),
        moves_take=any(map(takes_arguments, plain)),
        moves_return=any(map(returns_something, plain)),
        names_others=any(map(OTHERS.search, texts.values())),
        settings=frozenset(
            (key, (one or other).strip()) for text in texts.values() for key, one, other in _SETTING.findall(text)
        ),
        modules=frozenset(modules),
        replaced=frozenset(name for text in texts.values() for name in uses.replaced_in(text)),
        hiders=frozenset(name for text in texts.values() for name in functions_that_hide(text)),
        hiding=frozenset(name for text in texts.values() for name in uses.flags_that_hide(text)),
        typed=typed_defaults(texts.values()),
        uses=frozenset(word for text in texts.values() for word in uses.uses_in(text))
        | compiled_in(texts.values())
        | ({"apex"} if any(uses.drives_apex(text, modules) for text in texts.values()) else set()),
        loads=frozenset(words for text in texts.values() for words in uses.scaler_loads(text)),
    )
    below, above = defaultdict[Path, set[Path]](set), defaultdict[Path, set[Path]](set)
    for user, all_ in imports.items():
        for path, _ in all_:
            below[user].add(path)
            above[path].add(user)
    edges = {path: (_reached(path, below), _reached(path, above)) for path in given}
    programs = {path: frozenset(files | users) for path, (files, users) in edges.items()}
    scripts = {path: found for path, (found, users) in edges.items() if not (users or _TEST.fullmatch(path.name))}
    beside = {
        path: programs[path].union(*(scripts[user] for user in users & {*scripts}))
        for path, (_, users) in edges.items()
    }
    mac = lacks_of_mps({path: texts[path] for path in reached})
    return Project(_known_of_each(edges, texts, imports, known, set(own)), known, programs, beside, mac)


def _known_of_each(
    edges: Mapping[Path, tuple[set[Path], set[Path]]],
    texts: Mapping[Path, str],
    imports: Mapping[Path, Sequence[tuple[Path, str]]],
    known: Known,
    own: set[Path],
) -> dict[Path, Known]:
    """Return what is known of each file: by whom it is imported, and what is in the files that it imports.

    `edges`: for each file those that it imports, and those that import it, also through others.
    """
    given, taken = set(edges), dict[Path, set[str]]()
    for user, all_ in imports.items():
        for path, name in all_:
            if path in given - {user} and not _TEST.fullmatch(user.name):
                taken.setdefault(path, set()).update(_taken(name, texts[user]))
    taken |= {path: set() for path in given - set(taken) if _TEST.fullmatch(path.name) and _TESTS.search(texts[path])}
    choosing = {path for path, text in texts.items() if _CHOOSES.search(text)}
    words = {path: set(uses.devices_of(text)) for path, text in texts.items()}
    reading, setting, declaring = ({path for path in texts if word in words[path]} for word in uses.OF_DEVICE)
    programs = {path for path, text in texts.items() if "__main__" in text}  # whose options are their own
    ranking = {path for path, text in texts.items() if uses.RANKS.search(text)}
    numbering = {path for path, text in texts.items() if uses.NUMBERS.search(text)}
    forking = {path for path, text in texts.items() if uses.FORKS.search(text)}
    with_torch = {path for path, text in texts.items() if imports_torch(text.encode("utf-8", "replace"))}
    scripts = {path: text for path, text in texts.items() if not _TEST.fullmatch(path.name)}
    kept = {
        path: reason
        for path, text in scripts.items()
        if (reason := uses.kept_questions(text, _BESIDE.format(path.name)) or hides_by_rank(text, ported=path in given))
    }
    by_rank = {path: reason for path, text in scripts.items() if (reason := hides_by_rank(text))}
    flags = {
        path: {name: (_OWN if path in given else _ASKED).format(path.name, name) for name in found}
        for path, text in scripts.items()
        if known.own_moves or path not in given
        for found in [uses.flags_of_moves(text, known.own_moves if path in given else None)]
    }
    for path, text in scripts.items():
        flags.setdefault(path, {}).update({name: _LOADED.format(path.name, name) for name in uses.flags_of_loads(text)})
        flags[path] |= {name: _TYPED.format(path.name, name) for name in uses.flags_of_types(text)}
    flagged = {path: found for path, text in scripts.items() if (found := uses.flags_of_devices(text))}
    off = {name for text in texts.values() for name in uses.flags_off(text)} if flagged else set()
    flagged = {path: found & off for path, found in flagged.items()}
    rest = {path for path, text in texts.items() if uses.TAKES_REST.search(text)}
    copying = {path for path, text in scripts.items() if uses.copies_optimizer(text)}
    scaling = {path for path, text in scripts.items() if "GradScaler(" in text}
    meeting = _by_name(own, texts)
    known_of = {}
    for path, (files, users) in edges.items():
        asked = {name: why for each in sorted(files | users) for name, why in flags.get(each, {}).items()}
        passed = {pair for each in (path, *files, *users) for pair in uses.PASSED.findall(texts[each])} if asked else ()
        known_of[path] = replace(
            known,
            imported=path in taken,
            taken=frozenset(taken.get(path, ())),
            replaced=frozenset() if _is_untested(path, known.replaced, texts) else known.replaced,
            steered=not choosing.isdisjoint(files),
            meets_movers=path in meeting,
            forks=not forking.isdisjoint(files),
            device_given=not reading.isdisjoint({path, *files})
            and (setting | (declaring - programs)).isdisjoint({path, *files})
            and path not in declaring,
            meets_torch=not with_torch.isdisjoint({path, *files}),
            # A package may load its files by names in a configuration, so that those in folders below count, too.
            keeps_questions=(uses.kept_questions(texts[path]) if path in kept else "")
            or next((kept[each] for each in sorted(files | users) if each in kept), "")
            or _flagged(path, {*files, *users}, flagged, texts)
            or next((_REST.format(each.name) for each in sorted(rest) if path.parent in each.parents), ""),
            hides_by_rank=next((by_rank[each] for each in sorted(files | users) if each in by_rank), ""),
            uses=known.uses
            | (set() if copying.isdisjoint(files | users) else {"copied"})
            | (set() if scaling.isdisjoint(files) else {"scaled_below"})
            | (set() if ranking.isdisjoint(files) else {"ranked"})
            | (set() if numbering.isdisjoint(files | users) or choosing & (files | users) else {"numbers"}),
            asked={name: asked[parameter] for parameter, name in passed if parameter in asked} | asked,
        )
    return known_of


def _is_untested(path: Path, replaced: Collection[str], texts: Mapping[Path, str]) -> bool:
    """Return whether a file is a script that no file imports, and that none which replaces functions names."""
    if not replaced or "__main__" not in texts[path]:
        return False
    named = any(path.stem in text for each, text in texts.items() if each != path and any(uses.replaced_in(text)))
    return not named and _by_name({path}, texts) == {path}


def _flagged(path: Path, program: Collection[Path], flagged: Mapping[Path, set[str]], texts: Mapping[Path, str]) -> str:
    """Return the reason why a file's questions stay where another one chooses the device by a flag; "" if none does."""
    if not flagged or not uses.asks_where(texts[path]):
        return ""
    # The program of a module is not certain: others may load it by its name, or hold its objects beside its own.
    is_module = "__main__" not in texts[path] and _CLASS.search(texts[path])
    words = set(_WORD.findall(texts[path]))
    found = (
        (each, name)
        for each in sorted(set(flagged) - {path} if is_module else flagged.keys() & program)
        for name in sorted(flagged[each] - words)
    )
    return next((_FLAGGED.format(each.name, name) for each, name in found), "")


def _reached(path: Path, edges: Mapping[Path, set[Path]]) -> set[Path]:
    """Return the files to which edges lead from a file, also through others."""
    new, reached = {path}, set[Path]()
    while new := {found for each in new for found in edges.get(each, ())} - {*reached, path}:
        reached |= new
    return reached


def _by_name(files: set[Path], texts: Mapping[Path, str]) -> frozenset[Path]:
    """Return files with what imports one of that name, also through others, and from wherever it is found."""
    lines = {path: IMPORT.findall(text) for path, text in texts.items()} if files else {}
    words = {path: set(_WORD.findall(" ".join(map(" ".join, found)))) for path, found in lines.items()}
    reached, count = set(files), 0
    while count < len(reached):
        count = len(reached)
        names = {path.parent.name if path.stem == "__init__" else path.stem for path in reached}
        reached |= {path for path, each in words.items() if each & names}
    return frozenset(reached)


def _taken(name: str, text: str) -> set[str]:
    """Return what a file may take from a module by one of its names: that one, or its attributes; "*" is all."""
    if name == "*":
        return set(_WORD.findall(text))
    return {name, *re.findall(rf"(?<![\w.]){re.escape(name)}\.(\w+)", text)}
