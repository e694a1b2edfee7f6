import random

import torch
import torch.nn as nn
import accelcore

manualSeed = 999
random.seed(manualSeed)
torch.manual_seed(manualSeed)

ngpu = 1
nz = 4
accel = accelcore.select()
device = torch.device(str(accel.device) if (accel.device.type != "cpu" and ngpu > 0) else "cpu")

netG = nn.Sequential(nn.Linear(nz, 16), nn.ReLU(), nn.Linear(16, 6)).to(device)
netD = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1), nn.Sigmoid()).to(device)
if (device.type != "cpu") and (ngpu > 1):
    # TODO(accelcore): DataParallel drives several devices from one process: start one for each, and use DistributedDataParallel
    netG = nn.DataParallel(netG, list(range(ngpu)))

criterion = nn.BCELoss()
fixed_noise = torch.randn(2, nz, device=device)
optimizerD = accel.optimizers.create("adam", netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerG = accel.optimizers.create("adam", netG.parameters(), lr=2e-4, betas=(0.5, 0.999))

for i in range(3):
    # (1) update D: maximize log(D(x)) + log(1 - D(G(z)))
    netD.zero_grad()
    real = torch.randn(5, 6).to(device)
    label = torch.full((5,), 1.0, device=device)
    errD_real = criterion(netD(real).view(-1), label)
    errD_real.backward()
    fake = netG(torch.randn(5, nz).to(device))
    label.fill_(0.0)
    errD_fake = criterion(netD(fake.detach()).view(-1), label)
    errD_fake.backward()
    optimizerD.step()

    # (2) update G
    netG.zero_grad()
    label.fill_(1.0)
    errG = criterion(netD(fake).view(-1), label)
    errG.backward()
    optimizerG.step()
    print("loss", errD_real.item() + errD_fake.item())
    print("loss", errG.item())
