"""Numbers in a file: ranks, whole numbers, and those by which it chooses its devices."""

from __future__ import annotations

import re
from functools import cached_property

import libcst as cst

from accelcore_lint.port.device_names import index_of, is_device_name
from accelcore_lint.port.options import is_whole, options_in
from accelcore_lint.port.script_or_library import ScriptOrLibrary
from accelcore_lint.port.syntax import argument, text_of
from accelcore_lint.port.vendors import DEVICES
from accelcore_lint.port.walk import find

_VARIABLE = r"(?:LOCAL_RANK|SLURM_LOCALID|OMPI_COMM_WORLD_LOCAL_RANK|MV2_COMM_WORLD_LOCAL_RANK)"
_LOCAL_RANK = re.compile(
    r"(\w+\.)?_?(local_?rank|LOCAL_RANK)"
    rf"|int\(os\.environ\[.{_VARIABLE}.\]\)|int\(os\.(getenv|environ\.get)\(.{_VARIABLE}.[^)]*\)\)"
)
_RANK_PER_HOST = re.compile(r"[\w.()\[\]\"' ]*rank[\w.()\[\]\"']* ?% ?([\w.]*device_count\(\)|\w*(gpus|devices)\w*)")
_NUMBERS = (".get_rank", ".device_count", ".current_device")
"""Functions of torch that return a whole number."""

_RANK = re.compile(r"\bget_rank\(|environ\W|getenv\(")


class DeviceNumbers(ScriptOrLibrary):
    """A file with its ranks, its options, and the numbers of its devices."""

    @cached_property
    def options(self) -> dict[str, cst.Call]:
        """Return the options of the script's command line, by the attributes in which their values are."""
        return options_in(self.calls)

    def is_local_rank(self, node: cst.BaseExpression) -> bool:
        """Return whether a number is this rank's on its host."""
        return self._is_local_rank(text_of(node), node, ())

    def _is_local_rank(self, text: str, node: cst.CSTNode, seen: tuple[str, ...]) -> bool:
        if _LOCAL_RANK.fullmatch(text):
            return not self._is_fixed(node)
        if _RANK_PER_HOST.fullmatch(text):
            rank = node.left if isinstance(node, cst.BinaryOperation) else node
            return self._is_launchers(rank, ())
        function = self.function_of(node)
        if function is not None and self.spawned.get(function.name.value) == text:
            return text not in self.assigned
        values = [*self.assigned.get(text, []), *self._passed(text, node)]
        if not values or text in seen:
            return False
        # None and 0 are the devices of a script that no launcher started: the one that accelcore chooses.
        ranks = [value for value in values if text_of(value) not in ("None", "0")]
        return bool(ranks) and all(self._is_local_rank(text_of(value), value, (*seen, text)) for value in ranks)

    def _is_fixed(self, node: cst.CSTNode) -> bool:
        """Return whether a name is one number in its function, or in the module, as in `local_rank = 0`."""
        values = self.values(node) if isinstance(node, cst.Name) and not self.is_given(node.value, node) else []
        function = self.function_of(node)
        made = [value for value in values if self.function_of(value) is function]
        made = made or [value for value in values if self.function_of(value) is None]
        shared = {each.name.value for line in find(self.module, cst.Global) for each in line.names}
        made = self.assigned.get(text_of(node), []) if text_of(node) in shared else made
        return bool(made) and all(isinstance(value, cst.Integer) for value in made)

    def _is_launchers(self, rank: cst.CSTNode, seen: tuple[str, ...]) -> bool:
        """Return whether a rank is the launcher's or of a process that the script starts, and no option of its own."""
        text = text_of(rank)
        function = self.function_of(rank)
        if _RANK.search(text) or (function is not None and self.spawned.get(function.name.value) == text):
            return True
        values = [*self.assigned.get(text, []), *self._passed(text, rank)] if text not in seen else []
        return bool(values) and all(self._is_launchers(value, (*seen, text)) for value in values)

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
            return text_of(node.func) == "int" or (self.name(node.func) or "").endswith(_NUMBERS)
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, (cst.Add, cst.Modulo, cst.Multiply)):
            return self._is_whole(node.left, seen) and self._is_whole(node.right, seen)
        formatted = self.parent(node)
        if isinstance(formatted, cst.BinaryOperation) and re.fullmatch(
            r"[\"'][a-z]+:%[di][\"']", text_of(formatted.left)
        ):
            return True  # which Python refuses for a text
        function = self.function_of(node)
        if function is not None and self.spawned.get(function.name.value) == text:
            return True
        option = self.options.get(node.attr.value) if isinstance(node, cst.Attribute) else None
        if option is not None and is_whole(option):
            return all(
                self._is_whole(value, (*seen, text)) for value in self.assigned.get(text, ()) if text not in seen
            )
        if self._is_counted(node, text):
            return True
        values = self.assigned.get(text, [])
        if not values:  # what a caller gives, or None, which is no index
            around = self.code if isinstance(node, cst.Attribute) else text_of(self.function_of(node) or self.module)
            numbers = rf"(?<![\w.]){re.escape(text)} *([=!]=|[<>]=?) *\d"
            return isinstance(node, (cst.Name, cst.Attribute)) and re.search(numbers, around) is not None
        return text not in seen and all(self._is_whole(value, (*seen, text)) for value in values)

    def _is_counted(self, node: cst.CSTNode, text: str) -> bool:
        """Return whether a name is the variable of a loop around it, over `range(...)`."""
        for outer in self.parents(node):
            loop: cst.For | cst.CompFor | None = outer if isinstance(outer, cst.For) else getattr(outer, "for_in", None)
            while loop is not None:
                if text_of(loop.target) == text:
                    return isinstance(loop.iter, cst.Call) and text_of(loop.iter.func) == "range"
                loop = loop.inner_for_in if isinstance(loop, cst.CompFor) else None
        return False

    def values(self, node: cst.BaseExpression) -> list[cst.BaseExpression]:
        """Return what the file assigns to a name."""
        return self.assigned.get(text_of(node), []) if isinstance(node, (cst.Name, cst.Attribute)) else []

    def values_at(self, node: cst.BaseExpression, seen: tuple[cst.CSTNode, ...] = ()) -> list[cst.BaseExpression]:
        """Return the values of a name: what its function assigns or is given, or the module; itself if it varies."""
        values, function = self.values(node), self.function_of(node)
        if not isinstance(node, cst.Name) or node in seen:
            return values
        if self.varies(node):
            return [node]
        if local := [value for value in values if self.function_of(value) is function]:
            return local
        if self.is_given(node.value, node):
            passed = self._passed(node.value, node)
            return [each for value in passed for each in self.values_at(value, (*seen, node)) or [value]]
        return [value for value in values if self.function_of(value) is None]

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
        values = [] if isinstance(index, cst.Name) and self.varies(index) else self.values(index)
        return text_of(index) == "0" or (bool(values) and all(text_of(value) == "0" for value in values))

    def _is_other(self, index: cst.BaseExpression) -> bool:
        """Return whether what chooses a device may be the index of another one, such as that of a loop."""
        is_device = is_device_name(text_of(index)) and not self.is_whole(index)
        return not (text_of(index) == "None" or is_device or self.is_local_rank(index) or self._is_zero(index))

    @cached_property
    def has_several(self) -> bool:
        """Return whether the script may use several devices in one process, by numbers that it gives them."""
        numbers = {number for node, number in self.numbered.items() if self.in_default(node) is None}
        return bool(numbers - {"0"}) or any(map(self._is_other, self.moved_to))

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
