"""The index in the name of a device: `"cuda:1"`, `f"cuda:{rank}"`, `"npu:%d" % rank`."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.syntax import text_of
from accelcore_lint.port.vendors import DEVICES, device_text

_PREFIX = tuple(f"{name}:" for name in DEVICES)
_FORM = re.compile(rf"({'|'.join(DEVICES)}):{{0?(:d)?}}")

_NAME = re.compile(
    r"(.*[._])?(device|dev|device_type|device_name|default_device|map_location|map_loc|loc)", re.IGNORECASE
)


def is_device_name(text: str) -> bool:
    """Return whether a name, an attribute or an option is called a device."""
    return _NAME.fullmatch(text) is not None


def with_type(device: cst.Call, kind: str, index: str) -> str:
    """Return the arguments of a `torch.device` with another type and the index as it is given, whatever that is.

    Args:
        device: the call; its index is an argument, or in the text of the first one.
        kind, index: the source of the type, a string, and that of the index.
    """
    if len(device.args) > 1:
        return f"{kind}, {index}"
    if '"' in index:
        return f"{kind} + ':' + str({index})"
    kind = kind.replace('"', "'")  # Python before 3.12 needs other quotes in an f-string
    return f'f"{{{kind}}}:{{{index}}}"'


def index_source(index: cst.BaseExpression) -> str:
    """Return the source of an index, with the number of devices and the current one as torch counts them for all."""
    text = re.sub(r"\btorch\.(cuda|npu)\.device_count\b", "torch.accelerator.device_count", text_of(index))
    return re.sub(r"\btorch\.(cuda|npu)\.current_device\(\)", "torch.accelerator.current_device_index()", text)


def with_index(torch: str, device: str, index: str) -> str:
    """Return the source of torch's current device with an index, and of the CPU without: tensors there have none."""
    return f'({torch}.device({device}.type, {index}) if {device}.type != "cpu" else {device})'


def numbered(kind: str, index: str) -> str:
    """Return the source of the name of a device of a type, by the sources of the type and of the index."""
    kind = kind.replace('"', "'")  # Python before 3.12 needs other quotes in an f-string
    return f'f"{{{kind}}}:{index if index.isdecimal() else f"{{{index}}}"}"'


def branches(choice: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Return what a choice chooses between, also through further choices in it."""
    if isinstance(choice, cst.IfExp):
        return branches(choice.body) + branches(choice.orelse)
    return [choice]


def is_for_autocast(name: str, code: str) -> bool:
    """Return whether all that the source of a file uses a name for is autocast's device."""
    uses = re.findall(rf"(?<![\w.]){re.escape(name)}\b(?! *=[^=])", code)
    given = re.findall(rf"\bautocast\((?:device_type *= *)?{re.escape(name)}\b", code)
    return 0 < len(uses) == len(given)


def index_of(node: cst.BaseExpression) -> tuple[bool, cst.BaseExpression | None]:
    """Return whether an expression is a string that names a vendor's device, and its index if it has one."""
    if isinstance(node, cst.SimpleString) and isinstance(node.evaluated_value, str):
        value = node.evaluated_value
        if not device_text(value) or "{" in value or "%" in value or value.endswith(":"):
            return False, None
        _, _, index = value.partition(":")
        return True, cst.Integer(index) if index else None
    if isinstance(node, cst.FormattedString) and len(node.parts) == 1:
        only = node.parts[0]
        return isinstance(only, cst.FormattedStringText) and only.value in DEVICES, None
    if isinstance(node, cst.FormattedString) and len(node.parts) == 2:
        head, part = node.parts
        if (
            isinstance(head, cst.FormattedStringText)
            and head.value in _PREFIX
            and isinstance(part, cst.FormattedStringExpression)
        ):
            plain = [text_of(each) for each in part.format_spec or ()] in ([], ["d"])
            return plain, part.expression if plain else None
    if isinstance(node, cst.BinaryOperation) and isinstance(node.left, cst.SimpleString):
        value = str(node.left.evaluated_value)
        if isinstance(node.operator, cst.Modulo) and value in {f"{name}:%{kind}" for name in DEVICES for kind in "dsi"}:
            right = node.right
            if isinstance(right, cst.Tuple) and len(right.elements) == 1:
                right = right.elements[0].value
            return not isinstance(right, cst.Tuple), right
        if isinstance(node.operator, cst.Add) and value in _PREFIX:
            return _index_text(node.right)
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == "format":
        form = node.func.value
        if isinstance(form, cst.SimpleString) and _FORM.fullmatch(str(form.evaluated_value)):
            return len(node.args) == 1 and node.args[0].keyword is None, node.args[0].value if node.args else None
    return False, None


def _index_text(node: cst.BaseExpression) -> tuple[bool, cst.BaseExpression | None]:
    """Return whether what follows `"cuda:" +` is an index, as in `str(rank)` or `args.gpu`, which is a text, and it."""
    if isinstance(node, cst.Call):
        is_text = text_of(node.func) == "str" and len(node.args) == 1
        return is_text, node.args[0].value if is_text else None
    is_named = isinstance(node, (cst.Name, cst.Attribute))
    return is_named, node if is_named else None
