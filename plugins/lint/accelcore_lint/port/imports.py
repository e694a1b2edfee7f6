"""Imports of a rewritten file: those of vendors' packages, and those that nothing uses any more."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import libcst as cst

from accelcore_lint.port.removed import removed
from accelcore_lint.port.rule import TODO, Level, Note
from accelcore_lint.port.syntax import dotted, is_guard, is_import, reasons_above, text_of
from accelcore_lint.port.tree import Tree
from accelcore_lint.port.uses import STOPS
from accelcore_lint.port.vendors import DEVICES, MODULES
from accelcore_lint.port.walk import children, find

APEX: Mapping[str, frozenset[str]] = {
    "apex.amp": frozenset(
        [
            "disable_casts",
            "float_function",
            "half_function",
            "initialize",
            "load_state_dict",
            "master_params",
            "promote_function",
            "register_float_function",
            "register_half_function",
            "register_promote_function",
            "scale_loss",
            "state_dict",
        ]
    ),
    "apex.parallel": frozenset({"DistributedDataParallel", "SyncBatchNorm", "convert_syncbn_model"}),
    "apex.optimizers": frozenset({"FusedAdam", "FusedSGD", "FusedAdagrad", "Lamb"})
    | {f"NpuFused{kind}" for kind in ("Adadelta", "Adam", "AdamP", "AdamW", "Lamb", "RMSprop", "SGD")},
}
"""What `accelcore.apex` has. NpuFusedBertAdam and NpuFusedRMSpropTF of Ascend's apex compute something else there."""

_NEEDS_APEX = (
    "apex: a file of the project uses its private state, asks whether it is installed, or has a package that drives it"
)
_VENDOR = (*MODULES, *(f"torch.{device}" for device in DEVICES))
_WRAPPER = "FP16_Optimizer"
_IMPOSTOR = "transfer_to_npu"
_EXTENSION = re.compile(rf"(^|_)({'|'.join(DEVICES)})(_|$)")
"""Names of a vendor's functions and compiled modules."""

_ONE_DEVICES = (*MODULES, "torch.npu", "acl", "mindspeed", "torchair", "transformer_engine", "xformers")
"""Modules that a host with another device may not have. That of `torch.cuda` can be imported everywhere."""

_VENDORS_ONLY = ("bitsandbytes", "cupy", "flash_attn", "nvidia", "pycuda", "pynvml", "tensorrt", "triton")
_CUDNN = "torch.backends.cudnn"
_ANSWER = re.compile(r"(\w+) *=(?!=)|\breturn\b")


def is_known_apex(name: str) -> bool:
    """Return whether `accelcore.apex` has a function or a module."""
    module, _, function = name.rpartition(".")
    return name == "apex" or name in APEX or function in APEX.get(module, ())


def imports_torch(tree: Tree, node: cst.CSTNode) -> bool:
    """Return whether a function around a node, or the guard, imports torch above it: a script imports it late."""
    around = {outer for outer in tree.parents(node) if isinstance(outer, cst.FunctionDef) or is_guard(outer)}
    lines = [made for made in tree.imports if text_of(made) == tree.torch_import and tree.line(made) < tree.line(node)]
    return any(not around.isdisjoint(tree.parents(made)) for made in lines)


def may_lack_torch(tree: Tree) -> bool:
    """Return whether a file goes on without torch.

    It only imports torch in a `try`, and a handler returns, or assigns what a condition of the file asks. Another
    import in a function, such as of `torch.backends.xnnpack`, runs later: perhaps only if torch is there.
    """
    made = [node for node in tree.imports if _brings_torch(node)]
    made = [node for node in made if tree.function_of(node) is None] or made
    return bool(made) and all(any(_goes_on(each, tree.code) for each in _tries(tree, node)) for node in made)


def _brings_torch(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.ImportFrom):
        return not node.relative and node.module is not None and dotted(node.module).split(".")[0] == "torch"
    return isinstance(node, cst.Import) and any(dotted(each.name).split(".")[0] == "torch" for each in node.names)


