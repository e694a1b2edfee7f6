import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)

accumulation_steps = 2
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
train_loader = DataLoader(data, batch_size=8, shuffle=False, pin_memory=torch.accelerator.is_available())
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
criterion = nn.MSELoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

for epoch in range(2):
    optimizer.zero_grad()
    for i, (inputs, labels) in enumerate(train_loader):
        inputs = inputs.to(device)
        labels = labels.to(device)
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss = loss / accumulation_steps
        loss.backward()
        if (i + 1) % accumulation_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
        print("loss", loss.item())
