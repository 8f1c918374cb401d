"""What --deterministic adds to checkpoints: a job ends with the same weights, stopped or not.

On CPU they are the same to the last bit. Needs torch alone.
"""

import copy
import random

import torch
import torch.distributed as dist


class RandomStates:
    """A part of the checkpoint: the random states of all ranks, for dropout and the like.

    They are set if a job goes on with as many ranks as it had.
    """

    def state_dict(self):
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        mine = {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, mine)
        return {"ranks": everywhere}

    def load_state_dict(self, state):
        if len(state["ranks"]) != dist.get_world_size():
            return
        mine = state["ranks"][dist.get_rank()]
        version, internal, gauss = mine["python"]
        random.setstate((version, tuple(internal), gauss))
        torch.set_rng_state(mine["torch"])
        if torch.cuda.is_initialized() and mine["cuda"] is not None:
            torch.cuda.set_rng_state(mine["cuda"])


def prime(ddp_model, forward):
    """Run one step of a DistributedDataParallel model that changes nothing.

    After its first step it lays its buckets out anew (Reducer::rebuild_buckets), and where a number
    lies in a bucket decides in which order gloo adds up those of the ranks. A job that resumes
    would round its first step otherwise than one that never stopped, had it not had one already.
    """
    before = copy.deepcopy(ddp_model.module.state_dict())
    forward(ddp_model).sum().backward()
    ddp_model.zero_grad()
    ddp_model.module.load_state_dict(before)
