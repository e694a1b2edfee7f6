"""Facts of one file that rules ask for: what names mean, which expressions are ranks, and how the script starts."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, cast

import libcst as cst
from libcst import metadata
from libcst.helpers import get_full_name_for_node

from accelcore_lint.port.model import Level
from accelcore_lint.port.place import Place
from accelcore_lint.port.vendors import DEVICES, own_options

__all__ = ["Facts", "argument", "arguments", "dotted", "text_of"]

_VARIABLE = r"(?:LOCAL_RANK|SLURM_LOCALID|OMPI_COMM_WORLD_LOCAL_RANK|MV2_COMM_WORLD_LOCAL_RANK)"
_LOCAL_RANK = re.compile(
    r"(\w+\.)?_?(local_?rank|LOCAL_RANK)"
    rf"|int\(os\.environ\[.{_VARIABLE}.\]\)|int\(os\.(getenv|environ\.get)\(.{_VARIABLE}.[^)]*\)\)"
)
_RANK_PER_HOST = re.compile(r"[\w.()\[\]\"' ]*rank[\w.()\[\]\"']* ?% ?([\w.]*device_count\(\)|\w*(gpus|devices)\w*)")
_SPAWNS = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes", "torch.multiprocessing.spawn.spawn")

_ENGINES = "accelerate|lightning|pytorch_lightning|lightning_fabric|deepspeed|ignite|fastai|mmengine|colossalai"
_HIDE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


class Facts:
    """What a file says, read once before rules decide.

    Args:
        wrapper: the parsed file.
        level: what it is rewritten to.

    Attributes:
        level: as given; TRAINER has rules of its own, and otherwise those of ROLES.
        place: where the name of the device comes from in the rewritten file.
    """

    def __init__(self, wrapper: metadata.MetadataWrapper, level: Level) -> None:
        self.level = level
        self.module = wrapper.module
        self._names: Mapping[cst.CSTNode, Any] = wrapper.resolve(metadata.QualifiedNameProvider)
        self._parents: Mapping[cst.CSTNode, cst.CSTNode] = wrapper.resolve(metadata.ParentNodeProvider)
        self._positions: Mapping[cst.CSTNode, Any] = wrapper.resolve(metadata.PositionProvider)
        survey = _Survey(self)
        self.module.visit(survey)
        self.attributes = survey.attributes
        self.defined_methods = survey.methods
        self._assigned = survey.assigned
        self.hidden_by = survey.hidden_by
        self._imports = survey.imports
        self.calls = survey.calls
        self.uses = survey.uses
        self.indexes = survey.indexes
        self.seeds = survey.seeds
        self.functions = survey.functions
        self.torch = survey.torch or "torch"
        self.has_torch_name = survey.torch is not None
        self.place = Place(self, survey.identifiers, survey.helpers)

    def name(self, node: cst.CSTNode) -> str | None:
        """Return the full name of an imported object, such as `"torch.cuda.synchronize"`; None unless it is certain."""
        base = node
        while isinstance(base, cst.Attribute):
            base = base.value
        if not isinstance(base, cst.Name):  # such as `nn.Linear(2, 2).cuda`, which libcst names, too
            return None
        found = self._names.get(node, ())
        found = found() if callable(found) else found
        if len(found) != 1:
            return None
        (qualified,) = found
        if qualified.source is not metadata.QualifiedNameSource.IMPORT:
            return None
        return cast("str", qualified.name)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the node that holds a node; None for the module."""
        return self._parents.get(node)

    def parents(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around a node, from the inside."""
        above = self.parent(node)
        while above is not None:
            yield above
            above = self.parent(above)

    def line(self, node: cst.CSTNode) -> int:
        """Return the number of a node's first line."""
        return cast("int", self._positions[node].start.line)

    def function_of(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """Return the outermost function around a node, or None."""
        found = [each for each in self.parents(node) if isinstance(each, cst.FunctionDef)]
        return found[-1] if found else None

    @cached_property
    def own_options(self) -> set[str]:
        """Return the script's own options that are called as a device, such as `args.cuda`."""
        return own_options(self.module.code)

    @cached_property
    def spawned(self) -> dict[str, str]:
        """Return the functions that the script starts as processes, with the name of their first parameter."""
        names = {text_of(call.args[0].value) for call in self.calls if self.name(call.func) in _SPAWNS and call.args}
        return {
            name: function.params.params[0].name.value
            for name in names
            if (function := self.functions.get(name)) is not None and function.params.params
        }

    @cached_property
    def spawns(self) -> bool:
        """Return whether the script starts processes that train."""
        return any(
            (self.name(call.func) or "").startswith(("torch.multiprocessing.spawn", "torch.multiprocessing.start_proc"))
            or (self.name(call.func) or "").endswith("multiprocessing.Process")
            for call in self.calls
        )

    def import_lines(self) -> dict[str, int]:
        """Return the numbers of the lines of all import statements, by their text."""
        return {text_of(node): self.line(node) for node in reversed(self._imports)}

    @cached_property
    def has_engine(self) -> bool:
        """Return whether the script trains by another library, which wraps optimizers and seeds in its own way."""
        return any(re.search(rf"\b({_ENGINES})\b", text_of(node)) for node in self._imports)

    def is_local_rank(self, node: cst.BaseExpression) -> bool:
        """Return whether an expression is this rank's number on its host, by which accelcore chooses the device."""
        return self._is_local_rank(text_of(node), node, ())

    def _is_local_rank(self, text: str, node: cst.CSTNode, seen: tuple[str, ...]) -> bool:
        if _LOCAL_RANK.fullmatch(text) or _RANK_PER_HOST.fullmatch(text):
            return True
        function = self.function_of(node)
        if function is not None and self.spawned.get(function.name.value) == text:
            return text not in self._assigned
        values = [*self._assigned.get(text, []), *self._passed(text, node)]
        if not values or text in seen:
            return False
        # None and 0 are the devices of a script that no launcher started: the one that accelcore chooses.
        ranks = [value for value in values if text_of(value) not in ("None", "0")]
        return bool(ranks) and all(self._is_local_rank(text_of(value), value, (*seen, text)) for value in ranks)

    def _passed(self, text: str, node: cst.CSTNode) -> list[cst.BaseExpression]:
        """Return what the file's calls pass for a parameter of the function, or of the constructor, around a node.

        Nothing if one of the calls, or another use of the function, may pass something else.
        """
        function = next((outer for outer in self.parents(node) if isinstance(outer, cst.FunctionDef)), None)
        if function is None:
            return []
        names = [param.name.value for param in function.params.params]
        if text not in names or isinstance(function.params.star_arg, cst.Param) or function.decorators:
            return []
        owner = next((outer for outer in self.parents(function) if not isinstance(outer, cst.IndentedBlock)), None)
        if isinstance(owner, cst.ClassDef) and function.name.value == "__init__":
            called, names = owner.name.value, names[1:]
        elif isinstance(owner, cst.Module):
            called = function.name.value
        else:
            return []
        calls = [call for call in self.calls if text_of(call.func) == called]
        given = [argument(call, text, names.index(text)) for call in calls]
        if self.uses[called] != len(calls) or any(value is None for value in given):
            return []
        return [value for value in given if value is not None]

    def is_whole(self, node: cst.BaseExpression) -> bool:
        """Return whether an expression is certainly a whole number."""
        return self._is_whole(node, ())

    def _is_whole(self, node: cst.BaseExpression, seen: tuple[str, ...]) -> bool:
        if isinstance(node, cst.Integer):
            return True
        text = text_of(node)
        if isinstance(node, cst.Call):
            return text_of(node.func) == "int" or (self.name(node.func) or "").endswith((".get_rank", ".device_count"))
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, (cst.Add, cst.Modulo, cst.Multiply)):
            return self._is_whole(node.left, seen) and self._is_whole(node.right, seen)
        function = self.function_of(node)
        if function is not None and self.spawned.get(function.name.value) == text:
            return True
        if isinstance(node, cst.Attribute) and node.attr.value in self.whole_options:
            return all(
                self._is_whole(value, (*seen, text)) for value in self._assigned.get(text, ()) if text not in seen
            )
        values = self._assigned.get(text, [])
        return bool(values) and text not in seen and all(self._is_whole(value, (*seen, text)) for value in values)

    @cached_property
    def whole_options(self) -> set[str]:
        """Options of argparse that are whole numbers, and never None."""
        found: set[str] = set()
        for call in self.calls:
            if isinstance(call.func, cst.Attribute) and call.func.attr.value == "add_argument":
                kind, default = argument(call, "type"), argument(call, "default")
                required = argument(call, "required")
                fixed = isinstance(default, cst.Integer) or (required is not None and text_of(required) == "True")
                if kind is not None and text_of(kind) == "int" and fixed:
                    found.update(_option_names(call))
        return found

    def values(self, node: cst.BaseExpression) -> list[cst.BaseExpression]:
        """Return what the file assigns to a name."""
        return self._assigned.get(text_of(node), []) if isinstance(node, (cst.Name, cst.Attribute)) else []

    def chooses_by(self, index: cst.BaseExpression) -> bool:
        """Return whether the script chooses a device by this expression, apart from DistributedDataParallel's."""
        text = text_of(index)
        return any(
            text in text_of(arg.value)
            for call in self.calls
            if (self.name(call.func) or "").endswith((".set_device", "torch.device"))
            or (isinstance(call.func, cst.Attribute) and call.func.attr.value in (*DEVICES, "to", "format"))
            for arg in call.args
        )

    def sets_device(self, index: cst.BaseExpression) -> bool:
        """Return whether the script makes this index the current device somewhere."""
        return any(
            (self.name(call.func) or "").endswith(".set_device")
            and call.args
            and text_of(call.args[0].value) == text_of(index)
            for call in self.calls
        )

    def guards(self, node: cst.CSTNode) -> bool:
        """Return whether a node only runs where `torch.cuda.is_available()` is true."""
        inner = node
        for outer in self.parents(node):
            if isinstance(outer, cst.FunctionDef):
                return False
            if isinstance(outer, (cst.If, cst.IfExp)) and inner is outer.body and self._asks(outer.test):
                return True
            inner = outer
        return False

    def _asks(self, test: cst.BaseExpression) -> bool:
        if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
            return self._asks(test.left) or self._asks(test.right)
        return isinstance(test, cst.Call) and (self.name(test.func) or "").endswith(
            (".cuda.is_available", ".npu.is_available", ".accelerator.is_available")
        )


class _Survey(cst.CSTVisitor):
    """One walk over a file that collects what `Facts` answers from."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self._facts = facts
        self.identifiers: set[str] = set()
        self.uses: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.methods: set[str] = set()
        self.assigned: dict[str, list[cst.BaseExpression]] = defaultdict(list)
        self.imports: list[cst.CSTNode] = []
        self.hidden_by: list[cst.CSTNode] = []
        self.calls: list[cst.Call] = []
        self.indexes: set[str] = set()
        self.seeds: list[cst.Call] = []
        self.functions: dict[str, cst.FunctionDef] = {}
        self.helpers: dict[str, str] = {}
        self.torch: str | None = None
        self._depth = 0

    def visit_Name(self, node: cst.Name) -> None:
        parent = self._facts.parent(node)
        is_attribute = isinstance(parent, cst.Attribute) and parent.attr is node
        if not is_attribute and not (isinstance(parent, cst.Arg) and parent.keyword is node):
            self.identifiers.add(node.value)
            if not isinstance(parent, (cst.FunctionDef, cst.ClassDef)):
                self.uses[node.value] += 1

    def visit_Attribute(self, node: cst.Attribute) -> None:
        self.attributes.add(node.attr.value)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        if match := re.fullmatch(r"(?:cuda|npu):(\d+)", str(node.raw_value)):
            self.indexes.add(match[1])

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        if self._depth:
            self.methods.add(node.name.value)
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
        name = self._facts.name(node.func) or ""
        if name in ("torch.manual_seed", "random.seed", "numpy.random.seed") or "cuda.manual_seed" in name:
            self.seeds.append(node)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        if isinstance(node.target, cst.Subscript) and any(name in text_of(node.target) for name in _HIDE):
            self.hidden_by.append(node)

    def visit_Assign(self, node: cst.Assign) -> None:
        for target in node.targets:
            self._assign(target.target, node.value)
        if len(node.targets) == 1 and not self._depth and isinstance(node.targets[0].target, cst.Name):
            self.helpers.setdefault(text_of(node.value), node.targets[0].target.value)

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

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        self.imports.append(node)

    def visit_Import(self, node: cst.Import) -> None:
        self.imports.append(node)
        for alias in node.names:
            if dotted(alias.name) == "torch" and not self._depth:
                self.torch = text_of(alias.asname.name) if alias.asname else "torch"
            elif dotted(alias.name).startswith("torch.") and alias.asname is None and not self._depth:
                self.torch = "torch"


def text_of(node: cst.CSTNode) -> str:
    """Return the source of a node without the parentheses around it."""
    if isinstance(node, cst.BaseExpression) and node.lpar:
        node = node.with_changes(lpar=(), rpar=())
    return cst.Module([]).code_for_node(node).strip()


def dotted(node: cst.CSTNode) -> str:
    """Return a name with its dots, or ""."""
    return get_full_name_for_node(node) or ""


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


def _option_names(call: cst.Call) -> Iterator[str]:
    dest = argument(call, "dest")
    if isinstance(dest, cst.SimpleString):
        yield str(dest.raw_value)
        return
    for arg in call.args:
        if (
            arg.keyword is None
            and isinstance(arg.value, cst.SimpleString)
            and str(arg.value.raw_value).startswith("--")
        ):
            yield str(arg.value.raw_value)[2:].replace("-", "_")
            return
