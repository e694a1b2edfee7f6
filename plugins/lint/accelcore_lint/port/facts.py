"""Facts of one file that rules ask for: which expressions are ranks or whole numbers, and what is guarded."""

from __future__ import annotations

import re
from functools import cached_property

import libcst as cst
from libcst import metadata

from accelcore_lint.port.engines import ENGINES
from accelcore_lint.port.imports import extensions_in, is_known_apex
from accelcore_lint.port.indexes import index_of
from accelcore_lint.port.model import Level
from accelcore_lint.port.options import returns_options
from accelcore_lint.port.place import Place
from accelcore_lint.port.project import OTHERS, Known
from accelcore_lint.port.ranks import Ranks
from accelcore_lint.port.syntax import argument, is_guard, text_of
from accelcore_lint.port.uses import drives_apex, uses_in
from accelcore_lint.port.vendors import DEVICES, own_options

_CONTEXTS = tuple(f"torch.{device}.device" for device in DEVICES)
_CONTEXT = "torch.accelerator.device_index"

_INDEXED = re.compile(
    r"\.(?:cuda|npu)\((?:device=)?(\w+\.\w+)[,)]|device\([\"'](?:cuda|npu)[\"'], *(?:index=)?(\w+\.\w+)\)"
    r"|[\"'](?:cuda|npu):\{(\w+\.\w+)(?:![rsa])?(?::d)?\}[\"']|[\"'](?:cuda|npu):[\"'] *\+ *str\((\w+\.\w+)\)"
    r"|[\"'](?:cuda|npu):%d[\"'] *% *\(?(\w+\.\w+)\b|[\"'](?:cuda|npu):\{(?::d)?\}[\"']\.format\((\w+\.\w+)\)"
)
_SETS_UP = re.compile(r"\.((init|setup|set_up)_?(dist|ddp)\w*|(dist|ddp|distributed)_?(init|setup)\w*)$")
_TEXT = re.compile(
    r"\bstr\((\w+\.)*device\)(?! *[=!]=)|\{(\w+\.)*device\}|\.format\([^()]*\bdevice\b|\bdevice\.index\b"
)
_SHOWS = re.compile(r"print|log|info|warn|debug|error|raise|assert|write|echo|desc", re.IGNORECASE)
_LOOPS = re.compile(r"\bfor ([^\n]*?) in\b")
_OF_TYPE = re.compile(rf"[\w.]+\.type == [\"']({'|'.join(DEVICES)})[\"']")
_DEVICE_CALLS = (*DEVICES, "to", "device", "set_device", "load")
"""Calls whose device is certainly used; that of others, such as `os.getenv("DEVICE", "cuda:1")`, may be a default."""
_DEVICE = re.compile(r"(^|[._])dev(ice)?$", re.IGNORECASE)


