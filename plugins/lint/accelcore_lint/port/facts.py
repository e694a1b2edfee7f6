"""Facts of one file that rules ask for: what a condition guards, and which objects have to stay the original's."""

from __future__ import annotations

import re
from functools import cached_property
from typing import cast

import libcst as cst

from accelcore_lint.port.compiled import is_module
from accelcore_lint.port.device_names import index_of
from accelcore_lint.port.device_numbers import DeviceNumbers
from accelcore_lint.port.engines import ENGINES
from accelcore_lint.port.imports import extensions_in, is_known_apex
from accelcore_lint.port.place import Place
from accelcore_lint.port.project import OTHERS, Known
from accelcore_lint.port.rule import Level
from accelcore_lint.port.syntax import argument, is_guard, is_kept, text_of
from accelcore_lint.port.tree import Wrapper
from accelcore_lint.port.uses import RANKS, drives_apex, kept_questions, scaler_loads, uses_in
from accelcore_lint.port.vendors import DEVICES, own_options
from accelcore_lint.port.visible import hides_by_rank
from accelcore_lint.port.walk import find

_SETS_UP = re.compile(r"\.((init|setup|set_up)_?(dist|ddp)\w*|(dist|ddp|distributed)_?(init|setup)\w*)$")
_NAMED = r"(?:\w+\.)*\w*(?:dev|gpu|cuda)\w*"
_TEXT = re.compile(
    rf"(?i)\bstr\({_NAMED}\)(?! *[=!]=)|\{{{_NAMED}\}}|\.format\([^()]*\b{_NAMED}\b|\b{_NAMED}\.index\b"
    rf"|[\"'] *% *\(?(?:[^()\n]*\W)?{_NAMED}\b"
)
_SHOWS = re.compile(r"print|log|info|warn|debug|error|raise|assert|write|echo|desc", re.IGNORECASE)
_COMPARES = re.compile(r"\.device\)? *[!=]= *(?![\"']|torch\.device\([\"'])|[!=]= *(?:str\()?[\w.]+\.device\b(?![.(])")
_LOOPS = re.compile(r"\bfor ([^\n]*?) in\b")
_OF_TYPE = re.compile(rf"[\w.]+\.type == [\"']({'|'.join(DEVICES)})[\"']|[\w.]+\.type != [\"']cpu[\"']")
_DEVICE = re.compile(r"(^|[._])dev(ice)?$", re.IGNORECASE)
_INDEX = re.compile(r"(?i)(?:rank|gpu|npu|card|id|idx|index)s?(?:\[\d\])?$")
"""Names of numbers of devices."""

_CONTEXT = ".get_device_module().device("
"""A context that makes a device current, as an earlier run has written it."""

_RANK = re.compile(r"(?i)rank|localid")
_PORTED = "{current_device.type}:{"
"""The device of a number that the script chooses, as an earlier run has written it."""

SUMMARISED = 'torchsummary makes its input on CUDA or the CPU, so that this choice has to stay: give it device="cpu"'
"""Reason to leave a question whose answer says where the model is of which that package makes a summary."""

_LATE = ("deepspeed", "horovod", "byteps")
"""Libraries that start the ranks, and make a device current when they get the model, or leave it to the script."""


