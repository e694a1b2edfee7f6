"""The models, and how cases are timed."""

from __future__ import annotations

import pytest
import torch
from accelcore_cuda.compiler import replays_graphs
from accelcore_cuda.known_faults import MIX_ORDER_REDUCTION
from torch.nn.functional import cross_entropy

from benchmarks.gpu.device import Deadline, Device
from benchmarks.gpu.gpt import GPT, GPT2_124M, Shape
from benchmarks.gpu.loops import Mode, Work, by_hand, with_trainer
from benchmarks.gpu.measure import Entry, largest_batch, measure
from benchmarks.gpu.resnet import RESNET_50, ResNet


@pytest.fixture(scope="module")
def device():
    return Device("cpu", toy=True)


def work(lr=1e-2):
    torch.manual_seed(0)
    batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(4)]
    return Work(torch.nn.Linear(4, 3), lambda model, batch: cross_entropy(model(batch[0]), batch[1]), batches, lr)


def broken(work, mode, device):
    raise RuntimeError("out of\nluck")


def test_sizes_are_the_published_ones():
    with torch.device("meta"):
        gpt, resnet = GPT(GPT2_124M), ResNet(RESNET_50, 1000)
        assert resnet(torch.empty(2, 3, 224, 224)).shape == (2, 1000)
    assert sum(parameter.numel() for parameter in gpt.parameters()) == 123_587_328 + 1024 * 768  # nanoGPT: 123.59M
    assert gpt.operations() == 6 * 123_587_328 + 12 * 12 * 12 * 64 * 1024
    assert sum(parameter.numel() for parameter in resnet.parameters()) == 25_557_032  # torchvision's documentation


def test_the_gpt_sees_no_later_token():
    torch.manual_seed(0)
    model = GPT(Shape(layers=2, heads=2, width=8, context=6, vocabulary=11))
    tokens = torch.randint(11, (1, 6))
    targets = torch.full_like(tokens, -100)
    targets[0, 3] = 5
    changed = tokens.clone()
    changed[0, 4:] = (tokens[0, 4:] + 1) % 11
    assert torch.equal(model(tokens, targets), model(changed, targets))
    changed[0, 2] = (tokens[0, 2] + 1) % 11
    assert not torch.equal(model(tokens, targets), model(changed, targets))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_both_loops_train_alike(device, precision):
    mine, yours = work(), work()
    start = mine.model.weight.detach().clone()
    run = [loop(task, Mode(precision), device) for loop, task in ((by_hand, mine), (with_trainer, yours))]
    for _ in range(3):
        losses = [train() for train in run]
        torch.testing.assert_close(*losses)
    torch.testing.assert_close(mine.model.weight, yours.model.weight)  # flat: to the last bit or so
    assert not torch.equal(mine.model.weight, start)


def test_ratios_are_of_the_same_round(device):
    entries = [
        Entry("fp32", name, "by hand", work, loop, Mode())
        for name, loop in (("by hand", by_hand), ("trainer", with_trainer))
    ]
    found = measure(entries, device, Deadline(100), rounds=5, seconds=0.0)
    hand, trainer = found.cases
    assert hand.timing.ratio.smallest == hand.timing.ratio.largest == 1
    assert (hand.samples, trainer.samples) == (5, 5)
    ratios = sorted(a / b for a, b in zip(found.samples["fp32: trainer"], found.samples["fp32: by hand"], strict=True))
    assert found.ratio("fp32: trainer", "fp32: by hand") == ratios[2] == trainer.timing.ratio.median
    assert found.ratio("fp32: trainer", "fp32: nobody") is None


def test_rounds_end_before_the_deadline(device):
    found = measure([Entry("fp32", "a", "a", work, by_hand, Mode())], device, Deadline(0), rounds=1000, seconds=0.0)
    assert found.cases[0].samples == 2


def test_a_case_that_fails_leaves_the_others_alone(device, capsys):
    entries = [
        Entry("fp32", "by hand", "by hand", work, by_hand, Mode()),
        Entry("fp32", "trainer", "by hand", work, broken, Mode()),
        Entry("fp32", "peer", "by hand", work, broken, Mode(), required=False),
        Entry("fp32", "absent", "by hand", work, broken, Mode(), missing="it is not installed"),
        Entry("fp32", "captured", "by hand", work, broken, Mode(graph=True)),
    ]
    found = measure(entries, device, Deadline(30), rounds=2, seconds=0.0)
    assert found.failures == ["fp32: trainer: RuntimeError: out of"]
    assert [case.timing is None for case in found.cases] == [False, True, True, True, True]
    assert [case.note for case in found.cases[2:]] == [
        "failed: RuntimeError: out of", "not run: it is not installed", "not run: cpu cannot capture steps",
    ]  # fmt: skip


def test_a_case_that_fails_late_leaves_the_others_alone(device, capsys):
    def breaks(work, mode, device):
        train, passes = by_hand(work, mode, device), iter(range(4))

        def run():
            if next(passes, None) is None:
                raise MemoryError("out of it")
            return train()

        return run

    entries = [
        Entry("fp32", name, "by hand", work, loop, Mode(), required=name != "peer")
        for name, loop in (("by hand", by_hand), ("trainer", breaks), ("peer", breaks))
    ]
    found = measure(entries, device, Deadline(100), rounds=9, seconds=0.0)
    assert found.failures == ["fp32: trainer: MemoryError: out of it"]
    assert [case.timing is None for case in found.cases] == [False, True, True]
    assert [case.note for case in found.cases[1:]] == ["failed: MemoryError: out of it"] * 2


def test_a_model_that_falls_back_to_eager_is_a_failure(device, caplog):
    def refuses(graph, inputs):
        raise NotImplementedError("no such kernel")

    entry = Entry("fp32", "trainer", "trainer", work, with_trainer, Mode(compile={"backend": refuses}))
    found = measure([entry], device, Deadline(30), rounds=2, seconds=0.0)
    assert len(found.failures) == 1
    assert "not compiled" in found.failures[0]


def test_the_largest_batch_is_a_power_of_two_that_fits():
    def peak(size):
        return 100 + 10 * size

    assert largest_batch(peak, room=100 + 10 * 37, sizes=(2, 4), most=64) == 32
    assert largest_batch(peak, room=100 + 10 * 32, sizes=(2, 4), most=64) == 32
    assert largest_batch(peak, room=10**6, sizes=(2, 4), most=64) == 64
    with pytest.raises(MemoryError):
        largest_batch(peak, room=105, sizes=(2, 4), most=64)


def test_loops_by_hand_are_compiled_without_what_the_trainer_turns_off():
    device = object.__new__(Device)  # as it is with a GPU
    device.cuda, device.toy = True, False
    assert not replays_graphs(device.compile_options())
    options = device.compile_options("reduce-overhead")
    assert replays_graphs(options)
    turned_off = options.get("options", {}).get("triton.mix_order_reduction") is False
    assert turned_off is MIX_ORDER_REDUCTION.applies
