import argparse
import os
import random
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.utils.data
import accelcore

parser = argparse.ArgumentParser(description="image classifier")
parser.add_argument("-j", "--workers", default=0, type=int)
parser.add_argument("--lr", default=0.05, type=float)
accel = accelcore.select()
parser.add_argument("--dist-backend", default=torch.distributed.get_default_backend_for_device(accel.device), type=str, help="distributed backend")
parser.add_argument("--gpu", default=None, type=int, help="GPU id to use.")
parser.add_argument("--local_rank", default=0, type=int)
parser.add_argument("--seed", default=0, type=int)
args = parser.parse_args()


def main():
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = True
    args.distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if args.distributed:
        args.gpu = args.local_rank
        dist.init_process_group(backend=args.dist_backend, init_method="env://")

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    if args.distributed:
        model.to(accel.device)
        model = nn.parallel.DistributedDataParallel(model, device_ids=[accel.device] if accel.device.type != "cpu" else None)
    else:
        model = model.to(accel.device)

    # define loss function (criterion) and optimizer
    criterion = nn.CrossEntropyLoss().to(accel.device)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=args.lr,
                                momentum=0.9,
                                weight_decay=1e-4)

    images = torch.randn(24, 3, 8, 8)
    dataset = torch.utils.data.TensorDataset(images, torch.randint(10, (24,)))
    sampler = torch.utils.data.distributed.DistributedSampler(dataset) if args.distributed else None
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=8, shuffle=False,
        num_workers=args.workers, **accel.loading(), sampler=sampler)

    for epoch in range(2):
        train(loader, model, criterion, optimizer, epoch)
        acc1 = validate(loader, model, criterion)
        assert 0 <= acc1 <= 100
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "checkpoint.pth.tar")
            torch.save({"epoch": epoch, "state_dict": model.state_dict()}, path)
            checkpoint = torch.load(path, map_location=accel.device)
            model.load_state_dict(checkpoint["state_dict"])


def train(loader, model, criterion, optimizer, epoch):
    model.train()
    for i, (images, target) in enumerate(loader):
        images = images.to(accel.device, non_blocking=True)
        target = target.to(accel.device, non_blocking=True)

        output = model(images)
        loss = criterion(output, target)

        # compute gradient and do SGD step
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", loss.item())


def validate(loader, model, criterion):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, target in loader:
            if accel.device.type != "cpu":
                images = images.to(accel.device, non_blocking=True)
                target = target.to(accel.device, non_blocking=True)
            correct += (model(images).argmax(1) == target).sum().item()
    return 100.0 * correct / len(loader.dataset)


if __name__ == "__main__":
    main()
