"""What no other rule knows: it is left, with a reason."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.device_names import index_of
from accelcore_lint.port.facts import Facts
from accelcore_lint.port.imports import is_known_apex
from accelcore_lint.port.rule import Example, Left, Level, Rewrite, Rule
from accelcore_lint.port.rules import scaler
from accelcore_lint.port.rules.conditions import TYPE_QUESTION
from accelcore_lint.port.rules.device_strings import names_option, whole
from accelcore_lint.port.syntax import text_of
from accelcore_lint.port.vendors import DEVICES, GROUPS, MODULES, OTHERS, PRIVATE, type_text

_REASONS = {
    "Stream": "streams are each device's own; torch.Stream(device) where the device has them",
    "stream": "streams are each device's own; torch.Stream(device) where the device has them",
    "current_stream": "streams are each device's own; torch.accelerator.current_stream() returns the current one",
    "Event": "events are each device's own, and the CPU has none: torch.Event() under torch.accelerator.is_available()",
    "CUDAGraph": "graphs are each device's own; a trainer has graph=True where the backend declares them",
    "FloatTensor": "a type of tensor of one device: write torch.zeros(..., device=...) or .to(device, dtype)",
    "set_default_tensor_type": "a default of one device: torch.set_default_device(device) is for all of them",
    "get_device_name": "the name of the device: torch has no generic function",
    "get_device_properties": "properties of the device: torch has no generic function",
    "get_device_capability": "the generation of a vendor's chips: torch has no generic function",
    "device": "a context of one vendor's device: torch.accelerator.device_index(index) is one for all, from torch 2.8",
    "nvtx": "ranges of NVIDIA's profiler: torch.profiler.record_function(name) is a context for all devices",
    "cudart": "functions of the CUDA runtime: torch.profiler records on all devices",
    "memory_stats": "figures of one vendor's allocator: torch.get_device_module() has those of most devices",
    "is_bf16_supported": "whether one vendor's devices compute in bfloat16: torch has no generic question",
    "memory_summary": "a table of one vendor's allocator: torch.accelerator.memory_stats() has figures",
    "manual_seed": "seeds of one vendor's devices: torch.manual_seed(n) seeds those of all",
    "manual_seed_all": "seeds of one vendor's devices: torch.manual_seed(n) seeds those of all",
    "get_rng_state": "random numbers of one vendor's device: torch.get_device_module() has the state of each device's",
    "amp": "mixed precision of one vendor: torch.autocast and torch.amp.GradScaler take the device's type",
    "DistributedDataParallel": "apex's own: torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)",
    "convert_syncbn_model": "apex's own: torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) is for all devices",
    "FusedLayerNorm": "apex's own: torch.nn.LayerNorm is for all devices",
    "FusedRMSNorm": "apex's own: torch.nn.RMSNorm is for all devices",
    "FusedAdam": "apex's own: torch.optim.AdamW(..., fused=True) is for all devices",
}
_ANNOTATION = "an annotation with a type of tensor of one device: torch.Tensor is that of all"
_SWITCHES = ("torch.backends.cudnn", "torch.backends.cuda")
_ATTENTION = re.compile(r"torch\.backends\.cuda\.(sdp_kernel|\w+_sdp(_enabled)?)")
"""Kernels of scaled_dot_product_attention, which the CPU chooses by the same switches."""

_QUESTIONS = re.compile(
    r"torch\.backends\.(cudnn\.(is_available|is_acceptable|version)|cuda\.(is_built|is_\w+_available|can_use_\w+))"
)
"""Questions for one vendor's libraries, which other devices answer with no, or None."""

_SHOWS = re.compile(r"(\w+\.)*(print|log|info|debug|warn|warning|write)")
_VERSIONS = tuple(f"torch.version.{device}" for device in DEVICES)
_MEMORY = re.compile(r"(CUDA|NPU) out of memory\b")
_SPACED = re.compile(rf"\s*({'|'.join(DEVICES)})\s*:\s*\d+\s*")
_MODULE = "the module of one vendor's devices: torch.get_device_module() is that of any device"
_SUMMARY = 'torchsummary knows CUDA and the CPU only: give it a model on the CPU, and device="cpu"'
_DEFAULT = "one vendor's function, without a generic one"


