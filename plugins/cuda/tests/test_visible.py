"""The rules of CUDA_VISIBLE_DEVICES, against torch's own reading of them."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from accelcore_cuda.visible import Visible, visible

UUIDS = ["GPU-8f2b11aa", "GPU-8f2c22bb", "GPU-12345678"]
INDICES = ["0", "1", "2", "3", "-1", "", " 1 ", "+2", "1gpu", "x"]
NAMES = ["GPU-8f2b", "GPU-8f2c22bb", "GPU-8f2", "GPU-1", "GPU-", "GPU-9", "gpu-1", "0"]


def counted_by_torch(value, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: len(UUIDS))
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: UUIDS)
    return torch.cuda._device_count_nvml()


@pytest.mark.parametrize("entries", [INDICES, NAMES], ids=["indices", "uuids"])
def test_every_short_list_counts_as_torch_counts(entries, monkeypatch):
    wrong = []
    for length in (1, 2, 3):
        for chosen in product(entries, repeat=length):
            value = ",".join(chosen)
            expected = counted_by_torch(value, monkeypatch)
            if visible("CUDA_VISIBLE_DEVICES", value, len(UUIDS), UUIDS).count != expected:
                wrong.append((value, expected))
    assert not wrong


def test_unset_leaves_all():
    assert visible("V", None, 8) == Visible(8)


@pytest.mark.parametrize(
    ("value", "note"),
    [
        ("0,0", "V='0,0' names a GPU twice, which hides every GPU"),
        ("GPU-8f2b,GPU-8f2b1", "V='GPU-8f2b,GPU-8f2b1' names a GPU twice, which hides every GPU"),
        ("", "V='' hides every GPU"),
        ("0,9,1", "V='0,9,1' ends at '9', which names no GPU"),
        ("GPU-1,0", "V='GPU-1,0' ends at '0', which names no GPU"),
        ("2,0", ""),
    ],
)
def test_what_it_does_that_may_not_be_meant_is_said(value, note):
    assert visible("V", value, len(UUIDS), UUIDS).note == note


def test_of_mig_instances_one_is_used():
    assert visible("V", "MIG-1", 1) == Visible(1)
    found = visible("V", "MIG-1,MIG-2", 1)
    assert found.count == 1
    assert "names 2 MIG instances, of which CUDA uses one" in found.note


def test_uuids_that_are_not_known_are_believed():
    assert visible("V", "GPU-a,GPU-b", 2) == Visible(2)


def test_a_value_of_any_length_and_content_is_shown_short_and_printable():
    note = visible("V", "é\x1b" * 500, 1).note
    assert note.isascii()
    assert note.isprintable()
    assert len(note) < 500
