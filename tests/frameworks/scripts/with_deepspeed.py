"""DeepSpeed's engine with ZeRO, on CPU."""

import sys

import deepspeed
import torch
import torch.distributed as dist
from small import digest, leave_group, network, points
from values import Event, say

# Else it compiles C++ at the first start, which takes minutes; gloo does without.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,  # its own for CPU are compiled, too
}


def main():
    folder, event = sys.argv[1], Event("".join(sys.argv[2:]))
    deepspeed.init_distributed("gloo")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    data = points()
    sampler = torch.utils.data.DistributedSampler(data, seed=7)
    loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
    engine.load_checkpoint(folder)  # warns if there is none
    resumed = engine.global_steps
    for epoch in range(resumed // len(loader), 2):
        sampler.set_epoch(epoch)
        for samples, labels in loader:
            loss = torch.nn.functional.cross_entropy(engine(samples), labels)
            engine.backward(loss)
            engine.step()
            event.happens(engine.global_steps)
            stops = torch.tensor(len(event.stops))
            dist.all_reduce(stops)  # all ranks have to save after the same step
            if stops:
                engine.save_checkpoint(folder)
                sys.exit(143)
        engine.save_checkpoint(folder)
    say(
        ranks=[engine.global_rank, engine.local_rank, engine.world_size],
        stage=engine.zero_optimization_stage(),
        resumed=resumed,
        steps=engine.global_steps,
        loss=float(loss.detach()),
        weights=digest(engine.module),
    )
    dist.barrier()
    engine.destroy()
    del engine
    leave_group()


if __name__ == "__main__":
    main()
