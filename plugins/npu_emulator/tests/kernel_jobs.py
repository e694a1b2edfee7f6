"""What processes of their own do, where the machine that they emulate differs from the session's."""

import warnings

import torch
import torch.distributed as dist
import torch_npu
from accelcore_npu_emulator import counters
from emulated_jobs import start
from torch import nn
from torch_npu.npu.utils import get_npu_overflow_flag, npu_check_overflow

# torch_npu says this of every `empty_like(tensor, memory_format=torch.contiguous_format)`.
warnings.filterwarnings("ignore", "Cannot create tensor with intern?al format")


def half(*values):
    return torch.tensor(values, dtype=torch.float16).npu()


def saturation():
    """What float16 overflow gives, and the flag after each step."""
    seen = {"inf and nan": torch_npu.npu.utils.is_support_inf_nan()}
    seen["product"] = (half(300.0, -300.0, 2.0) * 300).tolist()
    seen["flag"] = get_npu_overflow_flag()
    seen["read twice"] = get_npu_overflow_flag()
    seen["checked"] = npu_check_overflow(half(1.0))
    seen["cleared"] = get_npu_overflow_flag()
    seen["sum in place"] = half(65504.0).add_(65504.0).tolist()
    seen["cast"] = torch.tensor([1e6, -1e6]).npu().half().tolist()
    seen["matmul"] = (half(300.0, 300.0) @ half(300.0, 300.0)).item()
    torch_npu.npu.utils.clear_npu_overflow_flag()
    seen["nan"] = (half(0.0) / 0).tolist()
    seen["nan raises"] = npu_check_overflow(half(1.0))
    return seen


def overflow():
    """What torch_npu says of inf and nan, and what comes of an overflow."""
    return torch_npu.npu.utils.is_support_inf_nan(), (half(300.0) * 300).item()


def product_of_bfloat16():
    """What it is refused with, or nothing."""
    values = torch.ones(2, 2, dtype=torch.bfloat16).npu()
    try:
        values @ values
    except RuntimeError as error:
        return str(error)
    return ""


def saturated_masks():
    """Attention with a mask of -inf is no overflow."""
    scores = half(1.0, 2.0, 3.0).masked_fill(torch.tensor([False, False, True]).npu(), float("-inf"))
    return scores.tolist(), scores.softmax(0).tolist(), get_npu_overflow_flag()


def scaled_steps(kind, steps, scale=2.0**10, spike=None):
    """Train with a scaler: after each step the scale, and whether the parameters moved."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4).npu()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    scaler = torch_npu.npu.amp.GradScaler(init_scale=scale) if kind == "npu" else torch.amp.GradScaler("npu", scale)
    history = []
    for step in range(steps):
        before = layer.weight.detach().cpu()
        optimizer.zero_grad()
        with torch.autocast("npu", dtype=torch.float16):
            loss = layer(torch.ones(2, 4, device="npu")).float().square().mean()
        scaler.scale(loss * (1e6 if step == spike else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = not torch.equal(before, layer.weight.detach().cpu())
        finite = bool(layer.weight.isfinite().all())
        history.append((scaler.get_scale(), moved, finite))
    return history


def check_costs():
    """Launches and waits of one overflow check of three gradients."""
    gradients = [torch.ones(2, device="npu") for _ in range(3)]
    found, inverse = torch.zeros(1, device="npu"), torch.ones(1, device="npu")
    with counters.count() as cost:
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
    return dict(cost.launches), cost.synchronizations.total()


def attempts(*names):
    """The error of each of these operations, or its result."""
    tensor = torch.ones(3, device="npu", requires_grad=True)
    operations = {
        "add": lambda: (tensor + tensor).sum().item(),
        "linear": lambda: nn.functional.linear(tensor, torch.ones(2, 3, device="npu")).sum().item(),
        "dropout": lambda: nn.functional.dropout(tensor, 0.5).sum().item(),
        "exp": lambda: torch.zeros(2, device="npu").exp().sum().item(),
        "digamma": lambda: torch.digamma(torch.ones(1, device="npu")).item(),
    }
    results = []
    for name in names:
        try:
            results.append(operations[name]())
        except RuntimeError as error:
            results.append(str(error))
    return results


def first_use_in_inference_mode():
    with torch.inference_mode():
        first = torch.tensor([1, 2], device="npu") * 2
    return first.tolist(), nn.functional.one_hot(torch.tensor([1, 0], device="npu"), 2).tolist()


def devices_that_a_random_tensor_wakes():
    torch.randn(1, device="npu:1")
    return [torch_npu._C._npu_hasPrimaryContext(index) for index in range(2)]


def silent_check():
    """What a rank is told that broadcasts a gradient, as torch_npu has it, and looks for faults of the hardware."""
    _, _, device = start()
    gradient = torch.ones(2, 2, device=device)
    torch_npu._C._npu_set_module_train_state("train")
    torch_npu._C._npu_set_call_state("backward")
    try:
        dist.broadcast(gradient, src=0)
    except RuntimeError as error:
        return str(error)
    return "nothing"
