"""Options of torch's operators of which the suite has no arguments on which they have an effect."""

from __future__ import annotations

import pytest
import torch

from accelcore.testing.support.coverage import arguments_of, joined, of_other_options
from accelcore.testing.support.effects import with_effect
from accelcore.testing.support.samples import FRAGILE, operators, samples

UNTESTED = {
    "allclose": {"atol", "equal_nan", "rtol"},
    "cross": {"dim"},
    "expand_copy": {"implicit"},
    "isin": {"assume_unique"},
    "lu_unpack": {"unpack_data"},
    "max.reduction_no_dim": {"keepdim"},
    "min.reduction_no_dim": {"keepdim"},
    "max.binary": {"keepdim"},
    "min.binary": {"keepdim"},
    "nn.functional.linear_cross_entropy.chunked": {"options"},
    "nn.functional.linear_cross_entropy.chunked_none": {"options"},
    "nn.functional.conv3d": {"stride"},
    "nn.functional.pad.circular": {"value"},
    "nn.functional.interpolate.nearest": {"align_corners", "antialias", "size"},
    "nn.functional.interpolate.nearest-exact": {"align_corners", "antialias", "size"},
    "nn.functional.interpolate.linear": {"antialias", "size"},
    "nn.functional.interpolate.bilinear": {"size"},
    "nn.functional.interpolate.bicubic": {"size"},
    "nn.functional.interpolate.trilinear": {"antialias", "size"},
    "nn.functional.interpolate.area": {"align_corners", "antialias", "recompute_scale_factor", "size"},
    "nn.functional.max_pool1d": {"dilation"},
    "max_pool2d_with_indices_backward": {"return_indices"},
    "nn.functional.max_unpool1d.grad": {"padding", "stride"},
    "nn.functional.max_unpool2d.grad": {"stride"},
    "nn.functional.max_unpool3d.grad": {"padding", "stride"},
    "nn.functional.scaled_dot_product_attention": {"enable_gqa"},
    "nn.functional.triplet_margin_with_distance_loss": {"distance_function"},
    "nn.functional.batch_norm": {"momentum"},
    "qr": {"some"},
    "svd": {"compute_uv"},
    "sort": {"reverse"},
    "unique": {"sorted"},
    "normal": {"std"},
    "histogram": {"range"},
    "histogramdd": {"range"},
    "repeat_interleave": {"output_size"},
    "linalg.cond": {"p"},
    "linalg.ldl_factor": {"hermitian"},
    "linalg.ldl_factor_ex": {"hermitian"},
    "linalg.ldl_solve": {"hermitian"},
    "linalg.norm": {"dim"},
    "linalg.lu_factor": {"pivot"},
    "linalg.lu_factor_ex": {"pivot"},
    "linalg.lu": {"pivot"},
    "linalg.solve": {"left"},
    "linalg.solve_ex": {"left"},
    "signal.windows.exponential": {"center"},
    "signal.windows.kaiser": {"beta"},
    "signal.windows.general_hamming": {"alpha"},
}
"""A kernel that ignores one of these is not found. Take out what is tested, and add what cannot be."""


def without_effect(name):
    info = operators()[name]
    every = samples(info, torch.float32)
    chosen = [*of_other_options(info, torch.float32, every, []), *joined(info, torch.float32, every)]
    found = with_effect(info, torch.float32, chosen, list(map(arguments_of, every)))
    options = {option for (option, word), arguments in found if arguments is None and not word}
    return {option for option in options if isinstance(option, str)}


def is_compared(name):
    return name not in FRAGILE and torch.float32 in operators()[name].supported_dtypes("cpu")


@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.full)])
def test_options_without_effect_are_known(every):
    """Other values are looked for by themselves; what is left has none, and is listed here."""
    left = {name: without_effect(name) for name in sorted(filter(is_compared, operators()))[::every]}
    known = {name: UNTESTED[name] for name in left if name in UNTESTED}
    assert {name: options for name, options in left.items() if options} == known


def test_an_option_that_another_one_hides_has_an_effect():
    assert without_effect("nn.functional.avg_pool3d") == set()


def test_values_on_which_an_option_has_an_effect_are_found():
    info = operators()["nan_to_num"]
    chosen = [((torch.ones(20),), {"nan": 0.5})]
    ((option, (given, named)),) = with_effect(info, torch.float32, chosen, [])
    assert (option, named) == (("nan", ""), {"nan": 0.5})
    assert given[0].isnan().any()
    assert list(with_effect(info, torch.float32, [(given, named)], [])) == []
