"""What `accelcore run --emulate npu` asks the emulator for."""

import pytest
from accelcore_npu_emulator import plugin

from accelcore.errors import ConfigurationError


def test_the_emulation_has_a_device_for_each_rank(monkeypatch):
    monkeypatch.setattr(plugin, "environment", lambda settings: settings.variables())
    monkeypatch.delenv("ACCEL_EMULATED_DEVICES", raising=False)
    for ranks, devices in ((1, "2"), (4, "4")):
        assert plugin.accelcore_emulate(name="npu", devices=ranks)["ACCEL_EMULATED_DEVICES"] == devices
    monkeypatch.setenv("ACCEL_EMULATED_DEVICES", "3")
    assert plugin.accelcore_emulate(name="npu", devices=3)["ACCEL_EMULATED_DEVICES"] == "3"
    with pytest.raises(ConfigurationError, match="less than the 4 ranks need"):
        plugin.accelcore_emulate(name="npu", devices=4)


def test_the_name_of_another_is_left_to_others():
    assert plugin.accelcore_emulate(name="cpu", devices=1) is None
