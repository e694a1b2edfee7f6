"""The command: what it prints, writes, refuses and returns."""

import codecs
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelcore_lint.port.port_command import port
from click.testing import CliRunner

SCRIPT = 'import torch\nx = torch.zeros(2, device="cuda")\n'


sys.path.insert(0, str(Path(__file__).parents[4] / "tests"))  # also for the forks, which import it by its name
fork = import_module("forks").fork


def run(*arguments):
    return CliRunner().invoke(port, [str(argument) for argument in arguments], standalone_mode=False)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_nothing_is_written_without_being_asked(script):
    result = run(script)
    assert result.return_value == 0
    assert "vendor lines 1 -> 0" in result.output
    assert "would be rewritten: " in result.output
    assert result.output.endswith("0 left for you; no file is changed: --write changes them\n")
    assert "device string 1" in result.output
    assert script.read_text() == SCRIPT


def test_the_diff_is_a_patch(script):
    result = run(script, "--diff")
    assert '-x = torch.zeros(2, device="cuda")\n' in result.stdout
    assert "+x = torch.zeros(2, device=accel.device)\n" in result.stdout


def test_a_file_is_replaced_with_its_mark_and_permissions(script):
    script.write_bytes(codecs.BOM_UTF8 + SCRIPT.replace("\n", "\r\n").encode())
    script.chmod(0o750)
    result = run(script, "--write", "--level", "torch")
    assert result.return_value == 0
    assert "  rewritten: " in result.output
    assert "no file is changed" not in result.output
    content = script.read_bytes()
    assert content.startswith(codecs.BOM_UTF8 + b"import torch\r\n")
    assert content.count(b"\n") == content.count(b"\r\n") == 3
    assert script.stat().st_mode & 0o777 == 0o750
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]


def test_json_has_what_is_left_with_lines(script):
    script.write_text(SCRIPT + "s = torch.cuda.CUDAGraph()\n")
    result = run(script, "--json")
    report = json.loads(result.stdout)
    assert result.return_value == 1
    assert report["vendor_lines"] == {"before": 2, "after": 1}
    (left,) = report["files"][0]["left"]
    assert (left["line"], "graph" in left["text"]) == (3, True)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"import torch\nx.cuda(\n", "not Python"),
        (b"import torch\n# \xff\n", "UTF-8"),
        (b"# coding: latin-1\nimport torch\n", "latin-1"),
    ],
)
def test_what_cannot_be_read_is_an_error_and_other_files_go_on(script, content, words):
    other = script.with_name("other.py")
    other.write_bytes(content)
    result = run(script.parent, "--write")
    assert result.return_value == 2
    assert words in result.output.replace("\n", " ")
    assert other.read_bytes() == content
    assert "accelcore" in script.read_text()


