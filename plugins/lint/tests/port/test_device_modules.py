"""Functions that the module of each accelerator has: events, properties, figures of memory; and forks of generators."""

import sys
import types

import pytest
import torch
from accelcore_lint.port import Level, port_source
from accelcore_lint.port.project import read_project
from port_sources import written

LEVELS = pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
EVENT = "torch.cuda.Event(enable_timing=True)"
TIMED = (
    "import torch\nfrom torch import cuda\n\n\ndef timed():\n    if torch.cuda.is_available():\n        start = {}\n"
    "        start.record()\n        return start\n"
)


@LEVELS
@pytest.mark.parametrize("event", [EVENT, "cuda.Event(enable_timing=True)"])
def test_an_event_is_that_of_all_accelerators(monkeypatch, level, event):
    outcome = port_source(TIMED.format(event), level)
    assert (outcome.after, outcome.left) == (0, [])
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("meta"))
    monkeypatch.setattr(torch, "Event", lambda **given: types.SimpleNamespace(record=lambda: None, given=given))
    exec(outcome.source, module := {})
    assert module["timed"]().given == {"enable_timing": True}


@LEVELS
def test_an_event_that_only_cuda_records_is_still_made_on_the_cpu(level):
    source = f"import torch\nstart = {EVENT}\nif torch.cuda.is_available():\n    start.record()\n"
    outcome = port_source(source, level)
    assert outcome.left == []
    if not torch.accelerator.is_available():
        exec(outcome.source, {"__name__": "__main__"})


@LEVELS
@pytest.mark.parametrize(
    ("lines", "stays"),
    [
        (f"if log:\n    start = {EVENT}\n    start.record()", True),
        (f"self.start = {EVENT}", True),
        (f"start = {EVENT}\nif torch.cuda.is_available():\n    start.record()\nuse(start)", True),
        (f"cuda = torch.cuda.is_available()\nstart = {EVENT} if cuda else None", False),
        (f"start = {EVENT}\nif torch.cuda.is_available():\n    start.record()\n    start.synchronize()", False),
    ],
)
def test_an_event_stays_that_a_cpu_would_record(level, lines, stays):
    outcome = port_source(f"import torch\n{lines}\n", level)
    assert (EVENT in outcome.source) is stays
    assert ["the CPU has none" in note.text for note in outcome.left] == [True] * stays


@LEVELS
@pytest.mark.parametrize(
    ("event", "more"),
    [
        ("torch.cuda.Event(interprocess=True)", ""),
        ("torch.cuda.Event()", "is_event = isinstance(x, torch.cuda.Event)"),
        ("torch.cuda.Event()", "graph = torch.cuda.CUDAGraph()"),
        ("torch.cuda.Event()", "pointer = x.cuda_event"),
        ("make(torch.cuda.Event)", ""),
        (EVENT, "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'"),
        (EVENT, "from multiprocessing import Process\nProcess(target=timed).start()"),
        ("torch.cuda.Event(blocking=True)", ""),
    ],
)
def test_an_event_stays_that_is_used_in_one_vendors_way(level, event, more):
    outcome = port_source(f"{TIMED.format(event)}{more}\n", level)
    assert event in outcome.source
    assert outcome.left


@LEVELS
@pytest.mark.parametrize(
    ("other", "stays"), [("def f(x: torch.cuda.Event): ...", True), ("x = torch.cuda.Event()", False), ("", False)]
)
def test_an_event_stays_if_another_file_asks_for_its_class(tmp_path, level, other, stays):
    paths = written(tmp_path, {"timer.py": TIMED.format(EVENT), "run.py": f"import timer\nimport torch\n{other}\n"})
    outcome = port_source(TIMED.format(EVENT), level, read_project(paths).known(paths[0]))
    assert bool(outcome.left) is stays


@LEVELS
@pytest.mark.parametrize(
    "other",
    [
        "end = torch.cuda.Event(enable_timing=True, blocking=True)",
        "end = torch.cuda.Event(True)",
        "try:\n    end = torch.cuda.Event(enable_timing=True)\nexcept RuntimeError:\n    end = None",
    ],
)
def test_events_of_a_file_stay_together(level, other):
    outcome = port_source(f"import torch\n\nstart = {EVENT}\n{other}\nprint(start.elapsed_time(end))\n", level)
    assert "= torch.Event(" not in outcome.source
    assert len(outcome.left) == 2


@LEVELS
def test_an_event_of_a_module_is_not_made_for_all_accelerators_on_import(level):
    assert port_source(f"import torch\n\nSTART = {EVENT}\n\n\ndef f(): ...\n", level).left


@LEVELS
@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("found = torch.cuda.get_device_properties(i)\n    return found.name, found.total_memory", False),
        ("return torch.cuda.get_device_properties(i).total_memory", False),
        ("found = torch.cuda.get_device_properties(i)\n    return found.name, found.major", True),
        ("found = torch.cuda.get_device_properties(i)\n    return found", True),
        ("return torch.cuda.get_device_properties(i).multi_processor_count", True),
        ("return torch.cuda.get_device_properties(i)", True),
        (
            "try:\n        return torch.cuda.get_device_properties(i).name\n    except AssertionError:\n        pass",
            True,
        ),
    ],
)
def test_properties_are_asked_for_what_devices_of_all_vendors_have(level, line, kept):
    outcome = port_source(f"import torch\n\n\ndef f(i):\n    {line}\n", level)
    assert ("torch.cuda.get_device_properties(i)" in outcome.source) is bool(outcome.left) is kept


