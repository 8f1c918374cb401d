"""A small transformer learns a made-up language; --parallel says how the ranks share the work.

One process:        python train_transformer.py
One host:           torchrun --nproc-per-node 4 train_transformer.py --parallel fsdp
One or more hosts:  sm-launch --train-script train_transformer.py --parallel fsdp

ddp       each rank has the whole model and a part of each batch (with --shard-optimizer: and a part
          of the optimizer's state)
fsdp      each rank has a part of each batch, and a part of all parameters, gradients and optimizer
          state; it gets the rest of a block only while it computes with it
tensor    each rank has the whole batch, some heads of each attention and some columns of each MLP
pipeline  each rank has some of the blocks; a batch goes through them in micro-batches

All four compute the same, except for rounding. A stopped job resumes where it was, with any of the
four and any number of ranks that fits. It needs only torch, 2.6 or later.
"""

import signal

stops = []  # signals that told this rank to stop; first of all, since the imports take seconds
signal.signal(signal.SIGTERM, lambda number, _: stops.append(number))

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from checkpoints import join_group, leave_group
from sharded_checkpoints import ShardedCheckpoints
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn.parallel import DistributedDataParallel


def refuse(why):
    """End this rank with exit code 2, as all ranks do; the first of this host says why."""
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)  # torchrun reports the rank that ended first, and ends the others
    else:
        print(f"train_transformer.py: {why}", file=sys.stderr, flush=True)
    raise SystemExit(2) from ValueError(why)


try:
    import torch.distributed.tensor.parallel as tp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
except ImportError:
    refuse(f"needs torch 2.6 or later; this is torch {torch.__version__}")

# SageMaker's folder, if this runs there; elsewhere nothing is saved unless you ask for it.
CHECKPOINT_DIR = "/opt/ml/checkpoints" if os.path.isdir("/opt/ml") else ""
MODEL = {"layers": 4, "heads": 4, "width": 64, "length": 32, "vocabulary": 64}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallel", choices=list(STRATEGIES), default="ddp")
    words = {"type": str.lower, "choices": ["true", "false"], "default": "false"}
    parser.add_argument("--shard-optimizer", **words, help="with ddp")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a batch, with pipeline")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16, help="of all ranks together")
    for name, number in MODEL.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-dir", default=CHECKPOINT_DIR)
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps")
    parser.add_argument("--model-dir", default=os.environ.get("SM_MODEL_DIR", "."))
    args = parser.parse_args()
    args.shard_optimizer = args.shard_optimizer == "true"
    return args


def check(args, ranks):
    """Refuse sizes that the ranks cannot share equally."""
    for name in (*MODEL, "micro_batches", "batch_size", "checkpoint_every"):
        if getattr(args, name) < 1:
            refuse(f"--{name.replace('_', '-')} {getattr(args, name)}: expected 1 or more")
    pipeline = args.parallel == "pipeline"
    parts, name = (args.micro_batches, "micro-batches") if pipeline else (ranks, "ranks")
    if args.width % args.heads:
        refuse(f"--width {args.width} cannot be divided by --heads {args.heads}")
    if args.parallel == "tensor" and args.heads % ranks:
        fit = ", ".join(str(n) for n in range(1, args.heads + 1) if args.heads % n == 0)
        refuse(f"{ranks} ranks cannot share --heads {args.heads} equally; use one of {fit}")
    if args.parallel != "tensor" and args.batch_size % parts:
        refuse(f"--batch-size {args.batch_size} cannot be divided by {parts} {name}")
    if pipeline and min(args.layers, args.micro_batches) < ranks:
        counts = f"--layers {args.layers} and --micro-batches {args.micro_batches}"
        refuse(f"{counts}: a pipeline of {ranks} ranks needs {ranks} or more of each")
    if args.shard_optimizer and (args.parallel != "ddp" or args.checkpoint_dir):
        refuse("--shard-optimizer is for ddp without --checkpoint-dir; use --parallel fsdp")


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_width = width // heads
        self.query, self.value, self.out = (nn.Linear(width, width) for _ in range(3))
        self.key = nn.Linear(width, width, bias=False)  # which softmax would take out again

    def forward(self, x):
        heads = (layer(x) for layer in (self.query, self.key, self.value))
        # As many heads as there are columns: with tensor parallelism only this rank's.
        heads = (one.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for one in heads)
        found = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Tokens [batch, length] in, logits [batch * length, vocabulary] out.

    A stage of a pipeline is such a model without the blocks of other ranks (by_pipeline).
    """

    def __init__(self, args):
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.places = nn.Embedding(args.length, args.width)
        blocks = {str(n): Block(args.width, args.heads) for n in range(args.layers)}
        self.blocks = nn.ModuleDict(blocks)  # not a list: the names stay when blocks are taken out
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, args.vocabulary)

    def forward(self, x):
        if self.tokens is not None:
            x = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x).flatten(0, 1))


def make_batch(args, step):
    """Return texts [batch, length], and each token's successor: the same on all ranks.

    Each token can be followed by four others. The texts depend only on the seed and the step, so
    a job that resumes needs nothing but its step.
    """
    generator = torch.Generator().manual_seed(args.seed)
    language = torch.randint(args.vocabulary, (args.vocabulary, 4), generator=generator)
    generator.manual_seed(args.seed * 1_000_003 + step + 1)
    texts = [torch.randint(args.vocabulary, (args.batch_size,), generator=generator)]
    for choice in torch.randint(4, (args.length, args.batch_size), generator=generator):
        texts.append(language[texts[-1], choice])
    texts = torch.stack(texts, dim=1)
    return texts[:, :-1], texts[:, 1:]


def loss_function(logits, targets):
    return F.cross_entropy(logits, targets.flatten())


def by_ddp(model, args, device):
    return step_of(DistributedDataParallel(model.to(device)), args.batch_size)


def by_fsdp(model, args, device):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks.values():  # a rank has one complete block at a time
        fully_shard(block, mesh=mesh)
    return step_of(fully_shard(model, mesh=mesh), args.batch_size)


def by_tensor(model, args, device):
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Of two layers in a row the first is divided by outputs, the second by inputs: ranks only
    # add up what comes out of the second. Embeddings, norms and the head stay whole.
    names = ("attention.query", "attention.key", "attention.value", "up")
    plan = {name: tp.ColwiseParallel() for name in names}
    plan.update({"attention.out": tp.RowwiseParallel(), "down": tp.RowwiseParallel()})
    for block in model.blocks.values():
        tp.parallelize_module(block, mesh, plan)
    return step_of(model.to(device))


def step_of(model, whole=0):
    """Return what computes a step: on this rank's part of the whole batch, or on all of it: 0."""
    size = whole // dist.get_world_size()
    part = slice(size * dist.get_rank(), size * (dist.get_rank() + 1)) if whole else slice(None)

    def step(tokens, targets):
        """Compute the gradients, their means over the ranks; return the loss."""
        loss = loss_function(model(tokens[part]), targets[part])
        loss.backward()
        return loss.detach()

    return step


