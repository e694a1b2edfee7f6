"""Scripts that look wrong and are not: windows that they make whole themselves, and optimizers for one step."""

import pytest
from accelcore_lint.lint import check

SOURCE = """
import torch
from samplers import Whole
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler


def load(data, args):
    {line}


def train(model, optimizer, loader, args):
    for i, batch in enumerate(loader):
        (model(batch) / args.accumulate).backward()
        if (i + 1) % args.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("return DataLoader(data)", True),
        ("return DataLoader(data, sampler=RandomSampler(data), batch_sampler=None)", True),
        ("sampler = DistributedSampler(data) if args.ranks else None; return DataLoader(data, sampler=sampler)", True),
        ("args.steps = len(data) // args.accumulate; return DataLoader(data)", True),
        ("return DataLoader(data, batch_sampler=Whole(data, args.accumulate))", False),
        ("return DataLoader(data, sampler=Whole(data) if args.whole else None)", False),
        ("size = len(data) // args.accumulate * args.accumulate; return DataLoader(data[:size])", False),
        ("return DataLoader(data[: len(data) - len(data) % args.accumulate])", False),
    ],
)
def test_a_window_is_short_unless_the_script_may_give_whole_ones(line, found):
    codes = [finding.code for finding in check(SOURCE.format(line=line))]
    assert ("ACC306" in codes) is found


@pytest.mark.parametrize(("indent", "found"), [("", True), ("    ", False)])
def test_gradients_of_an_optimizer_for_one_step_need_not_be_cleared(indent, found):
    made = "    model = build()\n    optimizer = torch.optim.SGD(model.parameters(), lr=1)\n".replace(
        "    ", f"    {indent}"
    )
    begin, loop = ("", made) if indent else (made, "")
    source = (
        f"import torch\n\n\ndef check(build, cases):\n{begin}    for case in cases:\n{loop}"
        "        model(case).mean().backward()\n        optimizer.step()\n"
    )
    assert ("ACC304" in [finding.code for finding in check(source)]) is found


@pytest.mark.parametrize(
    ("before", "between", "moved", "found"),
    [
        ("model.to(device)", "pass", "model.to(device)", False),
        ("model = Net().to(device)", "pass", "model = model.to(device)", False),
        ("model.cuda()", "pass", "model.cuda()", False),
        ("pass", "model.to(device)", "model.to(device)", True),
        ("model.to(device)", "device = args.device", "model.to(device)", True),
        ("model.to(device)", "model.cpu()", "model.to(device)", True),
        ("model.to(device)", "if args.cpu:\n        model.cpu()", "model.to(device)", True),
        ("model.to(device)", "pass", "model.to(args.device)", True),
        ("model = Net().to(device)", "model = Net()", "model.to(device)", True),
        ("other.to(device)", "pass", "model.to(device)", True),
    ],
)
@pytest.mark.parametrize("loads", [True, False])
def test_a_move_to_where_the_model_was_before_the_state_leaves_nothing_behind(before, between, moved, found, loads):
    kind, load = ("AdamW", "optimizer.load_state_dict(state)") if loads else ("Adagrad", "pass")
    source = (
        f"import torch\n\ndef main(model, other, device, args, state):\n    {before}\n"
        f"    optimizer = torch.optim.{kind}(model.parameters())\n    {load}\n    {between}\n    {moved}\n"
        "    return optimizer\n"
    )
    assert ("ACC308" in [finding.code for finding in check(source)]) is found


@pytest.mark.parametrize(
    ("ignored", "given", "found"),
    [
        ("-1", "logits, labels.squeeze(1)", False),
        ("-100", "model(x), labels", False),
        ("-1", "logits.view(-1, 9), labels.view(-1)", True),
        ("-100", "logits[:, :-1], labels[:, 1:]", True),
        ("-1", "shaped, labels", True),
        ("255", "logits, labels", True),
        ("tokenizer.pad_token_id", "logits, labels", True),
    ],
)
def test_a_loss_of_one_label_a_sample_ignores_no_target(ignored, given, found):
    source = (
        "import torch\nimport torch.nn as nn\n\ndef train(model, optimizer, loader, tokenizer, n):\n"
        f"    criterion = nn.CrossEntropyLoss(ignore_index={ignored})\n    for i, (x, labels) in enumerate(loader):\n"
        "        logits = model(x)\n        shaped = logits.transpose(1, 2)\n"
        f"        loss = criterion({given}) / n\n        loss.backward()\n"
        "        if (i + 1) % n == 0:\n            optimizer.step()\n            optimizer.zero_grad()\n"
    )
    assert ("ACC307" in [finding.code for finding in check(source)]) is found


@pytest.mark.parametrize(
    ("before", "first", "call", "found"),
    [
        ("pass", "scheduler.step()", "for n in range(9):\n        epoch(model, optimizer)", True),
        ("pass", "if model:\n        scheduler.step()", "for n in range(9):\n        epoch(model, optimizer)", False),
        ("pass", "scheduler.step(2)", "for n in range(9):\n        epoch(model, optimizer)", False),
        ("pass", "scheduler.step()", "epoch(model, optimizer)", False),
        ("optimizer.step()", "scheduler.step()", "for n in range(9):\n        epoch(model, optimizer)", False),
    ],
)
def test_a_schedule_that_a_function_of_a_round_steps_first(before, first, call, found):
    source = (
        "import torch\nfrom torch.optim.lr_scheduler import StepLR\n\ndef epoch(model, optimizer):\n"
        f"    model.train()\n    {first}\n    for x in data:\n        optimizer.zero_grad()\n"
        "        model(x).backward()\n        optimizer.step()\n\ndef main(model):\n    global scheduler\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n    scheduler = StepLR(optimizer, 30)\n"
        f"    {before}\n    {call}\n"
    )
    assert ("ACC302" in [finding.code for finding in check(source)]) is found


@pytest.mark.parametrize(("steps", "found"), [("loader", False), ("range(2)", True)])
def test_a_loss_that_is_read_once_an_epoch_is_not_read_in_each_step(steps, found):
    source = (
        "import torch\n\n\ndef train(model, optimizer, loader, last):\n    for epoch in range(9):\n"
        f"        for batch in {steps}:\n            loss = model(batch)\n            loss.backward()\n"
        "            optimizer.step()\n        if last:\n            loss = model(last)\n            loss.backward()\n"
        "            optimizer.step()\n        print(epoch, loss.item())\n"
    )
    assert ("ACC314" in [finding.code for finding in check(source)]) is found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("best = min(best, value)", True),
        ("if not math.isfinite(value): sys.exit(1)", False),
        ("if value < best: best, kept = value, model.state_dict()", False),
        ("if loss < best: best = loss", False),
        ("if torch.isnan(loss): raise ValueError", False),
        ("if loss is not None: best = loss", True),
        ("if best: best = 1 if loss < best else 2", True),
    ],
)
def test_a_loss_that_decides_something_in_each_step_is_read_there(line, found):
    source = (
        "import math\nimport sys\nimport torch\n\n\ndef train(model, optimizer, loader, best):\n    for x in loader:\n"
        "        optimizer.zero_grad()\n        loss = model(x)\n        loss.backward()\n        optimizer.step()\n"
        f"        value = loss.item()\n        {line}\n"
    )
    assert ("ACC314" in [finding.code for finding in check(source)]) is found


EPOCHS = """
{head}from torch.utils.data import DistributedSampler