@LEVELS
def test_figures_of_an_allocator_are_none_where_there_is_no_accelerator(level):
    source = "import torch\n\n\ndef figures(device):\n    return torch.cuda.memory_stats(device)\n"
    outcome = port_source(source, level)
    assert (outcome.after, outcome.left) == (0, [])
    exec(source, before := {})
    exec(outcome.source, module := {})
    assert module["figures"](torch.device("cpu")) == before["figures"](torch.device("cpu")) == {}


@pytest.mark.parametrize("kind", ["cpu", "npu"])
def test_a_fork_of_random_numbers_gets_the_type_of_the_device(monkeypatch, kind):
    source = (
        "import torch\n\nwith torch.random.fork_rng(devices=[torch.cuda.current_device()]):\n"
        "    torch.manual_seed(1)\n    drawn = torch.rand(1)\nafter = torch.rand(1)\n"
    )
    outcome = port_source(source, Level.ROLES)
    assert (outcome.after, outcome.left) == (0, [])
    accel = types.SimpleNamespace(device=types.SimpleNamespace(type=kind))
    monkeypatch.setitem(sys.modules, "accelcore", types.SimpleNamespace(select=lambda: accel))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    forked = []
    if kind != "cpu":
        random = types.SimpleNamespace(get_rng_state=forked.append, set_rng_state=lambda state, index: None)
        monkeypatch.setattr(torch, "get_device_module", lambda device: random)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    exec(outcome.source, module := {})
    assert torch.equal(module["after"], expected)
    assert forked == ([] if kind == "cpu" else [3])


@LEVELS
@pytest.mark.parametrize("devices", ["[0, torch.cuda.current_device()]", "range(torch.cuda.device_count())"])
def test_a_fork_of_other_devices_stays(level, devices):
    outcome = port_source(f"import torch\n\nwith torch.random.fork_rng(devices={devices}):\n    pass\n", level)
    assert f"devices={devices}" in outcome.source
    assert outcome.left


@LEVELS
@pytest.mark.parametrize(("test", "kept"), [('device.type == "cuda"', False), ("wanted", True)])
def test_a_function_that_waits_for_a_device_knows_that_it_is_none_of_the_cpu(level, test, kept):
    source = f"import torch\n\n\ndef waits(device, wanted):\n    if {test}:\n        return {{}}\n"
    outcome = port_source(source.format("lambda: torch.cuda.synchronize(device=device)"), level)
    assert ("torch.cuda.synchronize(" in outcome.source) is kept
    assert len(outcome.left) == kept


PREFETCHER = """import torch


class Prefetcher:
    def __init__(self, loader):
        self.loader, self.stream = iter(loader), torch.cuda.Stream()

    def following(self):
        with torch.cuda.stream(self.stream):
            batch = next(self.loader)
        torch.cuda.current_stream().wait_stream(self.stream)
        return batch
"""


@LEVELS
@pytest.mark.parametrize("vendor", ["cuda", "npu"])
def test_streams_are_those_of_the_device_module(monkeypatch, level, vendor):
    outcome = port_source(PREFETCHER.replace("cuda", vendor), level)
    assert (outcome.after, outcome.left) == (0, [])
    calls = []

    class Stream:
        def __enter__(self):
            calls.append("enter")

        def __exit__(self, *raised):
            calls.append("exit")

        def wait_stream(self, other):
            calls.append(other)

    module = types.SimpleNamespace(Stream=Stream, stream=lambda stream: stream, current_stream=Stream)
    monkeypatch.setattr(torch, "get_device_module", lambda: module)
    exec(outcome.source, made := {"__name__": "prefetcher"})
    prefetcher = made["Prefetcher"]([1])
    assert prefetcher.following() == 1
    assert calls == ["enter", "exit", prefetcher.stream]


@LEVELS
@pytest.mark.parametrize(
    "more",
    [
        "pointer = stream.cuda_stream",
        "main = torch.cuda.default_stream()",
        "graph = torch.cuda.CUDAGraph()",
        "import cupy",
    ],
)
def test_streams_stay_that_are_used_in_one_vendors_way(level, more):
    line = "stream = torch.cuda.Stream()"
    outcome = port_source(f"import torch\n{line}\n{more}\n", level)
    assert line in outcome.source
    assert outcome.left


@LEVELS
@pytest.mark.parametrize(("other", "stays"), [("pointer = x.cuda_stream", True), ("import cupy", False)])
def test_streams_stay_if_another_file_reads_the_address_of_one(tmp_path, level, other, stays):
    paths = written(tmp_path, {"a.py": PREFETCHER, "b.py": f"import torch\nimport a\n{other}\nx.cuda()\n"})
    outcome = port_source(PREFETCHER, level, read_project(paths).known(paths[0]))
    assert bool(outcome.left) is stays


@LEVELS
def test_a_stream_in_a_try_stays(level):
    source = "import torch\ntry:\n    s = torch.cuda.Stream()\nexcept RuntimeError:\n    s = None\n"
    assert "s = torch.cuda.Stream()" in port_source(source, level).source


def test_a_question_above_streams_asks_for_any_device():
    source = "import torch\nif torch.cuda.is_available():\n    s = torch.cuda.Stream()\n"
    assert port_source(source, Level.ROLES).after == 0


@LEVELS
@pytest.mark.parametrize(("shown", "stays"), [("x[i].total_memory", False), ("x[i].major", True), ("x", True)])
def test_properties_in_a_list_are_those_of_the_device_module(level, shown, stays):
    source = (
        "import torch\n\n\ndef show(n):\n    x = [torch.cuda.get_device_properties(i) for i in range(n)]\n"
        f"    for i in range(n):\n        print(x[i].name, {shown})\n"
    )
    assert ("torch.cuda" in port_source(source, level).source) is stays