def by_pipeline(model, args, device):
    stages, rank = dist.get_world_size(), dist.get_rank()
    first, last = rank == 0, rank == stages - 1
    ours = range(args.layers * rank // stages, args.layers * (rank + 1) // stages)
    for name in set(model.blocks) - {str(n) for n in ours}:
        del model.blocks[name]
    if not first:
        model.tokens = model.places = None
    if not last:
        model.norm = model.head = None
    # One forward, one backward in turn: a stage holds only its share of micro-batches.
    stage = PipelineStage(model.to(device), rank, stages, device)
    schedule = Schedule1F1B(stage, args.micro_batches, loss_function)

    def step(tokens, targets):
        """Return the mean loss on the last rank, None on the others, which do not know it."""
        losses = []
        inputs = (tokens,) if first else ()
        schedule.step(*inputs, target=targets if last else None, losses=losses)
        return torch.stack(losses).mean().detach() if last else None

    return step


STRATEGIES = {"ddp": by_ddp, "fsdp": by_fsdp, "tensor": by_tensor, "pipeline": by_pipeline}


def make(args, device):
    """Return this rank's part of the model, its optimizer, and what computes a step's gradients."""
    torch.manual_seed(args.seed)
    model = Transformer(args)  # all of it, on every rank, with the same weights
    step = STRATEGIES[args.parallel](model, args, device)
    # With a smaller eps Adam makes full steps of gradients that are only rounding errors.
    options = {"lr": args.lr, "eps": 1e-5}
    if args.shard_optimizer:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **options)
    else:
        # The default, all at once, fails if only some parameters are DTensors.
        options["foreach"] = False if args.parallel == "tensor" else None
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    return model, optimizer, step


def train(args, device):
    model, optimizer, compute = make(args, device)
    made_for = {name: getattr(args, name) for name in (*MODEL, "lr", "seed")}
    checkpoints = ShardedCheckpoints(args.checkpoint_dir, made_for, model, optimizer)
    for step in range(checkpoints.load(), args.steps):
        loss = compute(*(tokens.to(device) for tokens in make_batch(args, step)))
        optimizer.step()
        optimizer.zero_grad()
        # Over all ranks: the sum of losses, the number of losses, the number of ranks told to stop.
        known = loss is not None
        sums = torch.tensor([loss if known else 0.0, known, len(stops)], device=device)
        dist.all_reduce(sums)
        total, count, stop = sums.tolist()
        if dist.get_rank() == 0:
            print(f"step={step} loss={total / count:.6f}", flush=True)
        if stop or (step + 1) % args.checkpoint_every == 0:
            saved = checkpoints.save(step + 1)
        if stop:
            if dist.get_rank() == 0:
                print(f"stopped by SIGTERM; {saved}", flush=True)
            sys.exit(128 + signal.SIGTERM)
    return model


def save(model, args):
    """Have rank 0 write the whole model, as one process has it; all ranks send their shards."""
    if args.parallel == "pipeline":
        parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object({name: part.cpu() for name, part in model.state_dict().items()}, parts)
        state = {name: value for part in parts or () for name, value in part.items()}
    else:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)  # empty, but on rank 0
    if dist.get_rank() == 0:
        path = os.path.join(args.model_dir, "model.pt")
        os.makedirs(args.model_dir, exist_ok=True)
        torch.save(state, path + ".tmp")
        os.replace(path + ".tmp", path)
        print(f"saved {path}", flush=True)


def main():
    args = parse_args()
    # Before the group is joined, so that no rank waits for one that has left.
    check(args, int(os.environ.get("WORLD_SIZE", 1)))
    device = join_group()
    try:
        save(train(args, device), args)
    finally:
        leave_group()


if __name__ == "__main__":
    main()
