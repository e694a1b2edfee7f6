"""Place: where a rewritten file gets its device from, under which name, and which lines that adds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import libcst as cst

from accelcore_lint.port.compiled import is_scripted
from accelcore_lint.port.hiding import Hiding, first_inside, first_of, scope_of
from accelcore_lint.port.imports import imports_torch, may_lack_torch
from accelcore_lint.port.rule import Level
from accelcore_lint.port.script_or_library import ScriptOrLibrary
from accelcore_lint.port.syntax import common_guard, is_guard, text_of
from accelcore_lint.port.vendors import DEVICES, GROUPS
from accelcore_lint.port.walk import find

_NAMES = {
    Level.TORCH: ("device", "accelerator", "accelerator_device"),
    Level.ROLES: ("accel", "accelerator", "backend"),
}
_CURRENT = ("current_device", "current_accelerator", *(f"current_device_{n}" for n in range(2, 99)))

DEFAULT = "a default is set when this module is imported, before a script chooses a device: choose it in the function"
"""Reason to leave the default of a parameter."""

_FIXES = re.compile(r"is_available\(|device_count\(|current_device\(|\.(cuda|npu)\(")
"""Questions that fix which devices are visible; a seed waits for the first tensor, and an empty cache asks nothing."""
_ASKS = re.compile(
    r"is_available\(|autocast\(|device_count\(|current_device\(|\.(cuda|npu)\(|seed|memory"
    r"|\.to\([\"'](cuda|npu)|\.(cuda|npu)\.\w+Tensor\(|\.type\((\w+\.)*(cuda|npu)\.\w+Tensor\)"
)
"""Words of lines that ask CUDA which devices there are, as a move does."""

_VENDOR = re.compile(rf"(?i)\b({'|'.join((*DEVICES, *GROUPS))})\b|gpu")
_NAMED = rf"[\"']({'|'.join(DEVICES)})[\"']"
_OF_CALLER = re.compile(
    rf"({_NAMED} in )?(str\()?(?P<name>\w+)[\w.]*\)?"
    rf"( == {_NAMED}|\.startswith\({_NAMED}\)|(?<=cuda)|(?<=gpu))( and .*)?"
)
"""A condition on what a caller has chosen: the name of a device, or a flag."""
_CLOCK = re.compile(
    r"(?m)^([\w.]+) *= *([\w.]*\.)?(time|perf_counter|monotonic|process_time|default_timer|now)(_ns)?\(\)\s*(#.*)?$"
)
"""A line that reads a clock."""

_NUMBERED = re.compile(r"(\.to\(|\bdevice *= *)(?![\w.]*dev)[\w.]+ *[,)]")
"""A device that may be given as this rank's number."""

_OPTIONAL = "the file goes on where torch is missing: choose the device where it is there"
LATE = "the file imports torch in functions only: choose the device there"


class UnplacedError(Exception):
    """No line in the file can choose the device for an expression; the message is the reason."""


