"""What a training script does in which order: the model of training loops that rules share.

A `Flow` has the events of one function, or of the module's body, in the order of the text. Each event knows the blocks
that contain it. The model is small on purpose: it follows no value through containers or other modules. A rule that
needs to know more than a flow has must find nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from accelcore_lint.kinds import is_loss, is_optimizer, is_scaler, is_scheduler
from accelcore_lint.names import Function
from accelcore_lint.script import Script, last_name

BACKWARD, CLIP, FOREIGN, HELPER = "backward", "clip", "foreign", "helper"
SCHEDULE, STEP, UNSCALE, UPDATE, ZERO = "schedule", "step", "unscale", "update", "zero"

_FOREIGN = ("accelerator", "fabric", "engine", "manual_backward", "deepspeed", "strategy")
"""Words in the names of frameworks' objects: what they do with a window is not in the script."""


@dataclass(frozen=True)
class Block:
    """A statement that contains others, and which of its bodies: `body`, `orelse`, `handlers`, ..."""

    node: ast.stmt
    branch: str

    @property
    def loops(self) -> bool:
        return isinstance(self.node, ast.For | ast.AsyncFor | ast.While) and self.branch == "body"


@dataclass(frozen=True)
class Event:
    """A call that matters to training.

    Attributes:
        kind: one of this file's constants.
        node: the call, or for `zero` an assignment of None to gradients.
        blocks: what contains it, from the outside.
        key: the optimizer or other object as the script writes it; "" if it is not known.
        scaler: the scaler of a scaled backward or step, else "".
        loss: the expression of which backward is called.
        function: the function of this script that a helper calls; None for one of another file that trains.
    """

    kind: str
    node: ast.AST
    blocks: tuple[Block, ...]
    key: str = ""
    scaler: str = ""
    loss: ast.expr | None = None
    function: Function | None = None

    @property
    def loop(self) -> ast.stmt | None:
        """The innermost loop that contains it."""
        return next((block.node for block in reversed(self.blocks) if block.loops), None)

    def guards(self, within: ast.stmt | None) -> list[ast.If]:
        """Return the `if` statements around it, up to a loop; all if it is None."""
        found: list[ast.If] = []
        for block in reversed(self.blocks):
            if block.node is within:
                break
            if isinstance(block.node, ast.If):
                found.append(block.node)
        return found

    def in_loop(self, loop: ast.stmt | None) -> bool:
        return loop is None or any(block.node is loop and block.loops for block in self.blocks)

    def excludes(self, other: Event) -> bool:
        """Return whether this and another event are in different branches of one statement."""
        mine: dict[ast.stmt, str] = {
            block.node: block.branch for block in self.blocks if isinstance(block.node, ast.If | ast.Try | ast.Match)
        }
        return any(mine.get(block.node, block.branch) != block.branch for block in other.blocks)


@dataclass(frozen=True)
class Window:
    """Gradient accumulation: an optimizer that steps when a counter is a multiple of a number.

    Attributes:
        loop: the loop over micro-batches.
        guard: the `if` around the step.
        count: the number, as an expression.
        counter: the name that is divided.
        backward: the backward of each micro-batch.
        step: the step at the window's end.
    """

    loop: ast.stmt
    guard: ast.If
    count: ast.expr
    counter: str
    backward: Event
    step: Event

    @property
    def flushes(self) -> bool:
        """Whether the guard has a further condition, such as the last batch."""
        return isinstance(self.guard.test, ast.BoolOp) and isinstance(self.guard.test.op, ast.Or)


