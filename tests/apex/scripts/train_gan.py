"""Two models, two optimizers and three losses, each with a scale of its own, as in the example that apex comes with."""

import argparse
import json
import sys

import torch
from apex import amp, optimizers
from torch import nn


def get_args(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--opt-level", default="O1")
    parser.add_argument("--loss-scale", default=None)
    parser.add_argument("--num-losses", type=int, default=3)
    parser.add_argument("--combine-grad", action="store_true")
    parser.add_argument("--explode", type=int, default=None, help="at this step the loss of real images overflows")
    return parser.parse_args(argv)


def main(argv):
    args = get_args(argv)
    torch.manual_seed(0)
    netG = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6)).to(args.device)
    netD = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)).to(args.device)
    create = optimizers.NpuFusedAdam if args.amp else torch.optim.Adam
    optimizerD = create(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizerG = create(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
    if args.amp:
        [netD, netG], [optimizerD, optimizerG] = amp.initialize(
            [netD, netG],
            [optimizerD, optimizerG],
            opt_level=args.opt_level,
            loss_scale=args.loss_scale,
            num_losses=args.num_losses,
            combine_grad=True if args.combine_grad else None,
            verbosity=0,
        )
    criterion = nn.BCEWithLogitsLoss()
    generator = torch.Generator().manual_seed(3)

    def backward(loss, optimizer, loss_id):
        if not args.amp:
            loss.backward()
            return
        with amp.scale_loss(loss, optimizer, loss_id=loss_id % args.num_losses) as scaled_loss:
            scaled_loss.backward()

    losses = []
    for step in range(args.steps):
        real = (torch.randn(8, 6, generator=generator) + 1).to(args.device)
        noise = torch.randn(8, 4, generator=generator).to(args.device)

        netD.zero_grad()
        output = netD(real)
        errD_real = criterion(output, torch.ones_like(output))
        if step == args.explode:
            errD_real = errD_real * float("inf")
        backward(errD_real, optimizerD, 0)
        fake = netG(noise)
        output = netD(fake.detach())
        errD_fake = criterion(output, torch.zeros_like(output))
        backward(errD_fake, optimizerD, 1)
        optimizerD.step()

        netG.zero_grad()
        output = netD(fake)
        errG = criterion(output, torch.ones_like(output))
        backward(errG, optimizerG, 2)
        optimizerG.step()
        losses.append([errD_real.item(), errD_fake.item(), errG.item()])

    state = {**netD.state_dict(prefix="D."), **netG.state_dict(prefix="G.")}
    scales = [entry["loss_scale"] for entry in amp.state_dict().values()] if args.amp else None
    return {"losses": losses, "scales": scales, "state": {name: value.tolist() for name, value in state.items()}}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
