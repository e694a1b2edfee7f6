"""Two networks against each other, saved together, with a kill while they are: the subject of test_together.py.

As a program: together_run.py FOLDER WHEN. FOLDER/losses-RANK takes what each epoch came to. WHEN is "never", or the
number of the save in which the process is killed, or in a job rank 1 fails, between the generator and the critic.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import accelcore
from accelcore.jobs.collectives import NoCollectives

SAVES = 4


class Critic(nn.Sequential):
    saves, when, fails = 0, None, None

    def state_dict(self, *args, **keywords):
        if self.saves == self.when:
            self.fails()
        return super().state_dict(*args, **keywords)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def refuse():
    raise accelcore.CheckpointError("no room for the critic")


def refuse_another_job(trainer, file):
    net, accel = nn.Linear(2, 1), replace(accelcore.select("cpu"), collectives=NoCollectives())
    alone = accel.trainer(net, accel.optimizers.create("sgd", net.parameters()), parallel="none")
    try:
        accelcore.Together(generator=trainer, alone=alone)
    except accelcore.ConfigurationError as error:
        file.write_text(str(error))


def main(folder, when):
    accel = accelcore.select("cpu")
    job = accel.join()
    accel.runtime.seed(3)
    generator = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 2))
    critic = Critic(nn.Linear(2, 6), nn.Dropout(0.1), nn.ReLU(), nn.Linear(6, 1))
    make, judge = (
        accel.trainer(net, accel.optimizers.create("adam", net.parameters(), lr=0.01), parallel=parallel)
        for net, parallel in ((generator, "ddp"), (critic, "fsdp"))
    )
    if job.world_size > 1:
        refuse_another_job(make, Path(f"{folder}-another-job-{job.rank}"))
    both = accelcore.Together(generator=make, critic=judge)
    both.resume(folder)
    if when != "never" and job.rank == job.world_size - 1:
        critic.when, critic.fails = int(when), die if job.world_size == 1 else refuse
    loader = DataLoader(torch.randn(32, 2, generator=torch.Generator().manual_seed(0)), 4, shuffle=True)
    for _ in judge.epochs(SAVES):
        total = 0.0
        for number, real in enumerate(judge.batches(loader)):
            fake = make.forward(torch.randn(4, 2))
            loss = judge.forward(fake.detach()).mean() - judge.forward(real).mean()
            judge.backward(loss)
            judge.update()
            total += loss.item()
            if number % 2:  # the critic makes more steps
                loss = -critic(fake).mean()
                make.backward(loss)
                make.update()
                total += loss.item()
        critic.saves += 1
        try:
            both.save(folder, keep=2)
        except accelcore.CheckpointError as error:
            with Path(folder, f"refused-{job.rank}").open("a") as file:
                file.write(f"{judge.steps} {error}\n")
        with Path(folder, f"losses-{job.rank}").open("a") as file:
            file.write(json.dumps([judge.epoch, total]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