class Flow:
    """The events of one function or of the module's body, in the order of the text."""

    def __init__(self, script: Script, node: ast.Module | Function) -> None:
        self.script = script
        self.node = node
        self.events: list[Event] = []
        self._defined = {function.name: function for function in script.functions()}
        self._block(node.body, ())

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds."""
        return [event for event in self.events if event.kind in kinds]

    @property
    def foreign(self) -> bool:
        """Whether a framework trains here, which may do what the script does not show."""
        return any(event.kind == FOREIGN for event in self.events)

    def order(self, event: Event) -> int:
        return self.events.index(event)

    def between(self, first: Event, last: Event, *kinds: str) -> list[Event]:
        """Return the events of these kinds between two events, in the order of the text."""
        inner = self.events[self.order(first) + 1 : self.order(last)]
        return [event for event in inner if event.kind in kinds]

    @cached_property
    def windows(self) -> list[Window]:
        """The accumulations of gradients in this function."""
        found = []
        for step in self.of(STEP):
            for guard in step.guards(step.loop):
                counted = _modulo(guard.test)
                backwards = [
                    event
                    for event in self.of(BACKWARD)
                    if event.loop is step.loop and not event.excludes(step) and guard not in event.guards(step.loop)
                ]
                if counted and backwards and step.loop is not None:
                    found.append(Window(step.loop, guard, *counted, backwards[-1], step))
                    break
        return found

    def _block(self, body: Sequence[ast.stmt], blocks: tuple[Block, ...]) -> None:
        for statement in body:
            self._statement(statement, blocks)

    def _statement(self, statement: ast.stmt, blocks: tuple[Block, ...]) -> None:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return
        for name, value in ast.iter_fields(statement):
            parts = value if isinstance(value, list) else [value]
            for part in parts:
                inner = (*blocks, Block(statement, name))
                if isinstance(part, ast.stmt):
                    self._statement(part, inner)
                elif isinstance(part, ast.ExceptHandler):
                    self._block(part.body, inner)
                elif isinstance(part, ast.match_case):
                    # Each case is a branch of its own.
                    self._block(part.body, (*blocks, Block(statement, f"case {part.pattern!r}")))
                elif isinstance(part, ast.withitem):
                    self._expression(part.context_expr, blocks)
                elif isinstance(part, ast.expr):
                    self._expression(part, blocks)
        if isinstance(statement, ast.Assign) and _clears(statement):
            self.events.append(Event(ZERO, statement, blocks))

    def _expression(self, node: ast.AST, blocks: tuple[Block, ...]) -> None:
        if isinstance(node, ast.Lambda):
            return
        for child in ast.iter_child_nodes(node):
            self._expression(child, blocks)
        if isinstance(node, ast.Call):
            event = self._call(node, blocks)
            if event is not None:
                self.events.append(event)

    def _call(self, call: ast.Call, blocks: tuple[Block, ...]) -> Event | None:
        name = last_name(call.func)
        if any(word in ast.unparse(call.func).lower() for word in _FOREIGN):
            return Event(FOREIGN, call, blocks)
        if "clip_grad" in name:
            return Event(CLIP, call, blocks)
        if not isinstance(call.func, ast.Attribute):
            function = self._defined.get(name)
            if function is None and not ("train" in name and self._given(call)):
                return None
            return Event(HELPER, call, blocks, function=function)
        return self._method(call, call.func, blocks)

    def _given(self, call: ast.Call) -> bool:
        """Return whether a function of another file gets the optimizer, and no schedule that it may step."""
        given, names = [*call.args, *(keyword.value for keyword in call.keywords)], self.script.names
        return any(is_optimizer(names, each) for each in given) and not any(is_scheduler(names, each) for each in given)

    def _method(self, call: ast.Call, method: ast.Attribute, blocks: tuple[Block, ...]) -> Event | None:
        names, of = self.script.names, method.value
        if method.attr == "backward":
            if isinstance(of, ast.Call) and last_name(of.func) == "scale" and isinstance(of.func, ast.Attribute):
                loss = of.args[0] if of.args else None
                return Event(BACKWARD, call, blocks, scaler=ast.unparse(of.func.value), loss=loss)
            if names.resolve(method) == "torch.autograd.backward":
                return Event(BACKWARD, call, blocks, loss=call.args[0] if call.args else None)
            framework = call.args and isinstance(of, ast.Name | ast.Attribute) and not is_loss(of)
            return Event(FOREIGN if framework else BACKWARD, call, blocks, loss=of)
        if method.attr == "zero_grad":
            return Event(ZERO, call, blocks, key=ast.unparse(of))
        if "unscale" in method.attr:
            return Event(UNSCALE, call, blocks)
        if method.attr == "update" and is_scaler(names, of):
            return Event(UPDATE, call, blocks, key=ast.unparse(of))
        if method.attr != "step":
            function = self._defined.get(method.attr) if last_name(of) == "self" else None
            return None if function is None else Event(HELPER, call, blocks, function=function)
        if is_scaler(names, of) and call.args:
            return Event(STEP, call, blocks, key=ast.unparse(call.args[0]), scaler=ast.unparse(of))
        if is_scheduler(names, of):
            return Event(SCHEDULE, call, blocks, key=ast.unparse(of))
        return Event(STEP, call, blocks, key=ast.unparse(of)) if is_optimizer(names, of) else None


@lru_cache(maxsize=1)  # all rules ask for those of one script
def flows(script: Script) -> list[Flow]:
    """Return the flow of the module's body and of each function in which something happens."""
    made = [Flow(script, script.tree), *(Flow(script, function) for function in script.functions())]
    return [flow for flow in made if flow.events]


def _clears(statement: ast.Assign) -> bool:
    """Return whether a statement is `parameter.grad = None`."""
    none = isinstance(statement.value, ast.Constant) and statement.value.value is None
    return none and any(last_name(target) == "grad" for target in statement.targets)


def _modulo(test: ast.expr) -> tuple[ast.expr, str] | None:
    """Return the number and the counter of a test like `(i + 1) % n == 0`, also as a part of `and` and `or`."""
    for part in _parts(test):
        if isinstance(part, ast.Compare) and len(part.ops) == 1 and isinstance(part.ops[0], ast.Eq):
            part = part.left
        elif isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not):
            part = part.operand
        else:
            continue
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
            counters = [inner for inner in ast.walk(part.left) if isinstance(inner, ast.Name | ast.Attribute)]
            if counters:
                return part.right, ast.unparse(counters[0])
    return None


def _parts(test: ast.expr) -> Iterator[ast.expr]:
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _parts(value)
    else:
        yield test
