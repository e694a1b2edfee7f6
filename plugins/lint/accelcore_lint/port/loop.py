"""Recognition of a training loop that a trainer can run: everything in it is known, or the loop is left."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import libcst as cst
from libcst import matchers as m

from accelcore_lint.port.syntax import text_of

_CLIPS = re.compile(
    r"(?:torch\.)?(?:nn\.)?(?:utils\.)?clip_grad_norm_\( ?"
    r"(?:parameters=)?(\w+)\.parameters\(\), (?:max_norm=)?([^,()]+?),? ?\)"
)
_OF_TENSOR = re.compile(
    r"(?!(?:args|opt|opts|options|self|config|cfg|conf|params|hparams|flags)\.)\w+\.device", re.IGNORECASE
)
_OF_DEVICES = re.compile(r"cuda|gpu|npu|cpu|device|accel", re.IGNORECASE)
_AROUND = ("enumerate", "tqdm", "tqdm.tqdm")
_PRECISIONS = {"torch.float16": "fp16", "torch.bfloat16": "bf16"}
_OF_RANKS = r"DistributedSampler|DistributedDataParallel|\breplicate\(|init_process_group|accel\w*\.join\("

Block = cst.Module | cst.IndentedBlock


class NotCanonicalError(Exception):
    """A loop that is not replaced; the message is the reason."""


@dataclass
class Loop:
    """A training loop of which every step is known.

    Attributes:
        node: the `for` over batches.
        anchor: the statement of the block that holds the loop; the trainer is made before it.
        model, optimizer: names.
        data: name of what the loop reads; "" if the loop stays as it is.
        backward: the line that calls backward.
        update: the line that steps the optimizer.
        gone: lines that the trainer does itself.
        contexts: autocast contexts around the forward pass.
        options: further arguments of the trainer, as source.
    """

    node: cst.For
    anchor: cst.CSTNode
    model: str
    optimizer: str
    data: str
    backward: cst.CSTNode
    update: cst.CSTNode
    gone: list[cst.CSTNode]
    contexts: list[cst.With] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)


def lines_of(body: cst.BaseSuite | cst.Module) -> Sequence[cst.BaseStatement]:
    """Return the statements of a block."""
    return body.body if isinstance(body, (cst.IndentedBlock, cst.Module)) else ()


def loops_in(block: Block) -> Iterator[tuple[cst.For, cst.CSTNode]]:
    """Yield the innermost loops of a block, not of functions in it, that call backward; with the block's statement."""
    for statement in block.body:
        for loop in _loops(statement):
            yield loop, statement


def _loops(node: cst.CSTNode) -> Iterator[cst.For]:
    if isinstance(node, (cst.FunctionDef, cst.ClassDef)) or not isinstance(node, cst.BaseCompoundStatement):
        return
    inner = [found for part in lines_of(node.body) for found in _loops(part)]
    if isinstance(node, cst.If) and node.orelse is not None:
        inner += [found for part in lines_of(node.orelse.body) for found in _loops(part)]
    yield from inner
    if isinstance(node, cst.For) and not inner and re.search(r"\.backward\(\)", text_of(node)):
        yield node


