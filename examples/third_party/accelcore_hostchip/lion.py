"""Lion for hostchip. Put your own kernel here, or delete this and its hook."""

import torch

from accelcore.optim.engine import Engine


class Lion(Engine, torch.optim.Optimizer):
    keeps_shapes = True

    def __init__(self, params, lr=1e-4, b1=0.9, b2=0.99, decay=0.0):
        super().__init__(params, {"lr": lr, "b1": b1, "b2": b2, "decay": decay})

    def update(self, found_inf, grad_scale):
        for group in self.param_groups:
            values = [value for value in group["params"] if value.grad is not None]
            gradients = [value.grad for value in values]
            for value in values:
                if not self.state[value]:
                    self.state[value]["exp_avg"] = torch.zeros_like(value)
            means = [self.state[value]["exp_avg"] for value in values]
            torch._foreach_mul_(values, 1 - group["lr"] * group["decay"])
            steps = torch._foreach_lerp(means, gradients, 1 - group["b1"])
            torch._foreach_add_(values, torch._foreach_sign(steps), alpha=-group["lr"])
            torch._foreach_lerp_(means, gradients, 1 - group["b2"])
