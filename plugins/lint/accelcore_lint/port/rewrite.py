"""Rewrite one file: let the rules decide about each node, then apply what they decided."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import cast

import libcst as cst
from libcst import matchers, metadata

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.imports import Imports, names_used
from accelcore_lint.port.model import TODO, Left, Level, Note, Rewrite, Rule
from accelcore_lint.port.place import UnplacedError
from accelcore_lint.port.project import Known
from accelcore_lint.port.removed import sweep, without_unused
from accelcore_lint.port.rules import RULES
from accelcore_lint.port.syntax import reasons_above, text_of
from accelcore_lint.port.trainer import with_trainers
from accelcore_lint.port.vendors import may_concern, vendor_lines

_EVERYWHERE = re.compile(r"pin_memory|non_blocking|\bfused\b")
_CHOSEN = re.compile(r"torch\.(amp\.)?autocast\(|dict\(fused=True\)$|\{.fused.: True\}$")
_Guard = cst.If | cst.IfExp
_COMPOUND = (cst.SimpleStatementLine, cst.BaseCompoundStatement)


class UnfaithfulError(Exception):
    """A source that libcst cannot reproduce, and that is therefore not rewritten."""

    def __init__(self) -> None:
        super().__init__("libcst does not reproduce this file to the last byte")


@dataclass
class Outcome:
    """A rewritten file.

    Attributes:
        source: the new source; the old one, to the last byte, if nothing is to be done.
        rewritten: what was done.
        left: what a comment above the line now says.
        harmless: what was left without a comment, because other devices ignore it.
        before, after: number of lines that work on one vendor's devices only.
        loops: training loops at level TRAINER, and whether each was replaced, or why not.
    """

    source: str
    rewritten: list[Note] = field(default_factory=list)
    left: list[Note] = field(default_factory=list)
    harmless: list[Note] = field(default_factory=list)
    loops: list[Note] = field(default_factory=list)
    before: int = 0
    after: int = 0


def port_source(source: str, level: Level, known: Known | None = None) -> Outcome:
    """Rewrite the source of a script or module.

    Args:
        source: Python source, with the line ends of the file.
        level: what to rewrite it to.
        known: what other files say about it.

    Raises:
        libcst.ParserSyntaxError: it is not Python of a version that libcst reads.
        UnfaithfulError: libcst does not reproduce this source to the last byte.
    """
    if not may_concern(source.encode("utf-8", "surrogatepass")):
        return Outcome(source)
    module = cst.parse_module(source)
    if module.code != source:
        raise UnfaithfulError
    wrapper = metadata.MetadataWrapper(module, unsafe_skip_copy=True)
    facts = Facts(wrapper, level, known or Known())
    decisions = _Decisions(facts)
    module.visit(decisions)
    outcome = Outcome(source, decisions.rewritten, decisions.left, decisions.harmless, before=len(vendor_lines(source)))
    rewritten = module.visit(_Apply(facts, decisions))
    imports = Imports(
        level,
        names_used(module),
        names_used(rewritten),
        facts.import_lines(),
        complete=not decisions.left,
        strange=facts.strange_apex,
    )
    swept = sweep(imports.apply(rewritten))
    name = facts.place.current
    outcome.source = (swept if name in facts.identifiers else without_unused(swept, name)).code
    if level is Level.TRAINER:
        outcome.source, outcome.loops = with_trainers(outcome.source, source)
    outcome.rewritten += imports.rewritten
    outcome.left += imports.left
    for notes in (outcome.rewritten, outcome.left):
        notes.sort(key=attrgetter("line"))
    outcome.after = len(vendor_lines(outcome.source))
    return outcome


class _Decisions(cst.CSTVisitor):
    """Asks the rules about each node, from the outside to the inside.

    A statement below a comment of an earlier run stays as it is: what that run has rewritten may have been the reason.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self._facts = facts
        self._rules: dict[type[cst.CSTNode], list[Rule]] = defaultdict(list)
        for rule in RULES:
            for kind in rule.nodes:
                self._rules[kind].append(rule)
        self._claimed: set[int] = set()
        self._was_left: list[bool] = []
        self._waiting: dict[cst.CSTNode, list[tuple[_Guard, Rule, cst.CSTNode, Left]]] = defaultdict(list)
        self._unset: set[str] = set()
        self._marks: dict[cst.CSTNode, tuple[int, int, int]] = {}
        self.rewrites: dict[cst.CSTNode, Rewrite] = {}
        self.comments: dict[cst.CSTNode, list[str]] = defaultdict(list)
        self.imports: set[str] = set()
        self.rewritten: list[Note] = []
        self.left: list[Note] = []
        self.harmless: list[Note] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, _COMPOUND):
            reasons = reasons_above(node, self._facts.module)
            self._was_left.append(bool(reasons))
            if not _is_import(node):
                self.left += [Note(self._facts.line(node), "earlier run", reason) for reason in reasons]
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
            guard = self._guard_of(node) if decision.retry is not None else None
            if guard is None and decision.some and decision.retry is not None:
                self._rewrite(rule, node, decision.retry)
            elif guard is None:
                self._leave(rule, node, decision)
            else:
                self._waiting[self._end_of(guard)].append((guard, rule, node, decision))
            return decision.inner
        if isinstance(node, (cst.If, cst.IfExp)):
            self._marks[node] = (*self._done(), len(self.left))
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if isinstance(original_node, _COMPOUND):
            self._was_left.pop()
        for guard, rule, node, decision in self._waiting.pop(original_node, ()):
            rewritten, actions, left = self._marks[guard]
            done = self._done()
            some = (done[1] > actions if decision.some else done[0] > rewritten) or self._is_portable(guard)
            whole = len(self.left) == left
            opens = (some or whole) if decision.some else (some and whole)
            if original_node is not guard:
                opens = whole  # what follows an early return
            if self._unset & _names_in(guard):
                opens = False  # it uses what a condition that was left sets
            if opens and decision.retry is not None:
                self._rewrite(rule, node, decision.retry)
            else:
                self._leave(rule, node, decision)
                self._unset |= _set_in(guard)

    def _end_of(self, guard: _Guard) -> cst.CSTNode:
        """Return the node after which it is known what a guard guards: itself, or its block if it returns.

        After `if not torch.cuda.is_available(): return` the rest of the block only runs on the vendor's devices.
        """
        lines = guard.body.body if isinstance(guard, cst.If) and isinstance(guard.body, cst.IndentedBlock) else ()
        last = lines[-1] if lines else None
        returns = isinstance(last, cst.SimpleStatementLine) and isinstance(last.body[-1], cst.Return)
        block = self._facts.parent(guard)
        is_early = returns and isinstance(guard, cst.If) and guard.orelse is None and "not " in text_of(guard.test)
        return block if is_early and isinstance(block, cst.IndentedBlock) else guard

    def _done(self) -> tuple[int, int]:
        """Return how often something was rewritten, or is ignored elsewhere, with and without questions."""
        asked = sum(note.rule == "question" for note in self.rewritten)
        count = len(self.rewritten) + len(self.harmless)
        return count, count - asked

    def _guard_of(self, node: cst.CSTNode) -> _Guard | None:
        """Return the `if`, or the choice, of whose condition a node is a part."""
        inner = node
        for outer in self._facts.parents(node):
            if isinstance(outer, (cst.If, cst.IfExp)):
                return outer if inner is outer.test else None
            if not isinstance(outer, (cst.BooleanOperation, cst.UnaryOperation)):
                return None
            inner = outer
        return None

    def _rewrite(self, rule: Rule, node: cst.CSTNode, decision: Rewrite) -> None:
        self.rewrites[node] = decision
        self.imports.update(decision.imports)
        self.rewritten.append(Note(self._facts.line(node), rule.name, text_of(node).split("\n", 1)[0]))

    def _leave(self, rule: Rule, node: cst.CSTNode, decision: Left) -> None:
        self._facts.place.forget(node)
        note = Note(self._facts.line(node), rule.name, decision.reason)
        if decision.harmless:
            self.harmless.append(note)
            return
        self.left.append(note)
        comments = self.comments[self._statement(node)]
        if decision.reason not in comments:
            comments.append(decision.reason)

    def _decide(self, rule: Rule, node: cst.CSTNode) -> Rewrite | Left | None:
        try:
            decision = rule.decide(node, self._facts)
        except UnplacedError as unplaced:
            return None if rule.optional else Left(str(unplaced))
        if isinstance(decision, Rewrite) and _loses_comment(node, decision):
            if rule.optional:
                self._facts.place.forget(node)
            return None if rule.optional else Left("comments within it would be lost: move them above it")
        return decision

    def _is_portable(self, node: cst.CSTNode) -> bool:
        """Return whether an `if` only guards what every accelerator has: copies, autocast, fused steps, numbers."""
        if isinstance(node, cst.IfExp):
            numbers = self._facts.is_whole(node.body) and self._facts.is_whole(node.orelse)
            return numbers or _CHOSEN.match(text_of(node.body)) is not None
        if not isinstance(node, cst.If):
            return False
        lines = node.body.body if isinstance(node.body, cst.IndentedBlock) else ()
        return bool(lines) and all(_EVERYWHERE.search(text_of(line)) for line in lines)

    def _statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the statement above which a comment about a node goes."""
        around = [node, *self._facts.parents(node)]
        return next(outer for outer in around if isinstance(outer, _COMPOUND))


def _loses_comment(node: cst.CSTNode, rewrite: Rewrite) -> bool:
    if "#" not in cst.Module([]).code_for_node(node):
        return False
    made = rewrite.build(node)
    new = list(made) if isinstance(made, cst.FlattenSentinel) else [made] if isinstance(made, cst.CSTNode) else []
    return len(_comments(node)) > sum(len(_comments(each)) for each in new)


def _comments(node: cst.CSTNode) -> Sequence[cst.CSTNode]:
    return matchers.findall(node, matchers.Comment())


def _names_in(guard: cst.If | cst.IfExp) -> set[str]:
    return {cst.ensure_type(name, cst.Name).value for name in matchers.findall(guard.body, matchers.Name())}


def _set_in(guard: cst.If | cst.IfExp) -> set[str]:
    """Return the names that what an `if` guards assigns, and that are not set if it does not run."""
    return _assigned(guard.body) - (_assigned(guard.orelse) if guard.orelse is not None else set())


def _assigned(node: cst.CSTNode) -> set[str]:
    made = matchers.findall(node, matchers.AssignTarget(matchers.Name()))
    return {text_of(cst.ensure_type(target, cst.AssignTarget).target) for target in made}


class _Apply(cst.CSTTransformer):
    """Replaces nodes, and adds comments, imports and the line that chooses the device."""

    def __init__(self, facts: Facts, decisions: _Decisions) -> None:
        super().__init__()
        self._decisions = decisions
        self._parent = facts.parent
        self._before: dict[cst.CSTNode, str] = facts.place.lines()
        imports = sorted(line for line in decisions.imports | facts.place.imports() if not _has_import(facts, line))
        around = {id(outer) for node in (*self._before, *decisions.rewrites) for outer in (node, *facts.parents(node))}
        first = next((line for line in facts.module.body if id(line) in around), None)
        anchor = _import_anchor(facts, first)
        self._after: dict[cst.CSTNode, list[str]] = {anchor: imports} if anchor is not None and imports else {}
        self._above: dict[cst.CSTNode, list[str]] = {first: imports} if anchor is None and first is not None else {}

    def _bare(self, node: cst.CSTNode, made: object) -> object:
        """Return a new expression without parentheses that its place does not need."""
        holder = self._parent(node)
        is_plain = isinstance(holder, (cst.Assign, cst.AnnAssign, cst.Return)) or (
            isinstance(holder, cst.Arg) and not holder.star
        )
        if is_plain and isinstance(made, cst.IfExp) and not getattr(node, "lpar", ()):
            return made.with_changes(lpar=(), rpar=())
        return made

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> object:  # type: ignore[override]
        result: object = super().on_leave(original_node, updated_node)
        rewrite = self._decisions.rewrites.get(original_node)
        if rewrite is not None:
            result = self._bare(original_node, rewrite.build(result))
        if isinstance(original_node, cst.Call) and isinstance(result, cst.Call) and rewrite is None:
            result = _without_comma(original_node, result)
        if isinstance(result, cst.FormattedString) and not result.deep_equals(original_node):
            result = result.visit(_Requote(result.quote))
        comments = self._decisions.comments.get(original_node)
        if comments:
            result = _commented(cast("cst.SimpleStatementLine", result), comments)
        before, after = self._before.get(original_node), self._after.get(original_node, ())
        above = self._above.get(original_node, ())
        if before is None and not after and not above:
            return result
        statements = list(result) if isinstance(result, cst.FlattenSentinel) else [result]
        if before is not None:
            added = cst.parse_statement(before)
            has_blank = any(line.comment is None for line in getattr(original_node, "leading_lines", ()))
            statements = [
                added.with_changes(leading_lines=[cst.EmptyLine(indent=False)] if has_blank else []),
                *statements,
            ]
        statements = [*map(cst.parse_statement, above), *statements, *map(cst.parse_statement, after)]
        return cst.FlattenSentinel(cast("list[cst.CSTNode]", statements))


def _without_comma(before: cst.Call, after: cst.Call) -> cst.Call:
    """Return a call that has lost arguments with the comma at its end, or none, that it had before."""
    if not after.args or len(after.args) == len(before.args) or "#" in text_of(after.args[-1]):
        return after
    last = before.args[-1]
    end = after.args[-1].with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    return after.with_changes(args=[*after.args[:-1], end])


class _Requote(cst.CSTTransformer):
    """Gives strings in an f-string other quotes than its own, which Python before 3.12 needs."""

    def __init__(self, quote: str) -> None:
        super().__init__()
        self._quote = quote

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.SimpleString:
        other = "'" if self._quote == '"' else '"'
        if updated_node.quote != self._quote or other in updated_node.value or "\\" in updated_node.value:
            return updated_node
        return updated_node.with_changes(value=updated_node.value.replace(self._quote, other))


def _is_import(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleStatementLine) and all(
        isinstance(part, (cst.Import, cst.ImportFrom)) for part in node.body
    )


def _commented(statement: cst.SimpleStatementLine, reasons: list[str]) -> cst.CSTNode:
    new = [cst.EmptyLine(comment=cst.Comment(TODO + reason)) for reason in reasons]
    return statement.with_changes(leading_lines=[*statement.leading_lines, *new])


def _has_import(facts: Facts, line: str) -> bool:
    if line == "import torch":
        return facts.has_torch_name
    return any(
        isinstance(statement, cst.SimpleStatementLine) and any(text_of(part) == line for part in statement.body)
        for statement in facts.module.body
    )


def _import_anchor(facts: Facts, first: cst.CSTNode | None) -> cst.CSTNode | None:
    """Return the statement after which imports are added, or None if `first`, which needs them, is above all imports.

    It is the last of the imports that follow the first of torch.
    """
    anchor: cst.CSTNode | None = None
    fallback: cst.CSTNode | None = None
    for statement in facts.module.body:
        if statement is first:
            break
        if _is_import(statement):
            fallback = fallback or statement
            if anchor is not None or "torch" in text_of(statement):
                anchor = statement
        elif anchor is not None:
            break
    return anchor or fallback
