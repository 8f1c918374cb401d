"""Checkpoints of a sharded model, by torch.distributed.checkpoint (DCP).

    checkpoints = ShardedCheckpoints(folder, made_for, model, optimizer)
    for step in range(checkpoints.load(), steps):     # 0 at the first start
        ...
        checkpoints.save(step + 1)

All ranks call these together. Each rank writes its own shard, and reads what it needs from the
shards of all. So a job can resume with another number of ranks, or another way to divide the model.
For that every host must see the files of all hosts: in a folder that they share, or copied together
between the jobs (docs/systems.md).
"""

import contextlib
import json
import os
import re
import shutil

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoints import end_host
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

KEEP = 2  # complete checkpoints; older ones are removed
NAME = re.compile(r"step-(\d{9})")
# By the names of parameters, not their numbers: these differ between the stages of a pipeline.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


class ShardedCheckpoints:
    """Writes checkpoints step-NNNNNNNNN/ to a folder, and finds the newest complete one.

    `made_for` are plain values that identify the training; a checkpoint with other values ends the
    job, and is not changed. With folder "" nothing is saved.
    """

    def __init__(self, folder, made_for, model, optimizer):
        self.folder = folder
        self.made_for = json.dumps(made_for)  # in one piece: DCP would split a dict
        self.parts = (model, optimizer)
        self._whole = []  # steps, the oldest first
        self._told = False
        self._first_here = int(os.environ.get("LOCAL_RANK", 0)) == 0

    def save(self, step):
        """Write the checkpoint of a step; return a line about it."""
        if not self.folder:
            return "nothing saved: no --checkpoint-dir"
        path = self._path(step)
        # It makes a checkpoint whole, so an older one of this step must be gone before anything is
        # written. DCP lets no rank write before all of them have come to dcp.save.
        with contextlib.suppress(OSError):
            os.remove(os.path.join(path, ".metadata"))
        failed = _failure(dcp.save, self._state(), path)
        if failed:
            end_host(f"cannot write the checkpoint {path}: {failed}")
        if self._first_here and not self._told and _lacks(path):
            self._told = True
            print(f"{path} lacks the other hosts' parts, which resuming needs", flush=True)
        self._whole = [old for old in self._whole if old != step] + [step]
        while len(self._whole) > KEEP:
            old = self._path(self._whole.pop(0))
            shutil.rmtree(old, ignore_errors=True)  # another rank may do so, too
        return f"saved {path}"

    def load(self):
        """Resume from the newest checkpoint complete for all ranks; return its step, or 0."""
        lacks = {step: _lacks(self._path(step)) for step in self._steps()}
        seen = [None] * dist.get_world_size()
        dist.all_gather_object(seen, lacks)
        for step in sorted(set().union(*seen)):
            reasons = [one.get(step, "it is not there") for one in seen]
            if not any(reasons):
                self._whole.append(step)
            elif dist.get_rank() == 0:
                rank, reason = next(pair for pair in enumerate(reasons) if pair[1])
                path = self._path(step)
                print(f"passing over {path}, not whole for rank {rank}: {reason}", flush=True)
        if not self._whole:
            return 0
        self._load(self._path(self._whole[-1]))
        return self._whole[-1]

    def _load(self, path):
        state = {"made_for": ""}
        failed = _failure(dcp.load, state, path)
        if not failed and state["made_for"] != self.made_for:
            end_host(
                f"{path} is a checkpoint of {state['made_for']}, and this is {self.made_for}; "
                "choose another --checkpoint-dir"
            )
        if not failed:
            state = self._state()
            failed = _failure(dcp.load, state, path)
        if failed:
            end_host(f"cannot read the checkpoint {path}: {failed}")
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(
            *self.parts, model_state_dict=model, optim_state_dict=optimizer, options=BY_NAME
        )
        if dist.get_rank() == 0:
            print(f"resuming from {path}", flush=True)

    def _state(self):
        model, optimizer = get_state_dict(*self.parts, options=BY_NAME)
        return {"made_for": self.made_for, "model": model, "optimizer": optimizer}

    def _path(self, step):
        return os.path.join(self.folder, f"step-{step:09}")

    def _steps(self):
        """Return the steps of the checkpoints, complete or not, the oldest first."""
        names = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        return sorted(int(found[1]) for found in map(NAME.fullmatch, names) if found)


def _lacks(path):
    """Return why a checkpoint is incomplete, as this host sees it, or ""."""
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
        for part in metadata.storage_data.values():
            size = os.path.getsize(os.path.join(path, part.relative_path))
            if size < part.offset + part.length:
                return f"{part.relative_path} has been cut off"
    except FileNotFoundError as error:
        return f"{os.path.basename(error.filename)} is missing"
    except Exception as error:  # pickle raises many kinds of errors for a foreign file
        return f"{error!r}"
    return ""


def _failure(do, state, path):
    """Have DCP save or load; return what failed on a rank, without the tracebacks of all."""
    try:
        do(state, checkpoint_id=path)
    except dcp.api.CheckpointException as error:
        return next(iter(error.failures.values()))[0]
    return None
