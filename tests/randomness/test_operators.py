from __future__ import annotations

import numpy
import pytest
import torch
from draws import CALLS, ELSEWHERE, drawing
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import accelcore
from accelcore.errors import ConfigurationError, UnsupportedError
from accelcore.torch_features import GET_KERNEL

pytestmark = pytest.mark.skipif(not GET_KERNEL.present, reason=f"refused: torch has no {GET_KERNEL}")


@pytest.fixture(autouse=True, scope="module")
def _own_again():
    state = torch.get_rng_state()
    yield
    accelcore.select("cpu").runtime.seed(3)
    torch.set_rng_state(state)


@pytest.fixture(autouse=True)
def _alike(accel):
    accel.runtime.seed(3, same="everywhere")


def uniform(seed, count):
    """The first uniform numbers of a seed, by NumPy's Mersenne Twister: 53 bits of two words each."""
    words = numpy.random.RandomState(seed).randint(0, 2**32, size=2 * count, dtype=numpy.uint32).astype(numpy.uint64)
    return torch.from_numpy((((words[::2] << 32) | words[1::2]) & (2**53 - 1)).astype(numpy.float64) / 2**53)


def tensors(result):
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def test_every_operator_that_draws_has_been_thought_of():
    known = CALLS.keys() | ELSEWHERE.keys()
    assert not set(drawing()) - known, "these draw, and nobody has said that they draw alike or are refused"
    # Of those that draw elsewhere, each version of torch has others.
    assert not CALLS.keys() - set(drawing()), "torch knows no such operators that draw"


@pytest.mark.parametrize("name", CALLS)
def test_a_seed_repeats_every_operator_and_nothing_else_does(name, accel):
    accel.runtime.seed(3, same="everywhere")
    first = tensors(CALLS[name]("cpu"))
    behind = torch.rand(3)
    second = tensors(CALLS[name]("cpu"))
    accel.runtime.seed(3, same="everywhere")
    assert all(map(torch.equal, tensors(CALLS[name]("cpu")), first))
    assert torch.equal(torch.rand(3), behind), "it drew another number of numbers"
    if "generator" not in name:  # which has a seed of its own here
        assert not all(map(torch.equal, second, first))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_numbers_are_those_of_the_mersenne_twister_in_any_dtype_and_layout(dtype, layout, accel):
    def empty():
        return torch.empty(2, 3, 4, 5, dtype=dtype).to(memory_format=layout)

    def drawn(draw):
        accel.runtime.seed(9, same="everywhere")
        return draw(empty()).flatten().double()

    numbers, digits = uniform(9, 120), 2 / torch.finfo(dtype).eps
    assert torch.equal(drawn(lambda it: it.bernoulli_(0.3)) > 0, numbers < 0.3)
    assert torch.equal(drawn(lambda it: torch.nn.functional.dropout(it.fill_(1), 0.3)) > 0, numbers < 0.7)
    assert torch.equal(drawn(torch.Tensor.uniform_), (numbers * digits).floor() / digits)
    exponential = drawn(lambda it: it.exponential_(2.0))
    assert torch.equal(exponential, (-(-numbers).log1p() / 2).to(dtype).double())
    # torch's method: cosines of the first half of each sixteen, sines of the same.
    pairs = uniform(9, 120)[:112].view(7, 2, 8)
    radius, angle = (-2 * (1 - pairs[:, 0]).log()).sqrt(), 2 * torch.pi * pairs[:, 1]
    expected = torch.stack((radius * angle.cos(), radius * angle.sin()), 1).flatten()[:104]
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(drawn(lambda it: it.normal_(1.0, 2.0))[:104], 1 + 2 * expected, rtol=eps, atol=8 * eps)


def test_uniform_numbers_stay_below_one():
    assert torch.rand(10000, dtype=torch.bfloat16).max() < 1


@pytest.mark.parametrize("call", [lambda it: it.bernoulli_(1.5), lambda it: it.exponential_(0.0),
                                  lambda it: torch.normal(it, -it.abs() - 1)])  # fmt: skip
def test_what_is_no_distribution_is_refused(call):
    with pytest.raises((ValueError, RuntimeError)):
        call(torch.zeros(3))


def test_a_generator_of_ones_own_is_drawn_from():
    own = torch.Generator().manual_seed(9)
    before = torch.get_rng_state()
    assert torch.equal(torch.rand(5, dtype=torch.float64, generator=own), uniform(9, 5))
    assert torch.equal(torch.get_rng_state(), before)


def test_rrelu_is_refused_in_training_and_computed_in_evaluation():
    assert torch.equal(torch.nn.functional.rrelu(-torch.ones(2), 0.25, 0.75), torch.full((2,), -0.5))
    with pytest.raises(UnsupportedError, match="draws random numbers of its own"):
        torch.nn.functional.rrelu(-torch.ones(2), training=True)


