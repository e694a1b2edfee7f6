"""Syntax tree of one file with the names, places and calls in it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any, cast

import libcst as cst
from libcst import metadata

from accelcore_lint.port.project import Known
from accelcore_lint.port.rule import Level
from accelcore_lint.port.survey import Survey
from accelcore_lint.port.syntax import argument, dotted, is_guard, is_kept, text_of
from accelcore_lint.port.uses import FORKS
from accelcore_lint.port.vendors import STAR_IMPORT
from accelcore_lint.port.walk import find, walk

_SPAWNS = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes", "torch.multiprocessing.spawn.spawn")
_SUBMITS = re.compile(r"\b(submitit|simple_slurm|ray|dask|parsl)\b")
"""Packages that run functions of the script on other hosts, or in processes that they start."""

_OTHER_VENDOR = re.compile(r"^(torch|torch_npu)\.npu\b")
_OF_TORCH = re.compile(r"(import|from)\s+torch\b")
_STARTS = re.compile(r"(.*\.)?(Process|delayed|process_map|imap(_unordered)?|starmap(_async)?|map_async|apply_async)")
_POOL = re.compile(r"\w*Pool(Executor)?\(")
_OF_POOL = re.compile(r".*\.(map|apply|submit)")
"""Functions that take a function for another process; the last ones are a pool's, and others have them, too."""

_OF_LOADER = ("collate_fn", "worker_init_fn")
_IN_LOADER = re.compile(r"\bdef (__getitem__|__iter__)\b")
_USES_DEVICE = re.compile(r"cuda|npu|device|\bmodel|\bnet\b")
_ASKS_OR_USES = re.compile(
    r"is_available\(|device_count\(|current_device\(|\.(cuda|npu|to)\(|set_device|init_process_group"
)
_RANK = re.compile(
    r"None|-?\d+|int\(.*\)|([\w]+\.)*_?(local_?)?(rank|gpu|gpu_?id|device_?id|index|idx|i)", re.IGNORECASE
)
_TRAINS = re.compile(
    r"\b(DataLoader|load_state_dict|init_process_group|ArgumentParser|argv|hydra|click|fire|typer|tyro)\b|optim"
)
"""Words of scripts that train, evaluate or take options."""

_WORKS = re.compile(
    r"\b(torch|model|net\w*|loss|print|backward|DataLoader|load_state_dict|init_process_group|hydra|click|fire|typer)\b"
)
"""Words of lines that do the work of a script."""

_RECORDS = re.compile(
    r"(^|[._])((add|register|set|use|enable|disable|insert|update|append|extend|filter|simple|basic|parse|merge|freeze)"
    r"(_\w+|[A-Z]\w*|warnings|filter)?|(manual_)?seed(_\w+)?)$"
)
"""Functions that a module without a script calls when it is imported: they register something, or set it."""

_VARY = (cst.For, cst.CompFor, cst.AsName, cst.AugAssign, cst.NamedExpr)
_WORD = re.compile(r"\b[^\W\d]\w*")


