"""Names of devices that stay, because the script accepts no others, or because a user may give them."""

from unittest import mock

import pytest
import torch
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import Known
from port_sources import imported


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("assert device in ['cuda', 'cpu']", True),
        ("if device not in ('cpu', 'cuda'):\n        raise ValueError(device)", True),
        ("assert device == 'cpu' or device == 'cuda'", True),
        ("if device != 'cpu' and device != 'cuda':\n        raise ValueError(device)", True),
        ("print(device in ['cuda', 'cpu'])", False),
    ],
)
@pytest.mark.parametrize(
    "chosen",
    [
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'",
        "if torch.cuda.is_available():\n        device = 'cuda'\n    else:\n        device = 'cpu'",
    ],
)
def test_a_name_of_a_device_stays_if_a_list_of_such_names_is_asserted(chosen, line, kept):
    source = f"import torch\n\n\ndef f():\n    {chosen}\n    {line}\n    return device\n"
    module = imported(port_source(source, Level.TORCH).source)
    with (
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("meta")),
        mock.patch.object(torch.accelerator, "is_available", return_value=True),
    ):
        assert module.f() == ("cpu" if kept else "meta")


@pytest.mark.parametrize(
    ("line", "kept"), [("assert device in ('cuda', 'cpu')", True), ("assert x.device.type == 'cuda'", False)]
)
def test_a_default_stays_that_the_file_itself_would_refuse(line, kept):
    source = f"import torch\n\n\ndef f(x, device='cuda'):\n    {line}\n    return x.to(device)\n\n\nf(torch.ones(1))\n"
    assert ("device='cuda'" in port_source(source, Level.ROLES).source) is kept


@pytest.mark.parametrize("value", ["'cuda'", "'cuda' if torch.cuda.is_available() else 'cpu'"])
@pytest.mark.parametrize(("choices", "kept"), [(", choices=('cuda', 'cpu')", True), ("", False)])
def test_a_default_stays_that_is_one_of_the_options_choices(value, choices, kept):
    source = (
        "import argparse\nimport torch\n\nparser = argparse.ArgumentParser()\n"
        f"parser.add_argument('--device', default={value}{choices})\ntorch.ones(1).to(parser.parse_args().device)\n"
    )
    assert (f"default={value}" in port_source(source, Level.ROLES).source) is kept


@pytest.mark.parametrize(
    ("option", "kept"),
    [
        ("type=str", True),
        ("type=str, default='cuda:0'", True),
        ("default='cuda:0'", True),
        ("type=int, default=0", False),
        ("default=0", False),
    ],
)
def test_a_choice_stays_of_an_option_that_is_called_a_number_and_is_a_text(option, kept):
    choice = "args.gpu if torch.cuda.is_available() else 'cpu'"
    source = (
        "import argparse\nimport torch\n\nparser = argparse.ArgumentParser()\n"
        f"parser.add_argument('--gpu', {option})\nargs = parser.parse_args()\ntorch.ones(1).to({choice})\n"
    )
    assert (choice in port_source(source, Level.ROLES).source) is kept


@pytest.mark.parametrize(("name", "kept"), [("'cuda'", True), ("torch.device('cuda')", False)])
@pytest.mark.parametrize(
    "place", ["@pytest.mark.parametrize('d', [{}])\ndef test_a(d):\n    pass\n", "DEVICES = [{}]\n"]
)
def test_the_question_stays_by_which_a_test_is_skipped_for_a_name_that_stays(place, name, kept):
    case = f"pytest.param({name}, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason=''))"
    ported = port_source(f"import pytest\nimport torch\n\n{place.format(case)}", Level.TORCH).source
    assert ("skipif(not torch.cuda.is_available()" in ported) is kept


@pytest.mark.parametrize(("indent", "left"), [("    ", 0), ("", 1)])
def test_an_option_below_the_guard_of_a_file_that_others_import_is_the_programs_own(indent, left):
    source = (
        "import argparse\nimport torch\n\n\ndef sample(x):\n    return x + 1\n\n\n"
        "if __name__ == '__main__':\n    pass\n"
        f'{indent}parser = argparse.ArgumentParser()\n{indent}parser.add_argument("--device", default="cuda:0")\n'
        f"{indent}args = parser.parse_args()\n{indent}x = sample(torch.ones(2, device=args.device))\n"
    )
    assert len(port_source(source, Level.ROLES, Known(imported=True)).left) == left
