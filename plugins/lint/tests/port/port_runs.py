"""Scripts of the corpus, run in this process on the CPU, and their losses."""

import contextlib
import io
import os
import re
import sys
import types
from unittest import mock

import torch

_TWIN = [
    (r"device(_type|\.type)? == ['\"]cuda['\"]", "False"),
    (r"'cuda' in device", "False"),
    (r"\w+\.is_cuda", "False"),
    (r"import torch_npu\n", ""),
    (r"from torch_npu\.contrib import transfer_to_npu[^\n]*\n", ""),
    (
        r"from torch_npu\.optim import NpuFusedAdamW, NpuFusedLamb\n",
        "from accelcore.apex.optimizers import NpuFusedAdamW, NpuFusedLamb\n",
    ),
    (r"from apex", "from accelcore.apex"),
    (r"import apex\n", "from accelcore import apex\n"),
    (r"from torch\.cuda\.amp import [^\n]*\n", ""),
    (r"import torch\.cuda\.amp as amp\n", ""),
    (r"from torch import nn, cuda\n", "from torch import nn\n"),
    (r"if torch\.cuda\.is_available\(\):\n    torch\.cuda\.empty_cache\(\)\n", ""),
    (
        r"(torch\.)?(cuda|npu)\.(set_device|synchronize|manual_seed|manual_seed_all|reset_peak_memory_stats)\([^\n;]*",
        "pass",
    ),
    (r"torch\.(cuda|npu)\.(max_memory_allocated|device_count)\(\)", "0"),
    (r"torch\.cuda\.(is_available|is_bf16_supported)\(\)", "False"),
    (r"storage\.cuda\(0\)", "storage"),
    (r"\.(cuda|npu)\([^()]*\)", '.to("cpu")'),
    (r"\.to\(self\.gpu_id\)", '.to("cpu")'),
    (r"['\"](cuda|npu)(:\d+)?['\"]", '"cpu"'),
    (r"f['\"]cuda:\{[^}]*\}['\"]", '"cpu"'),
    (r"\"cuda:\{\}\"\.format\([^)]*\)", '"cpu"'),
    (r"['\"]nccl['\"]", '"gloo"'),
    (r"device_ids=\[[^\]]*\]", "device_ids=None"),
    (r"\b(torch\.cuda\.amp\.|amp\.|(?<![\w.]))autocast\(", 'torch.autocast("cpu", torch.float16, '),
    (r"\b(torch\.cuda\.amp\.|(?<![\w.]))GradScaler\(", 'torch.amp.GradScaler("cpu", '),
    (r"@custom_fwd\([^)]*\)", '@torch.amp.custom_fwd(device_type="cpu")'),
    (r"@custom_bwd", '@torch.amp.custom_bwd(device_type="cpu")'),
]


def cpu_twin(source):
    """The same script written for the CPU, by substitutions of text that know nothing of the port."""
    for pattern, replacement in _TWIN:
        source = re.sub(pattern, replacement, source)
    return source


@contextlib.contextmanager
def _as_main(module):
    before = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        yield
    finally:
        sys.modules["__main__"] = before


@contextlib.contextmanager
def _own_determinism():
    """Put back what a script switches on in the whole process."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def losses(source, name="script.py", argv=(), variables=()):
    """What a script prints after the word `loss`."""
    printed = io.StringIO()
    scope = {"__name__": "__main__", "__file__": name}
    module = types.ModuleType("__main__")  # dataclasses look their module up
    module.__dict__.update(scope)
    with (
        mock.patch.object(sys, "argv", [name, *argv]),
        mock.patch.dict(os.environ, dict(variables)),
        _as_main(module),
        contextlib.redirect_stdout(printed),
        _own_determinism(),
    ):
        exec(compile(source, name, "exec"), module.__dict__)
    return [float(line.split()[1]) for line in printed.getvalue().splitlines() if line.startswith("loss ")]