def _decide_summary(node: cst.Call, facts: Facts) -> Left | None:
    """Leave a call of torchsummary, which makes the model's input on a CUDA device or on the CPU."""
    return Left(_SUMMARY, node.children) if node in facts.summaries else None


def _decide_class(node: cst.Attribute | cst.Name, facts: Facts) -> Rewrite | None:
    """Write the error by the name that torch has for it on all devices; it is the same class. Scalers likewise."""
    name = facts.name(node)
    if name == "torch.cuda.OutOfMemoryError":
        return whole(node, f"{facts.torch}.OutOfMemoryError", facts.needs_torch)
    if name in scaler.OF_DEVICE and any(map(_names_class, facts.parents(node))):
        return whole(node, f"{facts.torch}.amp.GradScaler", facts.needs_torch)
    return None


def _names_class(outer: cst.CSTNode) -> bool:
    """Return whether a node takes the class of an object: as an annotation, or to ask for it."""
    return _asks_class(outer) or isinstance(outer, cst.Annotation)


def _asks_class(outer: cst.CSTNode) -> bool:
    return isinstance(outer, cst.Call) and text_of(outer.func) == "isinstance"


def _decide_attribute(node: cst.Attribute | cst.Name, facts: Facts) -> Left | None:
    parent = facts.parent(node)
    if isinstance(parent, (cst.ImportAlias, cst.ImportFrom, cst.AsName)) or getattr(parent, "keyword", None) is node:
        return None
    if isinstance(parent, cst.Attribute) and (parent.attr is node or facts.name(parent) is not None):
        return None
    name = facts.name(node)
    if name is None:
        return _unresolved(node, facts)
    if name == "torch.distributed.Backend.NCCL":
        return Left("the backend of one vendor: other devices have others", node.children)
    if _QUESTIONS.fullmatch(name):
        return _decide_question(node, name, facts)
    if _ATTENTION.fullmatch(name):
        return Left(f"{name}: torch.nn.attention.sdpa_kernel is for all devices", node.children, harmless=True)
    if PRIVATE.fullmatch(name):
        return Left(f"{name}: a function of torch for one vendor's devices", node.children)
    if name.startswith(_SWITCHES):
        return Left(f"{name}: other devices ignore it", node.children, harmless=True)
    if name in _VERSIONS:
        compared = any(isinstance(outer, cst.Comparison) for outer in facts.parents(node))
        return Left(f"{name}: None where torch is built for another device", node.children, harmless=not compared)
    stays = facts.strange_apex and text_of(node).startswith("apex.")
    if facts.level is not Level.TORCH and is_known_apex(name) and not stays:
        return None
    if name == "torch.cuda":
        return Left(_MODULE, node.children)
    parts = name.split(".")
    if parts[0] in OTHERS and set(DEVICES) & set(parts):
        return Left(f"{parts[0]} computes on one vendor's devices", node.children)
    if parts[0] in MODULES or (parts[0] == "torch" and len(parts) > 2 and parts[1] == "cuda"):
        asked = parts[-1].endswith("Tensor") and any(
            _asks_class(outer) or isinstance(outer, cst.Comparison) for outer in facts.parents(node)
        )
        is_annotation = parts[-1].endswith("Tensor") and isinstance(parent, cst.Annotation)
        reason = _ANNOTATION if is_annotation else _reason(parts)
        return Left(TYPE_QUESTION if asked else reason, node.children)
    return None


def _decide_question(node: cst.Attribute | cst.Name, name: str, facts: Facts) -> Left:
    """Report a question for one vendor's library.

    It is harmless if its answer is only shown, is a version that nothing compares, or turns on what others ignore.
    """
    is_version = name.endswith(".version")
    answer = "None" if is_version else "no"
    inner: cst.CSTNode = node
    for outer in facts.parents(node):
        is_shown = isinstance(outer, cst.Call) and _SHOWS.fullmatch(text_of(outer.func)) is not None
        is_end = isinstance(outer, cst.BaseStatement)
        is_idle = (
            isinstance(outer, cst.If) and inner is outer.test and outer.orelse is None and _sets_only(outer, facts)
        )
        if is_shown or is_idle or (is_end and is_version and not isinstance(outer, cst.If)):
            return Left(f"{name}: other devices answer {answer}", node.children, harmless=True)
        if is_end or isinstance(outer, (cst.Comparison, cst.BinaryOperation, cst.BooleanOperation, cst.IfExp)):
            break
        inner = outer
    return Left(f"{name}: other devices answer {answer}, so see what they need here", node.children)


