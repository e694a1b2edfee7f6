"""Numbers by which a script chooses its devices, and which of them is the one that accelcore selects."""

from __future__ import annotations

import re
from functools import cached_property

import libcst as cst

from accelcore_lint.port.indexes import index_of, is_device_name
from accelcore_lint.port.model import Level
from accelcore_lint.port.options import returns_options
from accelcore_lint.port.ranks import Ranks
from accelcore_lint.port.syntax import argument, is_guard, text_of
from accelcore_lint.port.vendors import DEVICES

_INDEXED = re.compile(
    r"\.(?:cuda|npu)\((?:device=)?(\w+\.\w+)[,)]|device\([\"'](?:cuda|npu)[\"'], *(?:index=)?(\w+\.\w+)\)"
    r"|[\"'](?:cuda|npu):\{(\w+\.\w+)(?:![rsa])?(?::d)?\}[\"']|[\"'](?:cuda|npu):[\"'] *\+ *str\((\w+\.\w+)\)"
    r"|[\"'](?:cuda|npu):%d[\"'] *% *\(?(\w+\.\w+)\b|[\"'](?:cuda|npu):\{(?::d)?\}[\"']\.format\((\w+\.\w+)\)"
)
_DEVICE_CALLS = (*DEVICES, "to", "device", "set_device", "load")
"""Calls whose device is certainly used; that of others, such as `os.getenv("DEVICE", "cuda:1")`, may be a default."""


class DeviceNumbers(Ranks):
    """A file with the numbers by which it chooses devices."""

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

    def is_own(self, index: cst.BaseExpression | None) -> bool:
        """Return whether an index is that of the process's only device."""
        if index is None or text_of(index) == "None" or self.is_current(index):
            return True
        if self.is_library:  # its current device may be another
            return False
        if self.is_local_rank(index):
            return True
        one = self.indexes <= {"0"} and all(made is None or text_of(made) == "0" for made in self.made_indexes)
        return one and self._is_zero(index) and not any(map(self._is_other, self.moved_to))

    def is_current(self, index: cst.BaseExpression) -> bool:
        """Return whether an index is `torch.cuda.current_device()`."""
        name = self.name(index.func) if isinstance(index, cst.Call) else None
        return name is not None and name.endswith(".current_device")

    def _is_zero(self, index: cst.BaseExpression) -> bool:
        """Return whether an index is 0, or a name to which the file only assigns 0."""
        values = self.values(index)
        return text_of(index) == "0" or (bool(values) and all(text_of(value) == "0" for value in values))

    def _is_other(self, index: cst.BaseExpression) -> bool:
        """Return whether what chooses a device may be the index of another one, such as that of a loop."""
        is_device = is_device_name(text_of(index)) and not self.is_whole(index)
        return not (text_of(index) == "None" or is_device or self.is_local_rank(index) or self._is_zero(index))

    @cached_property
    def has_several(self) -> bool:
        """Return whether the script may use several devices in one process, by numbers that it gives them."""
        numbers = {number for node, number in self.numbered.items() if self.in_default(node) is None}
        return bool(numbers - {"0", self.index_option}) or any(map(self._is_other, self.moved_to))

    def _is_default(self, node: cst.CSTNode) -> bool:
        """Return whether the number of a device is only what holds if nobody chooses another one."""
        inner = node
        for outer in self.parents(node):
            if isinstance(outer, cst.Param):
                return True
            if isinstance(outer, cst.Arg) and not isinstance(inner, cst.Call):
                call = self.parent(outer)
                method = text_of(call.func).split(".")[-1] if isinstance(call, cst.Call) else ""
                return method not in _DEVICE_CALLS or (outer.keyword is not None and outer.keyword.value == "default")
            inner = outer
        return False

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
        if self._is_default(node):
            return False
        for outer in self.parents(node):
            if isinstance(outer, (cst.BooleanOperation, cst.Try, cst.While)):
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

    def sets_device(self, index: cst.BaseExpression, site: cst.CSTNode) -> bool:
        """Return whether the script makes this index the current device, and not only below a site in its function."""
        function = self.function_of(site)
        return any(
            text_of(index_of(made)[1] or made) == text_of(index)
            and (self.function_of(made) is not function or self.line(made) < self.line(site))
            for made in self.made_current
        )

    def _asks(self, test: cst.BaseExpression) -> bool:
        if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
            return self._asks(test.left) or self._asks(test.right)
        return isinstance(test, cst.Call) and (self.name(test.func) or "").endswith(
            (".cuda.is_available", ".accelerator.is_available")
        )
