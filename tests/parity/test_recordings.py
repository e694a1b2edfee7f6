"""Recordings that are damaged, foreign or of another kind; and what becomes of them in a full or forbidden place."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import accelcore
from accelcore.cli.parity import write_page
from accelcore.parity.compare import compare


def train(scale=1.0, draws=0):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    torch.rand(draws)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        (scale * model(torch.randn(5, 4)).square().mean()).backward()
        optimizer.step()


@pytest.fixture
def reference(tmp_path):
    with accelcore.Record(tmp_path / "ref"):
        train()
    return tmp_path / "ref"


def test_a_folder_without_a_recording_is_named(tmp_path):
    with pytest.raises(accelcore.RecordingError, match="no recording in"):
        accelcore.Replay(tmp_path / "nowhere")


def _changed(reference, change):
    path = reference / "rank-00000" / "recording.json"
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts.update(what="a cake"),
        lambda facts: facts.pop("steps"),
        lambda facts: facts.update(steps="3"),
        lambda facts: facts.update(steps=4),
    ],
)
def test_changed_facts_are_damage(reference, change):
    _changed(reference, change)
    with pytest.raises(accelcore.RecordingError, match="damaged"):
        accelcore.Replay(reference)


@pytest.mark.parametrize(
    "change",
    [
        lambda events: events.pop("tables"),
        lambda events: events["steps"].update({"1": 7}),
        lambda events: events["tables"][0][0].__setitem__(0, "no such kind"),
        lambda events: events["tables"][0][0].__setitem__(7, -1),
    ],
)
def test_a_changed_table_is_damage(reference, change):
    path = reference / "rank-00000" / "steps-00000001.safetensors"
    with safe_open(path, framework="pt") as file:
        samples, events = {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["events"])  # noqa: SIM118
        sums = file.metadata()["sums"]
    change(events)
    save_file(samples, path, {"events": json.dumps(events), "sums": sums})
    with pytest.raises(accelcore.RecordingError, match="damaged"):
        accelcore.Replay(reference)


def test_a_recording_of_a_later_format_names_both(reference):
    _changed(reference, lambda facts: facts.update(format=2))
    with pytest.raises(accelcore.RecordingError, match="format 2"):
        accelcore.Replay(reference)


def test_samples_that_are_cut_off_are_damage(reference):
    path = reference / "rank-00000" / "steps-00000001.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(accelcore.RecordingError, match="damaged"):
        accelcore.Replay(reference)
    path.unlink()
    with pytest.raises(accelcore.RecordingError, match="damaged"):
        accelcore.Replay(reference)


@pytest.mark.parametrize("name", ["steps-00000001", "weights-0", "generators"])
def test_a_changed_byte_of_a_tensor_is_damage(reference, name):
    path = reference / "rank-00000" / f"{name}.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with pytest.raises(accelcore.RecordingError, match=r"damaged(?s:.*)checksum"), accelcore.Replay(reference):
        train()


def test_a_second_run_into_the_folder_of_one_that_goes_on_is_named(tmp_path):
    def both():
        with accelcore.Record(tmp_path / "ref"):
            train()
            with accelcore.Record(tmp_path / "ref"):
                train()

    with pytest.raises(accelcore.RecordingError, match="another run"):
        both()
    with accelcore.Replay(tmp_path / "ref") as replay:
        train()
    assert replay.result.agrees


def test_operators_after_the_last_step_are_reported(tmp_path, caplog):
    with accelcore.Record(tmp_path / "ref", operators=[2, 99]):
        train()
    assert "[99]" in caplog.text
    with pytest.raises(accelcore.ConfigurationError, match="operators"):
        accelcore.Record(tmp_path / "ref", operators=[2, 99], steps=3)


def test_a_replay_does_not_replace_its_recording(reference):
    with pytest.raises(accelcore.ConfigurationError, match="out="):
        accelcore.Replay(reference, out=reference)


@pytest.mark.parametrize("place", ["ref", "ref/below"])
def test_a_file_in_the_way_is_an_error_before_the_training(tmp_path, place):
    (tmp_path / "ref").write_text("a file")
    with pytest.raises(accelcore.RecordingError, match=r"cannot be written(?s:.*)ref is not a folder"):
        accelcore.Record(tmp_path / place).__enter__()


def test_steps_limits_what_is_recorded(tmp_path):
    with accelcore.Record(tmp_path / "ref", steps=2):
        train()
    assert compare(tmp_path / "ref", tmp_path / "ref").steps == 2


@pytest.mark.parametrize("options", [{"operators": [0]}, {"random": "here"}, {"steps": 0}, {"model": 1}])
def test_wrong_arguments_are_refused(tmp_path, options):
    with pytest.raises(accelcore.ConfigurationError, match=next(iter(options))):
        accelcore.Record(tmp_path / "ref", **options)


def test_the_page_names_the_first_difference_and_loads_nothing(reference, tmp_path):
    with accelcore.Replay(reference) as replay:
        train(1.5)
    page, replayed = tmp_path / "page.html", reference.with_name("ref-replay")
    shutil.copytree(replayed / "rank-00000", replayed / "rank-00001")  # a rank that was not recorded
    write_page(page, replace(replay.result, rank=1), reference, replayed)
    text = page.read_text()
    assert (replay.result.phase, replay.result.step) == ("backward", 1)
    assert "backward" in text
    assert "<svg" in text
    assert "http" not in text


def test_a_difference_of_whole_numbers_has_no_size_in_units_of_rounding(reference):
    with accelcore.Replay(reference) as replay:
        train(draws=1)
    assert (replay.result.phase, replay.result.ratio) == ("random", math.inf)
    assert "more than rounding" in str(replay.result)
    assert json.loads(json.dumps(replay.result.as_json(), allow_nan=False))["ratio"] is None