def _tries(tree: Tree, node: cst.CSTNode) -> list[cst.Try]:
    """Return the `try` statements in whose body a node is."""
    around = list(tree.parents(node))
    return [outer for outer in around if isinstance(outer, cst.Try) and outer.body in around]


def _goes_on(block: cst.Try, code: str) -> bool:
    names = [name for handler in block.handlers for name in _ANSWER.findall(text_of(handler.body))]
    return any(not name or re.search(rf"\b(if|elif|and|or|not) +{name}\b", code) for name in names)


def extensions_in(imports: Iterable[cst.CSTNode], own: Collection[str]) -> frozenset[str]:
    """Return the names of a vendor's functions that imports bring from compiled modules, such as `nms_cuda`.

    These are modules that are no files of the project, and whose names begin with `_` or have a vendor's word, also
    as `logsumexp` of `extension.cuda`; all of a module `_ext`; and packages such as cupy or nvidia.dali.
    `own`: the project's modules.
    """
    found: set[str] = set()
    for node in imports:
        if not isinstance(node, (cst.Import, cst.ImportFrom)) or isinstance(node.names, cst.ImportStar):
            continue
        for each in node.names:
            module = dotted(each.name) if isinstance(node, cst.Import) else dotted(node.module or cst.Name("_"))
            last = module.split(".")[-1]
            bound = text_of(each.asname.name) if each.asname else dotted(each.name)
            compiled = (last.startswith("_") or _EXTENSION.search(last)) and last not in {*own, *MODULES}
            first, *inner = module.split(".")
            beside = bool({*inner} & {*DEVICES}) and first != "torch" and last not in own
            named = compiled and _EXTENSION.search(bound)
            if beside or named or last == "_ext" or first in _VENDORS_ONLY:
                found.add(bound)
    return frozenset(found)


def brought_for_one(node: cst.Import | cst.ImportFrom) -> set[str]:
    """Return the modules of an import that only hosts with one vendor's device have."""
    if isinstance(node, cst.ImportFrom):
        module = "" if node.relative or node.module is None else dotted(node.module)
        names = () if isinstance(node.names, cst.ImportStar) else node.names
        found = {module, *(f"{module}.{dotted(each.name)}" for each in names if module == "torch")}
    else:
        found = {dotted(each.name) for each in node.names}
    return {module for module in found if _is_of(module, _ONE_DEVICES)}


def in_branches(module: cst.Module) -> frozenset[str]:
    """Return such modules that a file imports in a branch of an `if`."""
    found = set[str]()
    for branch in find(module, cst.If):
        for node in find(branch, cst.Import):
            found |= brought_for_one(node)
        for made in find(branch, cst.ImportFrom):
            found |= brought_for_one(made)
    return frozenset(found)


def _is_vendor(module: str) -> bool:
    return _is_of(module, _VENDOR)


