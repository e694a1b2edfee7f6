"""Random numbers follow the state of the device's generator, and nothing else does."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_npu")

pytestmark = [
    pytest.mark.usefixtures("emulated_npu"),
    # torch_npu says this of every `empty_like(tensor, memory_format=torch.contiguous_format)`.
    pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format"),
]

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


def test_normal_draws_are_normal():
    draws = torch.empty(20000, device="npu").normal_(3.0, 2.0)
    assert abs(draws.mean().item() - 3) < 0.1
    assert abs(draws.std().item() - 2) < 0.1