def _sets_only(guard: cst.If, facts: Facts) -> bool:
    """Return whether all that an `if` guards are settings of one vendor's libraries."""
    block = guard.body.body if isinstance(guard.body, cst.IndentedBlock) else (guard.body,)
    parts = [part for line in block for part in getattr(line, "body", [line])]
    targets = [part.targets[0].target for part in parts if isinstance(part, cst.Assign)]
    return len(targets) == len(parts) and all((facts.name(each) or "").startswith(_SWITCHES) for each in targets)


def _unresolved(node: cst.Attribute | cst.Name, facts: Facts) -> Left | None:
    """Report `x.cuda` that is not called, and `torch.cuda` where `torch` has several meanings."""
    parent = facts.parent(node)
    is_called = isinstance(parent, cst.Call) and parent.func is node  # the rule for moves has decided
    if is_called or text_of(node) in facts.own_options:
        return None
    if isinstance(node, cst.Attribute) and node.attr.value in DEVICES:
        return Left(f"{node.attr.value} of an object that is not known", node.children)
    return None


def _reason(parts: list[str]) -> str:
    for part in reversed(parts):
        if part in _REASONS:
            return _REASONS[part]
        if part.endswith("Tensor"):
            return _REASONS["FloatTensor"]
    return _DEFAULT


def _decide_string(node: cst.SimpleString, facts: Facts) -> Left | None:
    parent = facts.parent(node)
    if isinstance(parent, (cst.Expr, cst.ConcatenatedString, cst.Index)) or names_option(facts, node):
        return None
    if isinstance(parent, cst.DictElement) and parent.key is node:
        return None
    if isinstance(node.evaluated_value, str) and type_text(node.evaluated_value):
        call = facts.parent(parent) if isinstance(parent, cst.Arg) else None
        name = (facts.name(call.func) or "") if isinstance(call, cst.Call) else ""
        return Left(_REASONS.get(name.removeprefix("torch."), _REASONS["FloatTensor"]))
    if isinstance(parent, cst.Comparison) and _MEMORY.match(str(node.evaluated_value)):
        return Left("the text of an error of one vendor: torch.OutOfMemoryError is the error of all devices")
    if index_of(node)[0] or str(node.raw_value).lower() in GROUPS or _begins_device(node):
        return Left("a vendor's name in a place where it is not certain what it is for")
    return None


def _begins_device(node: cst.SimpleString) -> bool:
    """Return whether a string is the beginning of a device's name, as in `"cuda:" + number`, or one with spaces."""
    text = str(node.evaluated_value)
    forms = {f"{device}:{form}" for device in DEVICES for form in ("", "{}", "%s", "%d")}
    return text in forms or _SPACED.fullmatch(text) is not None


SUMMARY = Rule("other package", "summaries of a model by torchsummary", (cst.Call,), _decide_summary)

LEFTOVERS = (
    Rule(
        "class",
        "the error of a device that is out of memory, and annotations of scalers",
        (cst.Attribute, cst.Name),
        _decide_class,
        (
            Example(
                Level.TORCH,
                "try:\n    train()\nexcept torch.cuda.OutOfMemoryError:\n    pass",
                "try:\n    train()\nexcept torch.OutOfMemoryError:\n    pass",
            ),
        ),
    ),
    Rule(
        "unknown function",
        "functions of one vendor that nothing replaces",
        (cst.Attribute, cst.Name),
        _decide_attribute,
        (
            Example(
                Level.ROLES,
                "graph = torch.cuda.CUDAGraph()",
                f"# TODO(accelcore): {_REASONS['CUDAGraph']}\ngraph = torch.cuda.CUDAGraph()",
            ),
        ),
    ),
    Rule("unknown name", "other strings that name a vendor", (cst.SimpleString,), _decide_string, ()),
)
