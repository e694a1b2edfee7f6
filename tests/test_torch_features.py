"""Parts of torch that older versions lack: found with torch and without it, and done without."""

from __future__ import annotations

import sys

import pytest
import torch

from accelcore.torch_features import TORCH_FEATURES, TorchFeature


@pytest.mark.parametrize("feature", TORCH_FEATURES, ids=str)
def test_what_torch_has_is_found_in_its_source_too(feature, monkeypatch):
    """`accelcore doctor` looks there, because it does not import torch."""
    __import__(feature.module)
    imported = feature.present
    monkeypatch.delitem(sys.modules, feature.module)
    assert feature.present == imported


@pytest.mark.parametrize(
    ("module", "attribute", "present"),
    [
        ("torch.library", "Library", True),
        ("torch.library", "Library.impl", True),
        ("torch.library", "Library.no_such_method", False),
        ("torch.library", "no_such_function", False),
        ("torch.nn", "no_such_name", False),
        ("torch._functorch.config", "functionalize_rng_ops", True),
        ("torch._functorch.config", "functionalize", False),
    ],
)
@pytest.mark.parametrize("imported", [True, False])
def test_a_feature_is_present_or_not(module, attribute, present, imported, monkeypatch):
    if not imported:
        monkeypatch.delitem(sys.modules, module)
    assert TorchFeature(module, attribute, "nothing").present is present


def test_nothing_is_missing_of_what_cannot_be_read():
    assert TorchFeature("no_such_package.part", "name", "nothing").present
    assert TorchFeature("torch.no_such_module", "name", "nothing").present


def test_the_oldest_version_that_is_tested_has_the_rest():
    """Names that are asked for nowhere, because every supported version has them."""
    assert callable(torch.compiler.set_stance)
