"""Conformance of the strategies: two ranks train one model."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from accelcore import Backend
from accelcore.devices import SHARDED
from accelcore.testing.support.declared import DIVIDING, STRATEGIES
from accelcore.testing.support.job import two_ranks
from accelcore.testing.support.oracles import buffers, error, evaluated
from accelcore.testing.support.ranks import STEPS, VARIANTS, Partly, share, uses, variants_of
from accelcore.testing.support.usable import DeviceTests


@cache
def by_hand(accumulate: int) -> nn.Module:
    """Train two ranks in one process, in float64, and return the model of rank 0.

    Gradients are averaged by hand, and stay None if neither rank has one. Buffers are from rank 0.
    """
    models = [Partly(seed=0).double() for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.5) for model in models]
    shares = [share(rank) for rank in range(2)]
    for start in range(0, STEPS, accumulate):
        window = range(start, min(start + accumulate, STEPS))
        for rank, model in enumerate(models):
            for number in window:
                rows, classes = shares[rank][number]
                loss = cross_entropy(model(rows.double(), uses(rank, number)), classes) / len(window)
                loss.backward()
        for pair in zip(*(model.parameters() for model in models), strict=True):
            gradients = [parameter.grad for parameter in pair if parameter.grad is not None]
            for parameter in pair:
                parameter.grad = torch.stack(gradients).sum(0) / 2 if gradients else None
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for source, copy in zip(*(model.buffers() for model in models), strict=True):
            copy.copy_(source)
    return models[0]


def found_by(accel: Backend, strategy: str, variant: str) -> list[dict[str, Any]]:
    """Return what both ranks have after their training."""
    if strategy not in accel.capabilities.parallel or not accel.capabilities.process_groups:
        pytest.skip(f"not declared: parallel={strategy!r}; another test sees that it is refused")
    if variant not in variants_of(strategy):
        pytest.skip(f"no variant of parallel={strategy!r}: shards do not lie flat")
    return [rank[variant] for rank in two_ranks(accel, strategy)]


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
class TestParallel(DeviceTests):
    """Every strategy that is declared, on two ranks whose models start apart, and which use other layers."""

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_two_ranks_train_one_model(self, accel: Backend, strategy: str, variant: str) -> None:
        """Both ranks end with the weights of one process that averages their gradients. None is not zero."""
        first, second = found_by(accel, strategy, variant)
        assert first["weights"] == second["weights"], "the ranks trained apart"
        accumulate = VARIANTS[variant].get("accumulate", 1)
        reference = by_hand(accumulate)
        for name, parameter in reference.named_parameters():
            found = torch.tensor(first["weights"][name])
            assert error(found, parameter) < 1e-3, f"{name} is another one than by hand"
        assert first["steps"] == -(-STEPS // accumulate)

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_buffers_are_one(self, accel: Backend, strategy: str, variant: str) -> None:
        """At the end of a window all ranks have the buffers of rank 0, and evaluate one model."""
        first, second = found_by(accel, strategy, variant)
        assert first["buffers"] == second["buffers"], "the ranks' buffers are apart"
        assert first["evaluated"] == second["evaluated"], "the ranks evaluate two models"
        reference = by_hand(VARIANTS[variant].get("accumulate", 1))
        for name, value in buffers(reference).items():
            assert error(torch.tensor(first["buffers"][name]), value) < 1e-3, f"the buffer {name} is another one"
        assert error(torch.tensor(first["evaluated"]), evaluated(reference, torch.device("cpu"))) < 1e-3

    def test_a_rank_holds_its_share(self, accel: Backend, strategy: str) -> None:
        """A strategy that divides the model leaves each rank about half of it; any other, all."""
        held = [rank["elements"] for rank in found_by(accel, strategy, "plain")]
        whole = sum(parameter.numel() for parameter in Partly(seed=0).parameters())
        if strategy in SHARDED:
            assert sum(held) == whole, f"of {whole} elements the ranks hold {held}"
            assert max(held) < 0.75 * whole, "a rank holds nearly the whole model"
        else:
            assert held == [whole, whole]

    def test_a_rank_holds_its_share_of_the_moments(self, accel: Backend, strategy: str) -> None:
        """A strategy that divides the model or the optimizer's state leaves each rank about half of it."""
        held = [rank["moments"] for rank in found_by(accel, strategy, "plain")]
        model = Partly(seed=0)
        model.never.requires_grad_(False)
        whole = 2 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        if strategy in DIVIDING:
            assert sum(held) == whole, f"of {whole} elements of moments the ranks hold {held}"
            assert max(held) < 0.75 * whole, "a rank holds nearly all of the optimizer's state"
        else:
            assert held == [whole, whole]

    def test_gradients_stay_on_their_rank_within_a_window(self, accel: Backend, strategy: str) -> None:
        """Ranks exchange no gradients before the last micro-batch of a window, except those of shards."""
        if strategy in SHARDED:
            pytest.skip("gradients of shards are reduced in every backward pass")
        left, right = (rank["gradients"] for rank in found_by(accel, strategy, "accumulated"))
        within = range(0, STEPS, 2)
        assert all(left[number] != right[number] for number in within), "gradients were exchanged within a window"
