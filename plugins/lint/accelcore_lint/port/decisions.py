"""What is done with each node: the rules are asked, and conditions wait until it is known what they guard."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import replace
from typing import cast

import libcst as cst

from accelcore_lint.port.facts import SUMMARISED, Facts
from accelcore_lint.port.guards import (
    GUARDS,
    Guard,
    Test,
    body_of,
    empty_in,
    end_of,
    flag_in,
    forks_cudas,
    is_foreign,
    is_portable,
    is_tried,
    names_in,
    set_in,
    tests_of,
    turned_off,
)
from accelcore_lint.port.imports import brought_for_one, imports_torch
from accelcore_lint.port.place import LATE, UnplacedError
from accelcore_lint.port.questions import (
    PARTS,
    asserts,
    corrects,
    divides,
    flag_of,
    guard_of,
    is_only_asked,
    members_in,
    name_of,
    passed_as,
    precedes_other,
)
from accelcore_lint.port.removed import removed, removed_suite
from accelcore_lint.port.rule import Left, Note, Rewrite, Rule
from accelcore_lint.port.rules import RULES
from accelcore_lint.port.rules.availability import HIDES, WITHOUT_CAUSE
from accelcore_lint.port.rules.device_strings import BEGINS
from accelcore_lint.port.splits import is_idle, is_split, places
from accelcore_lint.port.syntax import is_import, loses_comment, reasons_above, text_of
from accelcore_lint.port.walk import find

KEPT_IMPORT = "kept import"
"""Rule of notes on imports in branches that stay."""

_FAILS = ("unknown name", "unknown function", "device call", "wait", "load", "move", KEPT_IMPORT)
"""Rules by which lines are left that raise an error on other devices. These ran without them so far."""

_QUESTIONS = ("condition", "is_cuda", "device check")
"""Rules of conditions."""

_TRIED = "a use of one vendor's device by which the script asks whether there is one: ask for accel.device.type instead"
_FORKS = "devices of torch.random.fork_rng: give it their type, too, by device_type="
_ASKED = re.compile(r"(?<![\w\"'])([^\W\d]\w*)(?:\(\))?(?![\w.(\"'])|[\[(][\"'](\w+)[\"'][\])]")
"""A flag in a condition: a name, an attribute, a key, or a function without arguments."""

_COMPOUND = (cst.SimpleStatementLine, cst.BaseCompoundStatement)


class Decisions(cst.CSTVisitor):
    """Asks the rules about each node, from the outside to the inside.

    A statement below a comment of an earlier run stays as it is: what that run has rewritten may have been the reason.

    `kept`: modules of one vendor whose imports stay.
    """

    def __init__(self, facts: Facts, kept: frozenset[str]) -> None:
        super().__init__()
        self._facts, self._kept_modules = facts, kept
        self._rules: dict[type[cst.CSTNode], list[Rule]] = defaultdict(list)
        for rule in RULES:
            for kind in rule.nodes:
                self._rules[kind].append(rule)
        self._claimed: set[int] = set()
        self._was_left: list[bool] = []
        self._waiting: dict[cst.CSTNode, list[tuple[Guard, Rule, cst.CSTNode, Left]]] = defaultdict(list)
        self._named: dict[cst.CSTNode, list[tuple[str, Rule, cst.CSTNode, Left]]] = defaultdict(list)
        self._guarded: list[tuple[cst.CSTNode, str, bool, bool]] = []
        self._placing: list[str] = []
        self._foreign: list[tuple[cst.CSTNode, str]] = []
        self._shut: set[cst.CSTNode] = set()
        self._left_lines: list[tuple[cst.CSTNode, set[str]]] = []
        self._scopes: set[cst.CSTNode] = set()
        self._unset: dict[str, str] = {}
        self._kept_in: set[cst.CSTNode] = set()
        self._fixed: set[cst.CSTNode | None] = set()
        self._marks: dict[cst.CSTNode, tuple[int, int, int]] = {}
        self.rewrites: dict[cst.CSTNode, Rewrite] = {}
        self.comments: dict[cst.CSTNode, list[str]] = defaultdict(list)
        self.imports: set[str] = set()
        self.rewritten: list[Note] = []
        self.left: list[Note] = []
        self.harmless: list[Note] = []
        self._split = False
        self._flags: set[str] = set()
        self.answers: set[str] = set()

    @property
    def closed(self) -> set[str]:
        """Return the flags in conditions above lines that are all left, or above a vendor's tools."""
        tests = [test for _, test, closed, _ in self._guarded if closed] + [test for _, test in self._foreign]
        return {name or key for test in tests for name, key in _ASKED.findall(test)}

    @property
    def splits(self) -> bool:
        """Return whether a question that was left decides where something is, also by a flag."""
        asked = "|".join(map(re.escape, self._flags))
        return self._split or (
            bool(asked) and any(re.search(rf"(?<![\w.])({asked})\b", test) for test in self._placing)
        )

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, _COMPOUND):
            reasons = reasons_above(node, self._facts.module)
            self._was_left.append(bool(reasons))
            if not is_import(node):
                self.left += [Note(self._facts.line(node), "earlier run", reason) for reason in reasons]
                choices = find(node, cst.IfExp) if isinstance(node, cst.SimpleStatementLine) else ()
                self._split = self._split or (bool(reasons) and any(map(is_split, (node, *choices))))
        if isinstance(node, (cst.Import, cst.ImportFrom)) and brought_for_one(node) & self._kept_modules:
            self._add_kept_import(node)
        if self._was_left and self._was_left[-1]:
            return True
        if id(node) in self._claimed or isinstance(node, (cst.Import, cst.ImportFrom)):
            return False
        for rule in self._rules.get(type(node), ()):
            decision = self._decide(rule, node)
            if decision is None:
                continue
            self._claimed.update(map(id, decision.claims))
            if isinstance(decision, Rewrite):
                self._rewrite(rule, node, decision)
                return True
            guard = guard_of(node, self._facts) if decision.retry is not None else None
            name = name_of(node, self._facts) if guard is None and decision.retry is not None else ""
            name = name or turned_off(guard, self._facts.code) or flag_in(guard)
            guard = None if name else guard
            if decision.some and guard is None and not name:
                around = itertools.takewhile(lambda outer: isinstance(outer, PARTS), self._facts.parents(node))
                guard = next((each for each in reversed([*around]) if isinstance(each, cst.BooleanOperation)), None)
            is_asked = decision.some or is_only_asked(name, node, self._facts)
            if guard is None and decision.retry is not None and is_asked:
                # Other methods ask an attribute, too.
                is_shared = "." in name or (name and passed_as(name, self._facts))
                scope = self._facts.module if is_shared else self._scope_of(node)
                self._named[scope].append((name, rule, node, decision))
            elif guard is None:
                self._leave(rule, node, decision)
            else:
                self._waiting[end_of(guard, self._facts.parent)].append((guard, rule, node, decision))
            return decision.inner
        if isinstance(node, GUARDS) or tests_of(node):
            self._marks[node] = (*self._done(), len(self.left))
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, _COMPOUND):
            self._was_left.pop()
        for guard, rule, node, decision in self._waiting.pop(original_node, ()):
            rewritten, actions, left = self._marks[guard]
            done = self._done()
            whole = all(note.rule == "replicas" for note in self.left[left:])  # DataParallel works on other devices
            some = done[0] > rewritten or len(self.left) > left or is_portable(guard, self._facts.is_whole)
            opens = (done[1] > actions or whole) if decision.some else (some and whole)
            fails = body_of(guard) in self._fixed or any(note.rule in _FAILS for note in self.left[left:])
            if decision.some and fails:
                opens = False
            if original_node is not guard or isinstance(guard, Test):
                opens = whole and (some or decision.some)  # what follows an early return, or a test
            foreign = any(is_foreign(test, guard, self._facts.extensions) for test in tests_of(guard))
            foreign = foreign or (original_node is self._facts.module and bool(self._facts.extensions))
            lacks = {self._unset[name] for name in names_in(body_of(guard)) & self._unset.keys()}
            if lacks or foreign:
                opens = False  # it uses what a condition that was left sets, or a vendor's other tools
            if isinstance(guard, cst.If):
                opens = opens and not corrects(guard, self._facts, self.left)
                opens = opens and not precedes_other(guard, self._facts, self.rewrites)
            holder = next((each for each in self._facts.parents(guard) if isinstance(each, cst.ClassDef)), None)
            if not (opens or fails or len(self.left) > left):
                decision = self._without_cause(decision, lacks)
            decision, opens = self._kept(rule, node, decision, opens=opens)
            if opens and decision.some and (holder is not None or asserts(node, self._facts)):
                # Other methods may set what this one reads, and questions below this one may stay.
                self._named[holder or self._scope_of(node)].append(("", rule, node, decision))
            elif opens and decision.retry is not None:
                self._rewrite(rule, node, decision.retry)
            else:
                self._leave(rule, node, decision)
                names = set_in(guard) | empty_in(guard, self._facts.parent)
                self._unset |= dict.fromkeys(names, decision.reason)

        if self._empties(original_node) and self.comments.pop(original_node, []):  # it goes with what it guards
            line = self._facts.line(original_node)
            self.left = [note for note in self.left if note.line != line]
        if original_node in self._marks:
            _, actions, left = self._marks[original_node]
            actions = self._done()[1] - actions
            lines = sum(note.rule != "replicas" for note in self.left[left:])
            imports = any(note.rule == KEPT_IMPORT for note in self.left[left:])
            closed = imports or (lines > 0 and (isinstance(original_node, Test) or not actions))
            if isinstance(original_node, cst.For):
                self._guarded.append((self._scope_of(original_node), text_of(original_node.iter), closed, not lines))
            for test in tests_of(original_node):
                self._placing += [text_of(test)] if places(original_node) else []
                whole = not lines and (actions > 0 or is_portable(original_node, self._facts.is_whole))
                self._guarded.append((self._scope_of(original_node), text_of(test), closed, whole))
                if is_foreign(test, cast("Guard", original_node), self._facts.extensions):
                    self._foreign.append((self._scope_of(original_node), text_of(test)))
        # What asserts that there is a device stays if another question in its function does: they are asked last.
        for name, rule, node, decision in sorted(
            self._named.pop(original_node, ()), key=lambda each: asserts(each[2], self._facts)
        ):
            is_open = self._opens(name, original_node, some=decision.some)
            stays = self._scope_of(node) in self._kept_in or self._facts.parent(self._statement(node)) in self._fixed
            is_open = is_open and not (asserts(node, self._facts) and stays)
            is_open = is_open and self._shut.isdisjoint(self._facts.parents(node))
            is_open = is_open and self._facts.function_of(node) not in self._fixed
            if is_open and isinstance(original_node, cst.ClassDef):
                is_open = self._unset.keys().isdisjoint(members_in(node, self._facts))
            decision, is_open = self._kept(rule, node, decision, opens=is_open)
            if decision.retry is not None and is_open:
                self._rewrite(rule, node, decision.retry)
            else:
                self._leave(rule, node, decision)

    def _kept(self, rule: Rule, node: cst.CSTNode, decision: Left, *, opens: bool) -> tuple[Left, bool]:
        """Return a decision and whether it opens, which no question for a device does in a program that keeps them.

        A question whose answer changes no result opens there, too.
        """
        keeps = opens and rule.name == "device check" and self._facts.keeps(node)
        if keeps and not (is_idle(guard := guard_of(node, self._facts)) or self._empties(guard)):
            return replace(decision, reason=keeps), False
        return decision, opens

    def _without_cause(self, decision: Left, lacks: set[str]) -> Left:
        """Return a decision that does not name lines below its question as left, as there are none.

        `lacks`: the reasons to leave the conditions that set what those lines use.
        """
        keeps = self._facts.keeps_questions
        reason = WITHOUT_CAUSE.get(decision.reason)
        return replace(decision, reason=keeps if lacks == {keeps} else reason) if reason else decision

    def _empties(self, guard: cst.CSTNode | None) -> bool:
        """Return whether all that an `if` guards is removed, so that its answer decides nothing."""
        body = guard.body if isinstance(guard, cst.If) else None
        lines = body.body if isinstance(body, cst.IndentedBlock) else filter(None, [body])
        gone = [line in self.rewrites and self.rewrites[line].build in (removed, removed_suite) for line in lines]
        return bool(gone) and all(gone) and cst.ensure_type(guard, cst.If).orelse is None

    def _add_kept_import(self, node: cst.CSTNode) -> None:
        """Count an import below an `if` that stays as a line that is left. Another pass reports it."""
        if any(isinstance(outer, cst.If) for outer in self._facts.parents(node)):
            self.left.append(Note(self._facts.line(node), KEPT_IMPORT, ""))

    def _scope_of(self, node: cst.CSTNode) -> cst.CSTNode:
        scope = self._facts.function_of(node) or self._facts.module
        self._scopes.add(scope)
        return scope

    def _opens(self, name: str, scope: cst.CSTNode, *, some: bool) -> bool:
        """Return whether each condition that asks a name in its scope guards something rewritten, or nothing left.

        A test that the name skips must have nothing left. A line that is left and has the name keeps it as it is.
        Unless `some` is enough, each condition must guard something rewritten, and nothing left.
        """
        if not name:
            return True
        names = [re.escape(name), *(rf"(?:self\.)?{each}" for each in passed_as(name, self._facts))]
        asks = re.compile(rf"(?<![\w.])(?:{'|'.join(names)})\b")
        places = {scope, *([] if scope is not self._facts.module else self._scopes)}
        if any(place in places and name in names for place, names in self._left_lines):
            return False
        if any(place in places and asks.search(test) for place, test in self._foreign):
            return False
        asked = [
            (closed, whole) for place, test, closed, whole in self._guarded if place in places and asks.search(test)
        ]
        return not any(closed if some else not whole for closed, whole in asked)

    def _done(self) -> tuple[int, int]:
        """Return how often something was rewritten, or is ignored elsewhere, and how often a device then does more."""
        idle = sum(note.rule in ("device check", "switch") for note in self.rewritten)
        return len(self.rewritten) + len(self.harmless), len(self.rewritten) - idle

    def _rewrite(self, rule: Rule, node: cst.CSTNode, decision: Rewrite) -> None:
        self.rewrites[node] = decision
        late = {self._facts.torch_import} if imports_torch(self._facts, node) else set()
        self.imports.update(set(decision.imports) - late)
        self.rewritten.append(Note(self._facts.line(node), rule.name, text_of(node).split("\n", 1)[0]))
        if rule.name == "device check" and "is_available" in text_of(node):
            self.answers |= {flag_of(node, self._facts)} - {""}

    def _would_import(self, node: cst.CSTNode, decision: Rewrite) -> bool:
        """Return whether a rewrite needs torch by a line at the top of a file that imports it in functions only."""
        needs = self._facts.torch_import in decision.imports and not imports_torch(self._facts, node)
        return needs and self._facts.imports_late

    def _leave(self, rule: Rule, node: cst.CSTNode, decision: Left) -> None:
        self._facts.place.forget(node)
        if rule.name == "device check":
            self._kept_in.add(self._scope_of(node))
        begins = decision.reason == BEGINS  # `name.startswith("cuda")`, of which the node is the text
        question = next(each for each in self._facts.parents(node) if isinstance(each, cst.Call)) if begins else node
        if (guard := guard_of(question, self._facts)) is not None:
            self._shut.add(body_of(guard))
        note = Note(self._facts.line(node), rule.name, decision.reason)
        if decision.harmless:
            self.harmless.append(note)
            return
        self.left.append(note)
        chooses = (rule.name == "device" and "is_available" in text_of(node)) or decision.reason in (HIDES, _TRIED)
        asks = rule.name in _QUESTIONS or begins
        if not (decision.reason == SUMMARISED and self._facts.is_library):  # programs that import it do not run this
            self._split = self._split or chooses or (asks and divides(guard, question, self._facts))
            self._flags |= {name_of(question, self._facts)} - {""} if guard is None and asks else set()
        made = (cst.IfExp, cst.BinaryOperation, cst.ListComp)
        around = itertools.dropwhile(lambda outer: isinstance(outer, made), self._facts.parents(node))
        if rule.name in ("device", "device string") and isinstance(next(around), cst.Assign):
            self._fixed.update(self._facts.parents(node))  # the name of a device, which fails elsewhere
        statement = self._statement(node)
        if isinstance(statement, cst.SimpleStatementLine) and rule.name != "replicas":
            attributes = set(map(text_of, find(statement, cst.Attribute)))
            self._left_lines.append((self._scope_of(node), self._facts.names_in(statement) | attributes))
        comments = self.comments[statement]
        if decision.reason not in comments:
            comments.append(decision.reason)

    def _decide(self, rule: Rule, node: cst.CSTNode) -> Rewrite | Left | None:
        try:
            decision = rule.decide(node, self._facts)
        except UnplacedError as unplaced:
            return None if rule.optional else Left(str(unplaced))
        if isinstance(decision, Rewrite) and is_tried(node, self._facts.parents):
            return Left(_TRIED, node.children)
        made = decision.retry if isinstance(decision, Left) else decision
        if made is not None and self._would_import(node, made):
            return None if rule.optional else Left(LATE, node.children)
        if decision is not None and forks_cudas(node, self._facts.parents):
            return Left(_FORKS, node.children)
        if isinstance(decision, Rewrite) and loses_comment(node, decision):
            if rule.optional:
                self._facts.place.forget(node)
            return None if rule.optional else Left("comments within it would be lost: move them above it")
        return decision

    def _statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the statement above which a comment about a node goes."""
        around = [node, *self._facts.parents(node)]
        return next(outer for outer in around if isinstance(outer, _COMPOUND))