class Facts(DeviceNumbers):
    """What the rules ask of a file.

    Attributes:
        contexts: calls `torch.cuda.device(...)` that stay.
        place: where the name of the device comes from in the rewritten file.
    """

    def __init__(self, wrapper: Wrapper, level: Level, known: Known) -> None:
        super().__init__(wrapper, level, known)
        contexts = [call for call in self.calls if self.name(call.func) == "torch.cuda.device"]
        by_hand = self.is_library or self._chooses_by_hand(contexts)
        follows = by_hand or level is Level.TORCH
        self.contexts = [call for call in contexts if not (follows and self._is_everywhere(call))]
        self.place = Place(self, by_hand=by_hand, contexts=self.contexts)

    def is_own(self, index: cst.BaseExpression | None) -> bool:
        """Return whether an index is that of the process's only device, which some line makes current."""
        is_apart = self.level is not Level.TORCH and (self.place.by_hand or bool(self.place.of_callers))
        lost = index is not None and is_apart and self.is_local_rank(index)
        return super().is_own(index) and not (lost and not self._makes_rank_current)

    @cached_property
    def _makes_rank_current(self) -> bool:
        """Return whether a line may make the device of the process's local rank current."""
        ranks = any(index is not None and self.is_local_rank(index) for index in self.made_indexes)
        engine = self.engine is not None and self.engine[0] not in _LATE
        return ranks or self._sets_up or engine

    def _chooses_by_hand(self, contexts: list[cst.Call]) -> bool:
        """Return whether the script gives a process its device by a number that no launcher's variable shows."""
        unknown = [
            index
            for index in self.made_indexes
            if index is not None
            and text_of(index) != "0"
            and not (_DEVICE.search(text_of(index)) and index in self.made_current and not self._may_be_number(index))
            and not self.is_local_rank(index)
        ]
        elsewhere = "rank" in self.options or self._sets_up or self.known.steered
        elsewhere = elsewhere or "ranked" in self.known.uses or RANKS.search(self.code) is not None
        several = self.has_several and not (self.spawns or self.backends)
        return (
            bool(unknown or several or _PORTED in self.code)
            or _CONTEXT in self.code
            or any(text_of(arg.value) != "0" for call in contexts for arg in call.args[:1])
            or self.engine is not None
            or bool(self.known.hides_by_rank or hides_by_rank(self.code))
            or any(map(self._shows_one, self.hidden_by))
            or (not self.spawns and elsewhere)
        )

    def _shows_one(self, target: cst.CSTNode) -> bool:
        """Return whether a rank shows itself its own device only, by CUDA_VISIBLE_DEVICES: its number is then 0."""
        line, function = self.parent(target), self.function_of(target)
        made = line.value if isinstance(line, cst.Assign) else None
        made = target.args[1].value if isinstance(target, cst.Call) and len(target.args) == 2 else made
        if made is None or isinstance(made, cst.SimpleString):
            return False
        is_ranks = function is not None and function.name.value in self.spawned
        names = [*find(made, cst.Name), *find(made, cst.Attribute)]
        values = [text_of(value) for name in names for value in self.values(name)]
        return is_ranks or any(map(self.is_local_rank, names)) or any(map(_RANK.search, values))

    def _is_everywhere(self, context: cst.Call) -> bool:
        """Return whether each accelerator's module has a context such as `with torch.cuda.device(gpu_id):`.

        It must get a number, and not run without an accelerator: the CPU's module and that of MPS have none.
        """
        index = context.args[0].value if len(context.args) == 1 and not context.args[0].star else None
        if index is None or self.names_others or not isinstance(self.parent(context), cst.WithItem):
            return False
        text, (named, number) = text_of(index), index_of(index)
        is_number = self.is_whole(index) or self.is_local_rank(index) or _INDEX.search(text) is not None
        if named or number is not None or not is_number:
            return False
        if self.guards(context):
            return True
        inner, itself = cast("cst.CSTNode", context), rf"(?<![\w.]){re.escape(text)}(?!\w)"
        for outer in self.parents(context):
            if isinstance(outer, cst.FunctionDef):
                break
            test = text_of(outer.test) if isinstance(outer, cst.If) and inner is outer.body else ""
            compares = not isinstance(index, cst.Integer) and re.search(rf"{itself} *(?:>|!= *-)", test)
            if compares or re.search("(?i)cuda|gpu", re.sub(itself, "", test)):
                return True  # a name, such as args.local_rank, may hold -1, which is neither None nor false
            inner = outer
        return False

    def _may_be_number(self, index: cst.BaseExpression) -> bool:
        """Return whether what is called a device may be its number, such as `args.device` of the command line."""
        values = self.values(index) or [index]
        return self.is_whole(index) or any(isinstance(value, cst.Attribute) for value in values)

    @cached_property
    def _sets_up(self) -> bool:
        """Return whether it calls a function that chooses the rank's device, such as DeiT's `init_distributed_mode`."""
        names = [self.name(call.func) or "" for call in self.calls]
        helpers = any(
            _SETS_UP.search(name) and not name.startswith(("torch.", "accelcore.", "deepspeed.")) for name in names
        )
        lists = [argument(call, "device_ids") for call in self.calls]
        lists = [ids.body if isinstance(ids, cst.IfExp) else ids for ids in lists]
        given = [each.value for ids in lists if isinstance(ids, (cst.List, cst.Tuple)) for each in ids.elements]
        return helpers or any(map(self.is_from_elsewhere, given))

    def is_from_elsewhere(self, index: cst.BaseExpression) -> bool:
        """Return whether an index is an attribute that only another file can have set, such as `args.gpu`."""
        known = self.is_local_rank(index) or bool(self.values(index))
        return isinstance(index, cst.Attribute) and not known and index.attr.value not in {*self.options, "index"}

    @cached_property
    def strange_apex(self) -> frozenset[str]:
        """Return the names of apex that the file uses and that have to stay apex's: accelcore.apex has none of them.

        `"apex"` stands for all. The project needs apex's private state then, or what another package brings drives
        apex, too, such as timm's `ApexScaler`.
        """
        if "apex" in self.uses_of or drives_apex(self.code, self.known.modules):
            return frozenset({"apex"})
        used: list[cst.BaseExpression] = [call.func for call in self.calls]
        if "apex" in self.code:
            parts = (cst.ImportAlias, cst.ImportFrom, cst.Attribute)
            used += [each for each in find(self.module, cst.Attribute) if not isinstance(self.parent(each), parts)]
        named = [(self.name(each) or "", text_of(each)) for each in used]
        return frozenset(
            name for name, text in named if name.startswith("apex.") and "." in text and not is_known_apex(name)
        )

    @cached_property
    def uses_of(self) -> frozenset[str]:
        """Return the kinds of objects of which the file, or its project, needs what only the original's have."""
        return self.known.uses | frozenset(uses_in(self.code))

    @cached_property
    def scaler_loads(self) -> frozenset[frozenset[str]]:
        """Return the words in the conditions above each line of the project that loads the state of a scaler."""
        return self.known.loads | scaler_loads(self.code)

    @cached_property
    def keeps_questions(self) -> str:
        """Return the reason why questions for a device stay in this file; "" if there is none."""
        kept = self.known.keeps_questions or kept_questions(self.code)
        if self.level is Level.TORCH:
            return kept or self.known.hides_by_rank or hides_by_rank(self.code)
        return kept or hides_by_rank(self.code, ported=True)

    def keeps(self, question: cst.CSTNode) -> str:
        """Return the reason why a question stays; "" if there is none. A script's torchsummary keeps all of its own.

        What others import only keeps those in the function, or under the guard, of such a call.
        """
        scope = self._scope_of(question)
        tied = any(not self.is_library or self._scope_of(call) is scope for call in self.summaries)
        return self.keeps_questions or (SUMMARISED if tied else "")

    @cached_property
    def summaries(self) -> list[cst.Call]:
        """Return the calls of torchsummary that make the model's input on a CUDA device or on the CPU."""
        calls = [call for call in self.calls if f".{self.name(call.func) or ''}".endswith(".torchsummary.summary")]
        given = [(call, argument(call, "device", 3)) for call in calls]
        return [call for call, device in given if device is None or text_of(device).strip("\"'") != "cpu"]

    def _scope_of(self, node: cst.CSTNode) -> cst.CSTNode | None:
        outer = [each for each in self.parents(node) if isinstance(each, cst.FunctionDef) or is_guard(each)]
        return outer[-1] if outer else None

    def compares(self, site: cst.CSTNode) -> bool:
        """Return whether a site gives a device a name in a file that compares devices: a tensor's has an index.

        Also whether a file of the project reads the index of a name.
        """
        kept = _COMPARES.search(self.code) is not None and is_kept([site, *self.parents(site)])
        return kept or "numbered" in self.uses_of

    @cached_property
    def hides_all(self) -> bool:
        """Return whether the file hides all devices for a choice of the CPU, which others than CUDA's do not read."""
        return bool(self.hidden_by) and "hidden" in uses_in(self.code)

    @cached_property
    def names_others(self) -> bool:
        """Return whether the project speaks of accelerators beside those that it is ported from, such as `"mps"`."""
        return self.known.names_others or OTHERS.search(self.code) is not None

    def sets_attribute(self, name: str) -> bool:
        """Return whether the file assigns to an attribute of an object, or of a class."""
        if any(text.endswith(f".{name}") for text in self.assigned):
            return True
        scopes = (cst.FunctionDef, cst.ClassDef, cst.Module)
        around = (
            next(each for each in self.parents(value) if isinstance(each, scopes))
            for value in self.assigned.get(name, ())
        )
        return any(isinstance(each, cst.ClassDef) for each in around)

    @cached_property
    def extensions(self) -> frozenset[str]:
        """Return the names of a vendor's functions that the file imports from compiled modules, such as `nms_cuda`."""
        return extensions_in(self.imports, self.known.modules)

    @cached_property
    def own_options(self) -> set[str]:
        """Return the script's own options that are called as a device, such as `args.cuda`."""
        return own_options(self.code)

    @cached_property
    def engine(self) -> tuple[str, int] | None:
        """Return the library by which the script trains, which wraps optimizers in its own way, and the line."""
        found = ((re.search(rf"\b({ENGINES})\b", text_of(node)), node) for node in self.imports)
        return next(((match[1], self.line(node)) for match, node in found if match), None)

    def device(self, site: cst.CSTNode) -> str:
        """Return the source of the device for a site, as `Place.device`, or of its name.

        DataParallel runs a module's replicas each with another device current, which a name without an index is. A
        script that compares devices with such a name keeps it, too.
        """
        source = self.place.device(site)
        has_index = source.endswith(".device") and self.level is not Level.TORCH
        return f"{source}.type" if has_index and (self._spells_device or self._in_replicas(site)) else source

    @cached_property
    def _spells_device(self) -> bool:
        """Return whether the file makes a text of a device for more than to show it, or asks for its index.

        Also whether a file of the project compares devices with one without an index.
        """
        lines = self.code.splitlines()
        return "spelled" in self.uses_of or any(_TEXT.search(line) and not _SHOWS.search(line) for line in lines)

    def _in_replicas(self, node: cst.CSTNode) -> bool:
        """Return whether a device is for a module of torch, of which DataParallel may run replicas."""
        holder = self.parent(node)
        name = text_of(holder.targets[0].target) if isinstance(holder, cst.Assign) else ""
        at_top = bool(name) and self.function_of(node) is None
        return any(isinstance(outer, cst.ClassDef) and is_module(outer) for outer in self.parents(node)) or (
            at_top and any(re.search(rf"(?<![\w.]){re.escape(name)}\b(?! *=)", text_of(made)) for made in self._modules)
        )

    @cached_property
    def _modules(self) -> list[cst.ClassDef]:
        return [made for made in self.module.body if isinstance(made, cst.ClassDef) and is_module(made)]

    def guards(self, node: cst.CSTNode) -> bool:
        """Return whether a node only runs where `torch.cuda.is_available()` is true, or a device is of that type."""
        inner = node
        for outer in self.parents(node):
            if isinstance(outer, cst.FunctionDef):
                return False
            if isinstance(outer, (cst.If, cst.IfExp)) and inner is outer.body and self.implies(outer.test):
                return True
            if isinstance(outer, cst.BooleanOperation) and inner is outer.right:
                found = isinstance(outer.operator, cst.And) and self.implies(outer.left)
                if found:
                    return True
            inner = outer
        return False

    def implies(self, test: cst.BaseExpression) -> bool:
        """Return whether there is an accelerator wherever a condition is true."""
        if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
            return self.implies(test.left) or self.implies(test.right)
        if isinstance(test, cst.Name):
            given = any(re.search(rf"\b{test.value}\b", text) for text in _LOOPS.findall(self.code))
            given = given or self.is_given(test.value, test)
            values = self.assigned.get(test.value, [])
            return bool(values) and not given and all(map(self._asks, values))
        return self._asks(test) or _OF_TYPE.fullmatch(text_of(test)) is not None

    def _asks(self, test: cst.BaseExpression) -> bool:
        if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
            return self._asks(test.left) or self._asks(test.right)
        return isinstance(test, cst.Call) and (self.name(test.func) or "").endswith(
            (".cuda.is_available", ".accelerator.is_available")
        )
