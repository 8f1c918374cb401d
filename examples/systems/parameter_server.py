"""A parameter server with torch.distributed.rpc: rank 0 serves the weights, the others train.

One host, a server and 3 trainers: torchrun --nproc-per-node 4 parameter_server.py
Several hosts, on each:            sm-launch --train-script parameter_server.py \
                                       --launcher-nproc-per-node 2

All-reduce has replaced this. Here the weights and gradients of all trainers go through one host,
whose network limits them all, and a gradient may be of weights that others have changed meanwhile.
With all-reduce each rank sends as much as the others, and all have the same weights at every step.
"""

import os
import sys
import threading

import torch
import torch.distributed.rpc as rpc
from torch import nn

STEPS, BATCH = 100, 32
SERVER = "server"


def new_model() -> nn.Module:
    """Return the model, with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1))


class Server:
    """Keeps the weights. Trainers call its methods, each in a thread of its own."""

    def __init__(self) -> None:
        self.model = new_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.lock = threading.Lock()
        self.updates = 0

    def pull(self) -> list[torch.Tensor]:
        """Return the weights as they are now."""
        with self.lock:
            return [parameter.detach().clone() for parameter in self.model.parameters()]

    def push(self, gradients: list[torch.Tensor]) -> None:
        """Take a step with the gradients of one trainer."""
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients):
                parameter.grad = gradient
            self.optimizer.step()
            self.updates += 1


server = Server()  # used on rank 0 alone


def pull() -> list[torch.Tensor]:
    """Run on the server, which finds it by its name."""
    return server.pull()


def push(gradients: list[torch.Tensor]) -> None:
    """Run on the server."""
    server.push(gradients)


def a_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random inputs and what they should give."""
    inputs = torch.randn(BATCH, 5)
    return inputs, torch.sin(inputs.sum(dim=1, keepdim=True))


def train(rank: int) -> None:
    """Pull the weights, and push what this rank's data says of them, step after step."""
    model = new_model()
    torch.manual_seed(rank)
    for _ in range(STEPS):
        for parameter, weight in zip(model.parameters(), rpc.rpc_sync(SERVER, pull)):
            parameter.data.copy_(weight)
        inputs, targets = a_batch()
        model.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        rpc.rpc_sync(SERVER, push, args=([parameter.grad for parameter in model.parameters()],))
    print(f"rank {rank} has trained {STEPS} steps", flush=True)


def loss_of(model: nn.Module) -> float:
    """Return the loss on data that no trainer has seen."""
    torch.manual_seed(12345)
    inputs, targets = a_batch()
    with torch.no_grad():
        return nn.functional.mse_loss(model(inputs), targets).item()


def main() -> None:
    """Serve or train, by rank; the server then looks at what was learned."""
    rank, count = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE"))
    if count < 2:
        sys.exit("parameter_server.py: there is no trainer; expected 2 processes at least")
    if "GLOO_SOCKET_IFNAME" in os.environ:
        # The launcher sets it. Without an interface TensorPipe takes the address of this host's own
        # name, or the loopback if it does not resolve: other hosts cannot reach that.
        os.environ.setdefault("TP_SOCKET_IFNAME", os.environ["GLOO_SOCKET_IFNAME"])
    before = loss_of(server.model)
    rpc.init_rpc(SERVER if rank == 0 else f"trainer-{rank}", rank=rank, world_size=count)
    if rank > 0:
        train(rank)
    rpc.shutdown()  # waits for all ranks
    if rank == 0:
        after, expected = loss_of(server.model), STEPS * (count - 1)
        text = f"{server.updates} updates by {count - 1} trainers: "
        text += f"loss {before:.3f} before, {after:.3f} after"
        if server.updates != expected or after >= before:
            sys.exit(f"{text}; expected {expected} updates, and a smaller loss")
        print(text, flush=True)


if __name__ == "__main__":
    main()
