"""Small questions about nodes: their source, their dotted name, the arguments of a call."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

import libcst as cst
from libcst import matchers
from libcst.helpers import get_full_name_for_node

from accelcore_lint.port.rule import TODO, Rewrite

STRING = r"""(?s:'''.*?'''|\"\"\".*?\"\"\"|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*")"""
_STRING_OR_COMMENT = re.compile(rf"({STRING})|[ \t]*(#[^\r\n]*)")
_HAS_LINES = (cst.BaseStatement, cst.BaseSuite, cst.Module)


def without_comments(text: str, kept: str = "") -> str:
    """Return a source without comments, but for those that begin with `kept`. Each line keeps its number."""
    return _STRING_OR_COMMENT.sub(
        lambda found: found[1] or (found[0] if kept and found[2].startswith(kept) else ""), text
    )


def reasons_above(statement: cst.CSTNode, module: cst.Module) -> list[str]:
    """Return the reasons in the comments that an earlier run has left above a statement."""
    # Comments above the first statement of a file are the module's.
    lines = [*getattr(statement, "leading_lines", ()), *(module.header if statement is module.body[0] else ())]
    comments = [line.comment.value for line in lines if line.comment]
    return [comment.removeprefix(TODO) for comment in comments if comment.startswith(TODO)]


def loses_comment(node: cst.CSTNode, rewrite: Rewrite) -> bool:
    """Return whether a comment in a node is not in what replaces it."""
    if "#" not in cst.Module([]).code_for_node(node):
        return False
    made = rewrite.build(node)
    new = list(made) if isinstance(made, cst.FlattenSentinel) else [made] if isinstance(made, cst.CSTNode) else []
    before, *after = (len(matchers.findall(each, matchers.Comment())) for each in (node, *new))
    return before > sum(after)


@lru_cache(maxsize=32)
def code_of(module: cst.Module) -> str:
    """Return the source of a module. libcst makes it again each time, and modules do not change."""
    return module.code


@lru_cache(maxsize=8192)
def text_of(node: cst.CSTNode) -> str:
    """Return the source of a node without the parentheses around it; `()` keeps them. A statement has no comments."""
    is_empty = isinstance(node, cst.Tuple) and not node.elements
    if isinstance(node, cst.BaseExpression) and node.lpar and not is_empty:
        node = node.with_changes(lpar=(), rpar=())
    text = cst.Module([]).code_for_node(node)
    return (without_comments(text) if isinstance(node, _HAS_LINES) else text).strip()


def dotted(node: cst.CSTNode) -> str:
    """Return a name with its dots, or ""."""
    return get_full_name_for_node(node) or ""


def is_kept(around: Iterable[cst.CSTNode], *kinds: type[cst.CSTNode]) -> bool:
    """Return whether a device is only named in a statement of these kinds, or in one that returns or assigns it."""
    for node in around:
        if isinstance(node, cst.BaseStatement | cst.BaseSmallStatement):
            return isinstance(node, kinds or (cst.Return, cst.Assign, cst.AnnAssign))
        if isinstance(node, cst.Call) and dotted(node.func).split(".")[-1] not in ("device", "format", "str"):
            return False
    return False


def argument(call: cst.Call, keyword: str, position: int | None = None) -> cst.BaseExpression | None:
    """Return the value of an argument by its keyword, or by its position; None if it is not given."""
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == keyword:
            return arg.value
    if position is not None and position < len(call.args):
        found = call.args[position]
        if found.keyword is None and not any(arg.star for arg in call.args[: position + 1]):
            return found.value
    return None


def arguments(call: cst.Call, *names: str) -> dict[str, cst.Arg] | None:
    """Return the arguments by name, given the names in their order; None if one is starred, or unknown."""
    found = {}
    for position, arg in enumerate(call.args):
        if arg.star or (arg.keyword is None and position >= len(names)):
            return None
        name = names[position] if arg.keyword is None else arg.keyword.value
        if name not in names:
            return None
        found[name] = arg
    return found


def key_of(node: cst.CSTNode | None) -> str:
    """Return the key of an entry in a dictionary that is a plain string; "" for anything else."""
    key = node.key if isinstance(node, cst.DictElement) else None
    return str(key.evaluated_value) if isinstance(key, cst.SimpleString) else ""


def is_import(node: cst.CSTNode) -> bool:
    """Return whether a statement only imports."""
    return isinstance(node, cst.SimpleStatementLine) and all(
        isinstance(part, (cst.Import, cst.ImportFrom)) for part in node.body
    )


def is_guard(node: cst.CSTNode) -> bool:
    """Return whether a statement of the module is `if __name__ == "__main__":`."""
    return (
        isinstance(node, cst.If)
        and isinstance(node.test, cst.Comparison)
        and text_of(node.test.left) == "__name__"
        and isinstance(node.body, cst.IndentedBlock)
    )


def common_guard(
    nodes: Iterable[cst.CSTNode], parents: Callable[[cst.CSTNode], Iterator[cst.CSTNode]]
) -> cst.If | None:
    """Return the module's `if __name__ == "__main__":` if all nodes are in its body; `parents` are those around one."""
    found: set[cst.CSTNode] = set()
    for node in nodes:
        inner = node
        for outer in parents(node):
            if isinstance(outer, cst.Module):
                found.add(inner)
            inner = outer
    guard = found.pop() if len(found) == 1 else None
    return guard if isinstance(guard, cst.If) and is_guard(guard) and guard.orelse is None else None


def run_on_import(line: cst.CSTNode) -> str:
    """Return the source of what runs when a statement of a module does: not the bodies of functions."""
    if isinstance(line, cst.FunctionDef):
        return "\n".join(map(text_of, (line.params, *line.decorators)))
    if isinstance(line, cst.ClassDef):
        return "\n".join([*map(text_of, line.decorators), *map(run_on_import, line.body.body)])
    return text_of(line)
