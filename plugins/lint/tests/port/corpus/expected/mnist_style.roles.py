from __future__ import print_function
import argparse
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR
import accelcore


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv = nn.Conv2d(1, 4, 3, 1)
        self.fc = nn.Linear(144, 10)

    def forward(self, x):
        x = F.relu(self.conv(x))
        return F.log_softmax(self.fc(torch.flatten(x, 1)), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print('loss', loss.item())


def test(model, device, test_loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction='sum').item()
            correct += output.argmax(dim=1).eq(target).sum().item()
    print('loss', test_loss / len(test_loader.dataset))


def main():
    parser = argparse.ArgumentParser(description='digits')
    parser.add_argument('--no-cuda', action='store_true', default=False, help='disables CUDA training')
    parser.add_argument('--seed', type=int, default=1)
    parser.add_argument('--log-interval', type=int, default=1)
    args = parser.parse_args()
    accel = accelcore.select()
    use_cuda = not args.no_cuda and accel.device.type != "cpu"

    torch.manual_seed(args.seed)

    device = torch.device(accel.device.type if use_cuda else "cpu")

    train_kwargs = {'batch_size': 8}
    if use_cuda:
        cuda_kwargs = {'num_workers': 0, 'pin_memory': True}
        train_kwargs.update(cuda_kwargs)

    images = torch.randn(32, 1, 8, 8)
    data = torch.utils.data.TensorDataset(images, torch.randint(10, (32,)))
    train_loader = torch.utils.data.DataLoader(data, **train_kwargs)
    test_loader = torch.utils.data.DataLoader(data, batch_size=16)

    model = Net().to(device)
    optimizer = accel.optimizers.create("adadelta", model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(1, 3):
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()


if __name__ == '__main__':
    main()
