"""Operators that torch composes of others are left to `--deep`, and all others are compared in every run."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice

import pytest
import torch
from accelcore_cpu.backend import create
from torch.utils._python_dispatch import TorchDispatchMode

from accelcore import testing as suite
from accelcore.testing import every_operator
from accelcore.testing.suite import operators as of_suite
from accelcore.testing.support.composed import is_composed
from accelcore.testing.support.coverage import of_other_options
from accelcore.testing.support.layouts import placed, tensors
from accelcore.testing.support.samples import FRAGILE, SAMPLED, operators, samples

HOST = torch.device("cpu")


def test_every_operator_is_compared_in_some_part(monkeypatch):
    seen = {True: [], False: []}
    monkeypatch.setattr(of_suite, "compare_options", lambda device, names, *_, brief: seen[brief].extend(names))
    monkeypatch.setattr(of_suite, "_report", lambda found, name, record: None)
    backend = create()
    for part in range(of_suite.PARTS):
        suite.TestOperators().test_options(backend, part, None)
        every_operator.TestOperators().test_all_options(backend, part, None)
    fragile = [name for name in FRAGILE if name in operators()]  # others are of another version of torch
    assert sorted([*seen[False], *SAMPLED, *fragile]) == sorted(operators())
    assert {*seen[True]} == {name for name in seen[False] if not is_composed(name, operators()[name], HOST)}


def test_an_operator_of_which_a_device_has_a_kernel_is_compared_by_default():
    device, info = torch.device("xpu"), operators()["fliplr"]
    assert is_composed("fliplr", info, HOST)
    library = torch.library.Library("aten", "IMPL")
    library.impl("fliplr", lambda x: x, "XPU")
    try:
        assert not is_composed("fliplr", info, device)
        assert is_composed("flipud", operators()["flipud"], device)
    finally:
        library._destroy()


class Called(TorchDispatchMode):
    """Collects the operators that have kernels."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def called_by(name):
    info, called = operators()[name], Called()
    known = info.supported_dtypes("cpu")
    for dtype in {torch.float32, torch.int64, torch.complex64} & known or sorted(known, key=str)[:1]:
        for arguments in islice(of_other_options(info, dtype, samples(info, dtype), []), 16):
            given, options = placed(arguments, HOST, "", graph=True)
            with suppress(Exception), called:
                results = [each for each in tensors(info.op(*given, **options)) if each.requires_grad]
                leaves = [each for each in tensors((given, options)) if each.requires_grad]
                torch.autograd.grad([each.sum() for each in results], leaves, allow_unused=True)
    return called.names


@pytest.mark.full
def test_what_composed_operators_call_is_called_by_others():
    names = operators().keys() - {*FRAGILE}
    composed = {name for name in names - {*SAMPLED} if is_composed(name, operators()[name], HOST)}
    compared = set().union(*map(called_by, sorted(names - composed)))
    assert {name: alone for name in sorted(composed) if (alone := called_by(name) - compared)} == {}
