"""wandb offline: a process of its own beside each rank, and files that the run leaves."""

import os
import sys

import torch
import wandb
from small import network
from values import say


def main():
    folder = os.path.join(sys.argv[1], os.environ["RANK"])
    os.makedirs(folder)
    run = wandb.init(project="tests", dir=folder, config={"lr": 0.1}, id="run")
    model = network()
    run.watch(model)
    for step in range(3):
        loss = model(torch.full((2, 4), float(step))).square().mean()
        loss.backward()
        run.log({"loss": float(loss)})
    say(
        program=run.settings.program,
        relative=run.settings.program_relpath,
        offline=run.offline,
        config=dict(run.config),
        loss=run.summary["loss"],
        step=run.step,
    )
    run.finish()


if __name__ == "__main__":
    main()
