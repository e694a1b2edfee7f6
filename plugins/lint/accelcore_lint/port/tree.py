"""Syntax tree of one file with the names, places and calls in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, cast

import libcst as cst
from libcst import metadata

from accelcore_lint.port.project import Known
from accelcore_lint.port.rule import TODO, Level
from accelcore_lint.port.survey import Survey
from accelcore_lint.port.syntax import code_of, dotted, is_guard, text_of, without_comments
from accelcore_lint.port.vendors import STAR_IMPORT
from accelcore_lint.port.walk import find, walk

_OTHER_VENDOR = re.compile(r"^(torch|torch_npu)\.npu\b")
_OF_TORCH = re.compile(r"(import|from)\s+torch\b")
_VARY = (cst.For, cst.CompFor, cst.AsName, cst.AugAssign, cst.NamedExpr)
WORD = re.compile(r"\b[^\W\d]\w*")


class Wrapper(metadata.MetadataWrapper):
    """Parsed file whose metadata is resolved without walks through the file that find nothing.

    Each provider of `Tree` walks through the file by itself when it is shown the module. libcst would show it all other
    nodes, too, and look for its methods among all that are possible, each time.
    """

    def visit_batched(
        self,
        visitors: Iterable[cst.BatchableCSTVisitor],
        before_visit: Callable[[cst.CSTNode], None] | None = None,
        after_leave: Callable[[cst.CSTNode], None] | None = None,
    ) -> cst.CSTNode:
        for visitor in visitors:
            with visitor.resolve(self):
                visitor.visit_Module(self.module)
        return self.module


class Tree(Survey):
    """Syntax tree of a file.

    Args:
        wrapper: the parsed file.
        level: what it is rewritten to.
        known: what other files of the project say about it.

    Attributes:
        level, known: as given; TRAINER has rules of its own, and otherwise those of ROLES.
        module, code: the file, and its source without comments, but those of an earlier run.
        imports_late: whether it imports torch in functions only, so that it may be run for something else without.
        indexes: the numbers in names of devices such as "cuda:1", and of moves such as `x.cuda(1)`.
    """

    def __init__(self, wrapper: Wrapper, level: Level, known: Known) -> None:
        super().__init__()
        self.level = level
        self.known = known
        self.module = wrapper.module
        self.code = without_comments(code_of(wrapper.module), TODO)
        # Both at once: each resolution walks the whole file once more. Its providers of names and parents, three times.
        resolved = wrapper.resolve_many([metadata.ScopeProvider, metadata.PositionProvider])
        self._scopes = cast("Mapping[cst.CSTNode, metadata.Scope | None]", resolved[metadata.ScopeProvider])
        self._positions = cast("Mapping[cst.CSTNode, Any]", resolved[metadata.PositionProvider])
        self._names: dict[cst.CSTNode, str | None] = {}
        self._has_star = STAR_IMPORT.search(self.code) is not None
        walk(self.module, self)
        self.indexes = set(self.numbered.values())
        is_named = any(_OF_TORCH.match(text_of(node)) for node in self.imports)
        self.imports_torch = self.imports_torch or ((self._has_star or known.meets_torch) and not is_named)
        self.imports_late = is_named and not self.imports_torch
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
        """Return the default that holds a node, of a parameter or of a field of a class, if one does."""
        inner = node
        for outer in self.parents(node):
            if isinstance(outer, cst.Param) and inner is outer.default:
                return outer.default
            if isinstance(outer, cst.AnnAssign) and inner is outer.value and self.is_field(outer):
                return outer.value
            if isinstance(outer, (cst.Lambda, cst.BaseStatement)):
                return None
            inner = outer
        return None

    def is_field(self, assign: cst.AnnAssign) -> bool:
        """Return whether an assignment declares an attribute of a class, such as a dataclass of options."""
        outer = (each for each in self.parents(assign) if isinstance(each, (cst.ClassDef, cst.FunctionDef)))
        return isinstance(next(outer, None), cst.ClassDef)

    def is_default(self, node: cst.CSTNode) -> bool:
        """Return whether a node is in a default that does not ask for a device when it is imported."""
        default = self.in_default(node)
        return default is not None and "is_available(" not in text_of(default)

    def others(self, names: Collection[str]) -> list[cst.CSTNode]:
        """Return the calls of functions and methods of other files that have one of these names."""
        own = {*self.functions, *self.defined_methods, *self.defined}
        found: list[cst.CSTNode] = []
        for call in self.calls:
            last, name = text_of(call.func).split(".")[-1], self.name(call.func) or ""
            is_other = bool(name) or isinstance(call.func, cst.Attribute) or self._has_star
            if last in names and last not in own and is_other and not name.startswith(("torch.", "accelcore.")):
                found.append(call)
        return found

    @cached_property
    def defined(self) -> dict[str, cst.CSTNode]:
        """Return the functions and classes of the module."""
        return {each.name.value: each for each in self.module.body if isinstance(each, (cst.FunctionDef, cst.ClassDef))}

    def reached(self, names: list[str]) -> tuple[set[str], str]:
        """Return functions and classes of the module with all that these name in turn, and their source."""
        names, found, text = list(names), set(), ""
        while names:
            if (name := names.pop()) in self.defined and name not in found:
                found.add(name)
                text += (more := text_of(self.defined[name]))
                names += WORD.findall(more)
        return found, text

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


def _is_apart(node: cst.CSTNode) -> bool:
    return isinstance(node, (cst.FunctionDef, cst.ClassDef)) or is_guard(node)