def test_a_fused_kernel_that_would_draw_is_refused_and_used_where_it_does_not():
    query = torch.ones(1, 1, 4, 8)
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    assert attend(query, query, query, 0.0)[0].shape == query.shape
    with pytest.raises(UnsupportedError, match="draws random numbers of its own"):
        attend(query, query, query, 0.5)


@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_attention_without_dropout_is_what_it_was_and_with_it_has_its_gradient(mask):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    given = {None: None, "bool": torch.ones(5, 5).tril().bool(), "float": torch.linspace(-1, 1, 25).view(5, 5).double()}
    attend = torch.nn.functional.scaled_dot_product_attention

    def seeded(*inputs):
        torch.manual_seed(2)
        return attend(*inputs, attn_mask=given[mask], dropout_p=0.4)

    scores = query @ key.transpose(-2, -1) / 8**0.5
    if mask is not None:
        scores = scores.masked_fill(~given[mask], -torch.inf) if mask == "bool" else scores + given[mask]
    weights = scores.softmax(-1)
    torch.testing.assert_close(attend(query, key, value, attn_mask=given[mask]), weights @ value)
    kept = (uniform(2, weights.numel()) < 0.6).double().view(weights.shape) / 0.6
    dropped, expected = seeded(query, key, value), (weights * kept) @ value
    torch.testing.assert_close(dropped, expected)
    gradients = [torch.autograd.grad(output.sin().sum(), (query, key, value)) for output in (dropped, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
@pytest.mark.parametrize("packed", [True, False])
def test_recurrent_layers_with_dropout_are_layers_with_dropout_between_them(kind, packed):
    options = {"bidirectional": True, "batch_first": not packed}
    whole = kind(3, 4, num_layers=2, dropout=0.5, **options)
    first, second = kind(3, 4, **options), kind(8, 4, **options)
    for layer, part in enumerate((first, second)):
        part.load_state_dict({name: getattr(whole, name.replace("l0", f"l{layer}")) for name in part.state_dict()})
    steps = torch.linspace(-1, 1, 30).view(5, 2, 3)
    pack = torch.nn.utils.rnn.pack_padded_sequence
    inputs = pack(steps, [5, 3]) if packed else steps
    torch.manual_seed(4)
    output, states = whole(inputs)
    torch.manual_seed(4)
    middle, states_1 = first(inputs)
    dropped = torch.dropout(middle.data if packed else middle, 0.5, True)
    expected, states_2 = second(middle._replace(data=dropped) if packed else dropped)
    torch.testing.assert_close(output.data, expected.data)
    for ended, *parts in zip(*map(tensors, (states, states_1, states_2)), strict=True):
        torch.testing.assert_close(ended, torch.cat(parts))


def test_a_kernel_in_python_that_was_replaced_still_computes_under_a_mode_of_the_dispatcher(accel):
    accel.runtime.seed(0)
    library = torch.library.Library("replaced", "FRAGMENT")
    library.define("shifted(Tensor x, float dropout) -> Tensor")
    library.impl("shifted", lambda x, dropout: x + 1, "AutogradCPU")
    accel.runtime.seed(0, same="everywhere")
    with FlopCounterMode(display=False):
        assert torch.ops.replaced.shifted(torch.ones(2), 0.0).tolist() == [2, 2]


def test_nothing_is_left_when_it_is_over(accel):
    def tables():
        return [torch._C._dispatch_dump_table(f"aten::{name}") for name in sorted(CALLS)]

    accel.runtime.seed(0)
    own = tables()
    accel.runtime.seed(0, same="everywhere")
    assert tables() != own
    accel.runtime.seed(0)
    assert tables() == own


def test_where_else_than_everywhere_is_a_mistake(accel):
    with pytest.raises(ConfigurationError, match="everywhere"):
        accel.runtime.seed(0, same="here")


@pytest.mark.parametrize("leave", ["seed", "reset"])
def test_kernels_that_are_replaced_meanwhile_stay_whole(accel, leave):
    """In either order: each calls the kernel that it has replaced."""
    queries = torch.ones(1, 2, 4, 8)
    accelcore.precision.reset()
    accel.runtime.seed(3, same="everywhere")
    with accel.autocast("bf16"):  # replaces attention
        pass
    if leave == "seed":
        accel.runtime.seed(3)
    else:
        accelcore.precision.reset()
        assert torch.equal(torch.rand(3, dtype=torch.float64), uniform(3, 3)), "the host still draws"
    found = torch.nn.functional.scaled_dot_product_attention(queries, queries, queries)
    torch.testing.assert_close(found, queries)
