"""Random numbers follow the state of the device's generator, and nothing else does."""

import pytest

torch = pytest.importorskip("torch")
torch_npu = pytest.importorskip("torch_npu")

pytestmark = [
    pytest.mark.usefixtures("emulated_npu"),
    # torch_npu says this of every `empty_like(tensor, memory_format=torch.contiguous_format)`.
    pytest.mark.filterwarnings("ignore:Cannot create tensor with intern?al format"),
]

# Until torch_npu 2.13, the generators of a captured graph have to be registered by the script.
REGISTERS_GENERATORS = tuple(map(int, torch_npu.__version__.split(".")[:2])) >= (2, 13)

DRAWS = {
    "rand": lambda: torch.rand(9, device="npu"),
    "randn": lambda: torch.randn(9, device="npu"),
    "randint": lambda: torch.randint(0, 1000, (9,), device="npu"),
    "randperm": lambda: torch.randperm(50, device="npu"),
    "normal_": lambda: torch.empty(9, device="npu").normal_(3, 2),
    "uniform_": lambda: torch.empty(9, device="npu").uniform_(-1, 1),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5, device="npu")),
    "multinomial": lambda: torch.multinomial(torch.ones(50, device="npu"), 9),
    "exponential_": lambda: torch.empty(9, device="npu").exponential_(),
    "rand_like": lambda: torch.rand_like(torch.ones(9, device="npu")),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(64, device="npu")),
    "alpha_dropout": lambda: torch.nn.functional.alpha_dropout(torch.ones(64, device="npu"), training=True),
    "dropout2d": lambda: torch.nn.functional.dropout2d(torch.ones(8, 8, 2, 2, device="npu")),
    "rrelu": lambda: torch.nn.functional.rrelu(-torch.ones(9, device="npu"), training=True),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_a_restored_state_replays_the_draw(draw):
    torch.npu.manual_seed(11)
    state = torch.npu.get_rng_state()
    first, second = DRAWS[draw]().cpu(), DRAWS[draw]().cpu()
    torch.npu.set_rng_state(state)
    assert torch.equal(DRAWS[draw]().cpu(), first)
    assert torch.equal(DRAWS[draw]().cpu(), second)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("draw", DRAWS)
def test_the_generator_of_the_host_is_left_alone(draw):
    before = torch.get_rng_state()
    DRAWS[draw]()
    assert torch.equal(torch.get_rng_state(), before)


def test_manual_seed_seeds_the_device():
    torch.manual_seed(3)
    first = torch.rand(4, device="npu")
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4, device="npu").cpu(), first.cpu())
    torch.manual_seed(4)
    assert not torch.equal(torch.rand(4, device="npu").cpu(), first.cpu())


def test_a_generator_of_ones_own():
    own = torch.Generator("npu").manual_seed(7)
    before = torch.npu.get_rng_state()
    first = torch.randn(4, generator=own, device="npu")
    assert torch.equal(torch.npu.get_rng_state(), before)
    assert not torch.equal(torch.randn(4, generator=own, device="npu").cpu(), first.cpu())
    own.manual_seed(7)
    assert torch.equal(torch.randn(4, generator=own, device="npu").cpu(), first.cpu())


def test_devices_draw_independently():
    torch.npu.manual_seed_all(5)
    other = torch.npu.get_rng_state(1)
    torch.rand(4, device="npu:0")
    assert torch.equal(torch.npu.get_rng_state(1), other)


def test_dropout_has_the_mask_of_its_gradient():
    ones = torch.ones(4096, device="npu", requires_grad=True)
    dropped = torch.nn.functional.dropout(ones, 0.25)
    dropped.sum().backward()
    assert torch.equal(dropped.detach().cpu(), ones.grad.cpu())
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(dropped.mean().item() - 1) < 0.05


