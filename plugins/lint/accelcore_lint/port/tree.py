"""Syntax tree of one file with the names, places and calls in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, cast

import libcst as cst
from libcst import metadata

from accelcore_lint.port.model import Level
from accelcore_lint.port.survey import Survey
from accelcore_lint.port.syntax import argument, dotted, text_of
from accelcore_lint.port.vendors import STAR_IMPORT

_SPAWNS = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes", "torch.multiprocessing.spawn.spawn")
_RANK = re.compile(
    r"None|-?\d+|int\(.*\)|([\w]+\.)*_?(local_?)?(rank|gpu|gpu_?id|device_?id|index|idx|i)", re.IGNORECASE
)
_TRAINS = re.compile(
    r"\b(backward|DataLoader|load_state_dict|init_process_group|ArgumentParser|argv|hydra|click|fire|typer|tyro)\b|optim"
)
"""Words of scripts that train, evaluate or take options."""

_OWN_READER = re.compile(r"\bself\.[\w.]+\.parse_args\(")
"""A method of the script's own configuration, if the file has no parser."""

_WORD = re.compile(r"\b[^\W\d]\w*")


class Tree:
    """What a file contains, collected in one walk.

    Args:
        wrapper: the parsed file.
        level: what it is rewritten to.

    Attributes:
        level: as given; TRAINER has rules of its own, and otherwise those of ROLES.
        module, code: the file, and its source.
        identifiers: all names that it uses or defines.
        uses: how often it uses each of them, apart from their imports and definitions.
        attributes, defined_methods, functions, calls, seeds: those in it.
        assigned: the values that it assigns to each name.
        helpers: names that the module assigns, by the source of their value.
        backends: names to which it assigns a backend of `accelcore.select`, with the call.
        hidden_by: assignments to the environment variables that hide devices, and calls of YOLO's function for it.
        made_current: expressions of the devices that it makes current.
        indexes: the numbers in names of devices such as "cuda:1", and of moves such as `x.cuda(1)`.
        moved_to: the names in moves such as `x.cuda(i)`.
        torch: the name of the module torch; `has_torch_name` is whether the file imports it under a name.
    """

    def __init__(self, wrapper: metadata.MetadataWrapper, level: Level) -> None:
        self.level = level
        self.module = wrapper.module
        self.code = wrapper.module.code
        self._names: Mapping[cst.CSTNode, Any] = wrapper.resolve(metadata.QualifiedNameProvider)
        self._parents: Mapping[cst.CSTNode, cst.CSTNode] = wrapper.resolve(metadata.ParentNodeProvider)
        self._positions: Mapping[cst.CSTNode, Any] = wrapper.resolve(metadata.PositionProvider)
        self._has_star = STAR_IMPORT.search(self.code) is not None
        survey = Survey(self.name, self.parent)
        self.module.visit(survey)
        self.identifiers = survey.identifiers
        self.uses = survey.uses
        self.attributes = survey.attributes
        self.defined_methods = survey.methods
        self.functions = survey.functions
        self.calls = survey.calls
        self.seeds = survey.seeds
        self.assigned = survey.assigned
        self.helpers = survey.helpers
        self.backends = survey.backends
        self.hidden_by = survey.hidden_by
        self.made_current = survey.made_current
        self.indexes = survey.indexes
        self.moved_to = survey.moved_to
        self.imports = survey.imports
        self.torch = survey.torch or "torch"
        self.has_torch_name = survey.torch is not None

    @property
    def needs_torch(self) -> tuple[str, ...]:
        """Return the statement that a line with `torch` needs, unless the file already has it."""
        return () if self.has_torch_name or self.is_library else ("import torch",)

    def name(self, node: cst.CSTNode) -> str | None:
        """Return the full name of an imported object, such as `"torch.cuda.synchronize"`; None unless it is certain."""
        base = node
        while isinstance(base, cst.Attribute):
            base = base.value
        if not isinstance(base, cst.Name):  # such as `nn.Linear(2, 2).cuda`, which libcst names, too
            return None
        found = self._names.get(node, ())
        found = found() if callable(found) else found
        if not found and self._has_star and base.value == "torch":  # only `from model import *` can bring it
            return dotted(node)
        if len(found) != 1:
            return None
        (qualified,) = found
        if qualified.source is not metadata.QualifiedNameSource.IMPORT:
            return None
        return cast("str", qualified.name).replace("torch_npu.npu.", "torch.npu.", 1)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the node that holds a node; None for the module."""
        return self._parents.get(node)

    def parents(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around a node, from the inside."""
        above = self.parent(node)
        while above is not None:
            yield above
            above = self.parent(above)

    def line(self, node: cst.CSTNode) -> int:
        """Return the number of a node's first line."""
        return cast("int", self._positions[node].start.line)

    def function_of(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the outermost function around a node, or None."""
        found = [each for each in self.parents(node) if isinstance(each, cst.FunctionDef)]
        return found[-1] if found else None

    def is_default(self, node: cst.CSTNode) -> bool:
        """Return whether a node is in a parameter's default that does not ask for a device when it is imported."""
        inner = node
        for outer in self.parents(node):
            if isinstance(outer, cst.Param) and inner is outer.default:
                return "is_available(" not in text_of(inner)
            if isinstance(outer, (cst.Lambda, cst.BaseStatement)):
                return False
            inner = outer
        return False

    @cached_property
    def spawned(self) -> dict[str, str]:
        """Return the functions that the script starts as processes, with the name of their first parameter.

        Without those that it also calls with what may be no rank, such as a list of devices.
        """
        names = {text_of(call.args[0].value) for call in self.calls if self.name(call.func) in _SPAWNS and call.args}
        return {
            name: function.params.params[0].name.value
            for name in names
            if (function := self.functions.get(name)) is not None
            and function.params.params
            and all(_RANK.fullmatch(text_of(call.args[0].value)) for call in self._direct_calls(name))
        }

    def _direct_calls(self, name: str) -> list[cst.Call]:
        return [
            call for call in self.calls if isinstance(call.func, cst.Name) and call.func.value == name and call.args
        ]

    @cached_property
    def spawns(self) -> bool:
        """Return whether the script starts processes that train."""
        return (
            any(
                (self.name(call.func) or "").startswith(
                    ("torch.multiprocessing.spawn", "torch.multiprocessing.start_proc")
                )
                or ((self.name(call.func) or "").endswith(".launch") and self._passes_function(call))
                for call in self.calls
            )
            or self.forks
        )

    @cached_property
    def forks(self) -> bool:
        """Return whether the script starts processes that may be forks, in which CUDA fails once its parent used it."""
        return any((self.name(call.func) or "").endswith("multiprocessing.Process") for call in self.calls)

    @cached_property
    def is_library(self) -> bool:
        """Return whether a file only defines what others use: it does nothing with a name of its own when imported.

        As a script, such as in `if __name__ == "__main__":`, it only tries that out.
        """
        body, code = self.module.body, self.code
        runs = (cst.For, cst.While, cst.With)
        reads = "parse_args(" in (code if "ArgumentParser" in code else _OWN_READER.sub("", code))
        if self.spawns or self.backends or reads or ("__main__" in code and _TRAINS.search(self._run)):
            return False
        own = {each.name.value for each in body if isinstance(each, (cst.FunctionDef, cst.ClassDef))}
        return bool(own) and not any(isinstance(each, runs) or self._uses(each, own) for each in body)

    @cached_property
    def _run(self) -> str:
        """Return the lines that the file runs as a script: its own, and functions and classes that these name."""
        kinds = (cst.FunctionDef, cst.ClassDef)
        defined = {each.name.value: each for each in self.module.body if isinstance(each, kinds)}
        found = "".join(
            text_of(line)
            for each in self.module.body
            if not isinstance(each, kinds)
            for line in (each.body if isinstance(each, cst.SimpleStatementLine) else [each])
            if not isinstance(line, (cst.Import, cst.ImportFrom))
        )
        names = list(_WORD.findall(found))
        while names:
            if (each := defined.pop(names.pop(), None)) is not None:
                found += (text := text_of(each))
                names += _WORD.findall(text)
        return found

    def _uses(self, line: cst.BaseStatement | cst.BaseSmallStatement, own: set[str]) -> bool:
        """Return whether a line of the module is a call with a name of its `own` or an assigned one, but no logger."""
        if not isinstance(line, cst.SimpleStatementLine):
            return False
        calls = " ".join(text_of(part) for part in line.body if isinstance(part, cst.Expr))
        names = set(re.findall(r"(?<![\w.])[^\W\d]\w*", re.sub(r"(?s)([\"']).*?\1", "", calls)))
        return "(" in calls and any(
            name in own or (name in self.assigned and not name.startswith(("log", "current_"))) for name in names
        )

    def _passes_function(self, call: cst.Call) -> bool:
        first = call.args[0].value if call.args else None
        return argument(call, "num_machines") is not None or (first is not None and text_of(first) in self.functions)

    def import_lines(self) -> dict[str, int]:
        """Return the numbers of the lines of all import statements, by their text."""
        return {text_of(node): self.line(node) for node in reversed(self.imports)}