class Place:
    """The name of the device in the rewritten file.

    With TORCH this is a `torch.device`, of the accelerator if there is one. With ROLES and TRAINER it is the backend.
    The line that makes it goes into the one function that needs it, if the script calls that function once. Otherwise
    it goes before the first statement of the module that needs it. A script that already has such a line keeps it.

    A script that starts its own ranks chooses the backend in the function that they run. Its other functions take the
    current device, which that choice has set. So does a module without a script, in each of its functions: another file
    may choose the device, or hide some, after this one is imported.

    Args:
        tree: of the file.
        by_hand: whether the script makes a device current by its own rules, which all expressions must then follow.
        contexts: calls that make a vendor's device current in a `with`.

    Attributes:
        name: of the device, or of the backend.
        current: the name of torch's current device.
    """

    def __init__(self, tree: ScriptOrLibrary, *, by_hand: bool, contexts: Sequence[cst.CSTNode]) -> None:
        self._tree = tree
        self._contexts = contexts
        self._may_lack_torch = may_lack_torch(tree)
        self.by_hand = by_hand
        taken, made = tree.identifiers, tree.helpers
        self._torch_level = tree.level is Level.TORCH
        torch = tree.torch
        self._current_value = f'{torch}.accelerator.current_accelerator(check_available=True) or {torch}.device("cpu")'
        self._unchecked = f'({torch}.accelerator.current_accelerator() or {torch}.device("cpu"))'
        self._value = self._current_value if self._torch_level else "accelcore.select()"
        candidates = _NAMES[Level.TORCH if self._torch_level else Level.ROLES]
        device = made.get(self._value)
        chosen = [device] if device else [] if self._torch_level else list(tree.backends)
        self._existing = {scope_of(self._tree, name): name for name in chosen}
        free = (name for name in (*candidates, *(f"{candidates[-1]}_{n}" for n in range(2, 99))) if name not in taken)
        self.name = chosen[0].value if chosen else next(free)
        self._hiding = Hiding(tree, at_torch_level=self._torch_level)
        remedy = "set it where the script is started" if self._torch_level else "choose the device by ACCEL_DEVICE"
        self._hidden = f"an environment variable may hide devices: {remedy} instead"
        self._sites: list[cst.CSTNode] = []
        self._local: dict[tuple[cst.FunctionDef, str], list[cst.CSTNode]] = defaultdict(list)
        current = made.get(self._current_value)
        self.current = current.value if current else next(name for name in _CURRENT if name not in taken)
        self._has_current = current is not None
        self._current_sites: list[cst.CSTNode] = []
        self._asking: list[cst.CSTNode] = []

    def device(self, site: cst.CSTNode) -> str:
        """Return the source of the `torch.device` for an expression.

        Raises:
            UnplacedError: the device cannot be chosen before this expression.
        """
        if is_scripted(site, self._tree):
            raise UnplacedError(
                "torch.jit.script compiles this function or may do so: compiled code asks for no device"
            )
        if self._in_context(site):
            raise UnplacedError("the device of the context around this line, which is one vendor's")
        if self._may_lack_torch:
            raise UnplacedError(_OPTIONAL)
        if self._tree.is_library and not self._tree.imports_torch:
            raise UnplacedError(LATE)
        is_default = (self._tree.is_library or self._tree.has_guard) and self._tree.is_default(site)
        if is_default and self._tree.submits:
            raise UnplacedError(DEFAULT)
        if is_default or ((self._tree.is_library or self._tree.known.steered) and self._is_new_question(site)):
            if self._tree.has_torch_name and not self._tree.has_torch_above(site):
                raise UnplacedError(DEFAULT)
            self._asking.append(site)
            # A check would fix which devices are visible, and an import of the original does not.
            default = self._tree.in_default(site)
            asks = self._asks(site) if default is None else _ASKS.search(text_of(default)) is not None
            checks = (is_default and (asks or self._tree.may_ask_on_import)) or (asks and self._in_lambda(site))
            return f"({self._current_value})" if checks else self._unchecked
        function, hidden = scope_of(self._tree, site), self._hiding.hides(site)
        forks = (call for call in self._tree.forking if self._tree.line(call) > self._tree.line(site))
        below = function in (scope_of(self._tree, call) for call in forks) and not self._asks(site)
        if below or self._tree.names_before_fork([site, *self._tree.parents(site)], function):
            self._asking.append(site)  # A process that is forked below cannot use CUDA if its parent asked for it.
            return self._unchecked
        takes_current = self.is_apart(site) or (hidden and self._is_repeated(function))
        is_placed = self._hiding.is_placed(site) or self._hiding.asks_anyway(site)
        if not self._torch_level and takes_current and is_placed:
            if hidden and function is not None and not isinstance(function.body, cst.IndentedBlock):
                raise UnplacedError("the function is one line: give it a line that chooses the device")
            if self._tree.forks and function is None:
                raise UnplacedError("processes are forked after this line, which must not ask for a device before")
            if (
                (self._tree.hidden_by or self._tree.is_library or self._tree.forks or self._tree.known.steered)
                and function is not None
                and isinstance(function.body, cst.IndentedBlock)
            ):
                self._local[self._running(site, function), f"{self.current} = {self._current_value}"].append(site)
            else:
                self._current_sites.append(site)
            return self.current
        name = self.backend(site)
        return name if self._torch_level else f"{name}.device"

    def _is_new_question(self, site: cst.CSTNode) -> bool:
        """Return whether a site is evaluated on import, by a line that asks no device in the original."""
        around = [site, *self._tree.parents(site)]
        if scope_of(self._tree, site) is not None or any(map(is_guard, around)):
            return False
        return self._in_lambda(site) or not self._asks(site)

    def _in_lambda(self, site: cst.CSTNode) -> bool:
        return any(isinstance(outer, cst.Lambda) for outer in self._tree.parents(site))

    def _asks(self, site: cst.CSTNode, question: re.Pattern[str] = _ASKS) -> bool:
        """Return whether the line of a site, or a condition on it, asks for devices in the original."""
        around = [site, *self._tree.parents(site)]
        line = next(outer for outer in around if isinstance(outer, (cst.Decorator, cst.BaseStatement)))
        tests = [outer.test for outer in around if isinstance(outer, cst.If)]
        return any(question.search(text_of(part)) for part in (line, *tests))

    def kind(self, site: cst.CSTNode) -> str:
        """Return the source of the device's type, a string. Raises as `device`."""
        return f"{self.device(site)}.type"

    def backend(self, site: cst.CSTNode) -> str:
        """Return the source of the backend, at the levels that have one. Raises as `device`."""
        if reason := self._obstacle(site):
            raise UnplacedError(reason)
        if (chosen := self._chosen_for(site)) is not None:
            return chosen.value
        self._use(site)
        return self.name

    def check_question(self, site: cst.CSTNode) -> None:
        """Raise an error if a line that asks for no device in the original must not ask: some are hidden below it."""
        if self._hiding.is_before(site) and not self._asks(site, _FIXES):
            raise UnplacedError(self._hidden)

    def forget(self, site: cst.CSTNode) -> None:
        """Take back what was asked for an expression that is left after all."""
        for sites in (self._sites, self._current_sites, self._asking, *self._local.values()):
            sites[:] = [each for each in sites if each is not site]
        self._local = defaultdict(list, {key: sites for key, sites in self._local.items() if sites})

    def can_choose(self, site: cst.CSTNode) -> bool:
        """Return whether `backend` has one for an expression; never at level TORCH."""
        return not (self._torch_level or self._obstacle(site))

    def _chosen_for(self, site: cst.CSTNode) -> cst.Name | None:
        """Return the name of a device that the script already chooses, in the function around a site or before."""
        return self._existing.get(scope_of(self._tree, site)) or self._existing.get(None)

    def _use(self, site: cst.CSTNode) -> None:
        function = scope_of(self._tree, site)
        tree = self._tree
        late = self._hiding.hides(site) and not tree.spawns
        if self._torch_level:
            late = late or tree.is_library or tree.forks or tree.known.forks
        if function is not None and late and isinstance(function.body, cst.IndentedBlock):
            self._local[self._running(site, function), f"{self.name} = {self._value}"].append(site)
        else:
            self._sites.append(site)

    def _obstacle(self, site: cst.CSTNode) -> str:
        if self._may_lack_torch:
            return _OPTIONAL
        function = scope_of(self._tree, site)
        is_apart = not self._torch_level and self.is_apart(site)
        if self._tree.imports_late and function is not None and not self._is_program(function):
            return LATE
        if not self._hiding.is_placed(site) or (
            not is_apart and self._is_repeated(function) and self._hiding.hides(site)
        ):
            return self._hidden
        if is_apart:
            return "the script chooses the device of this process itself: do this where its backend is known"
        if self._existing:
            chosen = self._chosen_for(site)
            if chosen is None:
                return "the backend is chosen in another function: pass it to this one"
            early = function is scope_of(self._tree, chosen) and self._tree.line(site) < self._tree.line(chosen)
            return "the device is chosen below this line" if early else ""
        return ""

    def _in_context(self, site: cst.CSTNode) -> bool:
        """Return whether a site is in a `with torch.cuda.device(index):`."""
        return any(
            item.item in self._contexts
            for outer in self._tree.parents(site)
            if isinstance(outer, cst.With)
            for item in outer.items
        )

    def is_apart(self, site: cst.CSTNode) -> bool:
        """Return whether a site takes the current device, as that of the process is chosen elsewhere.

        It is apart if the script starts the process, but not in the function around the site, or chooses by hand.
        """
        function = scope_of(self._tree, site)
        if self._tree.has_guard and self._tree.in_default(site):
            return True  # it is set when another file imports this one
        return self.by_hand or (
            self._tree.spawns
            and (function is None or function.name.value not in {*self._tree.spawned} - self.of_callers)
        )

    @cached_property
    def of_callers(self) -> set[str]:
        """Return the spawned functions that only use CUDA below a condition of their caller, as `if args.cuda:`.

        The caller has chosen the device: perhaps the CPU, as there are fewer devices than ranks.
        """
        tree, found = self._tree, set()
        for name in tree.spawned:
            body = tree.functions[name].body
            branches: list[cst.If | cst.IfExp] = [*find(body, cst.If), *find(body, cst.IfExp)]
            asked = [(each, _OF_CALLER.fullmatch(text_of(each.test))) for each in branches]
            guards = {each for each, name in asked if name and tree.is_given(name["name"], each)}
            parts: list[cst.Name | cst.SimpleString | cst.FormattedStringText] = [*find(body, cst.Name)]
            parts += [*find(body, cst.SimpleString), *find(body, cst.FormattedStringText)]
            words = (node for node in parts if _VENDOR.search(node.value))
            guarded = all(not guards.isdisjoint(tree.parents(node)) for node in words)
            if guards and guarded and not _NUMBERED.search(text_of(body)):
                found.add(name)
        return found

    def lines(self) -> dict[cst.CSTNode, str]:
        """Return the lines to add, by the statement before which each is added."""
        tree = self._tree
        found = [(first_inside(tree, function.body, sites), line) for (function, line), sites in self._local.items()]
        if self._current_sites and not self._has_current:
            guard = common_guard(self._current_sites, self._tree.parents)
            block = guard.body if guard is not None else tree.module
            found.append((first_of(self._tree, block, self._current_sites), f"{self.current} = {self._current_value}"))
        if not self._existing and self._sites:
            found += self._backend_lines().items()
        added: dict[cst.CSTNode, str] = {}
        for below, line in found:
            statement = self._above_clock(below)
            added[statement] = f"{added[statement]}\n{line}" if statement in added else line
        return added

    def _above_clock(self, statement: cst.CSTNode) -> cst.CSTNode:
        """Return the statement of the same block that reads a clock for a time that would hold the choice of a device.

        That is the statement itself if there is none, or if the device cannot be chosen earlier.
        """
        block, tree = self._tree.parent(statement), self._tree
        if not isinstance(block, (cst.IndentedBlock, cst.Module)) or tree.hidden_by or tree.forks:
            return statement
        at = next(n for n, each in enumerate(block.body) if each is statement)
        after = "".join(map(text_of, block.body[at:]))
        clocks = [(n, _CLOCK.search(text_of(each))) for n, each in enumerate(block.body[:at])]
        first = next((n for n, made in clocks if made and re.search(rf"- *{made[1]}\b", after)), at)
        passed = block.body[first:at]
        late = any(True for each in passed for kind in (cst.Import, cst.ImportFrom) for _ in find(each, kind))
        return statement if late or "environ" in "".join(map(text_of, passed)) else block.body[first]

    def _backend_lines(self) -> dict[cst.CSTNode, str]:
        tree = self._tree
        scopes = {scope_of(self._tree, site) for site in self._sites}
        if not self._torch_level and tree.spawns:
            return {
                first_of(self._tree, scope.body, self._sites): f"{self.name} = accelcore.select({self._rank(scope)})"
                for scope in scopes
                if scope is not None
            }
        line = f"{self.name} = {self._value}"
        (scope, *others) = scopes
        if scope is not None and not others and self._is_program(scope):
            return {first_of(self._tree, scope.body, self._sites): line}
        if scopes == {None} and (guard := common_guard(self._sites, self._tree.parents)) is not None:
            return {first_of(self._tree, guard.body, self._sites): line}
        if not self._torch_level and self._is_for_functions():
            line = f'if __name__ != "__mp_main__":\n    {line}'
        return {first_of(self._tree, tree.module, self._sites): line}

    def _is_program(self, function: cst.FunctionDef) -> bool:
        """Return whether a function runs once, so that it is the place to choose a device."""
        return self._tree.is_called_once(function) or function is self._tree.functions.get("main")

    def _is_for_functions(self) -> bool:
        """Return whether a module with a guard needs the backend in functions only, and not to import the module.

        A process that is spawned, as by a DataLoader with workers, imports the script again, as `__mp_main__`. If it
        runs a function that needs the backend, it selects for itself.
        """
        guards = [each for each in self._tree.module.body if is_guard(each)]
        around = [list(self._tree.parents(site)) for site in self._sites if scope_of(self._tree, site) is None]
        inside = all(any(guard in outer for guard in guards) for outer in around)
        lines = (line for site in self._sites for line in (site, *self._tree.parents(site)))
        tops = (line for line in lines if self._tree.parent(line) is self._tree.module)
        names = {line.name.value for line in tops if isinstance(line, (cst.FunctionDef, cst.ClassDef))}
        return bool(guards) and inside and not names & self._tree.in_workers

    def _rank(self, function: cst.FunctionDef) -> str:
        """Return the rank of a function that the script starts, as an argument; -1 means a single process there.

        It is no device's number if the function does not use it as one.
        """
        if not self._tree.chooses_by_rank(function):
            return ""
        name = self._tree.spawned[function.name.value]
        asks = re.search(rf"\b{name} *((==|!=|>|<) *-1|(>=|<) *0)\b", text_of(function))
        passes = f"{function.name.value}(-1" in self._tree.code
        return f"local_rank=max({name}, 0)" if asks or passes else f"local_rank={name}"

    def imports(self) -> set[str]:
        """Return the import statements that those lines need."""
        local = {line.split(" = ")[0] for _, line in self._local}
        chooses = self._sites or self.name in local
        needed = {"import accelcore"} if chooses and not self._torch_level else set()
        asking = [sites for (_, line), sites in self._local.items() if "accelcore" not in line]
        asking += [self._current_sites, self._sites if self._torch_level else []]
        made = (statement for statement, lines in self.lines().items() if ".accelerator." in lines)
        nodes = (*made, *self._asking, *(site for sites in asking for site in sites))
        late = all(imports_torch(self._tree, node) for node in nodes)
        return needed if late else needed | {self._tree.torch_import}

    def _running(self, site: cst.CSTNode, function: cst.FunctionDef) -> cst.FunctionDef:
        """Return the function that runs when a site does: the one that a process runs, or that a decorator returns.

        A decorator of a module runs when that is imported. What starts a process runs in its parent.
        """
        inside = [each for each in self._tree.parents(site) if isinstance(each, cst.FunctionDef)]
        inside = inside[: inside.index(function)]
        while inside:
            inner = inside.pop()
            word = rf"\b{inner.name.value}\b"
            started = any(re.search(word, text_of(call)) for call in self._tree.forking)
            returned = self._tree.is_library and re.search(rf"\breturn\b.*{word}", text_of(function.body))
            is_around = isinstance(inner.body, cst.IndentedBlock) and inner.body in self._tree.parents(site)
            if not ((started or returned) and is_around):
                break
            function = inner
        return function

    def _is_repeated(self, function: cst.FunctionDef | None) -> bool:
        """Return whether a function of this process may run more than once: choosing a device each time is slow."""
        return function is not None and not (self._tree.spawns or self._tree.is_called_once(function))
