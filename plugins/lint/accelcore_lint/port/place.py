"""Place: where a rewritten file gets its device from, under which name, and which lines that adds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import libcst as cst

from accelcore_lint.port.model import Level

if TYPE_CHECKING:
    from accelcore_lint.port.facts import Facts

__all__ = ["Place", "UnplacedError"]

_NAMES = {Level.TORCH: ("device", "accelerator", "accelerator_device"), Level.ROLES: ("accel", "accelerator", "backend")}
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")

Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement


class UnplacedError(Exception):
    """No line in the file can choose the device for an expression; the message is the reason."""


class Place:
    """The name of the device in the rewritten file.

    With TORCH this is a `torch.device`, of the accelerator if there is one. With ROLES and TRAINER it is the backend.
    The line that makes it goes into the one function that needs it, if the script calls that function once. Otherwise
    it goes before the first statement of the module that needs it.

    Args:
        facts: those of the file.
        taken: all identifiers of the file.
        made: names that the module assigns, by the source of their value.
    """

    def __init__(self, facts: Facts, taken: set[str], made: Mapping[str, str]) -> None:
        self._facts = facts
        self._torch_level = facts.level is Level.TORCH
        self._value = (
            f'{facts.torch}.accelerator.current_accelerator(check_available=True) or {facts.torch}.device("cpu")'
            if self._torch_level
            else "accelcore.select()"
        )
        candidates = _NAMES[Level.TORCH if self._torch_level else Level.ROLES]
        existing = made.get(self._value)
        free = (name for name in (*candidates, *(f"{candidates[-1]}_{n}" for n in range(2, 99))) if name not in taken)
        self.name = existing or next(free)
        self._existing = existing is not None
        self._sites: list[cst.CSTNode] = []

    def device(self, site: cst.CSTNode) -> str:
        """Return the source of the `torch.device` for an expression.

        Raises:
            UnplacedError: the device cannot be chosen before this expression.
        """
        self._use(site)
        return self.name if self._torch_level else f"{self.name}.device"

    def kind(self, site: cst.CSTNode) -> str:
        """Return the source of the device's type, a string. Raises as `device`."""
        return f"{self.device(site)}.type"

    def backend(self, site: cst.CSTNode) -> str:
        """Return the source of the backend, at the levels that have one. Raises as `device`."""
        self._use(site)
        return self.name

    def _use(self, site: cst.CSTNode) -> None:
        if reason := self._obstacle(site):
            raise UnplacedError(reason)
        self._sites.append(site)

    def _obstacle(self, site: cst.CSTNode) -> str:
        facts = self._facts
        if self._torch_level or self._existing:
            return ""
        function = self._scope(site)
        if facts.spawns() and (function is None or function.name.value not in facts.spawned()):
            return "this runs in processes that the script starts itself: pass the device or the backend to it"
        for call in _visible_devices(facts):
            setter = facts.function_of(call)
            if setter is not None and (setter is not function or facts.line(site) < facts.line(call)):
                return "the devices are restricted by an environment variable after this line is set up: use ACCEL_DEVICE"
        return ""

    def lines(self) -> dict[cst.CSTNode, str]:
        """Return the lines to add, by the statement before which each is added."""
        if self._existing or not self._sites:
            return {}
        facts = self._facts
        scopes = {self._scope(site) for site in self._sites}
        spawned = facts.spawned()
        if not self._torch_level and facts.spawns():
            return {
                self._first(scope.body, self._sites): f"{self.name} = accelcore.select(local_rank={spawned[scope.name.value]})"
                for scope in scopes
                if scope is not None
            }
        line = f"{self.name} = {self._value}"
        (scope, *others) = scopes
        if scope is not None and not others and self._called_once(scope):
            return {self._first(scope.body, self._sites): line}
        if scopes == {None} and (guard := self._common_guard()) is not None:
            return {self._first(guard.body, self._sites): line}
        return {self._first(facts.module, self._sites): line}

    def imports(self) -> set[str]:
        """Return the import statements that those lines need."""
        if not self._sites:
            return set()
        return {"import torch"} if self._torch_level else {"import accelcore"}

    def _scope(self, site: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the outermost function whose body holds a site."""
        found, inner = None, site
        for outer in self._facts.parents(site):
            if isinstance(outer, cst.FunctionDef) and inner is outer.body:
                found = outer
            inner = outer
        return found

    def _called_once(self, function: cst.FunctionDef) -> bool:
        """Return whether the module calls a function of its own in one place that is not in a loop."""
        name = function.name.value
        if self._facts.functions.get(name) is not function or not isinstance(function.body, cst.IndentedBlock):
            return False
        calls = [call for call in self._facts.calls if isinstance(call.func, cst.Name) and call.func.value == name]
        return len(calls) == 1 and not any(
            isinstance(outer, (cst.FunctionDef, cst.For, cst.While)) for outer in self._facts.parents(calls[0])
        )

    def _common_guard(self) -> cst.If | None:
        """Return the module's `if __name__ == "__main__":` if all sites are in its body."""
        found = set()
        for site in self._sites:
            inner = site
            for outer in self._facts.parents(site):
                if isinstance(outer, cst.Module):
                    found.add(inner)
                inner = outer
        if len(found) != 1:
            return None
        (guard,) = found
        is_guard = (
            isinstance(guard, cst.If)
            and isinstance(guard.test, cst.Comparison)
            and isinstance(guard.test.left, cst.Name)
            and guard.test.left.value == "__name__"
            and isinstance(guard.body, cst.IndentedBlock)
            and guard.orelse is None
        )
        return guard if is_guard else None

    def _first(self, block: cst.BaseSuite | cst.Module, sites: list[cst.CSTNode]) -> cst.CSTNode:
        """Return the first statement of a block that holds one of the sites."""
        around = {id(outer) for site in sites for outer in (site, *self._facts.parents(site))}
        return next(statement for statement in block.body if id(statement) in around)


def _visible_devices(facts: Facts) -> list[cst.CSTNode]:
    """Return the places that assign the variables by which a vendor's runtime hides devices."""
    found: list[cst.CSTNode] = []

    class Find(cst.CSTVisitor):
        def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
            if any(name in cst.Module([]).code_for_node(node) for name in _VISIBLE):
                found.append(node)

    facts.module.visit(Find())
    return found