def recognise(block: Block, loop: cst.For, anchor: cst.CSTNode, accel: str, source: str) -> Loop:
    """Return what a loop does, step by step.

    Args:
        block: the body of the function, or the module, with model, optimizer and loop.
        loop: the loop over batches.
        anchor: the statement of the block that holds it.
        accel: the name of the backend.
        source: of the whole file, without comments.

    Raises:
        NotCanonicalError: something in it is not known.
    """
    if re.search(_OF_RANKS, source):
        raise NotCanonicalError("the script trains on several ranks by itself")
    if "DataParallel" in source:
        raise NotCanonicalError("the script trains by DataParallel, which takes several devices in one process")
    text = text_of(loop)
    if word := re.search(r"\.grad\b|\b(yield|retain_graph)\b", text):
        raise NotCanonicalError(f"there is `{word[0]}` in it")
    if (several := text.count(".backward(")) > 1:
        raise NotCanonicalError(f"it calls backward {several} times: a trainer has one optimizer")
    before = {text_of(part): part for line in _plain(block, anchor) for part in line.body}
    made = _assigned(before)
    steps = _Steps(loop)
    optimizer = steps.optimizer
    creation = made.get(optimizer, "")
    models = set(re.findall(r"([\w.]+)\.parameters\(\)", creation))
    if (
        len(models) != 1
        or not all(map(str.isidentifier, models))
        or not re.match(rf"{accel}\.optimizers\.create\(|[\w.]*optim\.\w+\(", creation)
    ):
        raise NotCanonicalError(f"{optimizer} is not made in the same function, of one model's parameters")
    (model,) = models
    if _made_again(block, anchor, optimizer, model):
        raise NotCanonicalError(f"{model} is made again after {optimizer}")
    others = [
        name for name, value in made.items() if re.match(rf"{accel}\.optimizers\.create|[\w.]*optim\.[A-Z]", value)
    ]
    if len([name for name in others if "lr_scheduler" not in made[name]]) != 1:
        raise NotCanonicalError("there are several optimizers")
    _check_devices(block, accel, source)
    data = _data(loop, made)
    if steps.jumps:
        _check_jumps(loop, steps, model)
        data = ""  # what a loop leaves before its end is read as before
    if steps.zeroed not in (optimizer, model):
        raise NotCanonicalError("gradients are not cleared in it, or of something else")
    found = Loop(loop, anchor, model, optimizer, data, steps.backward, steps.update, steps.gone)
    found.contexts = steps.contexts
    if not re.search(rf"\b{model}\(", text):
        raise NotCanonicalError(f"{model} is not called in it")
    if re.search(rf"\b{optimizer}\.(?!step\b|zero_grad\b|param_groups\b)", text):
        raise NotCanonicalError(f"it uses {optimizer} in another way")
    _read_options(found, steps, made, accel, source)
    if steps.scaler:
        found.gone += [line for line in _plain(block, anchor) if text_of(line.body[0]).startswith(f"{steps.scaler} = ")]
    return found


def _check_jumps(loop: cst.For, steps: _Steps, model: str) -> None:
    """Raise if `break`, `continue` or `return` may leave a pass after its forward pass and before the update."""
    called = False
    for line in lines_of(loop.body):
        called = called or re.search(rf"\b{model}\(", text_of(line)) is not None
        if called and steps.jumps.get(line, "step") != "step":
            raise NotCanonicalError("it may skip the update after the forward pass")


def _check_devices(block: Block, accel: str, source: str) -> None:
    """Raise if the function moves something to a device that may differ from the trainer's, or may leave it."""
    text = "\n".join(map(text_of, block.body))
    if left := re.search(r"\w+\.(cuda|npu)\((?:[^()\n]|\([^()\n]*\))*\)", text):
        raise NotCanonicalError(f"{left[0]} was left, and may choose another device than accel.device")
    for node in m.findall(block, m.If() | m.IfExp()):
        choice = cast("cst.If | cst.IfExp", node)
        test = text_of(choice.test)
        values = [value.strip() for value in re.findall(rf"(?m)^ *{re.escape(test)} = ([^#\n]+)", source)] or [test]
        moves = f".to({accel}.device" in text_of(choice.body) and _OF_DEVICES.search(test)
        if moves and values != [f'{accel}.device.type != "cpu"']:
            raise NotCanonicalError(f"`{test}` may be false where there is an accelerator, which a trainer uses")
    for device in set(re.findall(r"(?:\.to\(|\bdevice ?= ?)([\w.\[\]\"']+)", text)):
        own = f"{accel}.device", f"{accel}.device.type"
        if "dev" not in device.lower() or device in own or _OF_TENSOR.fullmatch(device):
            continue
        values = re.findall(rf"(?m)^ *{re.escape(device)} = (.+)$", source)
        if [value.strip() for value in values] not in ([own[0]], [own[1]]):
            raise NotCanonicalError(f"port cannot tell whether `{device}` is always accel.device")