class Facts(Ranks):
    """What the rules ask of a file.

    Attributes:
        place: where the name of the device comes from in the rewritten file.
    """

    def __init__(self, wrapper: metadata.MetadataWrapper, level: Level, known: Known) -> None:
        super().__init__(wrapper, level, known)
        chosen = self.index_option
        read = self._read_at() if "." in chosen else None
        by_hand = self.is_library or self._chooses_by_hand(chosen)
        left = [call for call in self.calls if self.name(call.func) in _CONTEXTS and not self.makes_current(call)]
        self.place = Place(self, by_hand=by_hand, index=chosen, read=read, contexts=left)

    def _chooses_by_hand(self, chosen: str) -> bool:
        """Return whether the script gives a process its device by a number that no launcher's variable shows.

        `chosen`: the option by whose number the backend is selected.
        """
        unknown = [
            index
            for index in self.made_indexes
            if index is not None
            and not isinstance(index, cst.Integer)
            and not (_DEVICE.search(text_of(index)) and index in self.made_current)
            and not self.is_local_rank(index)
        ]
        launched = any(re.search(r"\b(horovod|byteps)\b", text_of(node)) for node in self.imports)
        contexts = any(
            (self.name(call.func) in _CONTEXTS and text_of(call.args[0].value) not in ("0", chosen))
            or (self.name(call.func) == _CONTEXT and ".device.index" not in text_of(call.args[0].value))
            for call in self.calls
            if call.args
        )
        elsewhere = "rank" in self.options.names or launched or self._is_set_up_elsewhere
        # The number of an option may be another device than the one that accelcore selects.
        numbered = {name for name in self._indexing if name.partition(".")[2] in self.options.names}
        numbered = {name for name in numbered if "local_rank" not in name and not (chosen or self.spawns)}
        return bool(unknown or numbered) or contexts or self.engine is not None or (not self.spawns and elsewhere)

    @cached_property
    def _is_set_up_elsewhere(self) -> bool:
        """Return whether a function of another file may choose the device, such as DeiT's `init_distributed_mode`."""
        names = [self.name(call.func) or "" for call in self.calls]
        helpers = any(_SETS_UP.search(name) and not name.startswith(("torch.", "accelcore.")) for name in names)
        helpers = helpers or self.known.steered
        lists = [argument(call, "device_ids") for call in self.calls]
        lists = [ids.body if isinstance(ids, cst.IfExp) else ids for ids in lists]
        given = [each.value for ids in lists if isinstance(ids, (cst.List, cst.Tuple)) for each in ids.elements]
        return helpers or any(map(self.is_from_elsewhere, given))

    def is_from_elsewhere(self, index: cst.BaseExpression) -> bool:
        """Return whether an index is an attribute that only another file can have set, such as `args.gpu`."""
        known = self.is_local_rank(index) or bool(self.values(index))
        return isinstance(index, cst.Attribute) and not known and index.attr.value not in {*self.options.names, "index"}

    @cached_property
    def made_indexes(self) -> list[cst.BaseExpression | None]:
        """Return the indexes of the devices that the script makes current; None for a device without an index."""
        return [index for made in self.made_current for index in self.indexes_of(made)]

    def indexes_of(self, device: cst.BaseExpression, seen: tuple[str, ...] = ()) -> list[cst.BaseExpression | None]:
        """Return the indexes that a device may have, by what the file assigns to names; itself if it is a number."""
        named, index = index_of(device)
        if named:
            return [index]
        if isinstance(device, cst.IfExp):
            return self.indexes_of(device.body, seen) + self.indexes_of(device.orelse, seen)
        if isinstance(device, cst.SimpleString):
            return []  # another device, such as "cpu"
        if isinstance(device, cst.Call) and self.name(device.func) == "torch.device" and device.args:
            given = argument(device, "index", 1)
            return self.indexes_of(device.args[0].value, seen) if given is None else [given]
        text = text_of(device)
        values = [value for value in self.values(device) if text_of(value) != text] if text not in seen else []
        devices = [value for value in values if not isinstance(value, (cst.Integer, cst.Name, cst.Attribute))]
        if not devices or len(devices) != len(values) or self._is_local_rank(text, device, ()):
            return [device]
        return [index for value in devices for index in self.indexes_of(value, (*seen, text))]

    def makes_current(self, call: cst.Call) -> bool:
        """Return whether a call is the context of a device that certainly has a whole number."""
        if (
            self.name(call.func) not in _CONTEXTS
            or len(call.args) != 1
            or not isinstance(self.parent(call), cst.WithItem)
        ):
            return False
        index = call.args[0].value
        compared = rf"(?<![\w.]){re.escape(text_of(index))} *(>=?|<=?|[=!]=) *-?\d"
        plain = isinstance(index, (cst.Name, cst.Attribute)) and re.search(compared, self.code) is not None
        is_option = isinstance(index, cst.Attribute) and index.attr.value in self.options.wholes
        numbers = is_option and all(re.fullmatch(r"-?\d+", text_of(value)) for value in self.values(index))
        return plain or numbers or self.counts(index) or self.is_whole(index)

    def counts(self, index: cst.BaseExpression) -> bool:
        """Return whether an index is certainly 0 or more."""
        in_range = re.search(rf"\bfor {re.escape(text_of(index))} in range\(", self.code)
        return in_range is not None or isinstance(index, cst.Integer) or self.is_local_rank(index)

    @cached_property
    def strange_apex(self) -> frozenset[str]:
        """Return the functions of apex that the file calls and that have to stay apex's: accelcore.apex has none.

        `"apex"` stands for all. The project needs apex's private state then, or what another package brings drives
        apex, too, such as timm's `ApexScaler`.
        """
        if "apex" in self.uses_of or drives_apex(self.code, self.known.modules):
            return frozenset({"apex"})
        called = [(self.name(call.func) or "", text_of(call.func)) for call in self.calls]
        return frozenset(
            name for name, text in called if name.startswith("apex.") and "." in text and not is_known_apex(name)
        )

    @cached_property
    def uses_of(self) -> frozenset[str]:
        """Return the kinds of objects of which the file, or its project, needs what only the original's have."""
        return self.known.uses | frozenset(uses_in(self.code))

    @cached_property
    def names_others(self) -> bool:
        """Return whether the project speaks of accelerators beside those that it is ported from, such as `"mps"`."""
        return self.known.names_others or OTHERS.search(self.code) is not None

    @cached_property
    def extensions(self) -> frozenset[str]:
        """Return the names of a vendor's functions that the file imports from compiled modules, such as `nms_cuda`."""
        return extensions_in(self.imports, self.known.modules)

    @cached_property
    def own_options(self) -> set[str]:
        """Return the script's own options that are called as a device, such as `args.cuda`."""
        return own_options(self.code)

    @cached_property
    def index_option(self) -> str:
        """Return the option by whose number the script chooses its only device, or the number itself; "" if none is."""
        if self._selected_by:
            return text_of(next(iter(self._selected_by.values())))
        if self.is_library:
            return ""
        found = self._indexing
        if not found:
            return self._constant_index
        options, read = {name.partition(".")[2] for name in found}, self._read
        option, others = min(options), rf"local_rank|\w\.{min(options)} *[=!<>]=? *-?\d"
        certain = (
            read is not None
            and options == {option}
            and options <= self.options.indexes
            and all(self._outside_readers(name.partition(".")[0]) in ([], [read[1]]) for name in found)
            and self._after(read[1]) is not None
            and not any(name.endswith(f".{option}") for name in self.assigned)
            and not (self.indexes - {"0"} or self.hidden_by or self.spawns or self.level is Level.TORCH)
            and not re.search(others, self.code, re.IGNORECASE)
            and {text_of(index) for index in self.made_indexes if index is not None} <= found
        )
        return f"{read[0]}.{option}" if read is not None and certain else ""

    @cached_property
    def _indexing(self) -> set[str]:
        """Return the attributes by which the script numbers devices, such as `args.gpu`."""
        return {next(filter(None, match.groups())) for match in _INDEXED.finditer(self.code)}

    @cached_property
    def _read(self) -> tuple[str, cst.BaseExpression] | None:
        """Return the name to which the script assigns its options, and the value, unless it does so several times."""
        calls = {f"{name}()" for name, function in self.functions.items() if returns_options(function)}
        reads = [
            (name, value)
            for name in self.assigned
            for value in self._outside_readers(name)
            if text_of(value).endswith(".parse_args()") or text_of(value) in calls
        ]
        return reads[0] if len(reads) == 1 else None

    def _outside_readers(self, name: str) -> list[cst.BaseExpression]:
        """Return what the file assigns to a name, but for functions that read the options and return them."""
        functions = [(value, self.function_of(value)) for value in self.assigned.get(name, [])]
        return [value for value, function in functions if function is None or not returns_options(function)]

    @cached_property
    def _constant_index(self) -> str:
        """Return the number of the only device that the script names, such as "1"; "" if it is 0, or not certain."""
        made = {"" if index is None else text_of(index) for index in self.made_indexes}
        numbers = self.indexes | (made - {""})
        code = re.sub(r"#.*", "", self.code)
        others = re.search(
            r"local_rank|parallel|init_process_group|device_count|device_ids|(cuda|npu)(:[\"'{%]|[\"'] *,)",
            code,
            re.IGNORECASE,
        )
        plain = re.search(rf"\.({'|'.join(DEVICES)})\(\s*(non_blocking|\))|[\"']({'|'.join(DEVICES)})[\"']", code)
        several = others or (plain and made != numbers) or self.moved_to or self.hidden_by or self.spawns
        if len(numbers) != 1 or several or self.backends or self.level is Level.TORCH:
            return ""
        (number,) = numbers
        certain = any(map(self._always_runs, [*self.numbered, *self.made_current]))
        return number if number.isdecimal() and number != "0" and certain else ""

    def _always_runs(self, node: cst.CSTNode) -> bool:
        """Return whether a device that has a number is no default, and not one of several choices."""
        inner = node
        for outer in self.parents(node):
            if isinstance(outer, (cst.Param, cst.BooleanOperation, cst.Try, cst.While)):
                return False
            if isinstance(outer, cst.Arg) and not isinstance(inner, cst.Call):
                call = self.parent(outer)
                method = text_of(call.func).split(".")[-1] if isinstance(call, cst.Call) else ""
                if method not in _DEVICE_CALLS or (outer.keyword is not None and outer.keyword.value == "default"):
                    return False
            if isinstance(outer, (cst.If, cst.IfExp)) and inner is not outer.test:
                runs = isinstance(outer, cst.If) and is_guard(outer)
                if inner is not outer.body or not (runs or self._asks(outer.test)):
                    return False
            if isinstance(outer, cst.FunctionDef) and not self.uses[outer.name.value] | (
                outer.name.value in {*self.attributes, "__init__", "forward"}
            ):
                return False
            inner = outer
        return True

    @cached_property
    def _selected_by(self) -> dict[cst.Name, cst.BaseExpression]:
        """Return the script's options by which it already selects a backend, by the backend's name."""
        backends = {} if self.level is Level.TORCH else self.backends
        given = {name: argument(call, "local_rank") for name, call in backends.items()}
        return {name: index for name, index in given.items() if isinstance(index, cst.Attribute)}

    def _read_at(self) -> cst.CSTNode | None:
        """Return the statement before which a backend is chosen by an option, or the one that already chooses it."""
        for name in self._selected_by:
            return next(outer for outer in self.parents(name) if isinstance(outer, cst.SimpleStatementLine))
        return self._after(self._read[1]) if self._read else None

    def _after(self, value: cst.CSTNode) -> cst.CSTNode | None:
        """Return the statement after an assignment, if that runs whenever its function or the script does."""
        _, line, block, *around = self.parents(value)
        if not isinstance(line, cst.SimpleStatementLine) or not isinstance(block, (cst.Module, cst.IndentedBlock)):
            return None
        owner = around[0] if around else None
        is_guard = isinstance(owner, cst.If) and text_of(owner.test).startswith("__name__")
        following = list(block.body)[list(block.body).index(line) + 1 :]
        runs = isinstance(owner, cst.FunctionDef) or owner is None or is_guard
        return following[0] if runs and following else None

    @cached_property
    def engine(self) -> tuple[str, int] | None:
        """Return the library by which the script trains, which wraps optimizers in its own way, and the line."""
        found = ((re.search(rf"\b({ENGINES})\b", text_of(node)), node) for node in self.imports)
        return next(((match[1], self.line(node)) for match, node in found if match), None)

    def is_local_rank(self, node: cst.BaseExpression) -> bool:
        """Return whether accelcore chooses the device by a number: this rank's on its host, or an option."""
        option, others = self.index_option, set() if self._selected_by else self._indexing
        if option and text_of(node) in {option, *others}:
            return True
        return self._is_local_rank(text_of(node), node, ())

    def chooses_by(self, index: cst.BaseExpression) -> bool:
        """Return whether the script chooses a device by this expression, apart from DistributedDataParallel's."""
        text = text_of(index)
        return any(text in text_of(made) for made in self.made_current) or any(
            text in text_of(arg.value)
            for call in self.calls
            if (self.name(call.func) or "").endswith("torch.device")
            or (isinstance(call.func, cst.Attribute) and call.func.attr.value in (*DEVICES, "to", "format"))
            for arg in call.args
        )

    def sets_device(self, index: cst.BaseExpression) -> bool:
        """Return whether the script makes this index the current device somewhere."""
        made_current = [index_of(made)[1] or made for made in self.made_current]
        return any(text_of(made) == text_of(index) for made in made_current)

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
        return any(isinstance(outer, cst.ClassDef) and _is_module(outer) for outer in self.parents(node)) or (
            at_top and any(re.search(rf"(?<![\w.]){re.escape(name)}\b(?! *=)", text_of(made)) for made in self._modules)
        )

    @cached_property
    def _modules(self) -> list[cst.ClassDef]:
        return [made for made in self.module.body if isinstance(made, cst.ClassDef) and _is_module(made)]

    def guards(self, node: cst.CSTNode) -> bool:
        """Return whether a node only runs where `torch.cuda.is_available()` is true, or a device is of that type."""
        inner = node
        for outer in self.parents(node):
            if isinstance(outer, cst.FunctionDef):
                return False
            if isinstance(outer, (cst.If, cst.IfExp)) and inner is outer.body and self._implies(outer.test):
                return True
            if isinstance(outer, cst.BooleanOperation) and inner is outer.right:
                found = isinstance(outer.operator, cst.And) and self._implies(outer.left)
                if found:
                    return True
            inner = outer
        return False

    def _implies(self, test: cst.BaseExpression) -> bool:
        """Return whether there is an accelerator wherever a condition is true."""
        if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
            return self._implies(test.left) or self._implies(test.right)
        if isinstance(test, cst.Name):
            heads = [text_of(outer.params) for outer in self.parents(test) if isinstance(outer, cst.FunctionDef)]
            given = any(re.search(rf"\b{test.value}\b", text) for text in (*heads, *_LOOPS.findall(self.code)))
            values = self.assigned.get(test.value, [])
            return bool(values) and not given and all(map(self._asks, values))
        return self._asks(test) or _OF_TYPE.fullmatch(text_of(test)) is not None

    def _asks(self, test: cst.BaseExpression) -> bool:
        if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
            return self._asks(test.left) or self._asks(test.right)
        return isinstance(test, cst.Call) and (self.name(test.func) or "").endswith(
            (".cuda.is_available", ".npu.is_available", ".accelerator.is_available")
        )


def _is_module(made: cst.ClassDef) -> bool:
    return any(text_of(base.value).endswith("Module") for base in made.bases) or any(
        isinstance(part, cst.FunctionDef) and part.name.value == "forward" for part in made.body.body
    )
