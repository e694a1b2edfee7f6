"""How a route is chosen, explained, refused and registered."""

from __future__ import annotations

import pytest
import torch

from accelcore.errors import ConfigurationError, PluginError, UnsupportedError
from accelcore.optim.registry import ExplainedRoute, Optimizers


def parameter():
    return torch.nn.Parameter(torch.tensor([1.0, -2.0]))


def sgd(params, **options):
    return torch.optim.SGD(params, **options)


# Choosing a route.


def test_explain_tells_every_route_best_first_and_why_not(accel):
    assert accel.optimizers.explain("AdamW") == (
        ExplainedRoute("native", chosen=True),
        ExplainedRoute("fused", chosen=False, reason="'native' serves this request, and is usually faster"),
        ExplainedRoute("loop", chosen=False, reason="'native' serves this request, and is usually faster"),
        ExplainedRoute("foreach", chosen=False, reason="'native' serves this request, and is usually faster"),
        ExplainedRoute("formula", chosen=False, reason="'native' serves this request, and is usually faster"),
    )
    rest = "fused, loop, foreach, formula: 'native' serves this request, and is usually faster"
    assert str(accel.optimizers.explain("AdamW")) == f"native: chosen\n{rest}"
    _, fused, loop, foreach, _ = accel.optimizers.explain("adamw", differentiable=True)
    assert (fused.chosen, loop.chosen, foreach.chosen) == (False, True, False)
    assert "differentiated" in fused.reason


@pytest.mark.parametrize("switch", ["fused", "foreach"])
@pytest.mark.parametrize("value", [True, False, None])
def test_torchs_own_switches_are_refused_because_the_route_says_it(accel, switch, value):
    with pytest.raises(UnsupportedError, match=f"{switch}="):
        accel.optimizers.explain("adamw", **{switch: value})
    for route in ("auto", "fused", "loop", "foreach"):
        with pytest.raises(UnsupportedError, match=f"remove {switch}=") as caught:
            accel.optimizers.create("adamw", [parameter()], route=route, **{switch: value})
        assert str(caught.value).count(f"{switch}=") == 2


@pytest.mark.parametrize(("route", "remedy"), [("fused", 'use route="auto"'), ("forech", "did you mean 'foreach'")])
def test_a_route_that_is_not_there_is_refused_and_the_others_named(accel, route, remedy):
    with pytest.raises(UnsupportedError, match=f"'adamax' has no route '{route}'(.|\n)*{remedy}") as caught:
        accel.optimizers.create("adamax", [parameter()], route=route)
    assert caught.value.available == "loop, foreach"


@pytest.mark.parametrize("name", ["adamV2", "", "adam w"])
def test_an_unknown_optimizer_is_refused_and_the_known_ones_named(accel, name):
    for ask in (lambda: accel.optimizers.create(name, [parameter()]), lambda: accel.optimizers.explain(name)):
        with pytest.raises(UnsupportedError, match=f"no optimizer '{name}'") as caught:
            ask()
        assert caught.value.available == ", ".join(accel.optimizers.names())


@pytest.mark.parametrize("route", ["auto", "fused", "loop", "foreach"])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"betta": 0.9}, "betta"),
        ({"lr": -1.0}, "learning rate"),
        ({"lr": 0.1, "betas": (0.9, 1.5)}, "beta"),
        ({"lr": 0.1, "weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_an_invalid_option_is_refused_in_torchs_words(accel, route, options, says):
    with pytest.raises(ConfigurationError, match="'adamw'") as caught:
        accel.optimizers.create("adamw", [parameter()], route=route, **options)
    assert says in caught.value.why
    assert isinstance(caught.value.__cause__, TypeError | ValueError)
    assert caught.value.remedy
    assert ("route" in caught.value.what) == (route != "auto")


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("sgd", "momentum", -0.1), ("adadelta", "rho", 1.5), ("rmsprop", "alpha", -0.1), ("adam", "eps", -0.1)],
)
def test_the_remedy_for_a_value_out_of_range_names_its_option(accel, name, option, value):
    with pytest.raises(ConfigurationError) as caught:
        accel.optimizers.create(name, [parameter()], lr=0.1, **{option: value})
    assert option in caught.value.remedy.replace(",", "").split()


@pytest.mark.parametrize("route", ["auto", "fused", "loop"])
@pytest.mark.parametrize(
    ("name", "option", "meant"),
    [
        ("adamw", "learning_rate", "did you mean 'lr'?"),
        ("adamw", "wd", "did you mean 'weight_decay'?"),
        ("sgd", "momentun", "did you mean 'momentum'?"),
        ("sgd", "x", "remove 'x', or use an available option"),
    ],
)
def test_an_unknown_option_is_refused_and_the_known_ones_named(accel, route, name, option, meant):
    with pytest.raises(ConfigurationError) as caught:
        accel.optimizers.create(name, [parameter()], route=route, **{option: 0.1})
    assert {"lr", "weight_decay", "maximize"} <= set(caught.value.available.split(", "))
    assert not {"fused", "foreach", "params"} & set(caught.value.available.split(", "))
    assert caught.value.remedy == meant


