"""Statements that hide devices by an environment variable: whether a site of the file runs after all of them."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.processes import Processes
from accelcore_lint.port.syntax import common_guard, run_on_import, text_of
from accelcore_lint.port.walk import find

_FIXES = ("torch.cuda.is_available", "torch.cuda.current_device")
"""Questions that fix which devices are visible. A move may fix nothing: a module without parameters asks nothing."""

_PERHAPS = (cst.BooleanOperation, cst.IfExp, cst.Lambda, cst.CompFor)
"""Expressions that may not evaluate all that is in them."""


def scope_of(tree: Processes, site: cst.CSTNode) -> cst.FunctionDef | None:
    """Return the outermost function whose body holds a site."""
    found, inner = None, site
    for outer in tree.parents(site):
        if isinstance(outer, cst.FunctionDef) and inner is outer.body:
            found = outer
        inner = outer
    return found


def first_of(tree: Processes, block: cst.BaseSuite | cst.Module, sites: list[cst.CSTNode]) -> cst.CSTNode:
    """Return the first statement of a block that holds one of the sites; in a `with` if that holds them all."""
    around = {id(outer) for site in sites for outer in (site, *tree.parents(site))}
    first = next(statement for statement in block.body if id(statement) in around)
    inner = first.body if isinstance(first, cst.With) else None
    if isinstance(inner, cst.IndentedBlock) and all(inner in tree.parents(site) for site in sites):
        return first_of(tree, inner, sites)  # what the `with` begins may choose devices
    return first


def first_inside(tree: Processes, block: cst.BaseSuite, sites: list[cst.CSTNode]) -> cst.CSTNode:
    """Return the first statement of a block that holds one of the sites; in the branch of an `if` that holds them all.

    A forked worker of a DataLoader that runs such a function must not ask for a device where the original does not.
    """
    first = first_of(tree, block, sites)
    branch = first.body if isinstance(first, cst.If) else None
    if isinstance(branch, cst.IndentedBlock) and all(branch in tree.parents(site) for site in sites):
        return first_inside(tree, branch, sites)
    return first


class Hiding:
    """Order of a file's sites and of its statements that hide devices.

    Args:
        tree: of the file.
        at_torch_level: whether each function chooses its device itself.
    """

    def __init__(self, tree: Processes, *, at_torch_level: bool) -> None:
        self._tree = tree
        self._torch_level = at_torch_level

    def _scope(self, site: cst.CSTNode) -> cst.FunctionDef | None:
        return scope_of(self._tree, site)

    def hides(self, site: cst.CSTNode) -> bool:
        """Return whether devices are hidden after a device would be chosen for a site."""
        tree, function = self._tree, self._scope(site)
        for target in tree.hidden_by:
            setter = self._scope(target)
            if setter is not None and (setter is not function or not tree.is_called_once(setter)):
                return True
            if not self._is_below(site, target):
                return True
        return False

    def is_placed(self, site: cst.CSTNode) -> bool:
        """Return whether the device can be chosen after all statements that hide devices."""
        function = self._scope(site)
        return not self.hides(site) or all(
            self._runs_after(function, each)
            or (function is self._scope(each) and self._is_below(site, each))
            or self._is_set_first(each, site)
            for each in self._tree.hidden_by
        )

    def asks_anyway(self, site: cst.CSTNode) -> bool:
        """Return whether the function around a site fixes, there or above, which devices are visible, and hides none.

        It does so in the original, too, so that a line of it that chooses the device there changes nothing.
        """
        function = self._scope(site)
        if function is None:
            return False
        setters = {setter.name.value for target in self._tree.hidden_by if (setter := self._scope(target)) is not None}
        words = re.findall(r"\w+", text_of(function))
        if not setters.isdisjoint((*words, *re.findall(r"\w+", self._tree.reached(words)[1]))):
            return False
        above = (each for each in function.body.body if self._tree.line(each) <= self._tree.line(site))
        return any(map(self._asks, above))

    def _asks(self, statement: cst.BaseStatement | cst.BaseSmallStatement) -> bool:
        """Return whether a statement certainly asks a question that fixes which devices are visible."""
        part = statement.test if isinstance(statement, cst.If) else statement
        if isinstance(part, cst.BaseCompoundStatement) or any(True for kind in _PERHAPS for _ in find(part, kind)):
            return False
        return any(self._tree.name(call.func) in _FIXES for call in find(part, cst.Call))

    def is_before(self, site: cst.CSTNode) -> bool:
        """Return whether a site certainly runs before a statement that hides devices, also by a call of its function.

        The module's own lines count as if they ran before what a function does.
        """
        scope, tree = self._scope(site), self._tree
        calls = [call for call in tree.calls if scope is not None and text_of(call.func) == scope.name.value]
        return any(
            tree.line(run) < tree.line(target) and self._scope(run) in (self._scope(target), None)
            for target in tree.hidden_by
            for run in (site, *calls)
        )

    def _is_below(self, site: cst.CSTNode, target: cst.CSTNode) -> bool:
        """Return whether a site is in a statement below one that hides devices, in the same block."""
        holder = self._scope(target) or common_guard([site, target], self._tree.parents)
        first = first_of(self._tree, holder.body if holder is not None else self._tree.module, [site])
        return self._tree.line(first) >= self._tree.line(target)

    def _runs_after(
        self, function: cst.FunctionDef | None, target: cst.CSTNode, callees: tuple[cst.FunctionDef, ...] = ()
    ) -> bool:
        """Return whether a function only runs after a statement that hides devices."""
        tree, setter = self._tree, self._scope(target)
        if function is None or function is setter or function in callees or self._torch_level:
            return False
        name = function.name.value
        calls = [call for call in tree.calls if text_of(call.func) == name]
        if any(tree.line(call) < tree.line(target) and self._scope(call) is setter for call in calls):
            return False
        if tree.spawns:
            return True  # A process that is started has the variables of its parent.
        known = bool(calls) and tree.functions.get(name) is function and tree.uses[name] == len(calls)
        seen = (*callees, function)
        return known and all(
            scope is setter or self._runs_after(scope, target, seen) for scope in map(self._scope, calls)
        )

    def _is_set_first(self, target: cst.CSTNode, site: cst.CSTNode) -> bool:
        """Return whether the guard hides devices before the function around a site can run: nothing above names it."""
        tree, guard = self._tree, common_guard([target], self._tree.parents)
        if guard is None or self._scope(site) is None:
            return False
        lines = [each for each in (*tree.module.body, *guard.body.body) if tree.line(each) < tree.line(target)]
        words = re.findall(r"\w+", "\n".join(run_on_import(line) for line in lines if line is not guard))
        (top,) = (each for each in tree.parents(site) if tree.parent(each) is tree.module)
        return isinstance(top, (cst.FunctionDef, cst.ClassDef)) and top.name.value not in tree.reached(words)[0]
