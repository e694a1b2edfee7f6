import argparse

import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--seed", type=int, default=3)


def main():
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    dataset = TensorDataset(torch.randn(40, 8), torch.randint(3, (40,)))
    train_loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=0, pin_memory=torch.accelerator.is_available())

    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    # one cycle over all updates
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=args.epochs * len(train_loader) + 1)
    accelerator = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    scaler = torch.amp.GradScaler(accelerator.type, enabled=accelerator.type != "cpu")

    for epoch in range(args.epochs):
        net.train()
        running = 0.0
        for step, (images, labels) in enumerate(train_loader):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast(accelerator.type, dtype=torch.float16, enabled=accelerator.type != "cpu"):  # float16
                logits = net(images)
                loss = criterion(logits, labels)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # so that the norm is right
            nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            running += loss.item()
            print("loss", loss.item())
        net.eval()
        with torch.no_grad():
            correct = sum((net(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in train_loader)
        print("accuracy", correct / len(dataset), running)


if __name__ == "__main__":
    main()
