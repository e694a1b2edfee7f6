"""Types of tensors of one device: `torch.cuda.FloatTensor(2, 3)`, `x.type(torch.cuda.FloatTensor)`, their names."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.rule import Example, Level, Rewrite, Rule
from accelcore_lint.port.rules.device_strings import AVAILABLE, whole
from accelcore_lint.port.syntax import text_of
from accelcore_lint.port.uses import NUMBERS
from accelcore_lint.port.walk import find

DTYPES = {
    "FloatTensor": "float32", "DoubleTensor": "float64", "HalfTensor": "float16", "BFloat16Tensor": "bfloat16",
    "LongTensor": "int64", "IntTensor": "int32", "ShortTensor": "int16", "CharTensor": "int8", "ByteTensor": "uint8",
    "BoolTensor": "bool",
}  # fmt: skip
_OF_TENSOR = ".is_cuda"
OF_DEVICE = {f"torch.cuda.{kind}": kind for kind in DTYPES}


def _decide(node: cst.Call | cst.IfExp, facts: Facts) -> Rewrite | None:
    if facts.indexes - {"0"} or (isinstance(node, cst.Call) and _converts(node) and _may_be_elsewhere(facts)):
        return None  # the type leaves a tensor on the one of several devices where it is
    if isinstance(node, cst.IfExp):
        return _decide_choice(node, facts)
    if _converts(node):
        return _decide_type(node, facts)
    kind = OF_DEVICE.get(facts.name(node.func) or "")
    has_device = any(arg.keyword is not None for arg in node.args)  # as in `torch.cuda.FloatTensor(n, device=x.device)`
    if kind is not None and (has_device or not (_makes(node, facts) or _is_sized(node, facts))):
        return None
    if kind is None and _of_name(node.func, facts) is None:
        return None
    if kind is not None and _is_sized(node, facts):
        return _empty(node, kind, facts)
    to = [cst.Arg(cst.parse_expression(_device(node, node.func, facts)))]
    func = node.func if kind is None else cst.parse_expression(f"{facts.torch}.{kind}")

    def build(updated: cst.Call) -> cst.Call:
        made = updated.with_changes(func=func, lpar=(), rpar=())
        return cst.Call(cst.Attribute(made, cst.Name("to")), to, lpar=updated.lpar, rpar=updated.rpar)

    return Rewrite(build, [node.func], facts.needs_torch)


def _may_be_elsewhere(facts: Facts) -> bool:
    """Return whether the program may put tensors on another device than the current one."""
    chooses = facts.made_current or facts.hidden_by or facts.known.steered
    return "numbers" in facts.known.uses or (not chooses and NUMBERS.search(facts.code) is not None)


def _is_sized(call: cst.Call, facts: Facts) -> bool:
    """Return whether all arguments are certainly sizes, and not data."""
    plain = [arg.value for arg in call.args if not arg.star]
    if len(plain) != 1 or len(call.args) != 1:
        return len(plain) > 1
    (only,) = plain
    if isinstance(only, cst.Call) and text_of(only.func).split(".")[-1] in ("size", "Size"):
        return True
    is_length = isinstance(only, cst.Subscript) and text_of(only.value).endswith(".shape")
    return is_length or _is_scalar(only, facts) or _is_number(only, facts)


def _is_scalar(node: cst.BaseExpression, facts: Facts, depth: int = 3) -> bool:
    """Return whether an expression is certainly one whole number, which is a size."""
    if isinstance(node, cst.Call):
        return text_of(node.func).split(".")[-1] in ("len", "int", "item") or (
            text_of(node.func).split(".")[-1] == "size" and len(node.args) == 1
        )
    if isinstance(node, cst.Subscript):
        return text_of(node.value).endswith(".shape") and not isinstance(node.slice[0].slice, cst.Slice)
    values = facts.values(node) if isinstance(node, cst.Name) and not _is_given(node, facts) else []
    known = bool(values) and depth > 0 and all(_is_scalar(value, facts, depth - 1) for value in values)
    return isinstance(node, cst.Integer) or known


def _is_given(name: cst.Name, facts: Facts) -> bool:
    """Return whether a name is a parameter, or the variable of a loop."""
    loops = [text_of(outer.target) for outer in facts.parents(name) if isinstance(outer, (cst.For, cst.CompFor))]
    return facts.is_given(name.value, name) or any(re.search(rf"\b{name.value}\b", text) for text in loops)


def _is_number(node: cst.BaseExpression, facts: Facts, kinds: tuple[type, ...] = (cst.Integer,)) -> bool:
    """Return whether a parameter is a number by its default, and is not assigned."""
    owners = [outer for outer in facts.parents(node) if isinstance(outer, cst.FunctionDef)]
    params = [param for outer in owners for param in (*outer.params.params, *outer.params.kwonly_params)]
    found = [param for param in params if param.name.value == text_of(node)]
    return bool(found) and isinstance(found[0].default, kinds) and not facts.values(node)


def _empty(node: cst.Call, kind: str, facts: Facts) -> Rewrite:
    """Make the tensor on the device, without its values on the host."""
    is_default = kind == "FloatTensor" and "set_default" not in facts.code
    dtype = "" if is_default else f"dtype={facts.torch}.{DTYPES[kind]}, "
    func = cst.parse_expression(f"{facts.torch}.empty")
    more = cst.ensure_type(cst.parse_expression(f"f({dtype}device={_device(node, node.func, facts)})"), cst.Call).args

    def build(updated: cst.Call) -> cst.Call:
        *args, last = updated.args
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        return updated.with_changes(func=func, args=[*args, last.with_changes(comma=comma), *more])

    return Rewrite(build, [node.func], facts.needs_torch)


def _decide_choice(node: cst.IfExp, facts: Facts) -> Rewrite | None:
    """Write `torch.cuda.FloatTensor if cuda else torch.FloatTensor` as the latter; its uses move what they make."""
    assign = facts.parent(node)
    if not isinstance(assign, cst.Assign):
        return None
    if _of_name(assign.targets[0].target, facts) is None:
        return None
    return whole(node, f"{facts.torch}.{_kind_of(node, facts)}")


def _converts(call: cst.Call) -> bool:
    return isinstance(call.func, cst.Attribute) and call.func.attr.value == "type" and len(call.args) == 1


def _decide_type(node: cst.Call, facts: Facts) -> Rewrite | None:
    (given,) = node.args
    default = _default_of(given.value, facts)
    named = _of_name(default or given.value, facts)
    kind = OF_DEVICE.get(facts.name(given.value) or "") or (named and named[0])
    if given.keyword is not None or given.star or not kind:
        return None
    device = _device(node, default or given.value, facts)
    if default is not None:  # the parameter, which is now a type for the CPU, keeps its meaning
        to = [cst.Arg(cst.parse_expression(device))]
        return Rewrite(lambda updated: cst.Call(cst.Attribute(updated, cst.Name("to")), to))
    sources = (device, f"{facts.torch}.{DTYPES[kind]}")
    args = [cst.Arg(cst.parse_expression(source)) for source in sources]
    func = cst.ensure_type(node.func, cst.Attribute)

    def build(updated: cst.Call) -> cst.Call:
        return updated.with_changes(func=updated.func.with_changes(attr=cst.Name("to")), args=args)

    return Rewrite(build, [func.attr, *node.args])


def _default_of(name: cst.BaseExpression, facts: Facts) -> cst.Name | None:
    """Return the default of a parameter that no call of the project gives, if its only use is as in `x.type(dtype)`."""
    function = facts.function_of(name)
    if function is None or function not in facts.functions.values():
        return None
    found = [param for param in function.params.params if param.name.value == text_of(name)]
    default = found[0].default if found and (function.name.value, text_of(name)) in facts.known.typed else None
    uses = [each for each in find(function.body, cst.Name) if each.value == text_of(name)]
    return default if isinstance(default, cst.Name) and len(uses) == 1 else None


def _device(site: cst.CSTNode, kind: cst.BaseExpression, facts: Facts) -> str:
    """Return the source of the device of a type, or of a name that stands for one."""
    named = _of_name(kind, facts)
    if named is not None and named[1].endswith(_OF_TENSOR):
        return f"{named[1].removesuffix(_OF_TENSOR)}.device"
    device = facts.device(site)
    return device if named is None or not named[1] else f'{device} if {named[1]} else "cpu"'


def _kind_of(choice: cst.BaseExpression, facts: Facts) -> str | None:
    """Return the type that `torch.cuda.FloatTensor if condition else torch.FloatTensor` chooses, on any device."""
    if not isinstance(choice, cst.IfExp):
        return None
    kind = OF_DEVICE.get(facts.name(choice.body) or "")
    same = {f"torch.{kind}", *(["torch.Tensor"] if kind == "FloatTensor" else [])}
    return kind if facts.name(choice.orelse) in same else None


def _of_name(name: cst.CSTNode, facts: Facts) -> tuple[str, str] | None:
    """Return the type that a name stands for, and the script's own condition for it, if it has one.

    None unless all uses of the name are known.
    """
    values = facts.values(name) if isinstance(name, cst.Name) else []
    if not isinstance(name, cst.Name) or len(values) != 1 or (kind := _kind_of(values[0], facts)) is None:
        return None
    known = 1
    for call in facts.calls:
        made = isinstance(call.func, cst.Name) and call.func.value == name.value and _makes(call, facts)
        of = _default_of(call.args[0].value, facts) or call.args[0].value if _converts(call) else None
        known += made or (of is not None and text_of(of) == name.value)
    condition = cst.ensure_type(values[0], cst.IfExp).test
    if known != facts.uses[name.value] or name.value in facts.known.taken or facts.sets_attribute(name.value):
        return None
    if _asks(condition, facts):
        return None if facts.keeps_questions else (kind, "")
    plain = isinstance(condition, (cst.Name, cst.Attribute)) and facts.name(condition) is None
    known_device = "is_cuda" not in text_of(condition) or _is_of_tensor(condition, name, facts)
    return (kind, text_of(condition)) if plain and known_device and _stays(condition, facts) else None


def _stays(condition: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether nothing below a condition gives another value to it, or to a name that it is."""
    line = facts.line(condition)
    scope = facts.function_of(condition) or facts.module
    names = [each for each in find(scope, cst.Name) if each.value == text_of(condition) and facts.line(each) > line]
    later = any(facts.line(value) > line for value in facts.assigned.get(text_of(condition), ()))
    return not later and not any(_is_target(each, facts) for each in names)


