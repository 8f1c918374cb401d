"""Hugging Face accelerate around a loop of the script's own, stopped by a trigger."""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, set_seed
from small import digest, network, points
from values import Event, say


class Progress:
    """What load_state() cannot know: which epochs are done."""

    epochs = 0

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


def main(*, cpu=True, **more):
    folder, event = sys.argv[1], Event("".join(sys.argv[2:]))
    set_seed(7)
    accelerator = Accelerator(
        cpu=cpu,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        **more,
    )
    loader = torch.utils.data.DataLoader(points(), batch_size=8, shuffle=True, num_workers=2)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if os.listdir(folder):
        accelerator.load_state(folder)
    resumed = steps = progress.epochs * len(loader)
    while progress.epochs < 2:
        for samples, labels in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(samples), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
            event.happens(steps)
            if event.stops:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                accelerator.save_state(folder)
                sys.exit(143)
        progress.epochs += 1
        accelerator.save_state(folder)
    say(
        ranks=[
            accelerator.process_index,
            accelerator.local_process_index,
            accelerator.num_processes,
        ],
        kind=str(accelerator.distributed_type),
        precision=accelerator.mixed_precision,
        accumulated=accelerator.gradient_accumulation_steps,
        bucket_view=getattr(model, "gradient_as_bucket_view", None),
        resumed=resumed,
        steps=steps,
        losses=accelerator.gather(loss.detach().reshape(1)).tolist(),
        weights=digest(accelerator.unwrap_model(model)),
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
