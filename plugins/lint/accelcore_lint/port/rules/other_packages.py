"""Answers and names of devices that another package gets: it may know one vendor's devices and the CPU only."""

from __future__ import annotations

import re

import libcst as cst

from accelcore_lint.port.engines import ENGINES
from accelcore_lint.port.facts import Facts
from accelcore_lint.port.syntax import text_of

GIVEN = "a device, or whether there is one, for another package: it may compute on one vendor's devices only"
_OPTION = re.compile(r"(use_)?(gpus?|cuda)")
_CUDA_OR_CPU = re.compile(
    r"faster_whisper|ctranslate2|whisperx|open3d|xgboost|lightgbm|catboost|cuml|cupy|jax|warp|isaacgym(envs)?"
    r"|insightface|llama_cpp|onnxruntime|nvdiffrast|kaolin"
)
"""Packages that know CUDA and the CPU only: no option of theirs takes another device."""

_TENSORS = re.compile(r"\.to\([^()]*\)|\btorch\.(?!device\b)\w+\([^()]*\)")
"""What places a tensor: such a package gets its numbers, and not the device."""


def is_given_away(answer: cst.CSTNode, facts: Facts, *, to_any: bool = True) -> bool:
    """Return whether an answer, or the name to which it is assigned, is in an option `gpu=` of another package.

    A library that trains the script, such as Lightning, gets it by any option, and a package that knows CUDA and the
    CPU only by any argument. If not `to_any`, only these last ones count.
    """
    holder = facts.parent(answer)
    while isinstance(holder, (cst.DictElement, cst.Dict)):
        holder = facts.parent(holder)
    name = text_of(holder.targets[0].target) if isinstance(holder, cst.Assign) else ""
    given = re.compile(rf"(?<![\w.]){re.escape(name)}(?!\w)")
    around, own = [*facts.parents(answer)], ("torch", "accelcore", *facts.known.modules)
    for call in facts.calls:
        package = (facts.name(call.func) or "").split(".")[0]
        is_theirs = _CUDA_OR_CPU.fullmatch(package) is not None
        wanted = re.compile(".*") if is_theirs or re.fullmatch(ENGINES, package) else _OPTION
        options = [arg for arg in call.args if is_theirs or (arg.keyword and wanted.fullmatch(arg.keyword.value))]
        texts = [_TENSORS.sub("", text_of(arg.value)) if is_theirs else text_of(arg.value) for arg in options]
        found = any(map(given.search, texts)) if name else any(arg in around for arg in options)
        if package and package not in own and found and (to_any or is_theirs):
            return True
    return False
