"""Numbers by which a script chooses its devices, and which of them is the one that accelcore selects."""

from __future__ import annotations

import re
from functools import cached_property

import libcst as cst

from accelcore_lint.port.indexes import index_of, is_device_name
from accelcore_lint.port.ranks import Ranks
from accelcore_lint.port.syntax import argument, text_of
from accelcore_lint.port.vendors import DEVICES

_INDEXED = re.compile(
    r"\.(?:cuda|npu)\((?:device=)?(\w+\.\w+)[,)]|device\([\"'](?:cuda|npu)[\"'], *(?:index=)?(\w+\.\w+)\)"
    r"|[\"'](?:cuda|npu):\{(\w+\.\w+)(?:![rsa])?(?::d)?\}[\"']|[\"'](?:cuda|npu):[\"'] *\+ *str\((\w+\.\w+)\)"
    r"|[\"'](?:cuda|npu):%d[\"'] *% *\(?(\w+\.\w+)\b|[\"'](?:cuda|npu):\{(?::d)?\}[\"']\.format\((\w+\.\w+)\)"
)


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
        return bool(numbers - {"0"}) or any(map(self._is_other, self.moved_to))

    @cached_property
    def _indexing(self) -> set[str]:
        """Return the attributes by which the script numbers devices, such as `args.gpu`."""
        return {next(filter(None, match.groups())) for match in _INDEXED.finditer(self.code)}

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
