"""Rewrite one file: let the rules decide about each node, then apply what they decided."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import cast

import libcst as cst

from accelcore_lint.port.decisions import KEPT_IMPORT, Decisions
from accelcore_lint.port.engines import engine_in, engine_note, wraps
from accelcore_lint.port.facts import Facts
from accelcore_lint.port.imports import Imports, in_branches, names_used
from accelcore_lint.port.project import Known
from accelcore_lint.port.removed import sweep, without_backend, without_ranks, without_unused
from accelcore_lint.port.rule import TODO, Level, Note
from accelcore_lint.port.splits import KEPT
from accelcore_lint.port.syntax import code_of, is_import, text_of, without_comments
from accelcore_lint.port.trainer import with_trainers
from accelcore_lint.port.tree import Wrapper
from accelcore_lint.port.vendors import (
    FLAGS,
    builds_extensions,
    first_lines,
    may_concern,
    settings_lines,
    tool_reason,
    vendor_lines,
)
from accelcore_lint.port.visible import variables_set, with_both_variables
from accelcore_lint.port.walk import walk

_BUILDS = "this file builds a package or an extension, for the vendor's own tools: it is left as a whole"
_UNKNOWN = "a word for one vendor's devices that no rule knows: see what other devices need here"
_SETTING = "one vendor's device in a file without torch: let torch.accelerator choose it"
_QUESTION = 'a question for one vendor\'s device in a file without torch: ask whether x.device.type != "cpu"'
_FLAG = re.compile(rf"\.({'|'.join(FLAGS)})\b")
_WORD = re.compile(r"\w+")
_IMPORT = re.compile(r"[ \t]*(from|import)\b")
_IGNORED = re.compile(r"[ \t]*\w+\.backends\.(cudnn|cuda)\.[\w.]+[ \t]*=[^=]")


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
        left: what a comment above the line now says; a file without torch gets none.
        harmless: what was left without a comment, because other devices ignore it.
        before, after: number of lines that work on one vendor's devices only.
        splits: whether a question that is left decides where something is, so that the program's others have to stay.
        answers: flags that now say whether there is any device.
        closed: flags above lines that are all left, which fail if such a flag is true on other devices.
        ignored: how many of those `after` are harmless, such as `cudnn.benchmark = True`, which other devices ignore.
        loops: training loops at level TRAINER, and whether each was replaced, or why not.
    """

    source: str
    rewritten: list[Note] = field(default_factory=list)
    left: list[Note] = field(default_factory=list)
    harmless: list[Note] = field(default_factory=list)
    loops: list[Note] = field(default_factory=list)
    before: int = 0
    after: int = 0
    ignored: int = 0
    splits: bool = False
    answers: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)


def parsed(source: str) -> cst.Module:
    """Return the tree of a source.

    Raises:
        libcst.ParserSyntaxError, libcst.CSTValidationError: libcst does not read it.
    """
    try:
        return cst.parse_module(source)
    except TypeError as error:  # of libcst's own check, as for `assert(lambda: 1)`
        raise cst.CSTValidationError(str(error)) from error


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
    known = known or Known()
    outcome = _port(source, level, known)
    if outcome.splits and not known.keeps_questions:
        outcome = _port(source, level, replace(known, keeps_questions=KEPT.format("this file")))
        outcome.splits = True
    return outcome


