"""Source of unusual shape: what a rewrite leaves is valid Python and does what it did."""

import pytest
import torch
from accelcore_lint.port import Level, port_source
from port_sources import imported


def _ported(source, level=Level.ROLES):
    outcome = port_source(source, level)
    compile(outcome.source, "script", "exec")
    assert port_source(outcome.source, level).source == outcome.source
    return outcome


@pytest.mark.parametrize("level", list(Level))
def test_empty_tuples_are_read(level):
    source = "import torch\nkept: tuple[()] = ()\nx = model(()).cuda()\n"
    assert _ported(source, level).after == 0


@pytest.mark.parametrize("comment", ["", "    # the second\n"])
@pytest.mark.parametrize("last", ["", "    else:\n        print(3)\n"])
def test_a_branch_with_nothing_in_it_is_removed_or_passes(comment, last):
    source = (
        "import torch\n\n\ndef main(kind):\n    if kind == 1:\n        print(1)\n"
        f"{comment}    elif kind == 2:\n        torch.cuda.set_device(0)\n{last}    return torch.ones(2).cuda()\n\n\n"
        "main(2)\n"
    )
    ported = _ported(source).source
    assert comment in ported
    assert ("elif kind == 2:\n        pass\n" in ported) is bool(comment or last)


@pytest.mark.parametrize("test", ["args.cuda or args.mixed", "torch.cuda.is_available() and kind", "kind == 'cuda'"])
def test_a_condition_goes_with_a_seed_that_is_all_it_guards(test):
    source = (
        "import torch\n\n\ndef main(args, kind):\n    assert kind in ['mps', 'cpu']\n    torch.manual_seed(4)\n"
        f"    if {test}:\n        torch.cuda.manual_seed(4)\n    return kind\n"
    )
    ported = _ported(source)
    assert "    torch.manual_seed(4)\n    return kind\n" in ported.source
    assert ported.left == []


@pytest.mark.parametrize("again", ["", "    seed(5)\n"])
def test_a_question_that_goes_leaves_no_backend_that_nothing_uses(again):
    seeds = "    if torch.cuda.is_available():\n        torch.cuda.manual_seed_all(n)\n"
    runs = f"\n\nif __name__ == '__main__':\n    seed(4)\n{again}    step(torch.optim.Rprop(model.parameters()))\n"
    ported = _ported(f"import torch\n\n\ndef seed(n):\n    torch.manual_seed(n)\n{seeds}{runs}").source
    assert ported == f"import torch\n\n\ndef seed(n):\n    torch.manual_seed(n)\n{runs}"


@pytest.mark.parametrize(("given", "is_left"), [("", True), ("dtype=torch.float16", False), ("enabled=False", False)])
@pytest.mark.parametrize("function", ["set_autocast_gpu_dtype(", "set_autocast_dtype('cuda', "])
def test_autocast_stays_where_its_default_type_is_set(function, given, is_left):
    source = (
        f"import torch\n\ntorch.{function}torch.bfloat16)\nmodel.cuda()\n"
        f"with torch.cuda.amp.autocast({given}):\n    model(x)\n"
    )
    assert (f"with torch.cuda.amp.autocast({given}):" in _ported(source).source) is is_left


@pytest.mark.parametrize(
    ("test", "asks"),
    [
        ("device.type == 'cuda'", False),
        ("device is not None", False),
        ("device", True),
        ("other is not None", True),
        ("device is None", True),
    ],
)
def test_a_place_that_a_condition_knows_is_not_asked_whether_it_is_none(test, asks):
    source = (
        f"import torch\n\n\ndef main(x, device, other):\n    if {test}:\n        x = x.cuda(device)\n    return x\n"
    )
    assert ("device if device is not None else" in _ported(source).source) is asks


def test_a_seed_below_a_question_that_stays_is_of_the_device_that_answers_it():
    source = (
        "import torch\n\nx = torch.ones(2).cuda()\nif torch.cuda.is_available():\n    torch.cuda.manual_seed(4)\n"
        "    torch.cuda.nothing_else_has_this()\n"
    )
    ported = _ported(source).source
    assert "if torch.cuda.is_available():\n    torch.get_device_module().manual_seed(4)" in ported


@pytest.mark.parametrize(
    ("header", "last"),
    [
        ("if a:", "else:"),
        ("if a:  # why", "else:"),
        ("if a:", "# why\n    else:"),
        ("if a:", "elif b:\n        x = 1\n    else:"),
    ],
)
def test_a_first_branch_with_nothing_in_it_passes(header, last):
    source = (
        f"import torch\n\n\ndef main(a, b):\n    torch.manual_seed(0)\n    {header}\n"
        f"        torch.cuda.manual_seed(0)\n    {last}\n        x = 2\n"
    )
    assert f"    {header}\n        pass\n    {last}\n" in _ported(source).source