{base}
class Trainer({name}):
    def load(self, data):
        sampler = DistributedSampler(data)
        return {answer}

    def train(self, loader):
        {prepare}
        for epoch in range(3):
            self.run(loader)
"""


@pytest.mark.parametrize(
    ("head", "base", "answer", "prepare", "found"),
    [
        ("", "", "Loader(data, sampler)", "", True),
        ("", "class Base:\n    pass\n\n", "Loader(data, sampler), sampler", "", True),
        ("from trainers import Base\n", "", "Loader(data, sampler), sampler", "", False),
        ("from accelerate import Accelerator\n", "", "Loader(data, sampler)", "loader = self.a.prepare(loader)", False),
        ("", "", "Loader(data, sampler)", "loader = self.a.prepare(loader)", True),
    ],
)
def test_set_epoch_may_be_called_by_a_base_class_or_by_accelerate(head, base, answer, prepare, found):
    name = "Base" if "Base" in head + base else ""
    source = EPOCHS.format(head=head, base=base, name=name, answer=answer, prepare=prepare or "pass")
    assert ("ACC309" in [finding.code for finding in check(source)]) is found


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("'cuda' if torch.cuda.is_available() else 'cpu'", False),
        ("torch.device('cuda:0' if args.cuda else 'cpu')", False),
        ("{'cuda:0': 'cpu'}", False),
        ("{'cuda:0': place}", False),
        ("{'cuda:0': 'cuda:1'}", True),
        ("'cuda:0' if args.first else 'cuda:1'", True),
        ("lambda storage, place: storage.cuda()", True),
    ],
)
def test_a_checkpoint_that_loads_elsewhere_without_the_device_is_not_bound_to_it(place, found):
    source = f"import torch\n\n\ndef load(args, path, place):\n    return torch.load(path, map_location={place})\n"
    assert ("ACC107" in [finding.code for finding in check(source)]) is found