class Tree(Survey):
    """Syntax tree of a file.

    Args:
        wrapper: the parsed file.
        level: what it is rewritten to.
        known: what other files of the project say about it.

    Attributes:
        level, known: as given; TRAINER has rules of its own, and otherwise those of ROLES.
        module, code: the file, and its source.
        indexes: the numbers in names of devices such as "cuda:1", and of moves such as `x.cuda(1)`.
    """

    def __init__(self, wrapper: metadata.MetadataWrapper, level: Level, known: Known) -> None:
        super().__init__()
        self.level = level
        self.known = known
        self.module = wrapper.module
        self.code = wrapper.module.code
        # libcst's providers of names and parents walk the whole file three times more.
        self._scopes: Mapping[cst.CSTNode, metadata.Scope | None] = wrapper.resolve(metadata.ScopeProvider)
        self._positions: Mapping[cst.CSTNode, Any] = wrapper.resolve(metadata.PositionProvider)
        self._names: dict[cst.CSTNode, str | None] = {}
        self._has_star = STAR_IMPORT.search(self.code) is not None
        walk(self.module, self)
        self.indexes = set(self.numbered.values())
        self.imports_torch = self.imports_torch or (
            (self._has_star or known.meets_torch) and not any(_OF_TORCH.match(text_of(node)) for node in self.imports)
        )
        self.hidden_by += self.others(known.hiders)

    @property
    def needs_torch(self) -> tuple[str, ...]:
        """Return the statement that a line with `torch` needs, unless the file already has it."""
        return () if self.has_torch_name else (self.torch_import,)

    @property
    def torch_import(self) -> str:
        """Return the statement that brings torch by the name that the file has for it."""
        return "import torch" if self.torch == "torch" else f"import torch as {self.torch}"

    def has_torch_above(self, site: cst.CSTNode) -> bool:
        """Return whether a line of the module above a site, and not of its guard, imports torch by its name."""
        lines = [node for node in self.imports if isinstance(node, cst.Import) and self.line(node) < self.line(site)]
        lines = [node for node in lines if not any(map(_is_apart, self.parents(node)))]
        names = [(dotted(alias.name), alias.asname) for node in lines for alias in node.names]
        return any(name == "torch" or (name.startswith("torch.") and alias is None) for name, alias in names)

    def name(self, node: cst.CSTNode) -> str | None:
        """Return the full name of an imported object, such as `"torch.cuda.synchronize"`; None unless it is certain.

        The functions of `torch.npu` get the names of those of `torch.cuda`.
        """
        if node not in self._names:
            self._names[node] = self._name(node)
        return self._names[node]

    def _name(self, node: cst.CSTNode) -> str | None:
        base = node
        while isinstance(base, cst.Attribute):
            base = base.value
        if not isinstance(base, cst.Name):  # such as `nn.Linear(2, 2).cuda`, which libcst names, too
            return None
        scope = self._scopes.get(node)
        found = () if scope is None else scope.get_qualified_names_for(node)
        if not found and self._has_star and base.value == "torch":  # only `from model import *` can bring it
            return dotted(node)
        if len(found) != 1:
            return None
        (qualified,) = found
        if qualified.source is not metadata.QualifiedNameSource.IMPORT:
            return None
        return _OTHER_VENDOR.sub("torch.cuda", qualified.name)

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

    def varies(self, node: cst.Name) -> bool:
        """Return whether a loop, `with`, or an operation such as `n -= 1` also gives a name its value."""
        found = () if (scope := self._scopes.get(node)) is None else scope[node.value]
        return any(isinstance(self.parent(getattr(each, "node", node)), _VARY) for each in found)

    def function_of(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the outermost function around a node, or None."""
        found = [each for each in self.parents(node) if isinstance(each, cst.FunctionDef)]
        return found[-1] if found else None

    def is_given(self, name: str, site: cst.CSTNode) -> bool:
        """Return whether a name is a parameter of a function around a site."""
        functions = (outer for outer in self.parents(site) if isinstance(outer, (cst.FunctionDef, cst.Lambda)))
        return any(re.search(rf"\b{re.escape(name)}\b", text_of(each.params)) for each in functions)

    def in_default(self, node: cst.CSTNode) -> cst.BaseExpression | None:
        """Return the parameter's default that holds a node, if one does."""
        inner = node
        for outer in self.parents(node):
            if isinstance(outer, cst.Param) and inner is outer.default:
                return outer.default
            if isinstance(outer, (cst.Lambda, cst.BaseStatement)):
                return None
            inner = outer
        return None

    def is_default(self, node: cst.CSTNode) -> bool:
        """Return whether a node is in a parameter's default that does not ask for a device when it is imported."""
        default = self.in_default(node)
        return default is not None and "is_available(" not in text_of(default)

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
            and all(_RANK.fullmatch(text_of(value)) for value in self._given_first(name))
        }

    def _given_first(self, name: str) -> list[cst.BaseExpression]:
        calls = (call for call in self.calls if isinstance(call.func, cst.Name) and call.func.value == name)
        return [call.args[0].value for call in calls if call.args]

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
    def submits(self) -> bool:
        """Return whether a package may run the script's functions in processes of its own, as ray does."""
        return any(_SUBMITS.search(text_of(node)) for node in self.imports)

    @cached_property
    def forks(self) -> bool:
        """Return whether the script starts processes that may be forks, in which CUDA fails once its parent used it."""
        named = FORKS.search(self.code) is not None or self.submits
        return bool(self.forking) or named or _USES_DEVICE.search(self.reached(self.started)[1]) is not None

    @cached_property
    def forking(self) -> list[cst.Call]:
        """Return the calls of `multiprocessing.Process`, pools of functions that use a device, and others that fork."""
        others, pools = FORKS.search(self.code), _USES_DEVICE.search(self.reached(self.started)[1])
        return [
            call
            for call in self.calls
            if (self.name(call.func) or "").endswith("multiprocessing.Process")
            or (others and FORKS.search(text_of(call)))
            or (pools and _POOL.match(f"{text_of(call.func).split('.')[-1]}("))
        ]

    def names_before_fork(self, around: list[cst.CSTNode], function: cst.FunctionDef | None) -> bool:
        """Return whether a device is only named where the process may fork afterwards.

        A function that only names it may run before. So may what a lambda of the module needs above it.
        """
        if not self.forks or (function is not None and _ASKS_OR_USES.search(text_of(function))):
            return False
        if function is None:
            return self.level is Level.TORCH and any(isinstance(each, cst.Lambda) for each in around)
        return function.name.value not in self.reached(self.started)[0] and is_kept(around)

    @cached_property
    def started(self) -> list[str]:
        """Return the module's functions that it passes to something that runs them in another process."""
        has_pool = _POOL.search(self.code)
        return [
            text_of(arg.value)
            for call in self.calls
            for arg in call.args
            if isinstance(arg.value, cst.Name)
            and arg.value.value in self.functions
            and (
                (arg.keyword is not None and arg.keyword.value in ("target", "initializer"))
                or _STARTS.fullmatch(text_of(call.func))
                or (has_pool and _OF_POOL.fullmatch(text_of(call.func)))
            )
        ]

    @cached_property
    def in_workers(self) -> set[str]:
        """Return the module's functions and classes that a process of the script's own, or of a DataLoader, may use."""
        given = [
            text_of(arg.value)
            for call in self.calls
            for arg in call.args
            if arg.keyword and arg.keyword.value in _OF_LOADER
        ]
        data = [name for name, made in self._defined.items() if _IN_LOADER.search(text_of(made))]
        return self.reached([*self.started, *given, *data])[0]

    def others(self, names: Collection[str]) -> list[cst.CSTNode]:
        """Return the calls of functions and methods of other files that have one of these names."""
        own = {*self.functions, *self.defined_methods, *self._defined}
        found: list[cst.CSTNode] = []
        for call in self.calls:
            last, name = text_of(call.func).split(".")[-1], self.name(call.func) or ""
            is_other = bool(name) or isinstance(call.func, cst.Attribute) or self._has_star
            if last in names and last not in own and is_other and not name.startswith(("torch.", "accelcore.")):
                found.append(call)
        return found

    @cached_property
    def _defined(self) -> dict[str, cst.CSTNode]:
        """Return the functions and classes of the module."""
        return {each.name.value: each for each in self.module.body if isinstance(each, (cst.FunctionDef, cst.ClassDef))}

    def reached(self, names: list[str]) -> tuple[set[str], str]:
        """Return functions and classes of the module with all that these name in turn, and their source."""
        names, found, text = list(names), set(), ""
        while names:
            if (name := names.pop()) in self._defined and name not in found:
                found.add(name)
                text += (more := text_of(self._defined[name]))
                names += _WORD.findall(more)
        return found, text

    @cached_property
    def has_guard(self) -> bool:
        """Return whether the file has an `if __name__ == "__main__":`, so that others may import it, too."""
        return any(map(is_guard, self.module.body))

    @cached_property
    def is_library(self) -> bool:
        """Return whether a file defines what others use, so that it must choose no device when it is imported.

        It does so if another file imports it, or if it certainly does not train, evaluate or take options itself.
        """
        if self.known.imported and (self.level is Level.TORCH or not (self.spawns or self.backends)):
            return True
        if self.spawns or self.backends:
            return False
        if self.has_guard:
            return not _TRAINS.search(self._run)
        own = set(self._defined)
        return bool(own) and not any(self._runs(line, own) for line in _lines(self.module))

    @cached_property
    def _run(self) -> str:
        """Return the lines that the file runs as a script: its own, and functions and classes that these name."""
        found = "".join(
            text_of(line)
            for each in self.module.body
            if not isinstance(each, (cst.FunctionDef, cst.ClassDef))
            for line in (each.body if isinstance(each, cst.SimpleStatementLine) else [each])
            if not isinstance(line, (cst.Import, cst.ImportFrom))
        )
        return found + self.reached(_WORD.findall(found))[1]

    def _runs(self, line: cst.CSTNode, own: set[str]) -> bool:
        """Return whether a line of the module does the work of a script, and not only registers or sets something.

        `own`: the functions and classes of the module.
        """
        if isinstance(line, (cst.For, cst.While, cst.With)):
            return bool(own & self.names_in(line)) or _WORKS.search(text_of(line)) is not None
        for part in line.body if isinstance(line, (cst.SimpleStatementLine, cst.SimpleStatementSuite)) else ():
            value = getattr(part, "value", None)
            if not isinstance(value, cst.Call):
                continue
            used = self.names_in(value)
            if not isinstance(part, cst.Expr):
                if used & own and _WORKS.search(self._run):
                    return True
            elif not _RECORDS.search(text_of(value.func)):
                known = {name for name in self.assigned if not name.startswith(("log", "current_"))}
                if used & (own | known):
                    return True
        return False

    def names_in(self, node: cst.CSTNode) -> set[str]:
        """Return the variables, functions and classes that a node names."""
        return {name.value for name in find(node, cst.Name) if not self._is_member(name)}

    def _is_member(self, name: cst.Name) -> bool:
        parent = self.parent(name)
        return (isinstance(parent, cst.Attribute) and parent.attr is name) or (
            isinstance(parent, cst.Arg) and parent.keyword is name
        )

    def is_called_once(self, function: cst.FunctionDef) -> bool:
        """Return whether the file calls a function of its module in one place that is not in a loop."""
        name = function.name.value
        if self.functions.get(name) is not function or not isinstance(function.body, cst.IndentedBlock):
            return False
        calls = [call for call in self.calls if isinstance(call.func, cst.Name) and call.func.value == name]
        return len(calls) == 1 and not any(
            isinstance(outer, (cst.FunctionDef, cst.For, cst.While))
            or (isinstance(outer, cst.With) and "graph" in "".join(map(text_of, outer.items)))
            for outer in self.parents(calls[0])
        )

    def _passes_function(self, call: cst.Call) -> bool:
        first = call.args[0].value if call.args else None
        return argument(call, "num_machines") is not None or (first is not None and text_of(first) in self.functions)


def _is_apart(node: cst.CSTNode) -> bool:
    return isinstance(node, (cst.FunctionDef, cst.ClassDef)) or is_guard(node)


def _lines(block: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield the lines that run when a module is imported, also those under an `if` or in a `try`."""
    if isinstance(block, cst.If):
        yield from _lines(block.body)
        if block.orelse is not None:
            yield from _lines(block.orelse)
    elif isinstance(block, (cst.Try, cst.Else)):
        yield from _lines(block.body)
    elif isinstance(block, (cst.Module, cst.IndentedBlock)):
        for line in block.body:
            yield from _lines(line)
    else:
        yield block
