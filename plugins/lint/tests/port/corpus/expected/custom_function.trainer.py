import torch
import accelcore

accel = accelcore.select()


class Square(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type=accel.device.type, cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.amp.custom_bwd(device_type=accel.device.type)
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


torch.manual_seed(0)
weight = torch.randn(4, device=accel.device, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1, maximize=False)
for _ in range(3):
    loss = Square.apply(weight).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
