"""The metadata of a file is what libcst's own wrapper says, though it is resolved with fewer walks."""

import libcst as cst
import pytest
from accelcore_lint.port import tree
from libcst import metadata

PROVIDERS = [metadata.ScopeProvider, metadata.PositionProvider, metadata.ParentNodeProvider]
SOURCE = """
import torch as t
from torch import nn

class Net(nn.Module):
    size = 3

    def forward(self, x, *, scale=1.0):
        y = [t.relu(each) for each in x]
        del scale
        return lambda z: (y, z, self.size)
"""


def readable(found):
    """Scopes by their kinds and by what they hold; the rest as it is."""
    if not isinstance(found, metadata.Scope):
        return found
    assignments = sorted((each.name, len(each.references)) for each in found.assignments)
    return type(found), assignments, sorted({each.node.value for each in found.accesses if hasattr(each.node, "value")})


@pytest.mark.parametrize("provider", PROVIDERS)
def test_it_is_that_of_libcst(provider):
    module = cst.parse_module(SOURCE)
    own, expected = (
        wrapper(module, unsafe_skip_copy=True).resolve(provider) for wrapper in (tree.Wrapper, metadata.MetadataWrapper)
    )
    assert list(own) == list(expected)
    assert [readable(own[node]) for node in own] == [readable(expected[node]) for node in expected]
    assert len(own) > 40
