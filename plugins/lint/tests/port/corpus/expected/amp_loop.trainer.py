import argparse

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset
import accelcore

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--seed", type=int, default=3)


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    accel = accelcore.select()
    device = accel.device
    dataset = TensorDataset(torch.randn(40, 8), torch.randint(3, (40,)))
    train_loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=0, **accel.loading())

    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = accel.optimizers.create("sgd", net.parameters(), lr=0.1, momentum=0.9)
    # one cycle over all updates
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=args.epochs * len(train_loader) + 1)
    trainer = accel.trainer(net, optimizer, clip_norm=1.0, scheduler=scheduler, precision="fp16")

    for epoch in range(args.epochs):
        net.train()
        running = 0.0
        for step, (images, labels) in enumerate(trainer.batches(train_loader)):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            with trainer.autocast():  # float16
                logits = trainer.forward(images)
                loss = criterion(logits, labels)
            trainer.backward(loss)
            # so that the norm is right
            trainer.update()
            running += loss.item()
            print("loss", loss.item())
        net.eval()
        with torch.no_grad():
            correct = sum((net(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in train_loader)
        print("accuracy", correct / len(dataset), running)


if __name__ == "__main__":
    main()