def _is_of_tensor(condition: cst.BaseExpression, kind: cst.Name, facts: Facts) -> bool:
    """Return whether a condition is `x.is_cuda`, and the same `x` stands where its function uses the type."""
    function, tensor = facts.function_of(condition), text_of(condition).removesuffix(_OF_TENSOR)
    if function is None or not tensor.isidentifier() or "is_cuda" in facts.uses_of:
        return False
    names = [each for each in find(function, cst.Name) if getattr(facts.parent(each), "attr", None) is not each]
    inside = sum(each.value == kind.value for each in names)
    below = [each for each in names if each.value == tensor and facts.line(each) > facts.line(condition)]
    return inside == facts.uses[kind.value] and not any(_is_target(each, facts) for each in below)


def _is_target(name: cst.Name, facts: Facts) -> bool:
    """Return whether a name gets a new value, a part of it does, or a function inside has it as a parameter."""
    holds = (cst.AssignTarget, cst.AsName, cst.Del)
    outer = facts.parents(name)
    slots = (getattr(facts.parent(name), "target", None), getattr(facts.parent(name), "name", None))
    return name in slots or any(isinstance(each, holds) for each in outer)


def _asks(condition: cst.BaseExpression, facts: Facts) -> bool:
    """Return whether a condition is true exactly where there is an accelerator."""
    if isinstance(condition, cst.IfExp):
        plain = (text_of(condition.body), text_of(condition.orelse)) == ("True", "False")
        return plain and _asks(condition.test, facts)
    if isinstance(condition, cst.Call):
        return facts.name(condition.func) == AVAILABLE
    values = facts.values(condition) if isinstance(condition, cst.Name) else []
    return len(values) == 1 and not isinstance(values[0], cst.Name) and _asks(values[0], facts)