def _made_again(block: Block, anchor: cst.CSTNode, optimizer: str, model: str) -> bool:
    """Return whether the model's name is assigned between the optimizer's line and the loop, other than by moves."""
    made = False
    for statement in block.body:
        if statement is anchor:
            return False
        text = text_of(statement)
        if made and re.search(rf"(?m)^ *(\w+, *)*{model}( *, *\w+)* *=(?!=| *{model}\.(to|train|eval)\()", text):
            return True
        made = made or re.match(rf"{optimizer} *=", text) is not None
    return False


def _plain(block: Block, anchor: cst.CSTNode) -> Iterator[cst.SimpleStatementLine]:
    """Yield the simple lines of a block up to a statement."""
    for statement in block.body:
        if statement is anchor:
            return
        if isinstance(statement, cst.SimpleStatementLine):
            yield statement


def _assigned(lines: Mapping[str, cst.CSTNode]) -> dict[str, str]:
    made: dict[str, str] = {}
    for part in lines.values():
        if isinstance(part, cst.Assign) and len(part.targets) == 1 and isinstance(part.targets[0].target, cst.Name):
            name = part.targets[0].target.value
            value = text_of(part.value)
            # `model = model.to(device)` does not say anything new about the name.
            made[name] = made[name] if re.match(rf"{name}\.(to|train)\(", value) and name in made else value
    return made


def source_of(loop: cst.For) -> cst.BaseExpression:
    """Return what a loop reads, without `enumerate` and progress bars around it."""
    source: cst.BaseExpression = loop.iter
    while isinstance(source, cst.Call) and text_of(source.func) in _AROUND and source.args and not source.args[0].star:
        source = source.args[0].value
    return source


def _data(loop: cst.For, made: dict[str, str]) -> str:
    """Return the name of the DataLoader or list that a loop reads; "" if it may read something else."""
    if loop.orelse is not None or loop.asynchronous is not None:
        raise NotCanonicalError("it has an else")
    name = text_of(source_of(loop))
    return name if re.match(r"[\w.]*DataLoader\(|\[", made.get(name, "")) else ""


class _Steps:
    """The calls of one pass of a loop, in their order."""

    def __init__(self, loop: cst.For) -> None:
        self.gone: list[cst.CSTNode] = []
        self.contexts: list[cst.With] = []
        self.clip: tuple[str, str] | None = None
        self.scaler = self.scheduler = ""
        self.loss = self.optimizer = self.zeroed = ""
        self.backward: cst.CSTNode = loop
        self.update: cst.CSTNode = loop
        self.jumps: dict[cst.CSTNode, str] = {}
        self._stage = "forward"
        for line in lines_of(loop.body):
            if m.findall(line, m.Break() | m.Continue() | m.Return()):
                self.jumps[line] = self._stage
            self._read(line)
        if not (self.loss and self.optimizer):
            raise NotCanonicalError("backward and step are not both lines of its own body")

    def _read(self, line: cst.BaseStatement) -> None:
        text = re.sub(r"\s+", " ", text_of(line)) if isinstance(line, cst.SimpleStatementLine) else ""
        if isinstance(line, cst.With) and ".autocast(" in text_of(line.items[0].item) and len(line.items) == 1:
            if self._stage != "forward" or ".backward()" in text_of(line):
                raise NotCanonicalError("autocast is around more than the forward pass")
            self.contexts.append(line)
        elif isinstance(line, cst.BaseCompoundStatement):
            if re.search(r"\.backward\(|\.zero_grad\(|\.step\(|unscale_|clip_grad", text_of(line)):
                raise NotCanonicalError("steps of it are under a condition")
        elif text:
            self._read_line(text, line)

    def _read_line(self, text: str, line: cst.CSTNode) -> None:
        if self._stage == "forward" and (loss := loss_of(line)) is not None:
            self.scaler, self.loss = loss
            self.backward, self._stage = line, "backward"
        elif match := re.fullmatch(r"(\w+)\.zero_grad\((?:set_to_none=True)?\)", text):
            if self.zeroed or self._stage == "backward":
                raise NotCanonicalError("it clears gradients between backward and step, or twice")
            self.zeroed = match[1]
            self.gone.append(line)
        elif self._stage == "backward" and re.fullmatch(rf"{self.scaler or '!'}\.unscale_\(\w+\)", text):
            self.gone.append(line)
        elif self._stage == "backward" and (match := _CLIPS.fullmatch(text)):
            if self.scaler and not any("unscale_" in text_of(each) for each in self.gone):
                raise NotCanonicalError("it clips gradients that are still multiplied by the loss scale")
            self.clip = (match[1], match[2])
            self.gone.append(line)
        elif match := re.fullmatch(r"(\w+)\.step\((\w*)\)", text):
            self._read_step(match[1], match[2], line)
        elif self._stage == "step" and self.scaler and text == f"{self.scaler}.update()":
            self.gone.append(line)
        elif re.search(r"\.backward\(|\.zero_grad\(|\.step\(|unscale_|clip_grad", text):
            raise NotCanonicalError(f"port does not know this form of a training step: {text}")

    def _read_step(self, name: str, argument: str, line: cst.CSTNode) -> None:
        if self._stage == "backward":
            if (self.scaler or "") != (name if argument else ""):
                raise NotCanonicalError("the optimizer is stepped around the scaler")
            self.optimizer, self.update, self._stage = argument or name, line, "step"
        elif self._stage == "step" and not argument and not self.scheduler:
            self.scheduler = name
            self.gone.append(line)
        else:
            raise NotCanonicalError("it steps before backward, or twice")


