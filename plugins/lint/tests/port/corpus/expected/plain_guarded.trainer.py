import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
import accelcore

accel = accelcore.select()

device = accel.device
print("running on", device.type)

torch.manual_seed(0)

inputs = torch.randn(64, 8)
dataset = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
loader = DataLoader(dataset, batch_size=16, shuffle=True, **accel.loading())

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
model = model.to(device)
criterion = nn.MSELoss()
optimizer = accel.optimizers.create("adam", model.parameters(), lr=1e-2)
trainer = accel.trainer(model, optimizer)

for epoch in range(2):
    for x, y in trainer.batches(loader):
        x, y = x.to(device), y.to(device)
        # forward, backward, update
        output = trainer.forward(x)
        loss = criterion(output, y)
        trainer.backward(loss)
        trainer.update()
        print("loss", loss.item())
