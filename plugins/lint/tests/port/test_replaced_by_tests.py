"""Functions of torch that a test replaces, and the arguments that it expects them to get."""

import pytest
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import read_project
from port_sources import written

AUTOCAST = 'with torch.autocast(device_type="npu", enabled=False):'
OF_AMP = 'with torch.amp.autocast("cuda", dtype=torch.float16):'
WAIT = "if torch.cuda.synchronize() is None:"


def _ported(folder, line, test):
    model = f"import torch\n\n\ndef run(x):\n    {line}\n        return x\n"
    files = {"model.py": model, "test_model.py": f"import torch\nimport model\nfrom unittest import mock\n\n\n{test}"}
    paths = written(folder, files)
    project = read_project(paths)
    return [port_source(path.read_text(), Level.ROLES, project.known(path)) for path in paths]


@pytest.mark.parametrize(
    ("line", "replaces"),
    [
        (AUTOCAST, 'monkeypatch.setattr(torch, "autocast", lambda **given: given)'),
        (AUTOCAST, 'monkeypatch.setattr(model.torch, "autocast", lambda **given: given)'),
        (AUTOCAST, 'monkeypatch.setattr("torch.autocast", lambda **given: given)'),
        (AUTOCAST, 'mock.patch("model.torch.autocast").start()'),
        (OF_AMP, 'mock.patch.object(torch.amp, "autocast").start()'),
        (OF_AMP, "torch.amp.autocast = lambda *given, **named: named"),
        (WAIT, 'mock.patch("model.torch.cuda.synchronize").start()'),
        (WAIT, 'monkeypatch.setattr(model.torch.cuda, "synchronize", print)'),
    ],
)
def test_a_function_that_a_test_replaces_keeps_its_arguments(tmp_path, line, replaces):
    model, _ = _ported(tmp_path, line, f"def test_a(monkeypatch):\n    {replaces}\n    model.run(1)\n")
    assert line in model.source
    assert "replaces" in model.left[0].text


@pytest.mark.parametrize("other", ["torch.autocast_mode = 1", 'monkeypatch.setattr(model, "autocast", print)'])
def test_an_autocast_that_no_test_replaces_is_rewritten(tmp_path, other):
    model, _ = _ported(tmp_path, AUTOCAST, f"def test_a(monkeypatch):\n    {other}\n    model.run(1)\n")
    assert model.after == 0


@pytest.mark.parametrize(
    "line",
    [
        'assert calls == [{"device_type": "npu", "enabled": False}]',
        'assert made.call_args.kwargs == {"device": "cuda"}',
        'case.assertEqual(calls[0], {"device_type": "cuda"})',
        'made.assert_called_once_with(1, device="cuda")',
        'made.assert_called_with(device_type="npu")',
        'made.assert_has_calls([mock.call(device="cuda:0")])',
    ],
)
def test_an_argument_that_a_test_expects_stays(tmp_path, line):
    test = (
        f'def test_a(calls, case):\n    with mock.patch("torch.autocast") as made:\n        model.run(1)\n    {line}\n'
    )
    _, ported = _ported(tmp_path, AUTOCAST, test)
    assert f"    {line}\n" in ported.source
    assert len(ported.left) == 1
