import argparse
from dataclasses import dataclass

import torch
import accelcore


@dataclass
class Config:
    lr: float = 0.1
    device: str = (torch.accelerator.current_accelerator() or torch.device("cpu")).type  # where to train


def build(width, device=(torch.accelerator.current_accelerator() or torch.device("cpu")).type):
    return torch.nn.Linear(width, 1, device=device)

if __name__ != "__mp_main__":
    accel = accelcore.select()


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default=accel.device.type, help="cuda or cpu")
    parser.add_argument("--name", default="cuda-run")
    return parser.parse_args()


def main():
    args = parse()
    options = {"device": accel.device.type, "name": "run"}
    torch.manual_seed(0)
    model = build(3, device=args.device)
    optimizer = accel.optimizers.create("sgd", model.parameters(), lr=Config().lr)
    for _ in range(3):
        loss = model(torch.randn(4, 3).to(options["device"])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("loss", loss.item())
    print(f"on {Config().device}")


if __name__ == "__main__":
    main()
