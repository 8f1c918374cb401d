"""torch.compile beside DistributedDataParallel: inductor writes C++ and calls the compiler."""

import torch
import torch.distributed as dist
from small import digest, leave_group, network, points
from torch.nn.parallel import DistributedDataParallel
from values import say


def main():
    dist.init_process_group("gloo")
    model = network()
    compiled = torch.compile(DistributedDataParallel(model), fullgraph=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = points()
    sampler = torch.utils.data.DistributedSampler(data, seed=7)
    for samples, labels in torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler):
        loss = torch.nn.functional.cross_entropy(compiled(samples), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    say(loss=float(loss), weights=digest(model), graphs=graphs)
    dist.barrier()
    del compiled
    leave_group()


if __name__ == "__main__":
    main()
