from __future__ import annotations

import copy
import logging
import shutil

import pytest
import torch
from torch import nn

import accelcore.precision
from accelcore.errors import ConfigurationError
from accelcore.precision.dispatcher import replace_kernels
from accelcore.roles.compiler import TorchCompiler
from accelcore.torch_features import BACKWARD_PASS_AUTOCAST, GET_KERNEL

SETTING = pytest.mark.skipif(not BACKWARD_PASS_AUTOCAST.present, reason=f"torch has no {BACKWARD_PASS_AUTOCAST}")

needs_a_cpp_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiler():
    """The role itself, on a machine where nothing is missing; tests give it compilers of their own."""
    return TorchCompiler()


def eager(graph, inputs):
    return graph.forward


def failing(graph, inputs):
    raise RuntimeError("the vendor's compiler\nhas crashed")


class Counting:
    """A compiler that counts what it compiles and how often that is called, and fails at the graphs it is told to."""

    def __init__(self, fail_at=()):
        self.fail_at, self.graphs, self.calls = fail_at, 0, 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        if self.graphs in self.fail_at:
            raise RuntimeError(f"graph {self.graphs} is too hard")

        def run(*args):
            self.calls += 1
            return graph.forward(*args)

        return run


def model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


X = torch.linspace(-1, 1, 12).view(3, 4)


def test_what_is_compiled_is_called_and_once(compiler):
    count = Counting()
    compiled = compiler.compile(model(), {"backend": count})
    assert count.graphs == 0, "nothing is compiled before the first call"
    for _ in range(3):
        assert torch.equal(compiled.module(X), model()(X))
    assert (count.graphs, count.calls) == (1, 3)
    assert compiled.compiled


def test_a_compiled_module_shares_the_parameters(compiler):
    module = model()
    compiled = compiler.compile(module, {"backend": eager})
    compiled.module(X)
    with torch.no_grad():
        for weight in module.parameters():
            weight.zero_()
    assert torch.equal(compiled.module(X), torch.zeros(3, 2))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_compiled_module_can_be_copied(compiler, duplicate):
    compiled = compiler.compile(model(), {"backend": eager})
    assert torch.equal(duplicate(compiled.module)(X), model()(X))


def test_a_compiled_module_has_the_attributes_of_its_module_and_no_others(compiler):
    module = model()
    compiled = compiler.compile(module, {"backend": eager})
    assert compiled.module.training
    assert [id(weight) for weight in compiled.module.parameters()] == [id(weight) for weight in module.parameters()]
    with pytest.raises(AttributeError, match="nonsense"):
        compiled.module.nonsense  # noqa: B018


def test_options_reach_the_compiler(compiler):
    count = Counting()
    compiled = compiler.compile(model(), {"backend": count, "dynamic": True})
    for rows in (3, 4, 5):
        compiled.module(torch.ones(rows, 4))
    assert count.graphs == 1


def test_where_something_is_missing_the_module_itself_runs_and_the_log_says_why(caplog):
    module = model()
    asked = []
    compiler = TorchCompiler(lambda: asked.append(1) or "there is no C++ compiler (install g++)")
    compiled = compiler.compile(module, {"backend": failing})
    assert compiled.module is module
    assert (compiled.compiled, compiled.reason) == (False, "there is no C++ compiler (install g++)")
    assert torch.equal(compiled.module(X), model()(X))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "eagerly" in caplog.text
    assert "there is no C++ compiler (install g++)" in caplog.text
    compiler.compile(module, {})
    assert len(asked) == 2, "what is missing may be installed in the meantime"


def test_a_compiler_that_fails_at_the_first_call_leaves_the_run_eager_and_says_so_once(compiler, caplog):
    module = model()
    compiled = compiler.compile(module, {"backend": failing})
    assert compiled.compiled
    wrapper = compiled.module
    for _ in range(3):
        assert torch.equal(wrapper(X), model()(X))
    assert not compiled.compiled
    assert compiled.module is module
    assert "failing" in compiled.reason
    assert "\n" not in compiled.reason
    (record,) = [record for record in caplog.records if record.name == "accelcore"]
    assert record.levelno == logging.WARNING
    assert compiled.reason in record.getMessage()


def test_the_reason_says_what_the_compiler_said(compiler):
    compiled = compiler.compile(model(), {"backend": failing})
    compiled.module(X)
    assert "the vendor's compiler" in compiled.reason


