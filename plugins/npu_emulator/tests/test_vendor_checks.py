"""What torch_npu's own code decides before anything reaches the device, in the emulator as on a device."""

import io

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_npu", exc_type=ImportError)

from accelcore_npu_emulator import counters


def test_a_conversion_to_float64_gives_float32():
    x = torch.tensor([1.5, 2.5], device="npu")
    for converted in (x.double(), x.to(torch.float64), x.type(torch.float64)):
        assert converted.dtype == torch.float32
        assert converted.tolist() == [1.5, 2.5]
    assert torch.tensor([1.5], dtype=torch.float64).npu().dtype == torch.float64


def test_a_conversion_to_channels_last_on_the_device_is_refused():
    image = torch.ones(2, 3, 4, 5, device="npu")
    with pytest.raises(RuntimeError, match="contiguous_format or preserve_format"):
        image.to(memory_format=torch.channels_last)
    assert image.clone(memory_format=torch.channels_last).is_contiguous()


VIEWS = {
    "transposed": lambda x: x.transpose(0, 2),
    "selected": lambda x: x[:, 1],
    "stepped": lambda x: x[::2, 1::2],
    "expanded": lambda x: x[:, :1].expand(4, 6, 5),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "overlapping": lambda x: x.unfold(1, 3, 1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
def test_copies_of_views(view, dtype):
    host = (torch.arange(4 * 6 * 5).reshape(4, 6, 5) % 7).to(dtype)
    expected, viewed = view(host), view(host.npu())
    for copied in (viewed.clone(), viewed.contiguous(), view(host).npu(), viewed.cpu()):
        assert torch.equal(copied.cpu(), expected)
    assert viewed.contiguous().is_contiguous()
    other = torch.complex128 if dtype.is_complex else torch.float16
    assert torch.equal(viewed.to(other).cpu(), expected.to(other))


def test_a_lazily_conjugated_tensor_is_cloned():
    conjugated = torch.tensor([1 + 2j], device="npu").conj()
    assert conjugated.clone().resolve_conj().tolist() == [1 - 2j]


@pytest.mark.parametrize("left", [(3, 4), (4,), (2, 3, 4), (2, 1, 3, 4)], ids=str)
@pytest.mark.parametrize("right", [(4, 2), (4,), (2, 4, 2)], ids=str)
def test_products_and_their_gradients(left, right):
    generator = torch.Generator().manual_seed(0)
    hosts = [torch.randn(shape, generator=generator, requires_grad=True) for shape in (left, right)]
    devices = [host.detach().npu().requires_grad_() for host in hosts]
    expected, found = hosts[0] @ hosts[1], devices[0] @ devices[1]
    expected.sum().backward()
    found.sum().backward()
    pairs = [(found, expected), *((device.grad, host.grad) for device, host in zip(devices, hosts, strict=True))]
    for one, other in pairs:
        torch.testing.assert_close(one.cpu(), other)


def test_a_copy_to_the_host_that_does_not_block_is_pinned_and_waits_for_nothing():
    x = torch.ones(4, device="npu")
    with counters.count() as cost:
        host = x.to("cpu", non_blocking=True)
    assert host.is_pinned()
    assert host.tolist() == [1.0] * 4
    assert not cost.synchronizations
    assert cost.copies == {"device to host": 1}


def test_saving_in_the_old_file_format_is_refused_as_torch_npu_does():
    # It reads the storage through a tensor that torch_npu knows nothing of, and loading writes through one.
    x = torch.ones(4, device="npu")
    try:
        torch.save(x, io.BytesIO(), _use_new_zipfile_serialization=False)
    except RuntimeError as error:
        reason = str(error)
    else:
        pytest.skip("this torch_npu does not check whether such a tensor is its own")
    assert "NPUStorageImpl" in reason
    file = io.BytesIO()
    torch.save(torch.ones(4), file, _use_new_zipfile_serialization=False)
    file.seek(0)
    assert torch.load(file, map_location=lambda storage, place: storage.npu(), weights_only=False).tolist() == [1.0] * 4
