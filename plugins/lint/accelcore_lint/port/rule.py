"""Vocabulary of a port: levels, rules and their examples, and the decisions that rules make about a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import libcst as cst

TODO = "# TODO(accelcore): "
"""Beginning of the comment above a statement that was not rewritten."""

Build = Callable[[Any], Any]
"""Function of a node whose parts are already rewritten; returns what replaces it."""


class Level(str, Enum):
    """What a script is rewritten to.

    Attributes:
        TORCH: `torch.accelerator` and generic AMP; the result does not need accelcore.
        ROLES: the roles of accelcore, in the script's own loop.
        TRAINER: as ROLES, and a trainer in place of a training loop that is recognised as a whole.
    """

    TORCH = "torch"
    ROLES = "roles"
    TRAINER = "trainer"


@dataclass(frozen=True)
class Example:
    """One statement or more, before and after a rule; `after` is for `level`."""

    level: Level
    before: str
    after: str


@dataclass(frozen=True)
class Rewrite:
    """Decision to replace a node.

    Attributes:
        build: makes the new node.
        claims: parts of the node that this rewrite covers. No rule looks at them or into them.
        imports: statements that the new node needs, such as `"import torch"`.
    """

    build: Build
    claims: Sequence[cst.CSTNode] = ()
    imports: Sequence[str] = ()


@dataclass(frozen=True)
class Left:
    """Decision to leave a node as it is.

    Attributes:
        reason: one line for the comment above the statement, and for the report.
        claims: as in `Rewrite`; the node itself is claimed as a whole, unless `inner` is set.
        harmless: whether other devices ignore the line. It is reported, without a comment.
        inner: whether rules still look at the parts of the node.
        retry: for a part of an `if`'s condition: what to do instead if all that the `if` guards is rewritten.
        some: whether that is done unless the `if` guards a line that is left, and none that is rewritten.
    """

    reason: str
    claims: Sequence[cst.CSTNode] = ()
    harmless: bool = False
    inner: bool = False
    retry: Rewrite | None = None
    some: bool = False


@dataclass(frozen=True)
class Note:
    """Line of the report: what a rule did, or why a line was left.

    Attributes:
        line: number of the line in the source, counted from 1.
        rule: name of the rule.
        text: source of the statement's first line for a rewrite, the reason for a line that was left.
    """

    line: int
    rule: str
    text: str


@dataclass(frozen=True)
class Rule:
    """One idea of the port.

    Attributes:
        name: as in the report.
        title: what it rewrites, for the documentation.
        nodes: types of the nodes that it looks at.
        decide: function of a node and the `Facts` of its file. Returns None if the node is not this rule's.
        examples: tested, and printed in the documentation.
        optional: whether the lines also work on other devices as they are. Nothing is reported if one is left.
    """

    name: str
    title: str
    nodes: tuple[type[cst.CSTNode], ...]
    decide: Callable[[Any, Any], Rewrite | Left | None]
    examples: Sequence[Example] = field(default=())
    optional: bool = False