@pytest.mark.parametrize("route", ["auto", "fused", "loop"])
@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("learning_rate", "lr"),
        ("wd", "weight_decay"),
        ("weight_deacy", "weight_decay"),
        ("LR", "lr"),
        ("beta", "betas"),
    ],
)
def test_a_misspelt_option_of_a_group_is_refused(accel, route, key, meant):
    groups = [{"params": [parameter()], "lr": 0.1}, {"params": [parameter()], key: 1e-5}]
    with pytest.raises(ConfigurationError, match=f"group 1 has the unknown key '{key}'") as caught:
        accel.optimizers.create("adamw", groups, lr=0.1, weight_decay=0.1, betas=(0.9, 0.99), route=route)
    assert f"did you mean '{meant}'?" in caught.value.remedy


def test_keys_of_the_scripts_own_stay_in_a_group(accel, caplog):
    own = {
        "name": "top",
        "lr_scale": 0.5,
        "group_name": "layer_1",
        "weight_decay_mult": 0.0,
        "max_momentum": 0.9,
        "wd": 1,
    }
    groups = [{"params": [parameter()], "weight_decay": 0.0, **own}, {"params": []}]
    optimizer = accel.optimizers.create("sgd", groups, lr=0.1)
    assert own.items() <= optimizer.param_groups[0].items()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["parameter group 1 is empty"]


# Registering.


def test_the_highest_priority_that_supports_the_request_wins():
    registry = Optimizers()

    def only(kind):
        return lambda request: None if request.options.get("kind") == kind else f"not {kind}"

    def factory(params, kind=None):
        return torch.optim.SGD(params, lr=0.1)

    for name, priority, supports in (("low", 1, only("b")), ("high", 9, only("a")), ("middle", 5, only("a"))):
        registry.register("lion", name, factory, priority=priority, supports=supports)
    weight = parameter()
    assert registry.create("lion", [weight], kind="a").route == "high"
    assert registry.create("LION", [weight], kind="b").route == "low"
    assert registry.create("lion", [weight], kind="a", route="middle").route == "middle"
    with pytest.raises(UnsupportedError) as caught:
        registry.create("lion", [weight])
    assert caught.value.why == "high: not a; middle: not a; low: not b"
    with pytest.raises(UnsupportedError, match="'low'"):
        registry.create("lion", [weight], kind="a", route="low")


def test_a_route_sees_the_request_as_it_was_made():
    seen = []
    registry = Optimizers()
    registry.register("Lion", "mine", sgd, supports=lambda request: seen.append(request))
    one, other = parameter(), parameter()
    registry.create("lIoN", [{"params": [("one", one)]}, {"params": [("other", other)]}], lr=0.5, momentum=0.1)
    (request,) = seen
    assert request.name == "lion"
    assert request.options == {"lr": 0.5, "momentum": 0.1}
    assert [id(p) for p in request.parameters] == [id(one), id(other)]
    registry.explain("lion", momentum=0.5)
    assert (seen[1].options, seen[1].parameters) == ({"momentum": 0.5}, ())


@pytest.mark.parametrize(
    ("name", "route", "priority"), [("lion", "mine", 1), ("LION", "mine", 1), ("lion", "yours", 0)]
)
def test_a_second_route_of_one_name_or_priority_is_refused(name, route, priority):
    registry = Optimizers()
    registry.register("Lion", "mine", sgd)
    with pytest.raises(ConfigurationError, match="already has a route 'mine' of priority 0"):
        registry.register(name, route, sgd, priority=priority)
    assert [choice.route for choice in registry.explain("lion")] == ["mine"]


def test_a_factory_that_makes_no_optimizer_is_a_broken_plugin():
    registry = Optimizers()
    registry.register("lion", "mine", lambda params: params)
    with pytest.raises(PluginError, match="'mine' of optimizer 'lion' made a list"):
        registry.create("lion", [parameter()])


def test_a_refused_name_is_not_left_half_registered():
    registry = Optimizers()
    registry.register("lion", "mine", sgd)
    registry.register("lion", "yours", sgd, priority=1)
    assert [name for name in registry.names() if name not in Optimizers().names()] == ["lion"]
    assert [choice.route for choice in registry.explain("lion")] == ["yours", "mine"]