@pytest.mark.parametrize(
    ("last", "is_left"),
    [("", False), ("else:\n    b = 1\n", True), ("finally:\n    b = 1\n", True), ("    # why\n", True)],
)
def test_a_try_of_nothing_goes_with_its_handlers(last, is_left):
    start = "import torch\ntry:\n    from torch.cuda import amp\nexcept ImportError:\n    a = 1\n"
    source = f"{start}{last}x = torch.ones(2).cuda()\n"
    assert ("except ImportError:" in _ported(source).source) is is_left


@pytest.mark.parametrize(
    ("test", "asks_again"),
    [
        ("device.type == 'cuda'", False),
        ("fast and device.type == 'cuda'", False),
        ("there", False),
        ("given", True),
        ("fast or there", True),
    ],
)
def test_a_line_under_a_condition_that_no_cpu_meets_does_not_ask_again(test, asks_again):
    source = (
        "import torch\nthere = torch.cuda.is_available() and FAST\n\n\ndef main(given, device):\n"
        f"    if {test}:\n        torch.cuda.empty_cache()\n"
    )
    assert ("if torch.accelerator.is_available():" in _ported(source).source) is asks_again


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("context = torch.cuda.amp.autocast\nwith context(True):\n    pass", "context = torch.cuda.amp.autocast"),
        ("scaler = torch.cuda.amp.GradScaler()\nscaler.update(2.0)", "torch.amp.GradScaler(accel.device.type)"),
        (
            "with torch.autocast(x.device.type) if x.device.type == 'cuda' else nothing():\n    pass",
            'if x.device.type != "cpu" else nothing():',
        ),
        ("from torch_npu.npu import amp\nscaler = amp.GradScaler()", "accel.scaler.create()"),
        ("labels = [1]\nlabels = torch.cuda.LongTensor(labels)", "torch.LongTensor(labels).to(accel.device)"),
        ("def step(scaler: torch.cuda.amp.GradScaler): ...", "def step(scaler: torch.amp.GradScaler): ..."),
        (
            "stream = torch.cuda.current_stream()\nstream.synchronize()",
            "stream = torch.get_device_module().current_stream()",
        ),
    ],
)
def test_a_form_decides_what_a_line_becomes(line, new):
    assert new in _ported(f"import torch\n{line}\n").source


@pytest.mark.parametrize(
    ("option", "is_torchs"), [("--device", True), ("-device", True), ("--dev", True), ("--epochs", False)]
)
def test_a_device_that_an_option_names_keeps_torchs_scaler(option, is_torchs):
    """The scale of accelcore's is on its own device, and a user may give `--device cuda:1`."""
    source = (
        f"import argparse, torch\nparser = argparse.ArgumentParser()\nparser.add_argument('{option}')\n"
        "args = parser.parse_args()\nscaler = torch.cuda.amp.GradScaler()\n"
    )
    made = "torch.amp.GradScaler(accel.device.type)" if is_torchs else "accel.scaler.create()"
    assert f"scaler = {made}\n" in port_source(source, Level.ROLES).source


def test_branches_for_two_vendors_become_one():
    source = (
        "import torch\n\n\ndef f(device):\n    if device.type == 'cuda':\n        torch.cuda.synchronize()\n"
        "    elif device.type == 'npu':\n        torch.npu.synchronize()\n{}    return torch.ones(2).cuda()\n"
    )
    for rest in ("", "    else:\n        print(1)\n"):
        ported = _ported(source.format(rest)).source
        assert ported.count("synchronize()") == 1
        assert "elif" not in ported
        assert ("print(1)" in ported) is bool(rest)
    same = "import torch\n\n\ndef f(x):\n    if x:\n        x.cuda()\n    elif x:\n        x.cuda()\n"
    assert "elif x:" in _ported(same).source


def test_a_question_that_was_negated_is_no_double_negation():
    ported = _ported("import torch\n\n\ndef f(x):\n    if not x.is_cuda:\n        x = x.cuda()\n    return x\n").source
    assert '    if x.device.type == "cpu":\n' in ported


@pytest.mark.parametrize(
    ("otherwise", "opens"),
    [
        ("y = x.numpy()", True),
        ("k = 2\n        y = x.detach().numpy()", True),
        ("y = made.detach().numpy()", True),
        ("y = moved.numpy()", False),
        ("y = x.cpu().numpy()", False),
        ("x = x.cpu()\n        y = x.numpy()", False),
        ("y = other.numpy()", False),
        ("if other:\n            y = x.numpy()", False),
        ("y = x", False),
    ],
)
@pytest.mark.parametrize("test", ['x.device.type == "cuda"', "x.is_cuda"])
def test_a_tensor_that_is_an_array_otherwise_is_on_the_cpu(test, otherwise, opens):
    source = (
        "import torch\n\n\ndef transform(x, other):\n    made = torch.cat([x, x + 1])\n"
        f"    moved = torch.cat([x.cpu()])\n    if {test}:\n        y = torch.fft.rfft(x)\n    else:\n"
        f"        {otherwise}\n    return y\n"
    )
    ported = _ported(source).source
    assert ('if x.device.type != "cpu":' in ported) is opens
    assert (test in ported) is not opens


