"""Each rule on the examples of its own file, which are those of the documentation, and on further cases."""

from __future__ import annotations

import textwrap

import pytest
from accelcore_lint.lint import check
from accelcore_lint.rules import RULES

SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
COSINE = f"{SGD}\n    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)"
STEP = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)"
UPDATE = ("    optimizer.step()", "    optimizer.zero_grad()")
PARTS = ("part_loss, rest = model(batch)", "loss = part_loss + rest", "loss.backward()", "optimizer.step()")
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


def train(*lines, over="batch in loader", before="pass"):
    """A script with a function that runs some lines in a loop, after a line before it."""
    body = "".join(f"        {line}\n" for line in lines)
    head = (
        "import torch\nimport torch.nn.functional as F\nfrom torch.utils.data import DataLoader, DistributedSampler\n"
    )
    given = "model, scaler, loader, args, n" + ("" if SGD[:9] in before else ", optimizer")
    return f"{head}\ndef train({given}):\n    {before}\n    for {over}:\n{body}"


OTHER_FILE = (
    f"import torch\nfrom engine import train_epoch\n\ndef main(model, loader):\n    {SGD}\n    {STEP}\n"
    "    for epoch in range(90):\n        scheduler.step()\n        train_epoch(model, loader, optimizer, epoch)\n"
)
FOUND = [
    *((rule.code, rule.found) for rule in RULES.values()),
    (
        "ACC101",
        (
            'import torch\n\nkwargs = {"batch_size": 32}\nuse_cuda = torch.cuda.is_available()\nif use_cuda:\n'
            '    kwargs.update({"num_workers": 1, "pin_memory": True})'
        ),
    ),
    ("ACC101", 'import torch\n\ndef make(device):\n    return torch.amp.GradScaler(enabled=device.type == "cuda")'),
    ("ACC101", "import torch\n\ndef build(model, x):\n    return torch.compile(model) if x.is_cuda else model"),
    (
        "ACC101",
        "import torch\n\ndef seeds(seed):\n    if torch.cuda.is_available():\n        torch.cuda.manual_seed_all(seed)",
    ),
    ("ACC102", "import torch\n\ndef step(x, rank):\n    return x.cuda(rank, non_blocking=True)"),
    ("ACC102", "import torch_npu\n\ndef move(x):\n    return x.npu()"),
    ("ACC103", 'import torch\n\ndef device(rank):\n    return torch.device(f"cuda:{rank}")'),
    (
        "ACC103",
        'import argparse, torch\nparser = argparse.ArgumentParser()\nparser.add_argument("--device", default="cuda")',
    ),
    ("ACC103", 'import torch\nx = torch.zeros(2, device="npu:0")'),
    ("ACC104", 'import torch\ndevice = torch.device("cuda:0") if torch.cuda.is_available() else torch.device("cpu")'),
    ("ACC104", "import torch\nif not torch.cuda.is_available():\n    raise SystemExit('no GPU')"),
    ("ACC105", "import torch\nfrom torch import cuda\ncuda.synchronize()"),
    ("ACC105", "import torch\ntorch.cuda.reset_peak_memory_stats()"),
    ("ACC105", "import torch\nimport torch_npu\ntorch.npu.manual_seed_all(1)"),
    ("ACC106", "import torch\ntorch.set_default_tensor_type('torch.cuda.HalfTensor')"),
    (
        "ACC107",
        'import torch\n\ndef load(path, n):\n    return torch.load(path, map_location=f"cuda:{n}", weights_only=True)',
    ),
    (
        "ACC107",
        "import torch\nload = lambda path: torch.load(path, lambda storage, _: storage.cuda(0), weights_only=True)",
    ),
    (
        "ACC107",
        (
            'import torch\n\ndef load(path, rank):\n    places = {"cuda:0": f"cuda:{rank}"}\n'
            "    return torch.load(path, map_location=places, weights_only=True)"
        ),
    ),
    ("ACC110", 'import argparse, torch\nargparse.ArgumentParser().add_argument("--dist-backend", default="nccl")'),
    ("ACC110", 'import torch.distributed as dist\ndist.init_process_group("cpu:gloo,npu:hccl")'),
    ("ACC111", 'import os, torch\nrank = int(os.environ.get("RANK", -1))'),
    ("ACC111", 'import os, torch\nos.environ["CUDA_VISIBLE_DEVICES"] = "0"'),
    ("ACC112", "import torch.backends.cudnn as cudnn\ncudnn.allow_tf32 = False"),
    ("ACC113", "from apex import amp\nimport torch"),
    ("ACC113", "import torch_xla.core.xla_model as xm"),
    ("ACC114", "from apex.optimizers import FusedAdam\n\ndef make(model):\n    return FusedAdam(model.parameters())"),
    ("ACC115", 'import torch\nwith torch.autocast("cuda", dtype=torch.float16):\n    pass'),
    ("ACC115", 'import torch\nscaler = torch.amp.GradScaler("cuda")'),
    (
        "ACC115",
        'from torch.amp import custom_fwd\n\n@custom_fwd(device_type="cuda")\ndef forward(ctx, x):\n    return x',
    ),
    ("ACC115", "import torch\n\n@torch.cuda.amp.custom_fwd\ndef forward(ctx, x):\n    return x"),
    ("ACC115", "import torch\nscaler = torch.amp.GradScaler()"),
    ("ACC201", "import torch\nimport torchada"),
    ("ACC201", "import habana_frameworks.torch.gpu_migration\nimport torch"),
    ("ACC201", "import torch\nimport torch_npu\ntorch.cuda.synchronize = torch.npu.synchronize"),
    (
        "ACC308",
        (
            "import torch\n\ndef main(model, device):\n    optimizer = torch.optim.Adagrad(model.parameters())\n"
            "    model.to(device)\n    return optimizer"
        ),
    ),
    ("ACC310", 'import torch\nstate = torch.load("a.pt", map_location="cpu")'),
    (
        "ACC301",
        train("scaler.scale(model(batch)).backward()", CLIP, "scaler.unscale_(optimizer)", "scaler.step(optimizer)"),
    ),
    (
        "ACC301",
        train(
            *("optimizer.zero_grad()", "loss = model(batch)", f"if args.clip > 0: {CLIP}"),
            *("loss.backward()", "optimizer.step()"),
        ),
    ),
    (
        "ACC302",
        train("optimizer.zero_grad()", "model(batch).backward()", "optimizer.step()")
        + f"\ndef main(model, loader):\n    {SGD}\n    {STEP}\n    for epoch in range(90):\n"
        "        scheduler.step()\n        train(model, optimizer, loader)\n",
    ),
    ("ACC302", OTHER_FILE),
    (
        "ACC303",
        train(
            "for batch in loader:",
            *(
                "    optimizer.zero_grad()",
                "    model(batch).backward()",
                "    optimizer.step()",
                "    scheduler.step()",
            ),
            over="epoch in range(args.epochs)",
            before=COSINE,
        ),
    ),
    (
        "ACC304",
        train("loss = model(batch).mean()", "loss.backward()", "optimizer.step()", before=SGD),
    ),
    (
        "ACC305",
        train(
            "loss = F.cross_entropy(model(x), y)",
            *("loss.backward()", "if (i + 1) % args.accum_steps == 0 or i + 1 == len(loader):", *UPDATE),
            over="i, (x, y) in enumerate(loader)",
        ),
    ),
    (
        "ACC305",
        train(
            "loss = (model(x) - y).abs().mean()",
            *("loss.backward()", "if (i + 1) % args.accumulate == 0:", *UPDATE),
            over="i, (x, y) in enumerate(loader)",
        ),
    ),
    (
        "ACC306",
        train(
            "(model(batch) / n).backward()",
            *("if (i + 1) % n == 0 or i + 1 == len(loader):", *UPDATE),
            over="i, batch in enumerate(loader)",
        ),
    ),
    (
        "ACC306",
        train(
            *("step = 0", "for batch in loader:", "    (model(batch) / n).backward()"),
            *("    if step % n == n - 1:", *(f"    {line}" for line in UPDATE), "    step += 1"),
            over="epoch in range(90)",
        ),
    ),
    (
        "ACC306",
        train(
            "(model(batch) / n).backward()", "if step % n == (n - 1):", *UPDATE, "step += 1", before="step = 0"
        ).replace("args, n", "epoch, n"),
    ),
    (
        "ACC309",
        train(
            "for x in loader:",
            *("    optimizer.zero_grad()", "    model(x).backward()", "    optimizer.step()"),
            over="e in range(9)",
            before="loader = DataLoader(data, sampler=DistributedSampler(data))",
        ),
    ),
    (
        "ACC309",
        train(
            "for x in enumerate(train_loader):",
            *("    optimizer.zero_grad()", "    model(x).backward()", "    optimizer.step()"),
            before="train_loader = DataLoader(data, sampler=DistributedSampler(data))",
        ).replace("for batch in loader", "while args.going"),
    ),
    ("ACC314", train(*PARTS, "args.log(part_loss.item())")),
    (
        "ACC314",
        train(
            *("for part in batch:", "    loss = model(part)", "    loss.backward()", "    args.total += loss.item()"),
            *("optimizer.step()", "optimizer.zero_grad()"),
        ),
    ),
    (
        "ACC314",
        train(
            *("loss = model(batch)", "with args.amp.scale_loss(loss, optimizer) as scaled_loss:"),
            *("    scaled_loss.backward()", "args.log(loss.item())", "if n:", "    optimizer.step()"),
        ),
    ),
]
CLEAN = [
    ("ACC302", OTHER_FILE.replace("optimizer, epoch", "optimizer, scheduler, epoch")),
    (
        "ACC309",
        train("for k in range(9):", "    model(n).backward()", before="sampler = DistributedSampler(data)").replace(
            "for batch in loader", "while args.going"
        ),
    ),
    ("ACC314", train(*PARTS, "if n:", "    args.log(part_loss.item())")),
    ("ACC314", train(*PARTS, "args.log(float(part_loss), model(batch).item())")),
    *((rule.code, rule.clean) for rule in RULES.values()),
    (
        "ACC101",
        (
            'import torch\n\ndef build(model, device):\n    if device.type == "cuda":\n'
            '        model = torch.compile(model)\n    else:\n        print(f"not compiled on {device}")\n'
            "    return model"
        ),
    ),
    (
        "ACC101",
        (
            "import torch\n\ndef step(model, batch, device):\n    with torch.autocast(device.type):\n"
            "        return model(batch)"
        ),
    ),
    ("ACC102", "import torch\nversion = torch.version.cuda"),
    ("ACC102", "import torch\n\ndef load(path):\n    return torch.load(path, lambda storage, place: storage.cuda())"),
    ("ACC103", 'import torch\n\ndef describe(device):\n    return {"cuda": 1}[device.type], "cuda is a word here"'),
    ("ACC104", 'import torch\n\ndef text(device):\n    return "fast" if device.type == "cuda" else "slow"'),
    ("ACC105", "import torch\n\nclass cuda:\n    synchronize = print\n\ncuda.synchronize()"),
    ("ACC108", "class DataParallel:\n    import torch\n\nDataParallel()"),
    ("ACC109", "import torch\ntorch.distributed.barrier()"),
    (
        "ACC110",
        (
            "import torch.distributed as dist\n\ndef start(device):\n"
            "    dist.init_process_group(dist.get_default_backend_for_device(device))"
        ),
    ),
    ("ACC111", 'import os, torch\nos.environ["WORLD_SIZE"] = "2"  # starts ranks itself'),
    ("ACC112", "import torch\ntorch.backends.cudnn.benchmark = True"),
    ("ACC112", "import torch.backends.cudnn as cudnn\ncudnn.deterministic = True"),
    ("ACC112", "import torch\ntorch.backends.cuda.enable_flash_sdp(False)"),
    ("ACC113", "import torch\nfrom accelcore.apex import amp"),
    (
        "ACC114",
        "from accelcore.apex import optimizers\n\ndef make(parameters):\n    return optimizers.NpuFusedSGD(parameters)",
    ),
    ("ACC115", "import torch\n\ndef make(device):\n    return torch.amp.GradScaler(device.type)"),
    ("ACC116", 'import torch\nnoise = torch.randn(4, device="cuda")'),
    ("ACC201", "import torch\nfrom .gpu_migration import helper"),
    (
        "ACC308",
        (
            "import torch\nfrom torch.distributed.fsdp import fully_shard\n\ndef main(model):\n"
            "    fully_shard(model)\n    return torch.optim.AdamW(model.parameters(), lr=1e-3)"
        ),
    ),
    (
        "ACC309",
        (
            "from torch.utils.data.distributed import DistributedSampler\n\ndef sampler(data):\n"
            "    return DistributedSampler(data)"
        ),
    ),
    (
        "ACC309",
        (
            "from torch.utils.data import DataLoader, DistributedSampler\n\ndef main(parts, train):\n"
            "    for epoch in range(3):\n        if train:\n            data = parts.made(shuffle=True)\n"
            "            train(DataLoader(data, sampler=DistributedSampler(data)))"
        ),
    ),
    ("ACC310", 'import accelcore\nimport torch\nstate = torch.load("a.pt")'),
    ("ACC310", "import torch\n\ndef load(path, **options):\n    return torch.load(path, **options)"),
    (
        "ACC314",
        (
            "import torch\n\ndef fit(model, optimizer, batch):\n    last = 1.0\n    while last > 0.1:\n"
            "        loss = model(batch)\n        loss.backward()\n        optimizer.step()\n"
            "        last = loss.item()"
        ),
    ),
    (
        "ACC301",
        train(
            "loss = model(batch)",
            *("if scaler is not None:", "    scaler.scale(loss).backward()", "    scaler.step(optimizer)"),
            *("else:", "    loss.backward()", f"    {CLIP}", "    optimizer.step()"),
        ),
    ),
    ("ACC301", train(CLIP, "optimizer.step()", "optimizer.zero_grad()", "model(batch).backward()")),
    (
        "ACC301",
        train("model(batch).backward()", CLIP, "optimizer.step()", "args.f(batch).backward()", "args.o.step()"),
    ),
    (
        "ACC301",
        train("for x in batch:", "    model(x).backward()", CLIP, "args.f(batch).backward()", "optimizer.step()"),
    ),
    ("ACC301", train(CLIP, "model(batch).backward()", CLIP, "optimizer.step()")),
    (
        "ACC303",
        train(
            *("model(batch).backward()", "optimizer.step()", "scheduler.step()"),
            over="epoch in range(args.epochs)",
            before=COSINE,
        ),
    ),
    (
        "ACC304",
        train(
            *("optimizer.zero_grad()", "model(batch).backward()", "if batch.norm() > n:"),
            *("    optimizer.zero_grad()", "    optimizer.step()", "    continue", "optimizer.step()"),
        ),
    ),
    (
        "ACC304",
        train(
            *("optimizer_d.zero_grad()", "model(batch).mean().backward()", "optimizer_d.step()"),
            *("optimizer_g.zero_grad()", "model(args.net(batch)).mean().backward()", "optimizer_g.step()"),
        ),
    ),
    (
        "ACC304",
        train(
            *("for parameter in model.parameters():", "    parameter.grad = None"),
            *("model(batch).mean().backward()", "optimizer.step()"),
            before=SGD,
        ),
    ),
    (
        "ACC305",
        train(
            "loss = F.cross_entropy(model(x), y)",
            *("loss.backward()", "if (i + 1) % args.accum_steps == 0:", *UPDATE),
            over="i, (x, y) in enumerate(loader)",
            before=SGD.replace("0.1", "args.lr / args.accum_steps"),
        ),
    ),
    (
        "ACC306",
        train(
            *("step = i // n", "if step >= args.steps:", "    continue", "(model(batch) / n).backward()"),
            *("if (i + 1) % n == 0:", *UPDATE),
            over="i, batch in enumerate(loader)",
        ),
    ),
    (
        "ACC306",
        train("(model(batch) / n).backward()", "step += 1", "if step % n == 0:", *UPDATE, before="step = 0"),
    ),
    (
        "ACC306",
        train(
            *("for batch in loader:", "    step += 1", "    (model(batch) / n).backward()"),
            *("    if step % n == 0:", *(f"    {line}" for line in UPDATE)),
            over="epoch in range(90)",
            before="step = 0",
        ),
    ),
    (
        "ACC309",
        train(
            *("data = args.parts(epoch=epoch)", "model(DataLoader(data, sampler=DistributedSampler(data)))"),
            over="epoch in range(3)",
        ),
    ),
]


def codes(source):
    return [finding.code for finding in check(textwrap.dedent(source))]


@pytest.mark.parametrize(("code", "source"), FOUND)
def test_a_rule_finds_its_examples(code, source):
    assert code in codes(source)


@pytest.mark.parametrize(("code", "source"), CLEAN)
def test_a_rule_leaves_its_counterexamples(code, source):
    assert code not in codes(source)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.code)
def test_a_rule_has_words(rule):
    assert (rule.about[-1], rule.code[:3], len(rule.code)) == (".", "ACC", 6)
