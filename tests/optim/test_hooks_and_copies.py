"""An optimizer by name has the hooks of torch's, and refuses to be copied."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import accelcore


@pytest.mark.parametrize("bound", [False, True])
def test_hooks_of_its_state_are_called_as_torch_calls_them(accel, bound):
    def seen_by(create):
        model = nn.Linear(3, 2)
        optimizer = create(model.parameters())
        if bound:
            accel.trainer(model, optimizer, loss=lambda m, b: m(b).sum())
        seen = []

        def note(what, result=None):
            def hook(of, *given):
                seen.append((what, of is optimizer, [sorted(each) for each in given], of.param_groups[0]["lr"]))
                return result and result(*given)

            return hook

        def with_rate(state):
            return {**state, "param_groups": [{**group, "lr": 0.7} for group in state["param_groups"]]}

        optimizer.register_state_dict_pre_hook(note("before saving"))
        optimizer.register_state_dict_post_hook(note("after saving", lambda state: {**state, "more": 1}))
        optimizer.register_load_state_dict_pre_hook(note("second", with_rate))
        optimizer.register_load_state_dict_pre_hook(note("first"), prepend=True)
        optimizer.register_load_state_dict_post_hook(note("after"))
        given = optimizer.state_dict()
        optimizer.load_state_dict(given)
        assert given["param_groups"][0]["lr"] == 0.1, "the caller's state was changed"
        return seen

    ours = seen_by(lambda parameters: accel.optimizers.create("adamw", parameters, lr=0.1))
    theirs = seen_by(lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
    assert ours == theirs
    assert [what for what, *_ in ours] == ["before saving", "after saving", "first", "second", "after"]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, pickle.dumps, lambda optimizer: torch.save(optimizer, io.BytesIO())]
)
@pytest.mark.parametrize("stepped", [False, True])
def test_a_copy_is_refused_and_its_error_says_what_to_copy(accel, copied, stepped):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = accel.optimizers.create("adamw", [parameter], lr=0.1)
    parameter.grad = torch.ones(3)
    if stepped:
        optimizer.step()
    with pytest.raises(accelcore.UnsupportedError, match=r"copy its state_dict\(\)"):
        copied(optimizer)