def _is_of(module: str, packages: Collection[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in packages)


def names_used(module: cst.Module) -> Counter[str]:
    """Count the names that a module uses, without those in import statements, attributes and keywords."""
    found, stack = Counter[str](), list[cst.CSTNode]([module])
    while stack:
        node = stack.pop()
        if isinstance(node, cst.Name):
            found[node.value] += 1
        elif isinstance(node, cst.Attribute | cst.Arg):
            stack.append(node.value)
        elif isinstance(node, cst.SimpleString):
            value = node.evaluated_value
            if isinstance(value, str) and value.isidentifier():
                found[value] += 1  # `__all__`, `getattr`, annotations
        elif not isinstance(node, (cst.Import, cst.ImportFrom)):
            stack += children(node)
    return found


class Imports(cst.CSTTransformer):
    """Pass over a file whose other parts are rewritten: it replaces imports, or marks them as removed.

    Args:
        level: what the file is rewritten to.
        before: names that the file used.
        after: names that it uses now.
        lines: numbers of the lines of the import statements in the source, by their text.
        complete: whether no vendor's word was left.
        strange: names in apex that the file uses and accelcore.apex does not have; `"apex"` is all of them.
        taken: names that other files take from this one.

    Attributes:
        rewritten, left: notes for the report.
    """

    def __init__(
        self,
        level: Level,
        *,
        before: Counter[str],
        after: Counter[str],
        lines: Mapping[str, int],
        complete: bool,
        strange: frozenset[str],
        taken: frozenset[str],
    ) -> None:
        super().__init__()
        self.level, self.before, self.after, self.lines = level, before, after, lines
        self.complete, self.strange, self.taken = complete, strange, taken
        self.rewritten: list[Note] = []
        self.left: list[Note] = []
        self._module = cst.Module([])
        self._present: Sequence[str] = ()
        self._line = 0
        self._has_torch = False
        self._probes: set[cst.CSTNode] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        return super().on_visit(node) and not isinstance(node, cst.SimpleStatementLine | cst.BaseExpression)

    def visit_Module(self, node: cst.Module) -> None:
        self._module = node

    def visit_Try(self, node: cst.Try) -> None:
        if _depends_on_imports(node):
            self._probes.update(node.body.body)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        self._present = reasons_above(original_node, self._module)
        body = self._module.body
        above = body[: body.index(original_node)] if original_node in body else ()
        self._has_torch = any(text_of(each) == "import torch" for each in above)
        self._line = self.lines.get(text_of(original_node.body[0]), 0)
        return self._replacement(updated_node, probe=original_node in self._probes)

    def _replacement(
        self, statement: cst.SimpleStatementLine, *, probe: bool
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        """Return what replaces one statement; `probe`: whether the script does something else if the import fails."""
        if len(statement.body) != 1:
            return statement
        part = statement.body[0]
        if probe and (module := _package_of(part)) in MODULES:
            return self._kept(statement, f"{module}: the script asks whether it is installed")
        if (
            isinstance(part, cst.ImportFrom)
            and not part.relative
            and part.module
            and not isinstance(part.names, cst.ImportStar)
        ):
            return self._from(statement, part, dotted(part.module), part.names)
        if isinstance(part, cst.ImportFrom) and not part.relative and part.module and _is_vendor(dotted(part.module)):
            return self._kept(statement, f"{dotted(part.module)}: one vendor's module, and all names of it")
        if isinstance(part, cst.Import) and len(part.names) == 1:
            return self._plain(statement, part, part.names[0])
        return statement

    def _from(
        self, statement: cst.SimpleStatementLine, part: cst.ImportFrom, module: str, names: Sequence[cst.ImportAlias]
    ) -> cst.BaseStatement:
        vendor = _is_vendor(module) or (module == "torch" and all(dotted(each.name) in DEVICES for each in names))
        if any(dotted(each.name) == _IMPOSTOR for each in names):
            if self.complete:
                return self._gone(statement)
            return self._kept(statement, "transfer_to_npu: remove it when the lines that are left are done")
        gone = [each for each in names if f"{module}.{dotted(each.name)}" == _CUDNN]
        gone += [each for each in names if module == "torch" and dotted(each.name) in DEVICES]
        kept = [each for each in names if self._is_needed(each, vendor=vendor or each in gone)]
        if not kept:
            return self._gone(statement)
        if module.split(".")[0] == "apex":
            parts = [f"{module}.{dotted(each.name)}" for each in names]
            lacks = [part for part in parts if not is_known_apex(part)]
            lacks += [used for used in sorted(self.strange) if any(used.startswith(f"{part}.") for part in parts)]
            why = "apex: level roles has accelcore.apex" if self.level is Level.TORCH else ""
            why = f"apex: accelcore has no {', '.join(lacks)}" if lacks else why
            why = _NEEDS_APEX if "apex" in self.strange else why
            if module == "apex.optimizers" and self.before[_WRAPPER] > 0:
                why = f"apex: its {_WRAPPER} takes apex's own optimizers"
            if why:
                return self._kept(statement, why)
            new = cst.parse_expression(f"accelcore.{module}")
            return self._changed(statement, part.with_changes(module=new))
        if len(kept) < len(names):
            kept[-1] = kept[-1].with_changes(comma=names[-1].comma)
            self._note(self.rewritten, text_of(part))
            statement = statement.with_changes(body=[part.with_changes(names=kept)])
        return self._kept(statement, f"{module}: one vendor's module") if vendor else statement

    def _plain(self, statement: cst.SimpleStatementLine, part: cst.Import, alias: cst.ImportAlias) -> cst.BaseStatement:
        module = dotted(alias.name)
        if not _is_vendor(module):
            unused = alias.asname is not None and not self._is_needed(alias, vendor=module == _CUDNN)
            return self._gone(statement) if unused else statement
        if module.startswith("torch.") and alias.asname is None:
            if self._has_torch:
                return self._gone(statement)
            return self._changed(statement, cst.Import([cst.ImportAlias(cst.Name("torch"))]))
        if not self._is_needed(alias, vendor=True):
            return self._gone(statement)
        if module.split(".")[0] == "apex" and self.level is not Level.TORCH:
            bound = text_of(alias.asname.name) if alias.asname else "apex"
            parent, _, name = f"accelcore.{module if alias.asname else 'apex'}".rpartition(".")
            source = f"from {parent} import {name}" + (f" as {bound}" if bound != name else "")
            if (module == "apex" or module in APEX) and not self._is_strange(module):
                return self._changed(
                    statement, cst.ensure_type(cst.parse_statement(source), cst.SimpleStatementLine).body[0]
                )
        lacks = sorted(self.strange - {"apex"}) if module.split(".")[0] == "apex" else []
        why = f"apex: accelcore has no {', '.join(lacks)}" if lacks else f"{module}: one vendor's module"
        return self._kept(statement, why)

    def _is_strange(self, module: str) -> bool:
        return "apex" in self.strange or any(f"{name}.".startswith(f"{module}.") for name in self.strange)

    def _is_needed(self, alias: cst.ImportAlias, *, vendor: bool) -> bool:
        bound = text_of(alias.asname.name) if alias.asname else dotted(alias.name).split(".")[0]
        return self.after[bound] > 0 or bound in self.taken or (not vendor and self.before[bound] <= 0)

    def _gone(self, statement: cst.SimpleStatementLine) -> cst.BaseStatement:
        self._note(self.rewritten, text_of(statement.body[0]))
        return removed(statement)

    def _changed(self, statement: cst.SimpleStatementLine, part: cst.BaseSmallStatement) -> cst.BaseStatement:
        self._note(self.rewritten, text_of(statement.body[0]))
        return statement.with_changes(body=[part])

    def _kept(self, statement: cst.SimpleStatementLine, reason: str) -> cst.BaseStatement:
        self._note(self.left, reason)
        if reason in self._present:
            return statement
        comment = cst.EmptyLine(comment=cst.Comment(TODO + reason))
        return statement.with_changes(leading_lines=[*statement.leading_lines, comment])

    def _note(self, notes: list[Note], text: str) -> None:
        notes.append(Note(self._line, "import", text))


def _package_of(part: cst.BaseSmallStatement) -> str:
    """Return the first part of the name of the module that a statement imports; "" if it imports none, or several."""
    if isinstance(part, cst.ImportFrom) and part.module is not None and not part.relative:
        return dotted(part.module).split(".")[0]
    return dotted(part.names[0].name).split(".")[0] if isinstance(part, cst.Import) and len(part.names) == 1 else ""


def _depends_on_imports(node: cst.Try) -> bool:
    """Return whether a script does something else if one of the imports in a `try` fails, and does not stop."""
    handlers = [text_of(statement) for handler in node.handlers for statement in handler.body.body]
    is_optional = all(map(is_import, node.body.body)) and all(text == "pass" for text in handlers)
    return not is_optional and not any(map(STOPS.search, handlers))
