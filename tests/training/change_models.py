"""What is changed while it is trained, by the ranks of change_ranks.py and by the oracle in test_changes_in_jobs.py."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import mse_loss

ACCUMULATE, MICRO_BATCHES = 2, 8
CHANGED_BEFORE = 4
CHANGES = ("freeze", "unfreeze", "add", "swap")
KINDS = {
    "own": lambda accel, members: accel.optimizers.create("adamw", members, lr=0.05, eps=1e-3),
    "given": lambda accel, members: torch.optim.AdamW(members, lr=0.05, eps=1e-3, fused=True),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.spare, self.last = (
            nn.Linear(*sizes) for sizes in ((3, 4), (4, 4), (4, 4), (4, 2))
        )

    def forward(self, rows):
        rows = torch.tanh(self.spare(torch.tanh(self.middle(torch.tanh(self.first(rows))))))
        return self.last(rows + self.added(rows) if hasattr(self, "added") else rows)


def start(change: str) -> tuple[Net, list[nn.Parameter]]:
    """A model, and what of it an optimizer is made of."""
    model = Net()
    if change == "unfreeze":
        model.middle.requires_grad_(False)
    if change == "swap":
        model.first.requires_grad_(False), model.spare.requires_grad_(False)
        return model, [*model.last.parameters(), *model.middle.parameters()]
    return model, list(model.parameters())


def apply(change: str, model: Net, optimizer: torch.optim.Optimizer, rank: int) -> None:
    if change in ("freeze", "unfreeze"):
        model.middle.requires_grad_(change == "unfreeze")
    elif change == "swap":
        optimizer.param_groups[0]["params"][2:] = list(model.spare.requires_grad_(True).parameters())
        model.middle.requires_grad_(False)
    else:
        torch.manual_seed(20 + rank)  # every rank makes another; rank 0's counts
        model.added = nn.Linear(4, 4)
        optimizer.add_param_group({"params": list(model.added.parameters()), "lr": 0.02})


def batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)


def loss_of(model, batch):
    return mse_loss(model(batch[0]), batch[1])


def state(model: nn.Module) -> dict[str, list[float]]:
    wholes = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in model.state_dict().items()}
    return {name: value.flatten().tolist() for name, value in wholes.items()}
