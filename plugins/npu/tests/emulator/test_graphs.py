"""Captured graphs: a capture changes nothing, a replay computes anew from the memory that was captured."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_npu")

from accelcore_npu.emulator import counters  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("emulated_npu"),
    # torch says so of every graphed callable whose parameters were made on another stream.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]


def capture(function):
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        result = function()
    return graph, result


def test_a_replay_reads_the_memory_of_the_capture():
    values, weight = torch.ones(4, device="npu"), torch.full((4, 4), 2.0, device="npu")
    graph, (product, parts) = capture(lambda: ((values @ weight).relu() + 1, torch.split(values * 3, 2)))
    values.fill_(3.0)
    graph.replay()
    assert product.tolist() == [25.0] * 4
    assert [part.tolist() for part in parts] == [[9.0, 9.0], [9.0, 9.0]]


def test_what_a_capture_wrote_in_place_is_put_back():
    counter = torch.zeros(3, device="npu")
    graph, _ = capture(lambda: counter.add_(1).mul_(2))
    assert counter.tolist() == [0, 0, 0]
    graph.replay()
    graph.replay()
    assert counter.tolist() == [6, 6, 6]


def test_copies_are_captured():
    source, target = torch.arange(3.0, device="npu"), torch.zeros(3, device="npu")
    graph, clone = capture(lambda: target.copy_(source).clone())
    source.add_(5)
    graph.replay()
    assert target.tolist() == clone.tolist() == [5, 6, 7]


def test_each_replay_draws_new_numbers():
    graph, drawn = capture(lambda: torch.rand(16, device="npu"))
    graph.replay()
    first = drawn.cpu()
    graph.replay()
    assert not torch.equal(drawn.cpu(), first)
    assert (first >= 0).all()
    assert (first < 1).all()


def test_an_optimizer_step_is_captured():
    parameter = torch.ones(3, device="npu", requires_grad=True)
    parameter.grad = torch.ones(3, device="npu")
    optimizer = torch.optim.SGD([parameter], lr=0.25, foreach=True)
    graph, _ = capture(optimizer.step)
    assert parameter.tolist() == [1, 1, 1]
    graph.replay()
    assert parameter.tolist() == [0.75] * 3


def test_reading_a_value_inside_a_capture_is_refused():
    values = torch.ones(2, device="npu")
    with pytest.raises(RuntimeError, match="EMULATED: the host cannot read a value while a graph is being captured"):
        capture(lambda: values.sum().item())
    assert (values + 1).tolist() == [2, 2]


def test_a_replay_is_one_launch():
    values = torch.ones(2, device="npu")
    graph, _ = capture(lambda: (values + 1) * 2)
    with counters.count() as cost:
        graph.replay()
    assert cost.launches.total() == 1


def test_graphed_callables_train_as_eager_ones():
    torch.manual_seed(2)
    inputs = torch.randn(2, 4, device="npu")
    losses = {}
    for graphed in (False, True):
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).npu()
        call = torch.npu.make_graphed_callables(model, (torch.randn(2, 4, device="npu"),)) if graphed else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses[graphed] = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = call(inputs).square().mean()
            loss.backward()
            optimizer.step()
            losses[graphed].append(loss.item())
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)
    assert losses[True][-1] < losses[True][0]
