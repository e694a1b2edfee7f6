"""The conformance suite on the emulated NPU."""

from __future__ import annotations

import pytest

from accelcore.testing import *  # noqa: F403

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # torch_npu's deepcopy
    pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning:UserWarning"),  # npugraph_ex
]
