import torch

from accelcore import hookimpl
from accelcore.optim.engine import Engine


class Lion(Engine, torch.optim.Optimizer):
    keeps_shapes = True

    def __init__(self, params, lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay})

    def update(self, found_inf, grad_scale):
        for group in self.param_groups:
            values = [value for value in group["params"] if value.grad is not None]
            gradients = [value.grad for value in values]
            for value in values:
                if not self.state[value]:
                    self.state[value]["exp_avg"] = torch.zeros_like(value)
            means = [self.state[value]["exp_avg"] for value in values]
            torch._foreach_mul_(values, 1 - group["lr"] * group["weight_decay"])
            signs = torch._foreach_sign(torch._foreach_lerp(means, gradients, 1 - group["beta1"]))
            torch._foreach_add_(values, signs, alpha=-group["lr"])
            torch._foreach_lerp_(means, gradients, 1 - group["beta2"])


@hookimpl
def accelcore_register_optimizers(backend, registry):
    registry.register("lion", "foreach", Lion, priority=10, memory="any")