def loss_of(line: cst.CSTNode) -> tuple[str, str] | None:
    """Return the scaler, or "", and the expression that backward is called on, of a line that only calls backward."""
    statement = line.body[0] if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1 else None
    call = statement.value if isinstance(statement, cst.Expr) else None
    if not isinstance(call, cst.Call) or call.args or not isinstance(call.func, cst.Attribute):
        return None
    of = call.func.value
    if call.func.attr.value != "backward":
        return None
    if isinstance(of, cst.Call) and len(of.args) == 1 and re.fullmatch(r"(?!self\.)\w+\.scale", text_of(of.func)):
        return text_of(of.func).removesuffix(".scale"), text_of(of.args[0].value)
    return "", text_of(of)


def _read_options(found: Loop, steps: _Steps, made: dict[str, str], accel: str, source: str) -> None:
    if steps.clip is not None:
        if steps.clip[0] != found.model:
            raise NotCanonicalError("it clips the gradients of something else")
        found.options["clip_norm"] = steps.clip[1]
    if steps.scheduler:
        if f"({found.optimizer}" not in made.get(steps.scheduler, ""):
            raise NotCanonicalError(f"{steps.scheduler} is not made in the same function")
        found.options["scheduler"] = steps.scheduler
    _read_precision(found, steps, made, accel, source)


def _read_precision(found: Loop, steps: _Steps, made: dict[str, str], accel: str, source: str) -> None:
    calls = [
        re.fullmatch(rf"{accel}\.autocast\(([\w.]+)(?:, enabled=(\w+))?\)", text_of(each.items[0].item))
        for each in steps.contexts
    ]
    if not steps.contexts and not steps.scaler:
        return
    if len(calls) != 1 or calls[0] is None or calls[0][1] not in _PRECISIONS:
        raise NotCanonicalError("mixed precision in a form that is not known")
    precision, enabled = _PRECISIONS[calls[0][1]], calls[0][2]
    if steps.scaler:
        condition = rf" if {enabled} else {accel}\.scaler\.none\(\)" if enabled else ""
        create = re.fullmatch(rf"{accel}\.scaler\.create\((?:init=([\d.e]+))?\){condition}", made.get(steps.scaler, ""))
        word = rf"(?<!\.)\b{steps.scaler}\b"
        uses, own = len(re.findall(word, source)), 1 + len(re.findall(word, text_of(found.node)))
        if create is None or precision != "fp16" or uses != own:
            raise NotCanonicalError(f"{steps.scaler} is not made in the same function, or used outside of the loop")
        if create[1]:
            found.options["loss_scale"] = f"accelcore.LossScale(init={create[1]})" + (
                f" if {enabled} else None" if enabled else ""
            )
    elif precision == "fp16":
        raise NotCanonicalError("float16 without a loss scale")
    found.options["precision"] = f'"{precision}" if {enabled} else "fp32"' if enabled else f'"{precision}"'
