"""Reference implementations of the four optimizers that torch does not have, written from their sources.

They are plain and slow, and share no code with accelcore's own. accelcore/optim/formulas documents what each computes;
tests compare these with the packages of the sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor


class _Plain(torch.optim.Optimizer):
    """Optimizer that updates one parameter after the other by `updated`.

    Attributes:
        options: with their defaults.
    """

    options: ClassVar[dict[str, Any]]

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {**self.options, **options})

    def start(self, o: dict[str, Any]) -> dict[str, float]:
        """Return the initial value of each entry of the state."""
        return {"exp_avg": 0.0, "exp_avg_sq": 0.0}

    def updated(self, p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any]) -> Any:
        """Return the new value of a parameter `p` with gradient `g`, state `s` and options `o`."""
        raise NotImplementedError

    def prepared(self, gradients: list[list[Tensor]]) -> list[list[Tensor]]:
        """Return the gradients of each group, after steps that concern several parameters."""
        return gradients

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        present = [[p for p in o["params"] if p.grad is not None] for o in self.param_groups]
        prepared = self.prepared([[p.grad for p in members] for members in present])
        for o, members, gradients in zip(self.param_groups, present, prepared, strict=True):
            for p, g in zip(members, gradients, strict=True):
                s = self.state[p]
                if not s:
                    s["step"] = torch.tensor(0.0)
                    s.update({key: torch.full_like(p, value) for key, value in self.start(o).items()})
                s["step"] += 1
                p.copy_(self.updated(p.clone(), g, s, o))
        return loss


def _moments(g: Tensor, s: dict[str, Any], beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    s["exp_avg"].copy_(beta1 * s["exp_avg"] + (1 - beta1) * g)
    s["exp_avg_sq"].copy_(beta2 * s["exp_avg_sq"] + (1 - beta2) * g**2)
    return s["exp_avg"], s["exp_avg_sq"]


class Lamb(_Plain):
    """Ascend's Lamb."""

    options: ClassVar[dict[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.0,
        "adam": False,
        "use_global_grad_norm": False,
    }

    def prepared(self, gradients: list[list[Tensor]]) -> list[list[Tensor]]:
        norm = math.sqrt(sum(float((g**2).sum()) for each in gradients for g in each))
        divided = [o["use_global_grad_norm"] and norm > 1 for o in self.param_groups]
        return [[g / norm if d else g for g in each] for each, d in zip(gradients, divided, strict=True)]

    def updated(self, p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any]) -> Any:
        m, v = _moments(g, s, *o["betas"])
        u = m / (v.sqrt() + o["eps"]) + o["weight_decay"] * p
        weight, length = min(float((p**2).sum()) ** 0.5, 10.0), float((u**2).sum()) ** 0.5
        ratio = 1.0 if o["adam"] or weight == 0 or length == 0 else weight / length
        return p - o["lr"] * ratio * u


class AdamP(_Plain):
    """AdamP as its authors have it."""

    options: ClassVar[dict[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "delta": 0.1,
        "wd_ratio": 0.1,
        "nesterov": False,
    }

    def updated(self, p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any]) -> Any:
        (beta1, beta2), eps, t = o["betas"], o["eps"], float(s["step"])
        m, v = _moments(g, s, beta1, beta2)
        direction = beta1 * m + (1 - beta1) * g if o["nesterov"] else m
        d, factor = direction / (v.sqrt() / math.sqrt(1 - beta2**t) + eps), 1.0
        for rows in (p.shape[0], 1) if p.dim() > 1 and p.numel() else ():
            ps, gs, ds = (tensor.reshape(rows, -1) for tensor in (p, g, d))
            norms = [float((row**2).sum()) ** 0.5 + eps for row in ps]
            slopes = [float((row**2).sum()) ** 0.5 + eps for row in gs]
            cosines = [abs(float((ps[n] * gs[n]).sum())) / (slopes[n] * norms[n]) for n in range(rows)]
            if max(cosines) < o["delta"] / math.sqrt(ps.shape[1]):
                units = [ps[n] / norms[n] for n in range(rows)]
                d = torch.stack([ds[n] - units[n] * (units[n] * ds[n]).sum() for n in range(rows)]).reshape(p.shape)
                factor = o["wd_ratio"]
                break
        return p * (1 - o["lr"] * o["weight_decay"] * factor) - o["lr"] / (1 - beta1**t) * d


