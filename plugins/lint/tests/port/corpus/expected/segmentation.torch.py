import torch
import torch.nn as nn
import torch.nn.functional as F


class ConfusionMatrix(object):
    def __init__(self, num_classes):
        self.num_classes = num_classes
        self.mat = None

    def update(self, a, b):
        n = self.num_classes
        if self.mat is None:
            self.mat = torch.zeros((n, n), dtype=torch.int64, device=a.device)
        with torch.no_grad():
            k = (a >= 0) & (a < n)
            inds = n * a[k].to(torch.int64) + b[k]
            self.mat += torch.bincount(inds, minlength=n**2).reshape(n, n)


def criterion(inputs, target):
    return F.cross_entropy(inputs["out"], target, ignore_index=255)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(3, 8, 3, padding=1)
        self.classifier = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return {"out": self.classifier(F.relu(self.backbone(x)))}


def evaluate(model, data_loader, device, num_classes):
    model.eval()
    confmat = ConfusionMatrix(num_classes)
    with torch.inference_mode():
        for image, target in data_loader:
            image, target = image.to(device), target.to(device)
            confmat.update(target.flatten(), model(image)["out"].argmax(1).flatten())
    return confmat

accelerator = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def train_one_epoch(model, optimizer, data_loader, device, scaler=None):
    model.train()
    for image, target in data_loader:
        image, target = image.to(device), target.to(device)
        with torch.autocast(accelerator.type, dtype=torch.float16, enabled=accelerator.type != "cpu" and scaler is not None):
            loss = criterion(model(image), target)
        optimizer.zero_grad()
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        print("loss", loss.item())


def main(amp=False):
    torch.manual_seed(4)
    device = accelerator
    data = [(torch.randn(2, 3, 6, 6), torch.randint(4, (2, 6, 6))) for _ in range(3)]
    model = Net().to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(accelerator.type, enabled=accelerator.type != "cpu") if amp else None
    train_one_epoch(model, optimizer, data, device, scaler)
    assert evaluate(model, data, device, 4).mat.sum() == 216


main()
