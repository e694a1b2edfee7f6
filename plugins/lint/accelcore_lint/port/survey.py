"""Names, calls, imports and devices of a file, collected in one walk."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import libcst as cst

from accelcore_lint.port.device_names import index_of
from accelcore_lint.port.syntax import argument, dotted, text_of
from accelcore_lint.port.vendors import DEVICES

_HIDE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
_HIDING = ".select_device"
"""An imported function, of that name in all scripts after the style of YOLO, which sets one of those variables."""

_SETS = ("torch.cuda.set_device", "torch.accelerator.set_device_index")


class Survey(cst.CSTVisitor):
    """What one walk over a file finds.

    Attributes:
        identifiers: all names that it uses or defines.
        uses: how often it uses each of them, apart from their imports and definitions.
        attributes, defined_methods, functions, calls, seeds, imports: those in it.
        assigned: the values that it assigns to each name.
        helpers: names that the module assigns, by the source of their value.
        backends: names to which it assigns a backend of `accelcore.select`, with the call.
        hidden_by: assignments to the environment variables that hide devices, and calls of functions that do so.
        made_current: expressions of the devices that it makes current.
        numbered: names of devices such as "cuda:1", and moves such as `x.cuda(1)`, with the number of each.
        moved_to: what numbers devices in moves such as `x.cuda(i)`, and in names such as `f"cuda:{i}"`.
        torch: the name of the module torch; `has_torch_name` is whether the file imports it under a name.
        imports_torch: whether it imports torch, or a part of it, outside of functions; a star may do so, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self._parents: dict[cst.CSTNode, cst.CSTNode] = {}
        self._around: list[cst.CSTNode] = []
        self.identifiers: set[str] = set()
        self.uses: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.defined_methods: set[str] = set()
        self.assigned: dict[str, list[cst.BaseExpression]] = defaultdict(list)
        self.imports: list[cst.CSTNode] = []
        self.backends: dict[cst.Name, cst.Call] = {}
        self.hidden_by: list[cst.CSTNode] = []
        self.made_current: list[cst.BaseExpression] = []
        self.calls: list[cst.Call] = []
        self.numbered: dict[cst.CSTNode, str] = {}
        self.moved_to: list[cst.BaseExpression] = []
        self.seeds: list[cst.Call] = []
        self.functions: dict[str, cst.FunctionDef] = {}
        self.helpers: dict[str, cst.Name] = {}
        self.torch = "torch"
        self._inner_names: set[str] = set()
        self.has_torch_name = self.imports_torch = False
        self._depth = 0

    def name(self, node: cst.CSTNode) -> str | None:
        """Return the full name of an imported object."""
        raise NotImplementedError

    def on_visit(self, node: cst.CSTNode) -> bool:
        if self._around:
            self._parents[node] = self._around[-1]
        self._around.append(node)
        return super().on_visit(node)

    def on_leave(self, original_node: cst.CSTNode) -> None:
        super().on_leave(original_node)
        self._around.pop()

    def visit_Name(self, node: cst.Name) -> None:
        parent = self._parents[node]
        is_attribute = isinstance(parent, cst.Attribute) and parent.attr is node
        if not is_attribute and not (isinstance(parent, cst.Arg) and parent.keyword is node):
            self.identifiers.add(node.value)
            if not isinstance(parent, (cst.FunctionDef, cst.ClassDef, cst.ImportAlias, cst.AsName)):
                self.uses[node.value] += 1

    def visit_Attribute(self, node: cst.Attribute) -> None:
        self.attributes.add(node.attr.value)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        if match := re.fullmatch(r"(?:cuda|npu):(\d+)", str(node.raw_value)):
            self.numbered[node] = match[1]

    def visit_FormattedString(self, node: cst.FormattedString) -> None:
        self._add_index(node)

    def visit_BinaryOperation(self, node: cst.BinaryOperation) -> None:
        self._add_index(node)

    def _add_index(self, node: cst.BaseExpression) -> None:
        index = index_of(node)[1]
        if index is not None:
            self.moved_to.append(index)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        if self._depth:
            self.defined_methods.add(node.name.value)
        else:
            self.functions[node.name.value] = node
        self._depth += 1

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self._depth -= 1

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._depth += 1

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self._depth -= 1

    def visit_Call(self, node: cst.Call) -> None:
        self.calls.append(node)
        name = self.name(node.func) or ""
        index = argument(node, "index", 1) if name == "torch.device" else None
        if isinstance(index, cst.Integer):
            self.numbered[node] = index.value
        elif index is not None:
            self.moved_to.append(index)
        if isinstance(node.func, cst.Attribute) and node.func.attr.value in DEVICES:
            moved = argument(node, "device", 0)
            if isinstance(moved, cst.Integer):
                self.numbered[node] = moved.value
            elif moved is not None and not index_of(moved)[0] and not isinstance(moved, (cst.Call, cst.SimpleString)):
                self.moved_to.append(moved)
        choice = node.args[0].value if node.args and text_of(node.func).endswith(".to") else None
        if isinstance(choice, cst.IfExp) and text_of(choice.test) == f"{text_of(choice.body)} is not None":
            self.moved_to.append(choice.body)  # which an earlier run has made of `x.cuda(i)`
        self._add_index(node)
        if name in ("torch.manual_seed", "torch.random.manual_seed"):
            self.seeds.append(node)
        is_setting = text_of(node.func).endswith("environ.setdefault")
        if name.endswith(_HIDING) or (is_setting and any(each in text_of(node) for each in _HIDE)):
            self.hidden_by.append(node)
        if name in _SETS and node.args:
            self.made_current.append(node.args[0].value)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        target = node.target
        if isinstance(target, cst.Subscript) and any(name in text_of(target.slice[0]) for name in _HIDE):
            made = [text_of(value) for value in self.assigned.get(text_of(target.value), ())]
            if not made or not all("copy(" in text or text.startswith(("dict(", "{")) for text in made):
                self.hidden_by.append(node)  # and not of a copy, for another process

    def visit_Assign(self, node: cst.Assign) -> None:
        for target in node.targets:
            self._assign(target.target, node.value)
        if len(node.targets) == 1 and not self._depth and isinstance(node.targets[0].target, cst.Name):
            self.helpers.setdefault(text_of(node.value), node.targets[0].target)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        if node.value is not None:
            self._assign(node.target, node.value)

    def _assign(self, target: cst.CSTNode, value: cst.BaseExpression) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            values = value.elements if isinstance(value, (cst.Tuple, cst.List)) else []
            pairs = zip(target.elements, values, strict=False) if len(values) == len(target.elements) else []
            for each, item in pairs:
                self._assign(each.value, item.value)
            if not values:
                for each in target.elements:
                    self.assigned[text_of(each.value)].append(value)
        else:
            self.assigned[text_of(target)].append(value)
            if (
                isinstance(target, cst.Name)
                and isinstance(value, cst.Call)
                and self.name(value.func) == "accelcore.select"
            ):
                self.backends[target] = value

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        self.imports.append(node)
        if not self._depth and not node.relative and node.module and dotted(node.module).split(".")[0] == "torch":
            self.imports_torch = True

    def visit_Import(self, node: cst.Import) -> None:
        self.imports.append(node)
        for alias in node.names:
            name = dotted(alias.name)
            if not self._depth and name.split(".")[0] == "torch":
                self.imports_torch = True
            if self.has_torch_name:
                continue
            bound = text_of(alias.asname.name) if alias.asname else "torch"
            if self._depth and name == "torch":
                self._inner_names.add(bound)
                self.torch = bound if len(self._inner_names) == 1 else "torch"
            elif not self._depth and (name == "torch" or (name.startswith("torch.") and alias.asname is None)):
                self.torch = bound
                self.has_torch_name = True