def test_a_model_that_cannot_be_compiled_in_one_piece_runs_eagerly_where_one_piece_was_asked_for(compiler):
    class Broken(nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            return x * 2

    compiled = compiler.compile(Broken(), {"backend": eager, "fullgraph": True})
    assert torch.equal(compiled.module(X), X * 2)
    assert not compiled.compiled


class Moody(nn.Module):
    """Raises for three rows, and cannot multiply five columns."""

    def forward(self, x):
        if x.shape[0] == 3:
            raise ValueError("three rows are unlucky")
        return nn.functional.linear(x, torch.ones(2, 4))


@pytest.fixture(params=[False, True], ids=["torch's kernels", "kernels in Python"])
def _kernels(request):
    """Dynamo must not compile kernels in Python, such as those for fp16: it would warn of torch's, which they call."""
    if request.param:
        if not GET_KERNEL.present:
            pytest.skip(f"torch has no {GET_KERNEL}")
        replace_kernels("a test's", {torch.ops.aten.mm.default: lambda torchs, *given: torchs(*given)}, "CPU")
    yield
    accelcore.precision.reset()


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.usefixtures("_kernels")
def test_an_error_of_the_models_own_reaches_the_user_as_without_a_compiler(compiler, first, caplog):
    compiled = compiler.compile(Moody(), {"backend": eager})
    if not first:
        compiled.module(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"\Athree rows are unlucky\Z"):
        compiled.module(torch.ones(3, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        compiled.module(torch.ones(2, 5))
    assert type(caught.value) is RuntimeError
    assert torch.equal(compiled.module(torch.ones(2, 4)), torch.full((2, 2), 4.0))
    assert compiled.compiled
    assert [record for record in caplog.records if record.name == "accelcore"] == []


@pytest.mark.parametrize(
    "options",
    [{"mode": "bogus"}, {"backend": "bogus"}, {"bogus": True}, {"options": {"bogus": 1}}],
    ids=str,
)
def test_an_option_that_does_not_exist_is_the_users_error_and_no_reason_to_run_eagerly(compiler, options):
    with pytest.raises(ConfigurationError, match="bogus"):
        compiler.compile(model(), options)


SCRIPT = """
    import logging, sys
    import torch
    import accelcore

    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("accelcore").addHandler(handler)
    torch.manual_seed(5)
    module = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.GELU())
    compiled = accelcore.select("cpu").compiler.compile(module, {})
    x = torch.ones(3, 4)
    for _ in range(2):
        assert torch.equal(compiled.module(x), module(x))
    assert not compiled.compiled
    assert len(records) == 1 and compiled.reason in records[0], records
    print(compiled.reason)
"""


@pytest.mark.full  # the same by inductor's settings: plugins/cpu/tests/test_cpu.py; said once: above
def test_without_a_cpp_compiler_the_run_is_eager_and_says_which_one_it_looked_for(run_python):
    reason = run_python(SCRIPT, CXX="/nowhere/c++").stdout
    assert "C++ compiler" in reason
    assert "'/nowhere/c++'" in reason
    assert "CXX" in reason


@pytest.mark.full
@needs_a_cpp_compiler
def test_a_cpp_compiler_that_is_there_but_broken_leaves_the_run_eager(run_python, tmp_path):
    compiler = tmp_path / "c++"
    real = shutil.which("g++")
    compiler.write_text(f'#!/bin/sh\ncase "$1" in --version|-v) exec {real} "$@";; esac\necho broken >&2\nexit 1\n')
    compiler.chmod(0o755)
    reason = run_python(SCRIPT, CXX=str(compiler), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache")).stdout
    assert "C++ compile error" in reason


class ExactHead(nn.Module):
    """Its last layer asks for fp32, as heads and losses do that low precision would spoil."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x):
        hidden = torch.relu(self.body(x))
        with torch.autocast("cpu", enabled=False):
            return self.head(hidden.float())


@SETTING
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_backward_computes_in_the_dtypes_it_has_without_a_compiler(accel, compiler, dtype):
    """By default torch compiles all of backward as if it ran under autocast (pytorch#153044)."""
    torch.manual_seed(5)
    module, rows = ExactHead(), torch.randn(16, 64)
    twin = copy.deepcopy(module)
    compiled = compiler.compile(module, {"backend": "aot_eager"})
    for call in (compiled.module, twin):
        with accel.autocast(dtype):
            output = call(rows)
        (output.square().mean() * 65536).backward()
    assert compiled.compiled
    for weight, other in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(weight.grad, other.grad)


@SETTING
def test_compiling_leaves_torchs_settings_of_others_alone(compiler):
    before = torch._functorch.config.backward_pass_autocast
    compiled = compiler.compile(model(), {"backend": eager})
    compiled.module(X)
    assert torch._functorch.config.backward_pass_autocast == before == "same_as_forward"


@pytest.mark.parametrize("name", ["TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_a_compiler_that_the_environment_switches_off_compiles_nothing_and_says_so(compiler, monkeypatch, name, caplog):
    monkeypatch.setenv(name, "1")
    module = nn.Linear(2, 2)
    compiled = compiler.compile(module, {"backend": eager})
    assert (compiled.compiled, compiled.module) == (False, module)
    assert f"{name}=1" in caplog.text