def _port(source: str, level: Level, known: Known, kept: frozenset[str] = frozenset()) -> Outcome:
    """Rewrite a source. `kept`: modules of one vendor that branches still import then, which keep their conditions."""
    if not may_concern(source.encode("utf-8", "surrogatepass"), meets_torch=known.meets_torch):
        engine, lines = engine_in(without_comments(source)), settings_lines(source)
        notes, text = [engine_note(*engine, source)] if engine else [], source.split("\n")
        reasons = {line: tool_reason(text[line - 1]) for line in lines}
        asks = {line for line in lines if _FLAG.search(text[line - 1])}
        left = [
            Note(line, "tool" if why else "setting", why or (_QUESTION if line in asks else _SETTING))
            for line, why in reasons.items()
        ]
        return Outcome(source, left=left, harmless=notes, before=len(lines), after=len(lines))
    module = parsed(source)
    if code_of(module) != source:
        raise UnfaithfulError
    before = len(vendor_lines(source))
    if line := builds_extensions(source):
        return Outcome(source, left=[Note(line, "build", _BUILDS)] if before else [], before=before, after=before)
    wrapper = Wrapper(module, unsafe_skip_copy=True)
    facts = Facts(wrapper, level, known)
    decisions = Decisions(facts, kept)
    walk(module, decisions)
    left = [note for note in decisions.left if note.rule != KEPT_IMPORT]
    outcome = Outcome(source, decisions.rewritten, left, decisions.harmless, before=before)
    outcome.splits, outcome.answers, outcome.closed = decisions.splits, decisions.answers, decisions.closed
    if (engine := facts.engine or engine_in(facts.code)) and wraps(engine[0], facts.code):
        outcome.harmless.append(engine_note(*engine, source))
    rewritten = module.visit(_Apply(facts, decisions))
    imports = Imports(
        level,
        before=names_used(module),
        after=names_used(rewritten),
        lines={text_of(node): facts.line(node) for node in reversed(facts.imports)},
        complete=not left,
        strange=facts.strange_apex,
        taken=facts.known.taken,
    )
    swept = without_ranks(sweep(rewritten.visit(imports)), module, facts.known.taken)
    if more := in_branches(swept) - kept:
        return _port(source, level, known, kept | more)
    name = facts.place.current
    swept = swept if name in facts.identifiers else without_unused(swept, name)
    if level is not Level.TORCH and all(note.rule != "device call" for note in outcome.rewritten):
        name = facts.place.name
        swept = swept if name in facts.identifiers else without_backend(swept, name)
    if level is not Level.TORCH:
        made = variables_set(module) if variables_set(swept) else []  # a comment on a line that is left keeps them all
        outcome.rewritten += [Note(facts.line(line), "variable", text_of(line).split("\n", 1)[0]) for line in made]
        swept = with_both_variables(swept)
    outcome.source = code_of(swept)
    if level is Level.TRAINER:
        outcome.source, outcome.loops = with_trainers(outcome.source, source)
    outcome.rewritten += imports.rewritten
    outcome.left += imports.left
    for notes in (outcome.rewritten, outcome.left, outcome.harmless):
        notes.sort(key=attrgetter("line"))
    _report_rest(outcome, source)
    after, rest = outcome.source.split("\n"), vendor_lines(outcome.source)
    outcome.after = len(rest)
    idle = {source.split("\n")[note.line - 1].strip() for note in outcome.harmless}
    stays = [after[number - 1] for number in rest]
    outcome.ignored = sum(_IGNORED.match(line) is not None or line.strip() in idle for line in stays)
    return outcome


def _report_rest(outcome: Outcome, source: str) -> None:
    """Report lines for one vendor that no rule has rewritten or left, and comment on them.

    An import is reported by the lines that use what it brings.
    """
    before, after = source.split("\n"), outcome.source.split("\n")
    ignored = {before[note.line - 1].strip() for note in outcome.harmless}
    used = {word for note in (*outcome.left, *outcome.harmless) for word in _WORD.findall(before[note.line - 1])}
    first = first_lines(outcome.source)
    rest: dict[int, int] = {}
    for number in sorted(vendor_lines(outcome.source)):
        head = after[first[number] - 1]
        is_import = _IMPORT.match(head) is not None
        text = " ".join(after[each - 1] for each, line in first.items() if line == first[number]) if is_import else ""
        brings = _WORD.findall(text.partition("import ")[2])
        is_known = {after[number - 1].strip(), head.strip()} & ignored or _IGNORED.match(head) or used & {*brings}
        if not is_known and not (reason := _reason_above(after, first[number])):
            rest[number] = first[number]
        elif not is_known and is_import and reason in (_UNKNOWN, tool_reason(head)):
            outcome.left.append(Note(before.index(head) + 1, "earlier run", reason))
    places = set[int]()
    reasons = {line: tool_reason(after[number - 1]) or _UNKNOWN for number, line in reversed([*rest.items()])}
    for number, line in rest.items():
        same = (at for at, text in enumerate(before, 1) if text == after[number - 1] and at not in places)
        places.add(place := next(same, line))
        outcome.left.append(Note(place, "unknown word" if reasons[line] == _UNKNOWN else "tool", reasons[line]))
    for line in sorted(reasons, reverse=True):
        text = after[line - 1]
        indent, end = text[: len(text) - len(text.lstrip())], "\r" if text.endswith("\r") else ""
        after.insert(line - 1, f"{indent}{TODO}{reasons[line]}{end}")
    outcome.source = "\n".join(after)
    outcome.left.sort(key=attrgetter("line"))


def _reason_above(lines: list[str], line: int) -> str:
    """Return the reason in a comment of a port above a line, or above its decorators; "" if there is none."""
    for above in map(str.strip, reversed(lines[: line - 1])):
        if above.startswith(TODO):
            return above.removeprefix(TODO)
        if not above.startswith(("#", "@")):
            break
    return ""


_TIGHT = (cst.Comparison, cst.ComparisonTarget, cst.UnaryOperation, cst.BinaryOperation, cst.Attribute, cst.Subscript)
_OPERATIONS = (*_TIGHT, cst.BooleanOperation, cst.IfExp, cst.CompFor, cst.StarredElement)
"""Expressions that bind a choice, and those of them that also bind a comparison: a part of them needs parentheses."""


