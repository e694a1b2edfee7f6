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
trainer = accel.trainer(model, optimizer, accumulate=accumulation_steps)

for epoch in range(2):
    optimizer.zero_grad()
    for i, (inputs, labels) in enumerate(trainer.batches(train_loader)):
        inputs = inputs.to(accel.device)
        labels = labels.to(accel.device)
        outputs = trainer.forward(inputs)
        loss = criterion(outputs, labels)
        trainer.backward(loss)
        loss = loss / accumulation_steps
        trainer.update()
        print("loss", loss.item())
