"""Hugging Face accelerate around a loop of the script's own, stopped by a trigger."""

import signal
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from small import digest, network, points
from values import say, wait_for_stop


def main():
    folder = sys.argv[1]
    stop = sys.argv[2:] == ["--stop"]
    heard = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    set_seed(7)
    accelerator = Accelerator(cpu=True)
    loader = torch.utils.data.DataLoader(points(), batch_size=8, shuffle=True, num_workers=2)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for _ in range(2):
        for samples, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(samples), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            steps += 1
            if stop and steps == 3:
                wait_for_stop(lambda: heard)
            if heard:
                accelerator.set_trigger()
            if accelerator.check_trigger():
                accelerator.save_state(folder)
                sys.exit(128 + signal.SIGTERM)
    accelerator.save_state(folder)
    say(
        ranks=[
            accelerator.process_index,
            accelerator.local_process_index,
            accelerator.num_processes,
        ],
        kind=str(accelerator.distributed_type),
        steps=steps,
        losses=accelerator.gather(loss.detach().reshape(1)).tolist(),
        weights=digest(accelerator.unwrap_model(model)),
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
