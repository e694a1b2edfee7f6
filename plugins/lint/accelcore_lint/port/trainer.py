"""Level trainer: training loops that are recognised as a whole become a trainer's; others stay, with the reason."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.loop import Block, Loop, NotCanonicalError, loops_in, loss_of, recognise, source_of
from accelcore_lint.port.removed import removed, sweep
from accelcore_lint.port.rule import Note
from accelcore_lint.port.syntax import text_of, without_comments

_BACKEND = re.compile(r"(?m)^ *(\w+) = accelcore\.select\(")


def with_trainers(source: str, original: str) -> tuple[str, list[Note]]:
    """Replace the training loops of a file that is already at level roles.

    Args:
        source: of that file.
        original: the file before any port, for the numbers of lines.

    Returns:
        The new source, and a note for each loop: whether it was replaced, or why not.
    """
    module = cst.parse_module(source)
    backend, code = _BACKEND.search(source), without_comments(source)
    blocks: list[Block] = [module]
    finder = _Functions()
    module.visit(finder)
    blocks += finder.bodies
    notes, found = [], []
    for block in blocks:
        for loop, anchor in loops_in(block):
            line = _line(original, loop)
            try:
                if backend is None:
                    raise NotCanonicalError("the file chooses no device")
                found.append(recognise(block, loop, anchor, backend[1], code))
                done = "replaced by a trainer"
                if not found[-1].data:
                    done += "; for a job of several ranks, read its data through trainer.batches"
                notes.append(Note(line, "loop", done))
            except NotCanonicalError as reason:
                notes.append(Note(line, "loop", f"stays at level roles: {reason}"))
    if not found or backend is None:
        return source, notes
    name = next(name for name in ("trainer", "accel_trainer", "loop_trainer") if not re.search(rf"\b{name}\b", source))
    if len(found) > 1:
        return source, [Note(note.line, "loop", "stays at level roles: there are several loops") for note in notes]
    return sweep(module.visit(_Replace(found[0], backend[1], name))).code, notes


def _line(original: str, loop: cst.For) -> int:
    header = text_of(loop).split("\n", 1)[0]
    start = re.split(r"\bin\b", header)[0]
    lines = [number for number, line in enumerate(original.split("\n"), 1) if line.strip().startswith(start.strip())]
    return lines[0] if lines else 0


class _Functions(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[Block] = []

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        if isinstance(node.body, cst.IndentedBlock):
            self.bodies.append(node.body)

    def visit_If(self, node: cst.If) -> None:
        if text_of(node.test).startswith("__name__") and isinstance(node.body, cst.IndentedBlock):
            self.bodies.append(node.body)


_WITHOUT_GRADIENTS = re.compile(r"\b(no_grad|inference_mode)\(")


class _Replace(cst.CSTTransformer):
    """Puts a trainer in the place of one loop's steps.

    Only the calls whose loss backward takes become `trainer.forward`. An evaluation in the loop calls the model, as
    before: in a job, ranks would wait for each other in `trainer.forward`, and not all of them may evaluate.
    """

    def __init__(self, loop: Loop, accel: str, name: str) -> None:
        super().__init__()
        self._loop, self._accel, self._name = loop, accel, name
        self._inside = False

    def on_visit(self, node: cst.CSTNode) -> bool:
        self._inside = self._inside or node is self._loop.node
        if isinstance(node, cst.With) and any(_WITHOUT_GRADIENTS.search(text_of(item)) for item in node.items):
            return False
        return super().on_visit(node)

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> object:  # type: ignore[override]
        loop, name = self._loop, self._name
        result: object = super().on_leave(original_node, updated_node)
        if any(original_node is each for each in loop.gone):
            return removed(cst.ensure_type(updated_node, cst.SimpleStatementLine))
        if original_node is loop.backward:
            self._inside = False
            found = loss_of(updated_node)
            assert found is not None, "the line calls backward"
            result = self._called(f"backward({found[1]})", updated_node)
        elif original_node is loop.update:
            result = self._called("update()", updated_node)
        elif any(original_node is each for each in loop.contexts):
            item = cst.WithItem(cst.parse_expression(f"{name}.autocast()"))
            result = cst.ensure_type(updated_node, cst.With).with_changes(items=[item])
        elif self._inside and isinstance(original_node, cst.Call) and text_of(original_node.func) == loop.model:
            result = cst.ensure_type(updated_node, cst.Call).with_changes(func=cst.parse_expression(f"{name}.forward"))
        elif original_node is loop.node:
            result = self._over_batches(cst.ensure_type(updated_node, cst.For))
        if original_node is loop.anchor:
            result = cst.FlattenSentinel([self._made(), result])  # type: ignore[type-var]
        return result

    def _called(self, method: str, line: cst.CSTNode) -> cst.CSTNode:
        return line.with_changes(body=[cst.Expr(cst.parse_expression(f"{self._name}.{method}"))])

    def _over_batches(self, node: cst.For) -> cst.For:
        if not self._loop.data:
            return node
        old = source_of(node)
        new = cst.parse_expression(f"{self._name}.batches({self._loop.data})")
        return node.with_changes(iter=new if old is node.iter else node.iter.deep_replace(old, new))

    def _made(self) -> cst.BaseStatement:
        loop = self._loop
        options = "".join(f", {key}={value}" for key, value in loop.options.items())
        line = f"{self._name} = {self._accel}.trainer({loop.model}, {loop.optimizer}{options})"
        return cst.ensure_type(cst.parse_statement(line), cst.SimpleStatementLine)
