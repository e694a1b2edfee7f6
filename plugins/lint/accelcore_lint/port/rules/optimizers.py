"""Optimizers of torch, of torch_npu and of NVIDIA's apex, by their name in accelcore."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.facts import Facts
from accelcore_lint.port.place import UnplacedError
from accelcore_lint.port.rule import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.syntax import arguments, text_of
from accelcore_lint.port.uses import REFERS, copies

_ADAM = ("params", "lr", "betas", "eps", "weight_decay", "amsgrad")
_SGD = ("params", "lr", "momentum", "dampening", "weight_decay", "nesterov")
_RMSPROP = ("params", "lr", "alpha", "eps", "weight_decay", "momentum", "centered")
_ADADELTA = ("params", "lr", "rho", "eps", "weight_decay")

_TORCHS = {"SGD": _SGD, "Adam": _ADAM, "AdamW": _ADAM, "RMSprop": _RMSPROP, "Adadelta": _ADADELTA}
_NPU_ONLY = {
    "AdamP": (*_ADAM[:5], "delta", "wd_ratio", "nesterov"),
    "Lamb": (*_ADAM[:5], "adam", "use_global_grad_norm"),
    "RMSpropTF": (*_RMSPROP, "decoupled_decay", "lr_in_momentum"),
    "BertAdam": (
        "params", "lr", "warmup", "t_total", "schedule", "b1", "b2", "e", "weight_decay", "max_grad_norm",
    ),
}  # fmt: skip
"""Options in their order; torch's classes have more options, which only choose between its kernels."""


_APEX = re.compile(r"(?m)^[ \t]*(from|import)[ \t]+apex\b")
_COPIES = ("torch.save", "copy.copy", "copy.deepcopy", "pickle.dump", "pickle.dumps")


def _decide(node: cst.Call, facts: Facts) -> Rewrite | Left | None:
    name = facts.name(node.func) or ""
    module, _, kind = name.rpartition(".")
    if module in ("torch_npu.optim", "torch.cuda.optim") and kind.startswith("NpuFused"):
        return _decide_npu(node, facts, kind.removeprefix("NpuFused"))
    if module.startswith("torch.optim") and kind in _TORCHS and facts.level is not Level.TORCH:
        given = arguments(node, *_TORCHS[kind])
        # A generator of groups, `**options` and the choice of a kernel stay torch's.
        # Flat memory would take parameters out of the memory that other processes read.
        stays = facts.engine is not None or "optimizer" in facts.uses_of or ".share_memory(" in facts.code
        # So does NVIDIA's apex, which puts masters of its own into an optimizer.
        theirs = "apex" in facts.strange_apex and _APEX.search(facts.code) is not None
        stays = stays or theirs or _is_copied(node, facts)
        if given is None or "params" not in given or stays:
            return None
        try:
            return _created(node, facts, kind, given)
        except UnplacedError:
            return None
    return None


def _is_copied(node: cst.Call, facts: Facts) -> bool:
    """Return whether the program saves or copies the optimizer, and not its state: accelcore's refuses that."""
    made = facts.parent(node)
    names = [text_of(target.target) for target in made.targets] if isinstance(made, cst.Assign) else []
    known = "|".join([*map(re.escape, {*names, *(name.partition(".")[0] for name in names)}), REFERS])
    calls = [text_of(call) for call in facts.calls if facts.name(call.func) in _COPIES]
    return "copied" in facts.uses_of or copies(calls, facts.code, known)


def _decide_npu(node: cst.Call, facts: Facts, kind: str) -> Rewrite | Left:
    known = _TORCHS.get(kind) or _NPU_ONLY.get(kind)
    given = arguments(node, *known) if known else None
    if given is None or "params" not in given:
        return Left(f"NpuFused{kind}, or options of it that are not known")
    if facts.level is not Level.TORCH:
        if _is_copied(node, facts):
            return Left(f"NpuFused{kind}, which the script saves or copies as a whole: save its state_dict()")
        return _created(node, facts, kind, given)
    if kind not in _TORCHS:
        return Left(f"NpuFused{kind}: torch has no such optimizer; level roles has")
    func = cst.parse_expression(f"{facts.torch}.optim.{kind}")
    return Rewrite(lambda updated: updated.with_changes(func=func), [node.func], facts.needs_torch)


def _created(node: cst.Call, facts: Facts, kind: str, given: dict[str, cst.Arg]) -> Rewrite:
    positions = {node.args.index(arg): key for key, arg in given.items()}
    func = cst.parse_expression(f"{facts.place.backend(node)}.optimizers.create")
    name = cst.Arg(cst.SimpleString(f'"{kind.lower()}"'), comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))

    def build(updated: cst.Call) -> cst.Call:
        args = [_named(arg, positions[at]) for at, arg in enumerate(updated.args)]
        return updated.with_changes(func=func, args=[name, *args])

    return Rewrite(build, [node.func])


def _named(arg: cst.Arg, key: str) -> cst.Arg:
    if arg.keyword is not None or key == "params":
        return arg
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return arg.with_changes(keyword=cst.Name(key), equal=equal)


OPTIMIZERS = Rule(
    "optimizer",
    "optimizers whose options accelcore has",
    (cst.Call,),
    _decide,
    (
        Example(
            Level.TORCH,
            "from torch_npu.optim import NpuFusedSGD\nimport torch\noptimizer = NpuFusedSGD(params, lr=0.1)",
            "import torch\noptimizer = torch.optim.SGD(params, lr=0.1)",
        ),
        Example(
            Level.ROLES,
            "optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)",
            'optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1, momentum=0.9)',
        ),
    ),
)
