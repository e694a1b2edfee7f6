"""Options of a script's command line, as argparse declares them: their names and kinds, and who reads them."""

from __future__ import annotations

import libcst as cst

from accelcore_lint.port.syntax import argument, text_of
from accelcore_lint.port.tree import Tree

_READS = ("parse_args", "parse_known_args", "parse_args_into_dataclasses")


class Options:
    """The options of a file.

    Attributes:
        names: of all of them, as the attributes in which their values are.
        wholes: those that are a whole number, and never None.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        added = {name: call for call in tree.calls if _method(call) == "add_argument" and (name := _name(call))}
        self.names = set(added)
        self.wholes = {name for name, call in added.items() if _is_whole(call)}

    def are_read_in(self, declared: cst.CSTNode) -> bool:
        """Return whether the process that declares an option also trains, so that a default may be its device.

        Others may call a function that only declares options, such as a script that hands a job to a cluster.
        """
        tree = self._tree
        function = tree.function_of(declared)
        if (tree.is_library and function is None) or tree.submits:
            return False
        reads = [call for call in tree.calls if _method(call) in _READS]
        if function is not None and function.name.value in tree.known.taken:
            return False  # another file calls it, such as one that hands a job to a cluster
        if function is not None and reads and any(text_of(call.func) == function.name.value for call in tree.calls):
            return True  # this file calls it, and reads what it declares
        return any(function is None or tree.function_of(call) is function for call in reads)


def _is_whole(option: cst.Call) -> bool:
    required = argument(option, "required")
    fixed = isinstance(argument(option, "default"), cst.Integer) or (required and text_of(required) == "True")
    kind = argument(option, "type")
    return kind is not None and text_of(kind) == "int" and bool(fixed)


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