def _makes(call: cst.Call, facts: Facts) -> bool:
    """Return whether a call certainly makes a tensor from sizes, or from data on the host."""
    if any(arg.keyword is not None or arg.star == "**" for arg in call.args):
        return False
    # Several arguments are sizes. A starred one may be none at all.
    plain = [arg.value for arg in call.args if not arg.star]
    return len(plain) > 1 or (len(plain) == 1 and _is_host(plain[0], facts)) or not call.args


def _is_host(node: cst.BaseExpression, facts: Facts, seen: tuple[str, ...] = ()) -> bool:
    """Return whether an expression is data on the host: numbers, lists, and arrays of NumPy."""
    if isinstance(node, (cst.List, cst.Tuple, cst.ListComp, cst.Integer, cst.Float)):
        return True
    if isinstance(node, cst.Subscript):
        return text_of(node.value).endswith(".shape")
    if isinstance(node, cst.Attribute) and node.attr.value == "shape":
        return True
    if isinstance(node, cst.Call):
        method = node.func.attr.value if isinstance(node.func, cst.Attribute) else text_of(node.func)
        return (facts.name(node.func) or "").startswith("numpy.") or method in ("size", "len", "int", "numpy", "tolist")
    if isinstance(node, cst.BinaryOperation):
        sides = (node.left, node.right)
        if any(isinstance(side, (cst.List, cst.ListComp)) for side in sides):
            return True
        return all(_is_host(side, facts, seen) or _is_number(side, facts, (cst.Integer, cst.Float)) for side in sides)
    text = text_of(node)
    if text in seen:  # a name may be assigned what is made of it: `weights = weights / numpy.max(weights)`
        return not (isinstance(node, cst.Name) and facts.is_given(text, node))
    found = facts.values_at(node) if isinstance(node, cst.Name) else facts.values(node)
    values = [value for value in found if value not in facts.parents(node)]
    return bool(values) and node not in values and all(_is_host(value, facts, (*seen, text)) for value in values)


TYPED = Rule(
    "typed tensor",
    "tensors made or converted by a type of one device",
    (cst.Call, cst.IfExp),
    _decide,
    (
        Example(
            Level.TORCH,
            "noise = torch.cuda.FloatTensor(2, 3).normal_()",
            "noise = torch.empty(2, 3, device=device).normal_()",
        ),
        Example(
            Level.ROLES,
            "images = images.type(torch.cuda.HalfTensor)",
            "images = images.to(accel.device, torch.float16)",
        ),
        Example(
            Level.ROLES,
            "Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.Tensor\n"
            "ones = Tensor(x.size(0), 1).fill_(1.0)\nx = x.type(Tensor)",
            "Tensor = torch.FloatTensor\nones = Tensor(x.size(0), 1).to(accel.device).fill_(1.0)\n"
            "x = x.to(accel.device, torch.float32)",
        ),
    ),
)
