from __future__ import annotations

import pytest
import torch
import torch_npu

SWITCHES = (torch_npu.npu.matmul, torch_npu.npu.conv)


def hf32():
    return [switch.allow_hf32 for switch in SWITCHES]


@pytest.fixture(autouse=True)
def _switches_as_they_were():
    before = hf32()
    yield
    for switch, value in zip(SWITCHES, before, strict=True):
        switch.allow_hf32 = value


def test_the_table_is_of_this_devices_autocast(accel):
    table = accel.precision.table()
    assert {"aten::mm", "aten::conv2d", "aten::softmax.int"} <= table
    assert "aten::relu" not in table
    assert "aten::rms_norm" not in table
    assert "aten::rms_norm" in accel.precision.table("O1")


@pytest.mark.parametrize("before", [[False, True], [True, False]])
@pytest.mark.parametrize(("mode", "inside"), [("fast", [True, True]), ("ieee", [False, False])])
def test_hf32_is_set_for_matmul_and_conv_and_put_back(accel, mode, inside, before):
    for switch, value in zip(SWITCHES, before, strict=True):
        switch.allow_hf32 = value
    with accel.precision.fp32(mode):
        assert hf32() == inside
    assert hf32() == before
    with pytest.raises(ZeroDivisionError), accel.precision.fp32(mode):
        raise ZeroDivisionError
    assert hf32() == before


def test_hf32_nests(accel):
    before = hf32()
    with accel.precision.fp32("fast"):
        with accel.precision.fp32("ieee"):
            assert hf32() == [False, False]
        assert hf32() == [True, True]
    assert hf32() == before


@pytest.mark.skipif(not hasattr(torch.backends, "flags"), reason="this torch has no such switch")
def test_it_works_beside_torchs_own_new_switch_which_torch_npu_does_not_read(accel):
    # Not by assignment, which torch refuses once a process has loaded its own tests' helpers, as other tests here do.
    with torch.backends.flags("ieee"), accel.precision.fp32("fast"):
        assert hf32() == [True, True]


def test_a_trainer_trains_whole_steps_in_hf32(accel):
    seen = []

    def loss(model, batch):
        output = model(batch)
        output.register_hook(lambda gradient: seen.append(hf32()))
        return output.mean()

    model = torch.nn.Linear(2, 1)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=0.1)
    trainer = accel.trainer(model, optimizer, loss=loss, fp32="fast")
    before = hf32()
    trainer(torch.ones(3, 2, device=accel.device))
    assert seen == [[True, True]]
    assert hf32() == before


@pytest.mark.skipif(not torch_npu.__version__.startswith("2.13."), reason="docs/precision.md is about torch_npu 2.13")
def test_torch_npus_table_is_that_of_cuda_without_what_the_page_names(accel):
    cuda = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    missing = {name.split("::")[1] for name in set(cuda) - accel.precision.table("torch")}
    upsampling = {name for name in missing if "upsample" in name}
    assert len(upsampling) == 12
    assert missing - upsampling == {"rms_norm", "linalg_vecdot", "vdot"}
    assert accel.precision.table("torch") <= set(cuda)