class BertAdam(_Plain):
    """BertAdam as torch_npu means it."""

    options: ClassVar[dict[str, Any]] = {
        "lr": 1e-3,
        "warmup": -1,
        "t_total": -1,
        "schedule": "warmup_linear",
        "b1": 0.9,
        "b2": 0.999,
        "e": 1e-6,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
    }

    def prepared(self, gradients: list[list[Tensor]]) -> list[list[Tensor]]:
        norms = [math.sqrt(sum(float((g**2).sum()) for g in each)) for each in gradients]
        limits = [o["max_grad_norm"] for o in self.param_groups]
        factors = [min(1.0, top / (n + 1e-6)) if top > 0 else 1.0 for top, n in zip(limits, norms, strict=True)]
        return [[g * factor for g in each] for each, factor in zip(gradients, factors, strict=True)]

    def updated(self, p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any]) -> Any:
        m, v = _moments(g, s, o["b1"], o["b2"])
        x, rate = (float(s["step"]) - 1) / o["t_total"], o["lr"]
        if o["t_total"] != -1:
            rate *= x / o["warmup"] if x < o["warmup"] else _AFTER_WARMUP[o["schedule"]](x, o["warmup"])
        return p - rate * (m / (v.sqrt() + o["e"]) + o["weight_decay"] * p)


_AFTER_WARMUP: dict[str, Callable[[float, float], float]] = {
    "warmup_constant": lambda x, warmup: 1.0,
    "warmup_cosine": lambda x, warmup: (1 + math.cos(math.pi * min(1.0, x))) / 2,
    "warmup_linear": lambda x, warmup: max(0.0, (1 - x) / (1 - warmup)),
    "warmup_poly": lambda x, warmup: math.sqrt(max(0.0, 1 - x)),
}


class RMSpropTF(_Plain):
    """RMSprop as TensorFlow 1 has it."""

    options: ClassVar[dict[str, Any]] = {
        "lr": 1e-2,
        "alpha": 0.9,
        "eps": 1e-10,
        "weight_decay": 0.0,
        "momentum": 0.0,
        "centered": False,
        "decoupled_decay": False,
        "lr_in_momentum": True,
    }

    def start(self, o: dict[str, Any]) -> dict[str, float]:
        named = {"momentum_buffer": o["momentum"], "grad_avg": o["centered"]}
        return {"square_avg": 1.0, **{key: 0.0 for key, wanted in named.items() if wanted}}

    def updated(self, p: Tensor, g: Tensor, s: dict[str, Any], o: dict[str, Any]) -> Any:
        lr, alpha, decay = o["lr"], o["alpha"], o["weight_decay"]
        p, g = (p * (1 - decay), g) if o["decoupled_decay"] else (p, g + decay * p)
        s["square_avg"] += (1 - alpha) * (g**2 - s["square_avg"])
        variance = s["square_avg"]
        if o["centered"]:
            s["grad_avg"] += (1 - alpha) * (g - s["grad_avg"])
            variance = variance - s["grad_avg"] ** 2
        u = g / (variance + o["eps"]).sqrt()
        if not o["momentum"]:
            return p - lr * u
        inner, outer = (lr, 1.0) if o["lr_in_momentum"] else (1.0, lr)
        s["momentum_buffer"].copy_(o["momentum"] * s["momentum_buffer"] + inner * u)
        return p - outer * s["momentum_buffer"]
