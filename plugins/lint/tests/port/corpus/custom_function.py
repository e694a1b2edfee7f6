import torch
from torch.cuda.amp import custom_bwd, custom_fwd


class Square(torch.autograd.Function):
    @staticmethod
    @custom_fwd(cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @custom_bwd
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


torch.manual_seed(0)
weight = torch.randn(4, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1, maximize=False)
for _ in range(3):
    loss = Square.apply(weight).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
