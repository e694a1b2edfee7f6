"""Options of a script's command line, as argparse declares them: their names and kinds, and who reads them."""

from __future__ import annotations

from collections.abc import Iterable

import libcst as cst

from accelcore_lint.port.script_or_library import ScriptOrLibrary
from accelcore_lint.port.syntax import argument, is_guard, text_of

_READS = ("parse_args", "parse_known_args", "parse_args_into_dataclasses")


def options_in(calls: Iterable[cst.Call]) -> dict[str, cst.Call]:
    """Return the calls that declare options, by the attributes in which the values are."""
    return {name: call for call in calls if _method(call) == "add_argument" and (name := _name(call))}


def is_whole(option: cst.Call) -> bool:
    """Return whether an option is a whole number, and never None."""
    kind, required = argument(option, "type"), argument(option, "required")
    fixed = isinstance(argument(option, "default"), cst.Integer) or (required and text_of(required) == "True")
    return kind is not None and text_of(kind) == "int" and bool(fixed)


def are_read_in(tree: ScriptOrLibrary, declared: cst.CSTNode) -> bool:
    """Return whether the process that declares an option also trains, so that a default may be its device.

    Others may call a function that only declares options, such as a script that hands a job to a cluster.
    """
    function = tree.function_of(declared)
    is_for_others = tree.is_library and function is None and not any(map(is_guard, tree.parents(declared)))
    if is_for_others or tree.submits:
        return False
    reads = [call for call in tree.calls if _method(call) in _READS]
    if function is not None and function.name.value in tree.known.taken:
        return False  # another file calls it, such as one that hands a job to a cluster
    if function is not None and reads and any(text_of(call.func) == function.name.value for call in tree.calls):
        return True  # this file calls it, and reads what it declares
    return any(function is None or tree.function_of(call) is function for call in reads)


def _method(call: cst.Call) -> str:
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else ""


def _name(option: cst.Call) -> str:
    """Return the attribute of an option, by its `dest`, its first long name or its first name; "" if it has none."""
    dest = argument(option, "dest")
    if isinstance(dest, cst.SimpleString):
        return str(dest.raw_value)
    given = [arg.value.raw_value for arg in option.args if not arg.keyword and isinstance(arg.value, cst.SimpleString)]
    long = [name for name in given if str(name).startswith("--")]
    return next((str(name).lstrip("-").replace("-", "_") for name in long or given), "")
