"""Words that tie a line to one vendor, and the count of such lines."""

from __future__ import annotations

import io
import re
import tokenize

DEVICES = ("cuda", "npu")
"""Names of devices that scripts are ported from."""

GROUPS = ("nccl", "hccl")
"""Process-group backends of those devices."""

MODULES = ("apex", "torch_npu")
"""Packages that only work on those devices."""

_WORDS = {*DEVICES, *MODULES, "cudnn", "device_ids", "output_device", "npu_fusion_attention"}
_OPTION = re.compile(r"NpuFused\w+")
_TEXT = re.compile(rf"({'|'.join(DEVICES)})(:(\d+|%d|\{{.*\}}|\{{\}}))?")
_TYPE = re.compile(rf"torch\.({'|'.join(DEVICES)})\.\w*Tensor")
_IMPORTS = re.compile(rb"(?m)^[ \t\f]*(from|import)\b[^\n#]*\b(torch|torch_npu|torchvision|apex)\b")
STAR_IMPORT = re.compile(r"(?m)^from\b[^\n#]*\bimport[ \t]*\*")
"""An import that may bring the name `torch` from a module of the script's own."""

_OUR_APEX = re.compile(r"(?m)^\s*from accelcore import (.*, *)?apex\b")
_NAMESPACES = re.compile(r"(?m)^[ \t]*(\w+)(?:, *\w+)?[ \t]*=[ \t]*[\w.]+\.parse_(?:known_)?args\(")
_FLAGS = re.compile(rf"(?m)^[ \t]*({'|'.join(DEVICES)})[ \t]*=(?!=)")
_IMPORTED = re.compile(rf"(?m)^[ \t]*(?:from|import)\b[^#\n]*\b({'|'.join(DEVICES)})\b[ \t]*(?:,|as\b|$|#)")
_MEMBERS = re.compile(rf"(?m)^[ \t]*self\.({'|'.join(DEVICES)})[ \t]*=(?!=)")
_TRUTHS = re.compile(rf"\b(?:if|elif|while|and|or|not)[ \t(]+((?:\w+\.)*\w+\.(?:{'|'.join(DEVICES)}))\b(?![ \t]*[.(])")
_HEADS = re.compile(r"(?s)\bdef\s+\w+\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
_PARAMETER = re.compile(rf"(?:^|,)\s*({'|'.join(DEVICES)})\s*(?:[,:=]|$)")
_STRING = re.compile(r"(?s)[a-zA-Z]*('''|\"\"\"|'|\")(.*)\1")


def device_text(text: str) -> bool:
    """Return whether the value of a string is the name of a device: `cuda`, `cuda:0`, `cuda:{rank}`."""
    return _TEXT.fullmatch(text) is not None


def type_text(text: str) -> bool:
    """Return whether the value of a string is the name of a type of one device: `torch.cuda.FloatTensor`."""
    return _TYPE.fullmatch(text) is not None


def may_concern(source: bytes) -> bool:
    """Return whether a file imports what may have to be ported, without parsing it."""
    brings = b"torch." in source and STAR_IMPORT.search(source.decode("utf-8", "replace"))
    return _IMPORTS.search(source) is not None or bool(brings)


def own_options(source: str) -> set[str]:
    """Return what a script itself calls as a device: attributes of argparse's namespace, and variables.

    What an option `--cuda` stores in `args.cuda`, or what the script sets there (`args.cuda = not args.no_cuda`), is a
    flag. So is a variable as in `cuda = torch.cuda.is_available()`, or a function's parameter `cuda`, unless the file
    imports something of that name, an attribute that the script sets, as in `self.cuda = use_cuda`, and one whose
    truth it asks, as in `if config.cuda:`.
    """
    options = {f"{space}.{device}" for space in _NAMESPACES.findall(source) for device in DEVICES}
    options |= {f"self.{device}" for device in _MEMBERS.findall(source)}
    asked = {name for name in _TRUTHS.findall(source) if not name.startswith("torch.")}
    options |= asked | {".".join(name.split(".")[-2:]) for name in asked}
    parameters = {name for head in _HEADS.findall(source) for name in _PARAMETER.findall(head)}
    return options | ((set(_FLAGS.findall(source)) | parameters) - set(_IMPORTED.findall(source)))


def vendor_lines(source: str) -> set[int]:
    """Return the numbers of the lines that work on one vendor's devices only.

    These are lines with the name of a device or of a vendor's package: `cuda`, `torch_npu`, `cudnn`, `device_ids`,
    `NpuFusedSGD`, or a string such as "cuda:0" or "nccl". Names that only contain such a word, as `use_cuda`, comments
    and docstrings do not count, and neither do `accelcore.apex` and the script's own option `args.cuda`.
    """
    found: set[int] = set()
    own = own_options(source)
    statement_begins = True
    before = earlier = ""
    in_accelcore = False
    words = _WORDS - {"apex"} if _OUR_APEX.search(source) else _WORDS
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind, text, (line, _) = token.type, token.string, token.start
        if kind in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            statement_begins, in_accelcore = True, False
            continue
        if kind in (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING):
            continue
        if kind == tokenize.NAME:
            in_accelcore = in_accelcore or (text == "accelcore" and before in ("from", "import"))
            if text in ("device_ids", "output_device") and " else None" in token.line:
                continue  # chosen by a condition, so that it is None elsewhere
            if (f"{earlier}.{text}" if before == "." else text) in own:
                continue
            is_option = _OPTION.fullmatch(text) and not (words is not _WORDS and earlier == "optimizers")
            if (text in words or is_option) and not in_accelcore:
                found.add(line)
        elif kind == tokenize.STRING and not statement_begins:
            match = _STRING.fullmatch(text)
            value = match[2] if match else ""
            if device_text(value) or type_text(value) or value in GROUPS:
                found.add(line)
        elif tokenize.tok_name[kind] == "FSTRING_MIDDLE" and text.rstrip(":") in DEVICES:
            found.add(line)
        statement_begins, earlier, before = False, before, text
    return found
