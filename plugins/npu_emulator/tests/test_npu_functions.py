"""torch_npu's own functions, against formulas of torch's."""

import pytest

torch = pytest.importorskip("torch")
torch_npu = pytest.importorskip("torch_npu")

from against_torch import same
from torch.nn import functional

pytestmark = [
    pytest.mark.usefixtures("emulated_npu"),
    pytest.mark.filterwarnings("ignore:Cannot create tensor with intern?al format"),
]


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


UNARY = {
    "rms_norm": (lambda x: torch_npu.npu_rms_norm(x, torch.full((8,), 2.0).to(x.device), 1e-5)[0],
                 lambda x: functional.rms_norm(x, (8,), torch.full((8,), 2.0), 1e-5)),
    "swiglu": (torch_npu.npu_swiglu, lambda x: functional.silu(x[..., :4]) * x[..., 4:]),
    "fast_gelu": (torch_npu.fast_gelu, lambda x: x * torch.sigmoid(1.702 * x)),
    "gelu": (lambda x: torch_npu.npu_gelu(x, approximate="tanh"), lambda x: functional.gelu(x, approximate="tanh")),
    "silu": (torch_npu.npu_silu, functional.silu),
    "mish": (torch_npu.npu_mish, functional.mish),
    "transpose first": (lambda x: torch_npu.npu_confusion_transpose(x, (0, 2, 1), (4, 48), True),
                        lambda x: x.permute(0, 2, 1).reshape(4, 48)),
    "reshape first": (lambda x: torch_npu.npu_confusion_transpose(x, (0, 2, 1), (4, 12, 4), False),
                      lambda x: x.reshape(4, 12, 4).permute(0, 2, 1)),
    "dtype_cast": (lambda x: torch_npu.npu_dtype_cast(x, torch.bfloat16).float(), lambda x: x.bfloat16().float()),
    "format_cast": (lambda x: torch_npu.npu_format_cast(x, 2) * 3, lambda x: x * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_tensor(name):
    same(*UNARY[name], [torch.randn(4, 6, 8)])


def test_rms_norm_has_the_gradient_of_its_weight():
    same(
        lambda x, w: torch_npu.npu_rms_norm(x, w)[0],
        lambda x, w: functional.rms_norm(x, (8,), w, 1e-6),
        [torch.randn(5, 8), torch.randn(8)],
    )


def test_rms_norm_of_a_sum():
    x, y, weight = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    found = torch_npu.npu_add_rms_norm(x.npu(), y.npu(), weight.npu())
    torch.testing.assert_close(found[0].cpu(), functional.rms_norm(x + y, (8,), weight, 1e-6))
    torch.testing.assert_close(found[2].cpu(), x + y)


def test_layer_norm_of_a_sum():
    x, y, weight, bias = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8), torch.randn(8)
    found = torch_npu.npu_add_layer_norm(x.npu(), y.npu(), weight.npu(), bias.npu(), 1e-5, True)
    torch.testing.assert_close(found[0].cpu(), functional.layer_norm(x + y, (8,), weight, bias))
    torch.testing.assert_close(found[3].cpu(), x + y)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_fused_cross_entropy(reduction):
    target = torch.tensor([1, 0, 4, 2])
    same(
        lambda x: torch_npu.npu_cross_entropy_loss(x, target.npu(), reduction=reduction)[0],
        lambda x: functional.cross_entropy(x, target, reduction=reduction).reshape(-1),
        [torch.randn(4, 5)],
    )


def test_rotary_embedding():
    same(
        torch_npu.npu_rotary_mul,
        lambda x, cosine, sine: x * cosine + rotate_half(x) * sine,
        [torch.randn(2, 3, 4, 8), torch.randn(1, 3, 1, 8), torch.randn(1, 3, 1, 8)],
    )


def test_linear_and_convolution():
    same(torch_npu.npu_linear, functional.linear, [torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)])


def test_masked_softmax():
    mask = torch.rand(2, 1, 32, 32) > 0.7
    same(
        lambda x: torch_npu.npu_scaled_masked_softmax(x, mask.npu(), 0.5, False),
        lambda x: (x * 0.5).masked_fill(mask, -10000.0).softmax(-1),
        [torch.randn(2, 3, 32, 32)],
    )


def test_private_formats_hold_the_same_values():
    torch.npu.config.allow_internal_format = True
    try:
        values = torch.randn(20, 9)
        cast = torch_npu.npu_format_cast(values.npu(), 29)
        assert torch_npu.get_npu_format(cast) == 29
        torch.testing.assert_close(cast.cpu(), values)
        torch.testing.assert_close((cast + 1).cpu(), values + 1)
    finally:
        torch.npu.config.allow_internal_format = False


def test_the_gradient_of_a_cast_has_a_graph_where_one_is_asked_for():
    x = torch.rand(4, device="npu", requires_grad=True)
    y = torch_npu.npu_dtype_cast(x, torch.float16)
    [gradient] = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    assert gradient.dtype == torch.float32
    assert gradient.grad_fn is not None
