"""Stand-ins for packages that recipes show and the tests do not install: as much of their interface as is used there.

Imported before a recipe. Where the package is installed, it is used itself.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import nn


class GPT2LMHeadModel(nn.Module):
    """A model of transformers': its configuration says its sizes, and what it returns has `loss` and `logits`."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.head(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)

    def save_pretrained(self, save_directory: str) -> None:
        Path(save_directory).mkdir(exist_ok=True)


def create_model(model_name: str, num_classes: int) -> nn.Module:
    """timm's."""
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4, num_classes))


def create_optimizer_v2(model: nn.Module, opt: str, **options: float) -> torch.optim.Optimizer:
    """timm.optim's."""
    return {"sgd": torch.optim.SGD}[opt](model.parameters(), **options)


class Adapted(nn.Module):
    """peft's: a frozen linear layer, and two trainable matrices beside it."""

    def __init__(self, layer: nn.Linear, r: int) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(layer.in_features, r, bias=False), nn.Linear(r, layer.out_features, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layer(rows) + self.up(self.down(rows))


class PeftModel(nn.Module):
    """peft's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return self.model(*batch)

    def save_pretrained(self, save_directory: str) -> None:
        Path(save_directory).mkdir(exist_ok=True)


def get_peft_model(model: nn.Module, config: SimpleNamespace) -> PeftModel:
    """peft's."""
    model.requires_grad_(False)
    for name in config.modules_to_save:
        model.get_submodule(name).requires_grad_(True)
    for name in config.target_modules:
        model.set_submodule(name, Adapted(model.get_submodule(name), config.r))
    return PeftModel(model)


class AUROC(nn.Module):
    """torchmetrics', of one process."""

    def __init__(self, task: str) -> None:
        super().__init__()
        assert task == "binary"
        self.reset()

    def update(self, scores: torch.Tensor, labels: torch.Tensor) -> None:
        self.seen.append((scores, labels))

    def compute(self) -> torch.Tensor:
        scores, labels = map(torch.cat, zip(*self.seen, strict=True))
        return (scores[labels == 1][:, None] > scores[labels == 0]).float().mean()

    def reset(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []


def _provide(needed: str, name: str, **members: object) -> None:
    if find_spec(needed) is None:
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(members)
        package, _, last = name.rpartition(".")
        if package:
            setattr(sys.modules[package], last, module)


_provide("peft", "peft", LoraConfig=SimpleNamespace, get_peft_model=get_peft_model)
_provide("torchmetrics", "torchmetrics", AUROC=AUROC)
_provide("transformers", "transformers", GPT2Config=SimpleNamespace, GPT2LMHeadModel=GPT2LMHeadModel)
# timm asks for torchvision, without which it cannot be imported.
_provide("torchvision", "timm", create_model=create_model)
_provide("torchvision", "timm.optim", create_optimizer_v2=create_optimizer_v2)
