"""Streams on which a script copies its next batch: `torch.Stream`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst
from libcst import matchers as m

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.rule import Example, Level, Rewrite, Rule
from accelcore_lint.port.rules.device_calls import is_current_stream
from accelcore_lint.port.rules.device_strings import whole
from accelcore_lint.port.syntax import text_of

_MADE = {"torch.cuda.Stream", "torch.cuda.streams.Stream"}
_USED = {"torch.cuda.stream", "torch.cuda.current_stream"}
_NAMED = m.Name() | m.Attribute(value=m.Name(), attr=m.Name())
_ASSIGNED = m.Assign(targets=[m.AssignTarget(target=_NAMED)])
_WITH = m.With(items=[m.WithItem(item=m.Call(args=[m.Arg(value=_NAMED, star="")]), asname=None)])

_MAKE, _ENTER, _WAIT, _KEEP = "make", "enter", "wait", "keep"


def _decide(node: cst.Call | cst.With | cst.SimpleStatementLine, facts: Facts) -> Rewrite | None:
    form = _form(node, facts)
    if form is None or not _knows_all(facts):
        return None
    kind, subject = form
    if kind == _MAKE:
        device = facts.place.device(node)
        choice = f'{facts.torch}.Stream({device}) if {device}.type != "cpu" else None'
        return whole(cst.ensure_type(node, cst.Call), choice, facts.needs_torch)
    if kind == _ENTER:
        item = cst.WithItem(cst.parse_expression(f"{subject} or contextlib.nullcontext()"))
        return Rewrite(
            lambda updated: updated.with_changes(items=[item]),
            cst.ensure_type(node, cst.With).items,
            ("import contextlib",),
        )
    test = f"{subject} is not None" if kind == _WAIT else _has_stream(node, facts)
    line = cst.ensure_type(node, cst.SimpleStatementLine)
    source = re.sub(r"[\w.]+\.current_stream\(\)", f"{facts.torch}.accelerator.current_stream()", text_of(line.body[0]))

    def build(updated: cst.SimpleStatementLine) -> cst.If:
        inner = updated.with_changes(body=[cst.Expr(cst.parse_expression(source))], leading_lines=[])
        return cst.If(cst.parse_expression(test), cst.IndentedBlock([inner]), leading_lines=updated.leading_lines)

    return Rewrite(build, line.body, facts.needs_torch)


def _has_stream(node: cst.CSTNode, facts: Facts) -> str:
    """Return the question whether there are streams: what is kept may be the script's own, which has no device."""
    function = facts.function_of(node)
    around = [other for other in _holders(facts) if facts.function_of(other) is function]
    streams = {form[1] for other in around if (form := _form(other, facts)) is not None and form[0] != _KEEP}
    return f"{min(streams)} is not None" if len(streams) == 1 else f'{facts.place.device(node)}.type != "cpu"'


def _form(node: cst.CSTNode, facts: Facts) -> tuple[str, str] | None:
    """Return which use of a stream a node is, and the stream or the tensor that is used."""
    if isinstance(node, cst.Call):
        assign = facts.parent(node)
        if facts.name(node.func) in _MADE and not node.args and assign is not None and m.matches(assign, _ASSIGNED):
            return _MAKE, text_of(cst.ensure_type(assign, cst.Assign).targets[0].target)
    if isinstance(node, cst.With) and m.matches(node, _WITH):
        call = cst.ensure_type(node.items[0].item, cst.Call)
        if facts.name(call.func) == "torch.cuda.stream":
            return _ENTER, text_of(call.args[0].value)
    if isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1 and isinstance(node.body[0], cst.Expr):
        return _method(node.body[0].value, facts)
    return None


def _method(call: cst.BaseExpression, facts: Facts) -> tuple[str, str] | None:
    """Return the form of `current_stream().wait_stream(s)`, `s.wait_stream(current_stream())` and `record_stream`."""
    if not m.matches(call, m.Call(func=m.Attribute(), args=[m.Arg()])):
        return None
    call = cst.ensure_type(call, cst.Call)
    func = cst.ensure_type(call.func, cst.Attribute)
    of, argument, method = func.value, call.args[0].value, func.attr.value
    if method == "wait_stream" and is_current_stream(of, facts) and m.matches(argument, _NAMED):
        return _WAIT, text_of(argument)
    if method == "wait_stream" and is_current_stream(argument, facts) and m.matches(of, _NAMED):
        return _WAIT, text_of(of)
    if method == "record_stream" and is_current_stream(argument, facts) and m.matches(of, _NAMED):
        return _KEEP, text_of(of)
    return None


def _knows_all(facts: Facts) -> bool:
    """Return whether every use of a stream in the file has one of the forms that this rule rewrites."""
    forms = [form for node in _holders(facts) if (form := _form(node, facts)) is not None]
    calls = [call for call in facts.calls if facts.name(call.func) in _MADE | _USED]
    made = {subject for kind, subject in forms if kind == _MAKE}
    used = [subject for kind, subject in forms if kind in (_MAKE, _ENTER, _WAIT)]
    code = re.sub(r"#.*", "", facts.code)
    written = sum(len(re.findall(rf"(?<![\w.]){re.escape(stream)}\b", code)) for stream in made)
    waits = any(kind == _WAIT for kind, _ in forms)
    return waits and len(forms) == len(calls) and set(used) <= made and len(used) == written


def _holders(facts: Facts) -> Iterator[cst.CSTNode]:
    """Yield the nodes around the calls that concern streams, each of which `_form` may know."""
    for call in facts.calls:
        if facts.name(call.func) in _MADE:
            yield call
        elif facts.name(call.func) in _USED:
            kinds = (cst.With, cst.SimpleStatementLine, cst.SimpleStatementSuite, cst.Module)
            yield next(outer for outer in facts.parents(call) if isinstance(outer, kinds))


STREAMS = Rule(
    "stream",
    "a stream for copies, if the script uses streams for nothing else",
    (cst.Call, cst.With, cst.SimpleStatementLine),
    _decide,
    (
        Example(
            Level.ROLES,
            "import contextlib\nside = torch.cuda.Stream()\n"
            "with torch.cuda.stream(side):\n    x = y.cuda(non_blocking=True)\n"
            "torch.cuda.current_stream().wait_stream(side)",
            "import contextlib\n"
            'side = torch.Stream(accel.device) if accel.device.type != "cpu" else None\n'
            "with side or contextlib.nullcontext():\n    x = y.to(accel.device, non_blocking=True)\n"
            "if side is not None:\n    torch.accelerator.current_stream().wait_stream(side)",
        ),
    ),
)
