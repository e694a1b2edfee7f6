"""Questions for a device that stay: another line of the program has an answer for CUDA and for the CPU only."""

import pytest
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import read_project
from port_sources import written

LEVELS = pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
CHOICE = 'device = "cuda" if torch.cuda.is_available() else "cpu"'


@LEVELS
@pytest.mark.parametrize(
    ("uses", "kept"),
    [
        ('times = {"cuda": [], "cpu": []}\ntimes[device].append(1)', True),
        ("times = {'cpu': [], 'cuda': []}\ntimes[device].append(1)", True),
        ("match device:\n    case 'cuda':\n        x = 1", True),
        ('times = {"run": [], "cpu": []}\ntimes["run"].append(device)', False),
        ("match device:\n    case 'cpu':\n        x = 1", False),
    ],
)
def test_a_device_that_a_dict_or_a_match_looks_up(level, uses, kept):
    source = f"import torch\n\n{CHOICE}\nx = torch.ones(1, device=device)\n{uses}\n"
    assert (CHOICE in port_source(source, level).source) is kept


@LEVELS
@pytest.mark.parametrize(("name", "kept"), [("cuda: 0", True), ("cuda :1", True), (" npu:0", True), ("cuda:0", False)])
def test_the_name_of_a_device_with_spaces(level, name, kept):
    source = f'import torch\n\ndevice = torch.device("{name}" if torch.cuda.is_available() else "cpu")\n'
    assert (f'torch.device("{name}" if torch.cuda.is_available()' in port_source(source, level).source) is kept


@LEVELS
@pytest.mark.parametrize("replaces", ["torch.cuda.is_available = lambda: False", "torch.cuda.is_available=never"])
def test_a_question_that_a_script_replaces(tmp_path, level, replaces):
    source = f"import torch\nfrom data import never\n\n{replaces}\n{CHOICE}\nx = torch.ones(1, device=device)\n"
    (path,) = written(tmp_path, {"train.py": source})
    assert CHOICE in port_source(source, level, read_project([path]).known(path)).source
    plain = source.replace(replaces, "print(torch.cuda.is_available == never)")
    path.write_text(plain)
    assert CHOICE not in port_source(plain, level, read_project([path]).known(path)).source


USAGE = """import torch


def usage(index):
    if not torch.cuda.is_available():
        return {}
    return {{"total": torch.cuda.get_device_properties(index).{}}}


def show():
    if not torch.cuda.is_available():
        print("no device")
        return
    for index in range(torch.cuda.device_count()):
        print({})


show()
"""


@LEVELS
@pytest.mark.parametrize("empty", ["{}", "[]", "dict()", "None", ""])
def test_a_function_that_returns_nothing_without_cuda(level, empty):
    source, unused = (USAGE.format(empty, "major", shown) for shown in ('usage(index)["total"]', "index"))
    asked = [port_source(each, level).source.count("if not torch.cuda.is_available():") for each in (source, unused)]
    assert asked == [2, 1]
    all_have = USAGE.format(empty, "total_memory", 'usage(index)["total"]')
    assert "torch.cuda" not in port_source(all_have, level).source


@LEVELS
def test_a_fixture_of_pytest_chooses_for_the_tests_in_its_folder(tmp_path, level):
    conftest = "import torch\n\ndevices = ['cpu']\n" + CHOICE + "\n"
    files = {
        "kernels.py": (
            "import kernels_cuda\nimport torch\n\n\ndef search(x):\n    if x.is_cuda:\n"
            "        return kernels_cuda.search(x)\n    return x.sort().to('cpu')\n"
        ),
        "tests/conftest.py": conftest,
        "tests/test_search.py": (
            "import torch\nfrom kernels import search\n\n\ndef test_search():\n    assert search(torch.ones(1))\n"
        ),
        "other/conftest.py": conftest,
    }
    paths = written(tmp_path, files)
    project = read_project(paths).keeping([paths[0]])
    kept, other = (port_source(conftest, level, project.known(path)).source for path in (paths[1], paths[3]))
    assert CHOICE in kept
    assert CHOICE not in other


ANSWERS = """import torch


def usage():
    if torch.cuda.is_available():
        return {}
    {}


def show():
    if torch.cuda.is_available():
        print(usage())


show()
"""
PROPERTIES = "torch.cuda.get_device_properties(0)"


@LEVELS
@pytest.mark.parametrize("end", ["return None", "return", "print('none')"])
def test_a_function_that_returns_something_with_cuda_only(level, end):
    kept = port_source(ANSWERS.format(PROPERTIES, end), level).source
    assert kept.count("if torch.cuda.is_available():") == 2
    both = port_source(ANSWERS.format(PROPERTIES, "return 'the CPU'"), level).source
    assert both.count("if torch.cuda.is_available():") == 1


@LEVELS
@pytest.mark.parametrize(("otherwise", "kept"), [("None", True), ("{}", True), ("'no name'", False)])
def test_a_name_that_has_something_with_cuda_only(level, otherwise, kept):
    source = (
        f"import torch\n\nfound = {PROPERTIES} if torch.cuda.is_available() else {otherwise}\n\n\n"
        "def show(x):\n    if torch.cuda.is_available():\n        print(x.cuda(), found)\n"
    )
    assert ("    if torch.cuda.is_available():" in port_source(source, level).source) is kept
