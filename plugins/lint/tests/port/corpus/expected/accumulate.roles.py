import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
import accelcore

torch.manual_seed(0)

accumulation_steps = 2
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
accel = accelcore.select()
train_loader = DataLoader(data, batch_size=8, shuffle=False, **accel.loading())
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(accel.device)
criterion = nn.MSELoss()
optimizer = accel.optimizers.create("adamw", model.parameters(), lr=1e-2, weight_decay=0.1)

for epoch in range(2):
    optimizer.zero_grad()
    for i, (inputs, labels) in enumerate(train_loader):
        inputs = inputs.to(accel.device)
        labels = labels.to(accel.device)
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss = loss / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
        print("loss", loss.item())