def test_checkpointing_replays_dropout():
    from torch.utils.checkpoint import checkpoint

    ones = torch.ones(512, device="npu", requires_grad=True)
    kept = checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5), ones, use_reentrant=False)
    kept.sum().backward()
    assert torch.equal(kept.detach().cpu(), ones.grad.cpu())


def test_the_numbers_of_the_host_are_not_the_devices():
    torch.manual_seed(0)
    host, device = torch.randn(8), torch.randn(8, device="npu")
    assert not torch.isin(host, device.cpu()).any()


def test_a_draw_advances_the_generator_as_torch_npu_says():
    generator = torch.Generator("npu").manual_seed(7)
    torch.rand(3, device="npu", generator=generator)
    assert generator.get_offset() == 12  # ten, to the next multiple of four
    generator.set_offset(0)
    again = torch.rand(3, device="npu", generator=generator)
    generator.manual_seed(7)
    assert torch.equal(torch.rand(3, device="npu", generator=generator), again)


@pytest.mark.parametrize("draw", ["rand", "normal_", "dropout", "bernoulli"])
def test_a_graph_draws_by_the_state_of_the_generator(draw):
    def numbers():
        return DRAWS[draw]()

    numbers()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        state = torch.npu.get_rng_state()
        first = numbers()
        torch.npu.set_rng_state(state)
        repeated, second = numbers(), numbers()
    torch.npu.manual_seed(3)
    eager = [numbers() for _ in range(2)]
    following = torch.npu.get_rng_state()
    torch.npu.manual_seed(3)
    graph.replay()
    for captured, expected in ((first, eager[0]), (repeated, eager[0]), (second, eager[1])):
        assert torch.equal(captured, expected)
    assert torch.equal(torch.npu.get_rng_state(), following)
    before = first.clone()
    graph.replay()
    assert not torch.equal(first, before)


def test_a_graph_that_draws_from_an_unregistered_generator_works_or_says_so(capfd):
    own = torch.Generator("npu").manual_seed(5)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        torch.rand(8, device="npu", generator=own)
    if REGISTERS_GENERATORS:
        graph.replay()
        assert own.get_offset() > 0
    else:
        with pytest.raises(RuntimeError):
            graph.replay()
        assert "EMULATED" in (told := capfd.readouterr().err)
        assert "register_generator_state" in told


@pytest.mark.parametrize(
    "registered",
    [
        pytest.param(
            False,
            marks=pytest.mark.skipif(not REGISTERS_GENERATORS, reason="captures do not register generators"),
        ),
        True,
    ],
    ids=["unregistered", "registered"],
)
def test_a_graph_draws_from_a_generator_of_ones_own(registered):
    own = torch.Generator("npu").manual_seed(5)
    graph = torch.npu.NPUGraph()
    if registered:
        graph.register_generator_state(own)
    with torch.npu.graph(graph):
        first = torch.rand(8, device="npu", generator=own)
        default = torch.rand(8, device="npu")
        second = torch.rand(8, device="npu", generator=own)
    assert own.get_offset() == 0
    own.manual_seed(6)
    replayed = []
    for _ in range(2):
        graph.replay()
        replayed += [first.tolist(), second.tolist()]
        assert default.tolist() not in replayed
    own.manual_seed(6)
    assert replayed == [torch.rand(8, device="npu", generator=own).tolist() for _ in range(4)]


def test_attention_in_a_graph_drops_anew_at_each_replay():
    query = torch.ones(1, 1, 64, 64, device="npu")
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out = torch.nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    graph.replay()
    before = out.clone()
    graph.replay()
    assert not torch.equal(out, before)


def test_checkpointing_in_a_graph_replays_dropout():
    from torch.utils.checkpoint import checkpoint

    ones = torch.ones(512, device="npu", requires_grad=True)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        kept = checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5), ones, use_reentrant=False)
        (gradient,) = torch.autograd.grad(kept.sum(), ones)
    for _ in range(2):
        graph.replay()
        assert torch.equal(kept.detach(), gradient)
        assert 100 < (kept == 0).sum().item() < 400