def test_a_link_out_of_the_folder_is_refused(script, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link.py").symlink_to(script)
    result = run(folder, "--write")
    assert result.return_value == 2
    assert "link" in result.output
    assert script.read_text() == SCRIPT


@pytest.mark.parametrize(("path", "words"), [("none.py", "no such file"), ("", "empty")])
def test_a_path_that_does_not_exist_or_is_empty_is_an_error(path, words):
    result = CliRunner().invoke(port, [path])
    assert result.exit_code == 64
    assert words in result.output


@pytest.mark.full
def test_check_compares_the_losses_of_the_script_and_its_port(script):
    pytest.importorskip("accelcore")
    script.write_text(
        "import sys\n"
        "import torch\n"
        'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")\n'
        "model = torch.nn.Linear(2, 1).to(device)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))\n"
        "while True:\n"
        "    loss = model(torch.ones(1, 2, device=device)).square().sum()\n"
        "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
    )
    result = run(script, "--check", "--steps", "3", "--", "0.1")
    assert "same losses in 3 steps" in result.output
    assert result.return_value == 0


@pytest.fixture
def forked(fork, monkeypatch):
    """--check in forks that have imported torch; with `full`, above, in processes."""
    pytest.importorskip("accelcore")
    monkeypatch.setattr(
        "accelcore_lint.port.check.subprocess",
        SimpleNamespace(
            run=lambda command, *, env, timeout, **_: fork(*command[1:], **env).finish(timeout),
            DEVNULL=None, PIPE=None, TimeoutExpired=subprocess.TimeoutExpired,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "words", "code"),
    [
        ("import nothing_here\n", "not compared: neither the original nor the port gives losses on this CPU", 1),
        ("x = torch.ones(1).cuda()\nimport nothing_here\n", ", and neither does the original (", 2),
    ],
)
def test_check_names_the_errors_of_an_original_that_fails_as_its_port_does(script, forked, lines, words, code):
    script.write_text(f"import torch\n{lines}")
    result = run(script, "--check")
    assert words in result.output
    assert "(ModuleNotFoundError: No module named 'nothing_here')" in result.output
    assert result.return_value == code


def test_check_compares_a_trainer_with_a_scaler_that_torch_disables_here(script, forked):
    script.write_text(
        "import warnings\n"
        "import torch\n"
        "warnings.simplefilter('ignore')\n"
        'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")\n'
        "model = torch.nn.Linear(2, 1).to(device)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.001)\n"
        "scaler = torch.cuda.amp.GradScaler()\n"
        "for rows in torch.utils.data.DataLoader(torch.ones(8, 2), 1):\n"
        "    rows = rows.to(device)\n"
        "    optimizer.zero_grad()\n"
        "    with torch.cuda.amp.autocast():\n"
        "        loss = model(rows).square().sum()\n"
        "    scaler.scale(loss).backward()\n"
        "    scaler.step(optimizer)\n"
        "    scaler.update()\n"
    )
    result = run(script, "--level", "trainer", "--check", "--steps", "5")
    assert re.search(r"same losses in 5 steps on the CPU, (to the bit|with differences up to \d)", result.output)
    assert "factor" not in result.output
    assert result.return_value == 0


@pytest.mark.full
def test_check_reports_an_original_that_cannot_run_here(script):
    script.write_text(SCRIPT + "x.requires_grad_().sum().backward()\n")
    result = run(script, "--check")
    assert "not compared" in result.output
    assert result.return_value == 1


def test_arguments_of_the_script_need_check(script):
    assert run(script, "--", "0.1").return_value == 64


def test_a_named_file_without_vendor_words_is_read_and_one_in_a_folder_is_not(tmp_path):
    old = tmp_path / "old.py"
    old.write_text('print "text"\n')
    result = run(old)
    assert (result.return_value, "line 1 is not Python" in result.output) == (2, True)
    assert result.output.endswith("level roles: 1 file, 1 not ported\n")
    result = run(tmp_path)
    assert result.return_value == 0
    assert result.output == "level roles: 1 file, nothing had to be changed\n"


@pytest.mark.parametrize(
    ("old", "count"),
    [
        ("import torch\nx = torch.ones(2).cuda(async=True)\nx = x.cuda()\n", 2),
        ("import torch\nprint torch.ones(2).cuda()\nprint 'cuda'  # x.cuda()\n", 2),
        ("import torch\nif torch:\n        x = torch.ones(2).cuda()\n    x = x.cuda()\n", 2),
        ("import torch\nx = torch.ones(2).cuda()\nassert(x if x else x)\n", 1),
        ("import cffi\nprint 'cuda'\n", 0),
    ],
)
def test_lines_of_a_file_that_cannot_be_read_are_counted_before_and_after(tmp_path, old, count):
    (tmp_path / "old.py").write_text(old)
    (tmp_path / "new.py").write_text("import torch\nprint(torch.ones(2).cuda())\n")
    output = run(tmp_path / "old.py", tmp_path / "new.py").output
    assert f"2 files, vendor lines {1 + count} -> {count}, 0 left for you, 1 not ported" in output
    assert (f"1 not ported with {count} vendor line" in output) is bool(count)
    report = json.loads(run(tmp_path / "old.py", "--json").stdout)
    assert report["vendor_lines"] == report["files"][0]["vendor_lines"] == {"before": count, "after": count}


def test_the_summary_counts_harmless_lines(tmp_path):
    made = "import torch\nprint(torch.ones(2, device='cuda'))\n"
    (tmp_path / "one.py").write_text(made + "torch.backends.cudnn.benchmark = True\n")
    assert "vendor lines 2 -> 1, of which 1 harmless, 0 left" in run(tmp_path).output
    (tmp_path / "one.py").write_text(made + "torch.backends.cuda.enable_flash_sdp(True)\n")
    assert "vendor lines 2 -> 1, of which 1 harmless, 0 left" in run(tmp_path).output
    (tmp_path / "one.py").write_text(made + "graph = torch.cuda.CUDAGraph()\n")
    assert "vendor lines 2 -> 1, 1 left" in run(tmp_path).output


def test_a_script_that_another_library_trains_does_not_read_as_done(script):
    script.write_text("from accelerate import Accelerator\naccelerator = Accelerator()\n")
    result = run(script)
    assert f"by hand {script}:1: accelerate trains this script" in result.output
    assert "1 file is trained by another library" in result.output
    assert "0 -> 0" not in result.output


def test_a_library_under_an_option_trains_only_there(script):
    begin = "import sys\nimport torch\nx = torch.ones(2).cuda()\n"
    script.write_text(f"{begin}if '--fast' in sys.argv:\n    import deepspeed\n    deepspeed.initialize(x)\n")
    output = run(script).output
    assert f"by hand {script}:5: where deepspeed trains this script" in output
    assert "1 file is trained by another library, or may be" in output


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("y = x.double()", "no float64 (other.py:2)"),
        ("torch.set_default_dtype(torch.float64)", "no float64 (other.py:2)"),
        ("dist.init_process_group()", "no process groups (other.py:2)"),
        ("name = torch.cuda.get_device_properties(0).name", "no properties of devices (other.py:2)"),
        ("side = torch.cuda.Stream()", "no streams (other.py:2)"),
        ("from torch import cuda\nside = cuda.Stream()", "no streams (other.py:3)"),
        ("import pycuda.driver as cuda\nside = cuda.Stream()", ""),
        ("y = x.double()", "Tensors on the CPU may be float64"),
        ("used = torch.cuda.memory_stats()", "no properties of devices (other.py:2)"),
        ("fork_rng(devices=[torch.cuda.current_device()])", "no numbers of generators (other.py:2)"),
        ("net = nn.DataParallel(net)", "no DataParallel (other.py:2)"),
        ("net = DistributedDataParallel(net)  # x.double()", ""),
        ("print('x.double()')", ""),
        ('"""\nx.double()\n"""', ""),
        ('print("\\"#")\ny = x.double()', "no float64 (other.py:3)"),
    ],
)
def test_the_report_names_what_the_program_uses_and_a_mac_lacks(script, line, named):
    (script.parent / "setup.py").touch()
    (script.parent / "other.py").write_text(f"import torch\n{line}\n")
    assert "on a Mac" not in run(script).output  # a neighbour
    script.write_text(f"import other\n{SCRIPT}")
    output = run(script).output
    assert ("on a Mac" in output) is bool(named)
    assert named in output
    assert named in json.loads(run(script, "--json").stdout)["mac"]
    script.write_text("import torch\n")
    assert "on a Mac" not in run(script).output


@pytest.mark.parametrize(
    "line", ["assert(lambda: 1)", "assert(x if y else z)", "x = not(x if y else z)", "if(x if y else z):\n    pass"]
)
def test_a_line_that_python_reads_and_the_parser_does_not_is_named(script, line):
    script.write_text(f"{SCRIPT}{line}\n")
    result = run(script)
    assert result.return_value == 2
    assert "line 3 cannot be read: write a space after " in result.output


@pytest.mark.parametrize(("before", "is_refused"), [(SCRIPT, True), (SCRIPT + "return\n", False)])
def test_a_port_that_no_longer_compiles_is_refused(monkeypatch, script, before, is_refused):
    module = import_module("accelcore_lint.port.port_command")
    rewrite = module.port_source

    def twice(*arguments):
        outcome = rewrite(*arguments)
        outcome.source += "print(end='', end='')\n"
        return outcome

    monkeypatch.setattr(module, "port_source", twice)
    script.write_text(before)
    result = run(script, "--write")
    assert result.return_value == (2 if is_refused else 0)
    assert ("keyword argument repeated: end" in result.output) == is_refused
    assert (script.read_text() == before) == is_refused
