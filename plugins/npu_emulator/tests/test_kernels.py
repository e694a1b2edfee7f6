"""The generic kernel: every layout of memory, every kind of result, and what each call costs."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_npu")
jobs = pytest.importorskip("kernel_jobs")

from accelcore_npu_emulator import counters

from accelcore.torch_features import GET_KERNEL

pytestmark = pytest.mark.usefixtures("emulated_npu")


def grid():
    return torch.arange(24.0).reshape(2, 3, 4) - 11


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 2),
    "strided": lambda t: t[:, ::2, 1:],
    "offset": lambda t: t.flatten()[5:17],
    "expanded": lambda t: t[:1].expand(5, 3, 4),
    "scalar": lambda t: t[1, 1, 1],
    "empty": lambda t: t[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_kernel_reads_every_layout(layout):
    host, device = LAYOUTS[layout](grid()), LAYOUTS[layout](grid().npu())
    assert device.stride() == host.stride()
    for operator in (torch.exp, torch.cumsum, torch.sum):
        arguments = (-1,) if operator is torch.cumsum else ()
        torch.testing.assert_close(operator(device, *arguments).cpu(), operator(host, *arguments))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_infinity_is_infinite(approximate):
    device = torch.full((16,), torch.inf).npu()
    assert torch.nn.functional.gelu(device, approximate=approximate).isposinf().all()


def test_gradients_of_a_layer_norm_are_summed_in_fp32():
    rows, bias = torch.linspace(-1, 1, 2**14).reshape(-1, 2).bfloat16().npu(), torch.zeros(2).npu().requires_grad_()
    torch.nn.functional.layer_norm(rows, (2,), torch.ones(2).npu(), bias).sum().backward()
    assert bias.grad.tolist() == [2**13, 2**13]


def test_a_kernel_writes_in_place_through_a_view():
    host, device = grid(), grid().npu()
    for tensor in (host, device):
        tensor[:, 1, ::2].mul_(2).add_(tensor[:, 2, ::2])
    torch.testing.assert_close(device.cpu(), host, rtol=0, atol=0)


def test_no_result_is_channels_last():
    # torch_npu moves an image as it is, and allocates what comes of it by its shape alone.
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).npu()
    assert image.is_contiguous(memory_format=torch.channels_last)
    convolution, norm = torch.nn.Conv2d(3, 3, 1).npu(), torch.nn.BatchNorm2d(3).npu()
    for layer in (torch.relu, torch.neg, convolution, norm, torch.nn.MaxPool2d(2), torch.nn.Upsample(scale_factor=2)):
        assert layer(image).is_contiguous(), layer
    volume = torch.randn(1, 2, 3, 4, 5).to(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(volume.npu().exp().cpu(), volume.exp().contiguous())
    assert volume.npu().exp().is_contiguous()


def test_lazy_conjugates_and_negatives_are_resolved():
    host = torch.complex(torch.randn(3), torch.randn(3))
    device = host.npu()
    torch.testing.assert_close(device.conj().cpu(), host.conj())
    torch.testing.assert_close(device.conj().imag.cpu(), host.conj().imag)
    torch.testing.assert_close((device.conj() * 2).cpu(), host.conj() * 2)


def test_an_out_argument_is_resized():
    out = torch.empty(0, device="npu")
    assert torch.add(grid().npu(), 1, out=out) is out
    torch.testing.assert_close(out.cpu(), grid() + 1)


def test_lists_of_out_arguments():
    host, device = grid().flatten(), grid().flatten().npu()
    parts = [torch.zeros(10, device="npu"), torch.zeros(14, device="npu")]
    torch.split_with_sizes_copy(device, [10, 14], out=parts)
    torch.testing.assert_close([part.cpu() for part in parts], list(host.split([10, 14])))


def test_a_lazy_clone_shares_no_memory():
    tensor = grid().npu()
    clone = torch._lazy_clone(tensor)
    tensor.zero_()
    torch.testing.assert_close(clone.cpu(), grid())
    assert not tensor.any()


@pytest.mark.parametrize("scatter", ["select", "slice", "diagonal"])
def test_scatters_copy_only_the_tensor(scatter):
    host, device = grid()[0], grid().npu()[0]
    shape = {"select": (4,), "slice": (3, 4), "diagonal": (3,)}[scatter]
    arguments = {"select": (0, 1), "slice": (), "diagonal": ()}[scatter]
    function = getattr(torch, f"{scatter}_scatter")
    torch.testing.assert_close(
        function(device, torch.zeros(shape).npu(), *arguments).cpu(), function(host, torch.zeros(shape), *arguments)
    )


def test_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        tensor = torch.zeros(4, device="npu").index_add(0, torch.tensor([1, 1]).npu(), torch.ones(2).npu())
        assert tensor.tolist() == [0, 2, 0, 0]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
)
def test_types(dtype):
    host = torch.tensor([0, 1, 2, 3]).to(dtype)
    torch.testing.assert_close(host.npu().cpu(), host)
    torch.testing.assert_close(host.npu().sum().cpu(), host.sum())
    torch.testing.assert_close(host.npu().float().cpu() if not dtype.is_complex else host.real, host.real.float())


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
def test_integers_divide_as_torch_defines(mode):
    numerator, denominator = torch.tensor([-7, -1, 0, 7, 9]), torch.tensor([2, 2, 3, -2, 4])
    expected = torch.div(numerator, denominator, rounding_mode=mode)
    found = torch.div(numerator.npu(), denominator.npu(), rounding_mode=mode).cpu()
    torch.testing.assert_close(found, expected)
    # In place the device cuts off what torch on the host refuses to store.
    in_place = numerator.npu().div_(denominator.npu(), rounding_mode=mode)
    torch.testing.assert_close(in_place.cpu(), expected.to(torch.int64))


DIVISIONS = {
    "new": lambda x, mode: torch.div(x, x, rounding_mode=mode),
    "by a number": lambda x, mode: torch.div(x, 2, rounding_mode=mode),
    "in place": lambda x, mode: x.div_(x, rounding_mode=mode),
    "in place by a number": lambda x, mode: x.div_(2, rounding_mode=mode),
    "out=": lambda x, mode: torch.div(x, x, rounding_mode=mode, out=torch.empty_like(x)),
}


@pytest.mark.skipif(not GET_KERNEL.present, reason="the host refuses it: this torch does not return torch_npu's kernel")
@pytest.mark.parametrize("divide", DIVISIONS.values(), ids=DIVISIONS)
def test_a_rounding_mode_that_does_not_exist_is_refused_in_torch_npus_words(divide):
    x = torch.tensor([7.0, 8.0], device="npu")
    with pytest.raises(RuntimeError, match=r"but found 'up'(?s:.)*ERR01001 OPS invalid parameter"):
        divide(x, "up")
    assert torch.equal(divide(x.clone(), "floor").cpu(), divide(torch.tensor([7.0, 8.0]), "floor"))


def test_each_device_has_its_results():
    second = torch.ones(3, device="npu:1")
    assert (second + 1).device == torch.device("npu", 1)
    assert torch.zeros(2, device="npu:1").device == torch.device("npu", 1)
    assert second.to("npu:0").device == torch.device("npu", 0)


@pytest.mark.parametrize("other", ["cpu", "npu:1"])
def test_devices_do_not_mix(other):
    with pytest.raises(RuntimeError, match=f"at least two devices, npu:0 and {other}"):
        torch.ones(3, device="npu:0") + torch.ones(3, device=other)


def test_devices_do_not_mix_in_lists():
    with pytest.raises(RuntimeError, match="at least two devices, npu:0 and cpu"):
        torch.cat([torch.ones(3, device="npu"), torch.ones(3)])


def test_a_single_host_value_and_host_indices_do_mix():
    tensor = torch.arange(4.0, device="npu")
    assert (tensor + torch.tensor(1.0)).tolist() == [1, 2, 3, 4]
    assert tensor[torch.tensor([3, 0])].tolist() == [3, 0]


def test_the_default_device_does_not_disturb_host_kernels():
    torch.set_default_device("npu")
    try:
        made = torch.nn.functional.dropout(torch.ones(8), 0.5) + torch.randn(8)
        assert made.device.type == "npu"
    finally:
        torch.set_default_device(None)


def test_inference_mode():
    with torch.inference_mode():
        assert (torch.ones(2, device="npu") @ torch.ones(2, 3, device="npu")).tolist() == [2, 2, 2]


def test_one_operator_is_one_launch():
    tensors = [torch.ones(3, device="npu") for _ in range(20)]
    with counters.count() as cost:
        torch._foreach_mul_(tensors, 2.0)
        tensors[0].add_(tensors[1])
    assert dict(cost.launches) == {"aten::_foreach_mul_.Scalar": 1, "aten::add_.Tensor": 1}
    assert cost.synchronizations.total() == 0


def test_views_launch_nothing():
    tensor = torch.ones(4, 6, device="npu")
    with counters.count() as cost:
        tensor.view(6, 4).t()[1:, None].expand(3, 3, 6).unfold(2, 2, 2).squeeze()
        tensor.detach().chunk(2)
        torch.empty_like(tensor)
    assert cost.launches.total() == 0


def test_a_composite_counts_its_parts():
    layer, tensor = torch.nn.Linear(4, 4).npu(), torch.ones(2, 3, 4, device="npu")
    with counters.count() as cost:
        torch.nn.functional.silu(layer(tensor)).square()
    assert cost.launches["aten::silu"] == 1
    assert cost.launches.total() == 3


# Torch makes these of others; torch_npu hands each to the device as one, and its gradient as another.
COMPOSITES = {
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), "npu::repeat_interleave_backward_int"),
    "l1_loss": (lambda x: torch.nn.functional.l1_loss(x, torch.ones_like(x)), "npu::l1_loss_backward"),
    "kl_div": (lambda x: torch.nn.functional.kl_div(x, x.detach(), reduction="sum"), "npu::kl_div_backward"),
    "cdist": (lambda x: torch.cdist(x, x.detach()[:2]), "aten::_cdist_backward"),
    "inverse": (torch.inverse, "aten::mm"),
    "linalg_cholesky": (torch.linalg.cholesky, "aten::linalg_solve_triangular"),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_a_composite_of_the_devices_own_is_one_launch(name):
    operator, backward = COMPOSITES[name]
    host = (torch.eye(3) + 0.1).requires_grad_()
    operator(host).sum().backward()
    device = host.detach().npu().requires_grad_()
    with counters.count() as cost:
        result = operator(device)
    launched = [key.partition(".")[0] for key in cost.launches.elements() if key != "aten::ones_like"]
    assert launched == ["aten::" + name]
    assert cost.synchronizations.total() == 0
    with counters.count() as cost:
        result.sum().backward()
    assert backward in cost.launches
    torch.testing.assert_close(device.grad.cpu(), host.grad)


def test_repetitions_on_the_device_are_waited_for_unless_the_size_is_told():
    values, repeats = torch.arange(3.0, device="npu"), torch.tensor([1, 0, 2]).npu()
    with counters.count() as cost:
        assert values.repeat_interleave(repeats, output_size=3).shape == (3,)
    assert cost.synchronizations.total() == 0
    with counters.count() as cost:
        assert values.repeat_interleave(repeats).shape == (3,)
    assert cost.synchronizations.total() == 1


@pytest.mark.parametrize(
    "wait",
    [
        lambda t: t.sum().item(),
        lambda t: bool(t.any()),
        lambda t: t.nonzero(),
        lambda t: t[t > 1],
        lambda t: t.masked_select(t > 1),
        lambda t: t.unique(),
        lambda t: torch.equal(t, t),
        lambda t: t.cpu(),
        lambda t: t.copy_(torch.ones(4)),
    ],
)
def test_the_host_waits_for_what_it_must_see(wait):
    tensor = torch.arange(4.0, device="npu")
    with counters.count() as cost:
        wait(tensor)
    assert cost.synchronizations.total() == 1


@pytest.mark.parametrize(
    "go",
    [
        lambda t: t[torch.arange(2, device="npu")],
        lambda t: torch.where(t > 1, t, 0),
        lambda t: torch.nn.utils.clip_grads_with_norm_([t], 1.0, t.norm()),
        lambda t: t.to("npu:1"),
        lambda t: t.copy_(torch.ones(4).pin_memory(), non_blocking=True),
    ],
)
def test_the_host_does_not_wait_otherwise(go):
    tensor = torch.arange(4.0, device="npu")
    with counters.count() as cost:
        go(tensor)
    assert cost.synchronizations.total() == 0


def test_what_is_first_used_in_inference_mode_is_written_to_outside_of_it(results):
    [(inside, outside)] = results(jobs.first_use_in_inference_mode)
    assert inside == [2, 4]
    assert outside == [[0, 1], [1, 0]]


def test_random_numbers_of_one_device_wake_no_other(results):
    [awake] = results(jobs.devices_that_a_random_tensor_wakes)
    assert awake == [False, True]
