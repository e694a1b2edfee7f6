"""Private names of torch: each does what accelcore needs it for. A new torch that changes one fails here first."""

from __future__ import annotations

import contextlib
import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from accelcore import torch_internals as internals
from accelcore.torch_features import BACKWARD_PASS_AUTOCAST, GET_KERNEL, RESET_ITER_STATE

ADD, SOFTMAX, DROPOUT = torch.ops.aten.add.Tensor, torch.ops.aten.softmax.int, torch.ops.aten.native_dropout.default


def test_a_recomputed_forward_pass_knows_that_it_runs_in_backward():
    seen = []

    def part(x):
        seen.append(internals.in_backward())
        return x.sin()

    checkpoint(part, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [False, True]


@pytest.mark.parametrize("start", [None, torch.tensor(0.25)])
def test_a_backward_pass_is_torchs(start):
    weight, other = torch.arange(3.0, requires_grad=True), torch.arange(3.0, requires_grad=True)
    for _ in range(2):
        loss = weight.square().sum()
        internals.run_backward(loss, start, retain_graph=True)
        internals.run_backward(loss, start, retain_graph=False)
        for _ in range(2):
            torch.autograd.backward(other.square().sum(), start)
    assert torch.equal(weight.grad, other.grad)
    with pytest.raises(RuntimeError, match="second time"):
        internals.run_backward(loss, start, retain_graph=False)


class Subclass(torch.Tensor):
    """A tensor whose class torch asks before it begins."""


@pytest.mark.parametrize("kind", ["replaced", "subclass", "complex"])
def test_a_backward_pass_that_is_not_plain_is_left_to_torch(kind, monkeypatch):
    if kind == "subclass" and "torch_function" not in inspect.getsource(torch.autograd.backward):
        pytest.skip("this torch asks no class before a backward pass")
    calls = []
    weight = torch.ones(1, dtype=torch.complex64 if kind == "complex" else torch.float32, requires_grad=True)
    loss = weight.sum().as_subclass(Subclass) if kind == "subclass" else weight.sum()
    if kind == "replaced":
        monkeypatch.setattr(torch.autograd, "backward", lambda *given, **options: calls.append(given))
    if kind == "subclass":
        noted = classmethod(lambda cls, function, *rest: calls.append(function))
        monkeypatch.setattr(Subclass, "__torch_function__", noted)
    with pytest.raises(RuntimeError, match="real scalar") if kind == "complex" else contextlib.nullcontext():
        internals.run_backward(loss, None, retain_graph=False)
    assert len(calls) == (kind != "complex")
    assert weight.grad is None


def test_a_node_of_the_backward_pass_has_the_number_it_got_in_the_forward_pass():
    seen = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(internals.backward_number())
            return gradient

    x = torch.ones(2, requires_grad=True)
    first = internals.forward_number()
    y = Noting.apply(x * 2)
    last = internals.forward_number()
    assert internals.backward_number() is None
    y.sum().backward()
    assert first <= seen[0] < last


def test_tracing_and_transforms_are_seen():
    with FakeTensorMode():
        assert internals.is_fake_mode_active()
    assert not internals.is_fake_mode_active()
    assert torch.func.vmap(lambda x: x + internals.in_transform())(torch.zeros(2)).tolist() == [1, 1]
    assert not internals.in_transform()


class Named(TorchDispatchMode):
    """A mode that lists its name for each operator."""

    def __init__(self, name, seen):
        super().__init__()
        self.name, self.seen = name, seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(self.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("other", ["none", "began before", "begins after"])
def test_a_mode_that_ends_out_of_turn_leaves_the_others_in_order(other):
    seen = []
    ours, theirs, outer = Named("ours", seen), Named("theirs", seen), Named("outer", seen)
    x = torch.ones(2)
    with outer:
        if other == "began before":
            with theirs:
                ours.__enter__()
            assert not internals.end_dispatch_mode(ours)
        elif other == "begins after":
            ours.__enter__()
            with theirs:
                assert not internals.end_dispatch_mode(ours)
                x.sin()
                assert seen == ["theirs", "outer"]
        else:
            ours.__enter__()
            assert internals.end_dispatch_mode(ours)
        seen.clear()
        x.sin()
        assert seen == ["outer"]
    x.sin()
    assert seen == ["outer"]


def test_autocast_is_off_below_its_key():
    with torch.autocast("cpu", torch.bfloat16):
        with internals.without_autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


@pytest.mark.parametrize("around", ["nothing", "before", "after", "before all", "after all", "profiler"])
def test_what_runs_around_a_step_is_noticed(around):
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    hook, every = (lambda *given: None), torch_optimizer
    with contextlib.ExitStack() as stack:
        if around == "profiler":
            stack.enter_context(torch.profiler.profile())
        elif around != "nothing":
            register = {
                "before": optimizer.register_step_pre_hook,
                "after": optimizer.register_step_post_hook,
                "before all": every.register_optimizer_step_pre_hook,
                "after all": every.register_optimizer_step_post_hook,
            }[around]
            stack.callback(register(hook).remove)
        assert internals.has_step_hooks(optimizer) == (around != "nothing")
    assert not internals.has_step_hooks(optimizer)


def test_a_failing_compiler_has_an_error_of_its_own():
    def fails(graph, inputs):
        raise ValueError("no compiler")

    with pytest.raises(internals.compiler_error()):
        torch.compile(lambda rows: rows.sin(), backend=fails)(torch.ones(2))  # torch counts compilations by function


@pytest.mark.skipif(not BACKWARD_PASS_AUTOCAST.present, reason=f"torch has no {BACKWARD_PASS_AUTOCAST}")
def test_backward_is_compiled_outside_autocast():
    with internals.backward_outside_autocast(), internals.backward_outside_autocast():  # a model that calls another
        assert torch._functorch.config.backward_pass_autocast == "off"
    assert torch._functorch.config.backward_pass_autocast != "off"


def test_graphs_are_compiled_without_the_cache():
    usual = torch._functorch.config.enable_autograd_cache
    with internals.without_graph_cache(), internals.without_graph_cache():
        assert torch._functorch.config.enable_autograd_cache is False
    assert torch._functorch.config.enable_autograd_cache == usual


def test_guards_on_tensors_are_kept():
    usual = torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags
    with internals.guards_on_tensors(), internals.guards_on_tensors():
        assert torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags is False
    assert torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags == usual


def test_the_flight_recorder_is_read_if_torch_has_one(monkeypatch):
    c10d = torch._C._distributed_c10d
    assert isinstance(internals.flight_records(), list)
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda: b'{"entries": [{"seq_id": 1}]}', raising=False)
    assert internals.flight_records() == [{"seq_id": 1}]
    monkeypatch.delattr(c10d, "_dump_fr_trace_json")
    assert internals.flight_records() == []


def test_kernels_are_found_at_their_keys():
    assert isinstance(ADD, internals.OpOverload)
    assert internals.operator_name(SOFTMAX) == "aten::softmax.int"
    assert "aten::mm" in internals.operators_registered_at("AutocastCPU")
    assert internals.has_any_kernel(ADD)
    assert internals.has_kernel(ADD, "CPU")
    assert not internals.has_kernel(SOFTMAX, "CPU")
    assert internals.has_computed_kernel(SOFTMAX, "CPU")
    assert internals.device_dispatch_key("cpu") == "CPU"


@pytest.mark.skipif(not GET_KERNEL.present, reason=f"torch has no {GET_KERNEL}")
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_a_library_covers_a_kernel_until_it_is_removed():
    one, keys = torch.ones(2), internals.dispatch_keyset("CPU")
    before = torch.library.get_kernel(ADD, "CPU")
    library = torch.library.Library("aten", "IMPL")
    library.impl(ADD, lambda *arguments, **options: before.call_boxed(keys, *arguments, **options) * 10, "CPU")
    internals.forget_python_dispatch(ADD, "CPU")
    assert (one + one).tolist() == [20, 20]
    internals.remove_library(library)
    internals.forget_python_dispatch(ADD, "CPU")
    assert (one + one).tolist() == [2, 2]


def test_a_kernel_reaches_what_it_covers_below_its_key():
    below, seen = internals.keyset_below("AutocastCPU"), []

    def kernel(keys, *arguments):
        seen.append(True)
        return torch.ops.aten.neg.default.redispatch(keys & below, *arguments)

    library = torch.library.Library("aten", "IMPL")
    library.impl(torch.ops.aten.neg.default, kernel, "AutocastCPU", with_keyset=True)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            assert (-torch.ones(1)).item() == -1
    finally:
        internals.remove_library(library)
    assert seen == [True]


def test_a_batch_is_flattened_and_put_together_again():
    batch = {"x": torch.ones(2), "rest": (1, [torch.zeros(1)])}
    leaves, structure = internals.pytree.tree_flatten(batch)
    assert leaves == [batch["x"], 1, batch["rest"][1][0]]
    assert internals.pytree.tree_unflatten(leaves, structure) == batch
    assert internals.pytree.tree_leaves(batch) == leaves


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_all_kinds_of_batchnorm_have_one_base(kind):
    assert isinstance(kind(3), internals.AnyBatchNorm)
    assert not isinstance(nn.LayerNorm(3), internals.AnyBatchNorm)


def test_torch_compile_stays_away_from_a_function_and_what_it_calls():
    compiled = []

    def inner(x):
        return x + 1

    def function(x):
        return inner(x) * 2

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    internals.never_compile(function)
    assert torch.compile(function, backend=backend)(torch.ones(1)) == 4
    assert not compiled


def test_a_compiled_module_names_the_module_it_was_made_of():
    module = nn.Linear(2, 2)
    assert internals.uncompiled(torch.compile(module, backend="eager")) is module
    assert internals.uncompiled(module) is module


def test_tensors_are_flattened_and_split_again():
    given = [torch.arange(6.0).reshape(2, 3).T, torch.tensor(7.0), torch.ones(2, 1, 2)]
    piece = internals.flatten(given)
    assert piece.tolist() == [0, 3, 1, 4, 2, 5, 7, 1, 1, 1, 1]
    assert [part.tolist() for part in internals.unflatten(piece, given)] == [tensor.tolist() for tensor in given]


def test_inductor_generates_code_for_the_host_and_not_for_a_device_without_storage():
    assert internals.inductor_generates_code("cpu")
    assert not internals.inductor_generates_code("meta")


def test_tensors_of_the_host_share_their_objects():
    assert internals.shares_tensor_objects(torch.device("cpu"))


def test_a_mode_sees_nothing_in_a_context_without_modes():
    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    ones = torch.ones(2)
    with Seeing():
        with internals.without_modes():
            ones.sin()
        ones.cos()
    assert seen == [torch.ops.aten.cos.default]


@pytest.fixture
def job_of_one():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_store_of_a_job_keeps_keys_of_two_prefixes_apart(job_of_one):
    assert internals.job_store("one").add("key", 2) == 2
    assert internals.job_store("one").add("key", 1) == 3
    assert internals.job_store("two").add("key", 1) == 1


def test_a_group_ends_while_one_of_its_threads_needs_pythons_lock(fork, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        """
import torch, torch.distributed as dist
from accelcore.torch_internals import unlocked_destruction

class Dropped:
    def __del__(self):
        print("dropped", flush=True)

def marked():
    tensor = torch.ones(1 << 20)
    tensor.mark = Dropped()
    return tensor

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(marked(), async_op=True)
with unlocked_destruction():
    dist.destroy_process_group()
print("ended")
"""
    )
    assert fork(script).finish(timeout=60).stdout.split() == ["dropped", "ended"]


@pytest.mark.parametrize("feature", [True, False])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_sharded_model_forgets_a_pass_that_raised(phase, feature, job_of_one, monkeypatch):
    if not feature:
        monkeypatch.delattr(FSDPModule, "reset_iter_state", raising=False)
    if RESET_ITER_STATE.present is not feature:
        pytest.skip(f"torch has no {RESET_ITER_STATE}")

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            if phase == "forward":
                raise MemoryError
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise MemoryError

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    oracle, rows = copy.deepcopy(model), torch.ones(2, 4)
    for part in (*model, model):
        fully_shard(part, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
    model(rows).sum().backward()
    model.zero_grad()
    fails = model[1].register_forward_hook(lambda module, given, output: Fails.apply(output))
    with pytest.raises(MemoryError):
        model(rows).sum().backward()
    fails.remove()
    internals.reset_sharded_model(model)
    for group in model.modules():
        if isinstance(group, FSDPModule):
            group.reshard()
    model.zero_grad()
    for each in (model, oracle):
        for _ in range(2):
            each(rows).square().sum().backward()
    for ours, expected in zip(model.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), expected.grad)


def test_an_optimizer_may_be_updated_without_its_step_before_its_scheduler_is_stepped(recwarn):
    for expected in (True, False):
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        if not expected:
            internals.expect_no_step(optimizer)
        scheduler.step()
        assert any("optimizer.step()" in str(warning.message) for warning in recwarn) == expected
        recwarn.clear()