@pytest.mark.parametrize(
    ("before", "count"), [("import torch\n", 1), ("import torch as t\n", 1), ("", 1), ("import torch\nimport os\n", 1)]
)
def test_torch_is_imported_once(before, count):
    ported = _ported(f"{before}import torch.cuda\nx = torch.ones(2).cuda()\n").source
    assert ported.count("import torch\n") == count
    assert "import torch.cuda" not in ported


@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
@pytest.mark.parametrize(
    ("test", "calls", "is_left"),
    [
        ("torch.cuda.is_available()", "torch.cuda.empty_cache()", False),
        ("torch.cuda.is_available()", "torch.cuda.synchronize(); torch.cuda.empty_cache()", False),
        ("torch.cuda.is_available() and step % 10 == 0", "torch.cuda.empty_cache()", False),
        ("step % 10 == 0", "torch.cuda.empty_cache()", True),
    ],
)
def test_a_cache_is_emptied_on_the_line_of_a_question(level, test, calls, is_left):
    outcome = _ported(f"import torch\nstep = 3\nif {test}: {calls}\nx = torch.ones(2).cuda()\n", level)
    assert bool(outcome.left) is is_left
    assert ("torch.get_device_module().empty_cache()" in outcome.source) is not is_left


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("args.batch_size *= {}", True),
        ("total = {} * self.bs", True),
        ("steps = len(data) // (samples_per_gpu * {})", True),
        ("n //= {}", True),
        ("n *= {}", False),
        ("workers = 4 * {}", False),
    ],
)
def test_a_batch_is_not_multiplied_by_no_devices(line, is_one):
    ported = port_source(f"import torch\n{line.format('torch.cuda.device_count()')}\n", Level.ROLES).source
    assert (line.format("max(torch.get_device_module().device_count(), 1)") in ported) is is_one
    assert "torch.cuda" not in ported


@pytest.mark.parametrize(
    ("line", "after"),
    [
        ("torch.cuda.manual_seed_all(0); torch.manual_seed(0)", "torch.manual_seed(0)"),
        ("torch.manual_seed(s); torch.cuda.manual_seed(s)  # same", "torch.manual_seed(s)  # same"),
        ("random.seed(0); torch.manual_seed(0); torch.cuda.manual_seed_all(0)", "random.seed(0); torch.manual_seed(0)"),
        ("torch.cuda.manual_seed_all(1); torch.manual_seed(0)", None),
        ("torch.cuda.manual_seed_all(draw()); torch.manual_seed(draw())", None),
        ("torch.cuda.manual_seed_all(0); x = draw(); torch.manual_seed(0)", None),
    ],
)
@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_seed_of_the_device_goes_from_a_line_with_others(level, line, after):
    ported = port_source(f"import random\nimport torch\nfrom data import draw\n\ns = 1\n{line}\n", level).source
    assert ported.splitlines()[-1] == (after or line)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("state = torch.cuda.get_rng_state().clone()", " else None).clone()"),
        ("state = torch.cuda.get_rng_state()[0]", " else None)[0]"),
        ("state = torch.cuda.get_rng_state() if keep else None", " else None) if keep else None"),
        ("state = keep and torch.cuda.get_rng_state()", "keep and (torch."),
        ("state = [*torch.cuda.get_rng_state()]", "[*(torch."),
        ("return torch.cuda.get_rng_state()", "return torch."),
        ("found = torch.cuda.is_available().real", ").real"),
    ],
)
@pytest.mark.parametrize("level", [Level.TORCH, Level.ROLES])
def test_a_choice_is_put_in_parentheses_where_something_binds_to_it(line, part, level):
    assert part in port_source(f"import torch\n\n\ndef f(keep):\n    {line}\n", level).source


@pytest.mark.parametrize("test", ["x.is_cuda == y.is_cuda", "x.is_cuda is False", "x.is_cuda != True"])
def test_a_comparison_of_answers_stays_one(test):
    source = f"import torch\n\n\ndef f(x, y):\n    if {test}:\n        return x.cuda()\n    raise ValueError\n"
    ported = _ported(source, Level.TORCH).source
    assert "x.to(" in ported
    assert imported(ported).f(torch.ones(1), torch.ones(1)).device.type == "cpu"
