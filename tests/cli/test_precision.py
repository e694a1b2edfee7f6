"""`accelcore precision` shows the tables that the dispatcher has."""

from __future__ import annotations

import json

import pytest
import torch

import accelcore.precision
from accelcore.cli import main
from accelcore.precision import O1


def registered(key):
    return sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def test_the_json_has_o1_and_torchs_tables(capsys):
    accelcore.precision.reset()  # which takes out kernels of ours that other tests have left
    assert main(["precision", "--backend", "cpu", "--diff", "cuda", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1
    assert found["o1"] == {name: treatment.value for name, treatment in O1.items()}
    tables = {"cpu": registered("AutocastCPU"), "cuda": registered("AutocastCUDA")}
    assert {name: table["operators"] for name, table in found["torch"].items()} == tables
    assert found["diff"]["cpu"] == sorted(set(tables["cpu"]) - set(tables["cuda"]))
    assert found["diff"]["cuda"] == sorted(set(tables["cuda"]) - set(tables["cpu"]))


def test_the_text_says_who_lists_what(capsys):
    assert main(["precision", "--backend", "cpu"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "operator"
    rows = {line.split()[0]: line.split("  ") for line in lines[:-1]}
    assert rows.keys() >= O1.keys()
    cells = {name: [cell.strip() for cell in row[1:] if cell.strip()] for name, row in rows.items()}
    assert cells["softmax"] == ["fp32", "-"]
    assert cells["linear"] == ["low precision", "listed"]
    assert cells["mkldnn_rnn_layer"] == ["low precision", "listed"]
    assert lines[-1].startswith("cpu: ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--diff", "cuda"], "--diff compares two backends"),
        (["--backend", "cpu", "--diff", "cpu"], "--diff compares two backends"),
        (["--backend", "nowhere"], "torch has no autocast for 'nowhere'"),
    ],
)
def test_a_mistake_is_one_message(arguments, says, capsys):
    assert main(["precision", *arguments]) == 64
    assert says in capsys.readouterr().err
