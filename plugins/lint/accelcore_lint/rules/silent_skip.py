"""A guard on one vendor's device that leaves other accelerators without a feature, and says nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from accelcore_lint.rule import Mark, Rule
from accelcore_lint.script import Script, last_name, text_of
from accelcore_lint.vendors import asks_for_vendor, runtime_call

_FLAGS = {"pin_memory", "non_blocking", "fused"}
_SEEDS = {"manual_seed", "manual_seed_all", "seed", "seed_all"}
_SPEAKS = ("print", "warn", "warning", "info", "error", "debug", "exception", "critical", "log", "exit", "skip", "fail")
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def _feature(script: Script, node: ast.AST) -> str:
    """Name the feature that a node turns on, or return ''."""
    if isinstance(node, ast.keyword) and node.arg in _FLAGS:
        return node.arg if isinstance(node.value, ast.Constant) and node.value.value is True else ""
    if isinstance(node, ast.Dict):
        keys = (text_of(key) for key, value in zip(node.keys, node.values, strict=True) if ast.unparse(value) == "True")
        return next((key for key in keys if key in _FLAGS), "")
    if not isinstance(node, ast.Call):
        return ""
    name, dotted = last_name(node.func), script.names.resolve(node.func)
    if name in {"autocast", "GradScaler"}:
        return "mixed precision"
    if name == "pin_memory":
        return name
    if dotted == "torch.compile":
        return "compilation"
    runtime = runtime_call(dotted)
    if runtime is None:
        return ""
    if runtime[1] in _SEEDS:
        return "" if _seeds_all(script, node) else "the seed"
    if "memory" in runtime[1] or runtime[1] in {"empty_cache", "mem_get_info"}:
        return "the memory call"
    return "the synchronization" if runtime[1] == "synchronize" else ""


def _seeds_all(script: Script, near: ast.Call) -> bool:
    """Return whether `torch.manual_seed`, which seeds every device, is called in the same function."""
    place = next(script.inside(near, (ast.FunctionDef, ast.AsyncFunctionDef)), script.tree)
    calls = (node for node in ast.walk(place) if isinstance(node, ast.Call))
    return any(script.names.resolve(call.func) == "torch.manual_seed" for call in calls)


def _features(script: Script, parts: Sequence[ast.AST]) -> dict[ast.AST, str]:
    found = {}
    for part in parts:
        for node in ast.walk(part):
            name = _feature(script, node)
            if name:
                found[node] = name
    return found


def _speaks(parts: Sequence[ast.AST]) -> bool:
    """Return whether statements raise, warn, print or assert."""
    for part in parts:
        for node in ast.walk(part):
            if isinstance(node, ast.Raise | ast.Assert):
                return True
            if isinstance(node, ast.Call) and last_name(node.func) in _SPEAKS:
                return True
    return False


def _branches(script: Script, node: ast.If, positive: bool) -> tuple[Sequence[ast.AST], Sequence[ast.AST]]:
    """Return what is done on the vendor's device and what is done on others."""
    rest: Sequence[ast.AST] = node.orelse
    if not rest and isinstance(node.body[-1], _LEAVES):
        parent = script.names.parents[node]
        bodies = [body for _, body in ast.iter_fields(parent) if isinstance(body, list) and node in body]
        rest = bodies[0][bodies[0].index(node) + 1 :] if bodies else []
    return (node.body, rest) if positive else (rest, node.body)


def _check(script: Script) -> Iterator[Mark]:
    for guard in script.all(ast.If):
        positive = asks_for_vendor(script, guard.test)
        if positive is not None:
            yield from _mark(script, guard.test, *_branches(script, guard, positive))
    for choice in script.all(ast.IfExp):
        positive = asks_for_vendor(script, choice.test)
        if positive is not None:
            branches = ([choice.body], [choice.orelse]) if positive else ([choice.orelse], [choice.body])
            yield from _mark(script, choice.test, *branches)
    for call in script.all(ast.Call):
        precision = last_name(call.func) in {"autocast", "GradScaler"}
        for keyword in call.keywords:
            turns_on = keyword.arg in _FLAGS or (keyword.arg == "enabled" and precision)
            if turns_on and asks_for_vendor(script, keyword.value):
                yield _silent(keyword.value, "mixed precision" if precision else str(keyword.arg), ())


def _mark(script: Script, test: ast.expr, here: Sequence[ast.AST], elsewhere: Sequence[ast.AST]) -> Iterator[Mark]:
    features = _features(script, here)
    alike = {*_features(script, elsewhere).values()}
    missing = {node: name for node, name in features.items() if name not in alike}
    if missing and not _speaks(elsewhere):
        yield _silent(test, ", ".join(dict.fromkeys(missing.values())), tuple(missing))


def _silent(node: ast.expr, names: str, covers: tuple[ast.AST, ...]) -> Mark:
    return Mark(
        node,
        f"This test leaves other accelerators without {names}, and nothing reports it.",
        "Ask whether the device can do it, not for its name (accel.capabilities, or device.type passed on to "
        "torch); or raise or warn in the other branch.",
        covers,
    )


RULE = Rule(
    code="ACC101",
    name="silent-skip",
    about='A guard such as `device.type == "cuda"`, `tensor.is_cuda` or `torch.cuda.is_available()` stands around '
    "mixed precision, a GradScaler, pinned memory, non-blocking copies, compilation, seeds, or memory calls. On "
    "every other accelerator the script runs without them: slower, in another precision, or with other random "
    "numbers, without a message. A guard whose other branch raises, warns, prints, or does the same by other "
    "means is not found.",
    check=_check,
    found="""
        import torch

        def step(model, batch, device):
            if device.type == "cuda":
                with torch.autocast("cuda"):
                    return model(batch)
            return model(batch)
    """,
    clean="""
        import torch

        def step(model, batch, device):
            if device.type != "cuda":
                raise RuntimeError(f"mixed precision needs CUDA, and this is {device}")
            with torch.autocast("cuda"):
                return model(batch)
    """,
)
