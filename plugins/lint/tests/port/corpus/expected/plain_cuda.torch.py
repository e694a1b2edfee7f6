"""A script that knows nothing but CUDA."""
import time

import torch
import torch.nn.functional as F
from torch import nn, optim

torch.backends.cudnn.benchmark = True  # fixed sizes
torch.manual_seed(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(10, 20)
        self.fc2 = nn.Linear(20, 5)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def make_batch(n):
    return torch.randn(n, 10), torch.randint(5, (n,))


def main():
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    net = Net().to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    batches = [make_batch(8) for _ in range(4)]

    start = time.time()
    for i, (data, target) in enumerate(batches):
        data = data.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = criterion(net(data), target)
        loss.backward()
        optimizer.step()
        print("loss", loss.item())
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # before the clock is read
    assert time.time() >= start

    weights = torch.ones(5, device=device)
    print("loss", F.cross_entropy(net(data), target, weight=weights).item())
    print("memory", getattr(torch.get_device_module(), "max_memory_allocated", lambda: 0)() >= 0)


if __name__ == "__main__":
    main()