class _Apply(cst.CSTTransformer):
    """Replaces nodes, and adds comments, imports and the line that chooses the device."""

    def __init__(self, facts: Facts, decisions: Decisions) -> None:
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
        changed = (*decisions.rewrites, *decisions.comments, *self._before, *self._after, *self._above)
        self._around = {outer for node in changed for outer in (node, *facts.parents(node))}

    def on_visit(self, node: cst.CSTNode) -> bool:
        return node in self._around

    def _fitted(self, node: cst.CSTNode, made: object) -> object:
        """Return a new expression with the parentheses that its place needs, and without others."""
        holder = self._parent(node)
        loose = (cst.IfExp, cst.BooleanOperation, cst.Comparison)
        if isinstance(made, loose) and not made.lpar and not isinstance(node, type(made)):
            binds = _OPERATIONS if isinstance(made, cst.IfExp) else _TIGHT
            is_negated = isinstance(made, cst.Comparison) and isinstance(holder, cst.UnaryOperation)
            if isinstance(holder, binds) and not is_negated:
                return made.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        is_plain = isinstance(holder, (cst.Assign, cst.AnnAssign, cst.Return)) or (
            isinstance(holder, cst.Arg) and not holder.star
        )
        if is_plain and isinstance(made, (cst.IfExp, cst.BooleanOperation)) and not getattr(node, "lpar", ()):
            return made.with_changes(lpar=(), rpar=())
        return made

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> object:  # type: ignore[override]
        result: object = super().on_leave(original_node, updated_node)
        rewrite = self._decisions.rewrites.get(original_node)
        if rewrite is not None:
            result = self._fitted(original_node, rewrite.build(result))
        if isinstance(result, cst.FormattedString) and result is not original_node:
            result = result.visit(_Requote(result.quote))
        if isinstance(original_node, cst.UnaryOperation) and isinstance(result, cst.UnaryOperation):
            result = _affirmed(original_node, result)
        if isinstance(original_node, cst.If) and isinstance(result, cst.If) and result is not original_node:
            result = _without_twin(original_node, result)
        comments = self._decisions.comments.get(original_node)
        if comments:
            result = _commented(cast("cst.SimpleStatementLine", result), comments)
        before, after = self._before.get(original_node), self._after.get(original_node, ())
        above = self._above.get(original_node, ())
        if before is None and not after and not above:
            return result
        statements = list(result) if isinstance(result, cst.FlattenSentinel) else [result]
        if before is not None:
            first, *others = cst.parse_module(before).body
            has_blank = any(line.comment is None for line in getattr(original_node, "leading_lines", ()))
            statements = [
                first.with_changes(leading_lines=[cst.EmptyLine(indent=False)] if has_blank else []),
                *others,
                *statements,
            ]
        statements = [*map(cst.parse_statement, above), *statements, *map(cst.parse_statement, after)]
        return cst.FlattenSentinel(cast("list[cst.CSTNode]", statements))


def _affirmed(before: cst.UnaryOperation, after: cst.UnaryOperation) -> cst.BaseExpression:
    """Write `not x.device.type != "cpu"`, where this was `not x.is_cuda`, as `x.device.type == "cpu"`."""
    test = after.expression
    if isinstance(before.expression, cst.Comparison) or not isinstance(test, cst.Comparison):
        return after
    only = test.comparisons[0] if isinstance(after.operator, cst.Not) and len(test.comparisons) == 1 else None
    if only is None or not isinstance(only.operator, cst.NotEqual):
        return after
    return test.with_changes(comparisons=[only.with_changes(operator=cst.Equal())], lpar=after.lpar, rpar=after.rpar)


def _without_twin(before: cst.If, after: cst.If) -> cst.If:
    """Return an `if` without a second branch for another vendor that has become the first one."""
    was, other = before.orelse, after.orelse
    if not isinstance(was, cst.If) or not isinstance(other, cst.If) or was.test.deep_equals(before.test):
        return after
    same = text_of(other.test) == text_of(after.test) and other.body.deep_equals(after.body)
    return after.with_changes(orelse=other.orelse) if same and not other.leading_lines else after


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


def _commented(statement: cst.SimpleStatementLine, reasons: list[str]) -> cst.CSTNode:
    new = [cst.EmptyLine(comment=cst.Comment(TODO + reason)) for reason in reasons]
    return statement.with_changes(leading_lines=[*statement.leading_lines, *new])


def _has_import(facts: Facts, line: str) -> bool:
    if line == facts.torch_import:
        return facts.has_torch_name and facts.has_torch_above(facts.module.body[-1])
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
        if is_import(statement):
            fallback = fallback or statement
            if anchor is not None or "torch" in text_of(statement):
                anchor = statement
        elif anchor is not None:
            break
    return anchor or fallback
