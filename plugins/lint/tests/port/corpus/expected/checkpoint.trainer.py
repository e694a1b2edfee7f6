import os
import tempfile

import torch
from torch import nn
import accelcore


def save(path, model, optimizer, epoch):
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)

accel = accelcore.select()


def resume(path, model, optimizer):
    checkpoint = torch.load(path, map_location=accel.device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return checkpoint["epoch"] + 1


def fit(path, epochs):
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(accel.device)
    optimizer = accel.optimizers.create("adam", model.parameters(), lr=0.1)
    start = resume(path, model, optimizer) if os.path.isfile(path) else 0
    trainer = accel.trainer(model, optimizer)
    for epoch in range(start, epochs):
        x = torch.full((2, 4), 1.0 + epoch, device=accel.device)
        loss = trainer.forward(x).square().mean()
        trainer.backward(loss)
        trainer.update()
        save(path, model, optimizer, epoch)
        print("loss", loss.item())


with tempfile.TemporaryDirectory() as folder:
    fit(os.path.join(folder, "last.pth"), 2)
    fit(os.path.join(folder, "last.pth"), 4)  # goes on
