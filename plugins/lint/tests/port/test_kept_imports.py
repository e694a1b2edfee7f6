"""Conditions on a device above an import that only one vendor's hosts have, or its other tools."""

import pytest
from accelcore_lint.port import Level, port_source

HEAD = "import torch\ndevice_type = get()\nx = torch.ones(2)\n"
SYNC = 'if device_type == "npu":\n    import torch_npu\n    torch_npu.npu.synchronize()\n'
USE = "print(torch_npu.__version__)\n"

STAYS = [
    f"{SYNC}else:\n    torch.cuda.synchronize()\n{USE}",
    "if x.is_npu:\n    try:\n        import torch_npu\n        x = x.npu()\n    except ImportError:\n        x = 0\n",
    'if x.device.type == "npu" and step > 0:\n    import torch_npu\n    torch_npu.npu.empty_cache()\n' + USE,
    'if device_type == "npu":\n    import torch_npu, os\n    torch.npu.synchronize()\n',
    f'if device_type == "npu": import torch_npu\n{USE}',
    'if device_type == "npu":\n    from torch import npu\n    npu.synchronize()\nnpu.set_option(options)\n',
    "if x.is_cuda:\n    from apex.normalization import FusedLayerNorm\n    x = x.cuda()\nnet = FusedLayerNorm(2)\n",
    "if x.is_cuda:\n    import xformers\n    x = x.cuda()\n",
    "if torch.npu.is_available():\n    import torchair\n    x = x.npu()\n",
    f"if torch.npu.is_available():\n    import torch_npu\n    x = x.npu()\n{USE}",
    f"use_npu = torch.npu.is_available()\nif use_npu:\n    import torch_npu\nif use_npu:\n    x = x.npu()\n{USE}",
]


FOREIGN = [
    'if device_type == "npu":\n    from ops.npu_ops import fused\n    x = fused(x.npu())\n',
    'if x.is_npu:\n    subprocess.run(["npu-smi", "info"])\n    x = x.npu()\n',
    'if torch.npu.is_available():\n    seen = os.popen("npu-smi info").read()\n    x = x.npu()\n',
    "if x.is_npu:\n    y = npu_attention(x.npu())\nelse:\n    y = attention(x)\n",
    "if x.is_npu:\n    y = torch.ops.npu.npu_rms_norm(x.npu(), w)\n",
]


@pytest.mark.parametrize("lines", [*STAYS, *FOREIGN])
@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_condition_above_an_import_that_stays_is_left(lines, level):
    outcome = port_source(HEAD + lines, level)
    condition = lines.split("\n", 1)[0]
    assert f"\n{condition}\n" in outcome.source
    assert 4 in {note.line for note in outcome.left}
    again = port_source(outcome.source, level)
    assert again.source == outcome.source
    assert {note.text for note in again.left} == {note.text for note in outcome.left}


def test_a_condition_above_an_import_that_goes_asks_for_any_device():
    outcome = port_source(f"{HEAD}{SYNC}else:\n    waited()\n", Level.ROLES)
    assert 'if device_type != "cpu":\n    accel.runtime.synchronize()\nelse:\n    waited()\n' in outcome.source
    assert outcome.left == []


def test_each_import_in_a_branch_that_stays_is_reported_once():
    outcome = port_source(HEAD + STAYS[0], Level.ROLES)
    assert [note.line for note in outcome.left] == [4, 5, 9]
