"""Conformance of random numbers: their statistics, independence, and the state of their generator."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from accelcore import Backend
from accelcore.testing.suite.distributions import DistributionTests
from accelcore.testing.suite.whole_draws import WholeDrawTests
from accelcore.testing.support.declared import refused
from accelcore.testing.support.statistics import COUNT, SIGMAS, SIGMAS_OF_ANY, correlation, is_off, largest_correlation
from accelcore.util.text import first_line

_FINE = ("rand", "randn", "normal_", "uniform_", "exponential_")  # draws of fractions
_MOST_AGAIN = 2700  # of two calls: of 23 bits some 2,400 come again by chance, of 24 bits 1,200


def _ones(accel: Backend, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(COUNT, device=accel.device, dtype=dtype)


_DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda ones: torch.rand(len(ones), device=ones.device, dtype=ones.dtype),
    "randn": lambda ones: torch.randn(len(ones), device=ones.device, dtype=ones.dtype),
    "normal_": lambda ones: ones.normal_(),
    "uniform_": lambda ones: ones.uniform_(-1, 1),
    "bernoulli": lambda ones: torch.bernoulli(ones * 0.3),
    "bernoulli_": lambda ones: ones.bernoulli_(0.3),
    "dropout": lambda ones: functional.dropout(ones, 0.5),
    "randint": lambda ones: torch.randint(0, 100, (len(ones),), device=ones.device),
    "randperm": lambda ones: torch.randperm(len(ones), device=ones.device),
    "multinomial": lambda ones: torch.multinomial(ones[:50], len(ones), replacement=True),
    "exponential_": lambda ones: ones.exponential_(),
}
"""Draws by name, in the device and dtype of a vector of ones, which they may overwrite."""
_BY_PARAMETERS: dict[str, Callable[[Tensor], Tensor]] = {  # which a device may refuse
    "bernoulli_ of whole numbers": lambda ones: ones.int().bernoulli_(0.3),
    "bernoulli of 1 in 172": lambda ones: torch.bernoulli(ones / 172),  # no part of 256
    # Low precision has digits for the small chance where it comes first, and not where chances add up to nearly 1.
    "1 in 172 of multinomial": lambda ones: 1 - ones[:2].div(171).cumprod(0).flip(0).multinomial(len(ones), True),
    "randn of complex numbers": lambda ones: torch.view_as_real(
        torch.randn_like(ones, dtype=torch.complex64)
    ).flatten(),
    "randint of 8 bits": lambda ones: torch.randint(-50, 50, (len(ones),), device=ones.device, dtype=torch.int8),
    "randint of 40 bits": lambda ones: torch.randint(0, 2**40, (len(ones),), device=ones.device),
    "the last bits of randint": lambda ones: torch.randint(0, 2**40, (len(ones),), device=ones.device) % 4,
}

_MOMENTS = {  # mean, variance, and the fourth central moment over the square of the variance
    "rand": (1 / 2, 1 / 12, 1.8),
    **dict.fromkeys(("randn", "normal_"), (0.0, 1.0, 3.0)),
    "uniform_": (0.0, 1 / 3, 1.8),
    **{f"bernoulli{kind}": (0.3, 0.21, 1.8) for kind in ("", "_", "_ of whole numbers")},
    "dropout": (1.0, 1.0, 1.1),
    "randint": (49.5, 9999 / 12, 1.8),
    "multinomial": (24.5, 2499 / 12, 1.8),
    "exponential_": (1.0, 1.0, 18.0),  # twice its own, because the tail of its squares is long
    **dict.fromkeys(("bernoulli of 1 in 172", "1 in 172 of multinomial"), (1 / 172, 171 / 172**2, 175.0)),
    "randn of complex numbers": (0.0, 1 / 2, 3.0),
    "randint of 8 bits": (-0.5, 9999 / 12, 1.8),
    "randint of 40 bits": ((2**40 - 1) / 2, (2**80 - 1) / 12, 1.8),
    "the last bits of randint": (1.5, 1.25, 1.8),
}
_IN_DTYPES = [draw for draw in _MOMENTS if not any(word in draw for word in ("randint", "whole", "complex"))]
_ENDS = {"rand": (0, 1), "uniform_": (-1, 1)}

_WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    **{draw: _DRAWS[draw] for draw in ("normal_", "uniform_", "bernoulli_", "exponential_")},
    "dropout": lambda view: functional.dropout(view.fill_(1.0), 0.5, inplace=True),
}
"""Draws that write into a tensor."""

_BY_GENERATOR: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "rand": lambda ones, own: torch.rand(len(ones), device=ones.device, generator=own),
    "randn": lambda ones, own: torch.randn(len(ones), device=ones.device, generator=own),
    "randint": lambda ones, own: torch.randint(0, 100, (len(ones),), device=ones.device, generator=own),
    "randperm": lambda ones, own: torch.randperm(len(ones), device=ones.device, generator=own),
    "bernoulli": lambda ones, own: torch.bernoulli(ones * 0.3, generator=own),
    "multinomial": lambda ones, own: torch.multinomial(ones[:50], len(ones), replacement=True, generator=own),
    "normal": lambda ones, own: torch.normal(ones, ones, generator=own),
    "normal_": lambda ones, own: ones.normal_(generator=own),
    "uniform_": lambda ones, own: ones.uniform_(generator=own),
    "bernoulli_": lambda ones, own: ones.bernoulli_(0.3, generator=own),
    "bernoulli_ by a tensor": lambda ones, own: ones.bernoulli_(ones * 0.3, generator=own),
    "exponential_": lambda ones, own: ones.exponential_(generator=own),
    "random_": lambda ones, own: ones.random_(0, 100, generator=own),
    "trunc_normal_": lambda ones, own: nn.init.trunc_normal_(ones, generator=own),
}
"""Draws by a generator that is given."""

_of_draws = pytest.mark.parametrize("draw", _DRAWS)


def _draw(accel: Backend, draw: str) -> Tensor:
    return _DRAWS[draw](_ones(accel))


def _drawn(accel: Backend, draw: str, dtype: torch.dtype = torch.float32) -> Tensor:
    if draw in _DRAWS:
        return _DRAWS[draw](_ones(accel, dtype)).detach().cpu().double()
    try:
        return _BY_PARAMETERS[draw](_ones(accel, dtype)).detach().cpu().double()
    except (NotImplementedError, RuntimeError) as error:
        refused(f"{draw}: {first_line(error)}")


def _check_moments(draw: str, drawn: Tensor, rounding: float = 0.0) -> None:
    """Compare mean and variance with the distribution's, which may differ by `rounding` of the draw's parameters."""
    (mean, variance, fourth), count = _MOMENTS[draw], len(drawn)
    found, spread = float(drawn.mean()), float(((drawn - mean) ** 2).mean())
    deviation = SIGMAS * math.sqrt(variance / count) + rounding * max(1.0, abs(mean))
    assert abs(found - mean) <= deviation, f"{draw} has mean {found:.4f}, not {mean:.4f}"
    deviation = SIGMAS * variance * math.sqrt((fourth - 1) / count) + 4 * rounding * variance
    assert abs(spread - variance) <= deviation, f"{draw} has variance {spread:.4f}, not {variance:.4f}"


class DrawnTests(DistributionTests, WholeDrawTests):
    """Random numbers of the device."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("rate", [0.002, 0.1, 0.5, 0.9])
    def test_dropout(self, accel: Backend, rate: float, dtype: torch.dtype) -> None:
        """Dropout keeps the declared share, rescales what it keeps, and gives gradients by the same mask."""
        if str(dtype).removeprefix("torch.") not in accel.capabilities.model_dtypes:
            pytest.skip(f"not declared: models in {dtype}")
        accel.runtime.seed(11)
        for drop in (lambda x: functional.dropout(x, rate), nn.Dropout(rate), nn.AlphaDropout(rate)):
            leaf = torch.full((COUNT,), 2.0, device=accel.device, dtype=dtype, requires_grad=True)
            output = drop(leaf)
            output.sum().backward()
            assert leaf.grad is not None
            if isinstance(drop, nn.AlphaDropout):
                continue
            values, gradient = output.detach().cpu().double(), leaf.grad.cpu().double()
            kept = values != 0
            assert not is_off(float(kept.double().mean()), 1 - rate, math.sqrt(rate * (1 - rate) / COUNT)), (
                f"dropout at {rate} keeps {float(kept.double().mean()):.4f}"
            )
            scale = 1 / (1 - rate)
            eps = 2 * torch.finfo(dtype).eps
            assert torch.allclose(values[kept], torch.tensor(2 * scale).double(), rtol=eps), (
                f"dropout at {rate} makes {float(values[kept][0]):.4f} of 2 instead of {2 * scale:.4f}"
            )
            assert torch.equal(gradient != 0, kept), "the gradient of dropout has another mask"
            assert torch.allclose(gradient[kept], torch.tensor(scale).double(), rtol=eps), "it has another scale"
        ones = torch.ones(4, 6, 10, 5, device=accel.device, dtype=dtype)
        for leaf in (ones.permute(3, 1, 0, 2), ones.permute(0, 3, 1, 2), ones[:, ::2]):
            leaf = leaf.detach().requires_grad_()
            output = functional.dropout(leaf, rate)
            (found,) = torch.autograd.grad(output.sum(), leaf)
            assert torch.equal(found.cpu() != 0, output.cpu() != 0), "in other strides its gradient has another mask"

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("draw", _IN_DTYPES)
    def test_draws_in_other_dtypes(self, accel: Backend, draw: str, dtype: torch.dtype) -> None:
        """Numbers have mean and variance by the draw's parameters, and bounds and digits of their dtype."""
        if str(dtype).removeprefix("torch.") not in accel.capabilities.model_dtypes:
            pytest.skip(f"not declared: models in {dtype}")
        accel.runtime.seed(24)
        drawn, (least, end) = _drawn(accel, draw, dtype), _ENDS.get(draw, (-math.inf, math.inf))
        _check_moments(draw, drawn, torch.finfo(dtype).eps)
        assert float(drawn.min()) >= least, f"{draw} drew {float(drawn.min())}"
        assert float(drawn.max()) < end, f"{draw} in {dtype} drew the upper end"
        if dtype == torch.float64 and draw in _FINE:
            assert bool((drawn * 2**26 % 1 != 0).any()), f"{draw} in float64 has the digits of fp32"

    def test_few_numbers(self, accel: Backend) -> None:
        """Draws of few numbers continue one sequence, and short permutations are even."""
        accel.runtime.seed(25)
        for draw in (torch.rand, torch.randn):
            for count in (1, 3):
                firsts = torch.stack([draw(count, device=accel.device)[0] for _ in range(64)])
                assert len(set(firsts.tolist())) > 60, f"{draw.__name__}({count}) draws the same numbers again"
            ends = [draw(count, device=accel.device)[-2:].tolist() for count in range(2, 66)]
            assert len({number for pair in ends for number in pair}) > 120, f"{draw.__name__} repeats its last numbers"
        for count, orders in ((2, 2), (3, 6)):
            drawn = torch.stack([torch.randperm(count, device=accel.device) for _ in range(600)]).cpu()
            counts = torch.unique(drawn, dim=0, return_counts=True)[1].tolist()
            share = 1 / orders
            deviation = math.sqrt(600 * share * (1 - share))
            even = len(counts) == orders and not any(is_off(found, 600 * share, deviation) for found in counts)
            assert even, f"of 600 permutations of {count} each order came {counts} times"

    def test_dropout_at_the_ends(self, accel: Backend) -> None:
        """Dropout keeps everything at 0 and in evaluation, and nothing at 1; by channel it drops whole channels."""
        ones = _ones(accel)
        assert torch.equal(functional.dropout(ones, 0.0).cpu(), ones.cpu()), "dropout at 0 changes something"
        assert torch.equal(nn.Dropout(0.5).eval()(ones).cpu(), ones.cpu()), "dropout in evaluation changes something"
        assert not bool(functional.dropout(ones, 1.0).cpu().any()), "dropout at 1 keeps something"
        image = functional.dropout2d(ones[:100_000].reshape(-1, 50, 2, 2), 0.5).cpu().flatten(2)
        assert torch.equal(image.amin(2), image.amax(2)), "dropout2d drops parts of a channel"
        assert set(image.flatten().tolist()) == {0.0, 2.0}, "dropout2d does not rescale what it keeps"
        held = ones.clone()
        returned = functional.dropout(held, 0.5, inplace=True)
        assert returned.data_ptr() == held.data_ptr(), "dropout in place returns another tensor"
        assert not torch.equal(held.cpu(), ones.cpu()), "dropout in place did not write"

    @pytest.mark.parametrize("draw", _MOMENTS)
    def test_moments(self, accel: Backend, draw: str) -> None:
        """Mean and variance of what is drawn are those of the distribution, also in each half and every other one."""
        accel.runtime.seed(12)
        drawn = _drawn(accel, draw)
        for part in (slice(None), slice(COUNT // 2), slice(COUNT // 2, None), slice(0, None, 2), slice(1, None, 2)):
            _check_moments(draw, drawn[part])

    def test_normal_tails(self, accel: Backend) -> None:
        """A normal distribution has its tails and is symmetric."""
        accel.runtime.seed(13)
        drawn = torch.cat([_drawn(accel, "randn") for _ in range(30)])
        for bound in (0.5, 1.0, 2.0, 3.0, 4.0):
            share = math.erfc(bound / math.sqrt(2)) / 2
            deviation = 1.25 * math.sqrt(share / len(drawn))  # rare events are not normal
            for found in (float((drawn > bound).double().mean()), float((drawn < -bound).double().mean())):
                assert not is_off(found, share, deviation), f"{found:.5f} are beyond {bound}, not {share:.5f}"

    def test_uniform_is_half_open(self, accel: Backend) -> None:
        """Uniform numbers fill the interval evenly: the lower end may be drawn, the upper may not."""
        accel.runtime.seed(14)
        drawn = _drawn(accel, "rand")
        assert 0 <= float(drawn.min()) < 1e-3, "the lower end is not reached"
        assert 1 - 1e-3 < float(drawn.max()) < 1, "the upper end is not reached, or drawn"
        for count in torch.histc(drawn, 16, 0, 1).tolist():
            assert not is_off(count, COUNT / 16, math.sqrt(COUNT / 16)), "the numbers are not even"

    @_of_draws
    def test_independence(self, accel: Backend, draw: str) -> None:
        """Two calls, parts of one call, and two seeds give numbers that have nothing to do with each other."""
        accel.runtime.seed(16)
        first, second = _drawn(accel, draw), _drawn(accel, draw)
        accel.runtime.seed(17)
        third = _drawn(accel, draw)
        host = torch.rand(COUNT, generator=torch.Generator().manual_seed(17)).double()
        pairs = {"two calls": (first, second), "two seeds": (first, third), "two seeds ": (second, third)}
        for what, (one, other) in pairs.items():
            assert not torch.equal(one, other), f"{draw}: {what.strip()} give the same numbers"
            assert largest_correlation(one, other) < SIGMAS_OF_ANY, f"{draw}: {what.strip()} are correlated"
        assert largest_correlation(first, first) < SIGMAS_OF_ANY, f"{draw}: parts of one call are correlated"
        again = 2 * COUNT - len(torch.unique(torch.cat([first, second])))
        assert draw not in _FINE or again < _MOST_AGAIN, f"{draw}: in two calls {again} numbers come again"
        if accel.device.type != "cpu":  # the host is seeded alike, and must not draw the same
            assert not torch.equal(third, host), f"{draw}: the device draws the host's numbers"

    @pytest.mark.parametrize("draw", _WRITTEN)
    def test_shapes_and_views(self, accel: Backend, draw: str) -> None:
        """Rows, columns and channels differ; a draw into a view with gaps fills the view, and nothing else."""
        accel.runtime.seed(26)
        memory = torch.full((101, 12, 2 * 83), 7.0, device=accel.device)
        for view in (memory[..., 1::2].transpose(0, 2), memory[..., ::2].contiguous()):
            drawn = _WRITTEN[draw](view).cpu().double()
            mean, variance, _ = _MOMENTS[draw]
            deviation = math.sqrt(variance / drawn.numel())
            assert not is_off(float(drawn.mean()), mean, deviation), f"{draw} has another mean in these strides"
            for dimension in range(3):
                one, other = (drawn.narrow(dimension, start, drawn.shape[dimension] - 1).flatten() for start in (0, 1))
                assert abs(correlation(one, other)) < SIGMAS, f"{draw}: neighbours along {dimension} are correlated"
        assert bool((memory[..., ::2] == 7).all()), f"{draw} wrote beside a view"

    @pytest.mark.parametrize("draw", ["rand", "randn", "dropout", "bernoulli_"])
    def test_large_draws(self, accel: Backend, draw: str) -> None:
        """In a large tensor no part repeats another, however far it is away."""
        accel.runtime.seed(21)
        count = 2**20 + 2**17
        empty = torch.empty(count, device=accel.device)
        drawn = {
            "rand": lambda: torch.rand(count, device=accel.device),
            "randn": lambda: torch.randn(count, device=accel.device),
            "dropout": lambda: functional.dropout(torch.ones_like(empty), 0.5),
            "bernoulli_": lambda: empty.bernoulli_(0.5),
        }[draw]().cpu()
        for shift in (2**power for power in range(13, 21)):
            found = correlation(drawn[shift:].double(), drawn[:-shift].double())
            assert abs(found) < SIGMAS, f"{draw}: elements {shift} apart are correlated"

    @_of_draws
    def test_state_at_any_point(self, accel: Backend, draw: str) -> None:
        """A state that was taken after odd numbers of draws, and put back, repeats what followed."""
        accel.runtime.seed(18)
        for count in (1, 3, 7):
            torch.rand(count, device=accel.device)
            torch.randn(count, device=accel.device)
            state = accel.runtime.rng_state()
            # Few normal numbers first: a generator that makes them in pairs has kept one.
            expected = [torch.randn(3, device=accel.device).cpu(), *(_draw(accel, draw)[:999].cpu() for _ in range(2))]
            later = accel.runtime.rng_state()
            assert any(not torch.equal(later[name], state[name]) for name in state), "drawing does not change the state"
            _draw(accel, draw)
            assert accel.runtime.set_rng_state(state) == []
            again = [torch.randn(3, device=accel.device).cpu(), *(_draw(accel, draw)[:999].cpu() for _ in range(2))]
            assert all(map(torch.equal, again, expected)), f"{draw}: a state that was put back gives other numbers"

    @_of_draws
    def test_draws_in_threads(self, accel: Backend, draw: str) -> None:
        """Another thread draws from the generator that `seed` and a state set, and this one continues behind it."""
        accel.runtime.seed(27)
        state = accel.runtime.rng_state()
        expected = [_draw(accel, draw).cpu() for _ in range(2)]
        for begin in (lambda: accel.runtime.seed(27), lambda: accel.runtime.set_rng_state(state)):
            begin()
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(lambda: _draw(accel, draw).cpu()).result()
            assert torch.equal(found, expected[0]), f"{draw}: another thread draws other numbers after the same seed"
            assert torch.equal(_draw(accel, draw).cpu(), expected[1]), f"{draw}: what a thread drew is drawn again"

    @pytest.mark.parametrize("draw", _BY_GENERATOR)
    def test_own_generator(self, accel: Backend, draw: str) -> None:
        """A generator that is given draws its own numbers, repeats them by its seed, and leaves the device's alone."""
        generator = torch.Generator(accel.device)

        def drawn() -> Tensor:
            return _BY_GENERATOR[draw](_ones(accel), generator).cpu()

        accel.runtime.seed(22)
        expected = torch.rand(8, device=accel.device).cpu()
        accel.runtime.seed(22)
        generator.manual_seed(23)
        first, second = (drawn() for _ in range(2))
        assert not torch.equal(first, second), f"{draw}: two calls with a generator give the same numbers"
        assert torch.equal(torch.rand(8, device=accel.device).cpu(), expected), f"{draw}: it draws other numbers, too"
        generator.manual_seed(23)
        assert torch.equal(drawn(), first), f"{draw}: with its seed, a generator draws other numbers"
        state = generator.get_state()
        following = drawn()
        generator.set_state(state)
        for found in (following, drawn()):
            assert torch.equal(found, second), f"{draw}: a generator does not go on by its state"

    def test_modules_draw_anew(self, accel: Backend) -> None:
        """A module in training draws another mask in each step, a copy of it too; initial weights differ by layer."""
        accel.runtime.seed(19)
        drop: Any = nn.Dropout(0.5)
        masks = [(drop(_ones(accel)) != 0).cpu() for _ in range(3)]
        assert not any(torch.equal(masks[one], masks[two]) for one, two in ((0, 1), (1, 2), (0, 2))), (
            "dropout has the same mask in each call"
        )
        shared = _ones(accel)[:500].div(2).expand(64, 500)  # in memory that all rows share
        for draw in (functional.dropout, torch.rand_like, torch.randn_like, torch.bernoulli):
            for drawn in (draw(shared), draw(shared.t()).t()):
                rows = len(torch.unique(drawn.cpu(), dim=0))
                assert rows == 64, f"of 64 rows of expanded memory {draw.__name__} draws only {rows} others"
        one, two = (nn.Linear(50, 50, device=accel.device) for _ in range(2))
        assert not torch.equal(one.weight.cpu(), two.weight.cpu()), "two layers begin with the same weights"
