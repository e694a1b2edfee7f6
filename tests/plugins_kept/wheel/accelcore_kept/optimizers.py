import torch

from accelcore.optim.engine import Engine


class KeptSGD(Engine, torch.optim.Optimizer):
    keeps_shapes = True

    def __init__(self, params, lr=1e-3, momentum=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    def update(self, found_inf, grad_scale):
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is None:
                    continue
                entry = self.state[value]
                if not entry:
                    entry["momentum_buffer"] = torch.zeros_like(value)
                entry["momentum_buffer"].mul_(group["momentum"]).add_(value.grad)
                value.sub_(entry["momentum_buffer"], alpha=group["lr"])
