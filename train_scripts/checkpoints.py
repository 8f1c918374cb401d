"""Save at a stop, and resume, for a model that fits on one rank. Needs only torch.

    device = join_group()
    progress = Progress(device)
    parts = {"model": model, "optimizer": optimizer}
    with Checkpoints(folder, made_for, parts, stops) as checkpoints:
        checkpoints.load(progress)  # nothing at the first start
        for epoch in range(progress.epoch, epochs):
            sampler.set_epoch(epoch, progress.samples)
            for ... in loader:
                ...
                progress.count(loss, logits, labels)
                checkpoints.leave_if_stopped(progress)
            loss, accuracy = progress.end_epoch()
            checkpoints.save(progress)  # or before a long validation, which is then repeated

All ranks call these together. Only rank 0 reads and writes files, so only the first host needs the
folder; SageMaker keeps it for the next start (checkpoint_s3_uri).
"""

import copy
import gc
import io
import itertools
import os
import re
import signal
import sys
import threading
import time
import traceback
import zipfile

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

KEEP = 2  # checkpoints
NAME = re.compile(r"checkpoint-\d{6}-\d{12}\.pt")


class Progress:
    """Where a job is, and its loss and accuracy over all ranks.

    `history` is the script's own, a list of plain values.
    """

    def __init__(self, device):
        self.epoch = 0
        self.samples = 0  # of this epoch, seen by all ranks together
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # this rank's
        self.history = []

    def count(self, loss, logits, labels):
        """Count this rank's batch, and those of the other ranks, which are equally large."""
        correct = (logits.argmax(dim=1) == labels).sum()
        # On the device: a tensor copied there from the CPU would wait for the GPU.
        count = torch.full_like(correct, len(labels))
        self.sums += torch.stack((loss.detach() * len(labels), correct, count))
        self.samples += len(labels) * dist.get_world_size()

    def sums_of_all(self):
        """Return [loss, correct, samples], added up over all ranks."""
        sums = self.sums.clone()
        dist.all_reduce(sums)
        return sums

    def end_epoch(self):
        """Return the epoch's mean loss and accuracy, and begin the next epoch."""
        sums = self.sums_of_all()
        self.sums.zero_()
        self.epoch, self.samples = self.epoch + 1, 0
        return (sums[:2] / sums[2]).tolist()


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that can resume in the middle of an epoch."""

    start = 0

    def set_epoch(self, epoch, start=0):
        """Set the epoch, and how many of its samples all ranks together have seen."""
        super().set_epoch(epoch)
        self.start = start

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.start // self.num_replicas, None)


class Checkpoints:
    """Writes checkpoints, finds the newest complete one, and notices a stop.

    `made_for` are plain values that identify the training (script, model, classes, seed, learning
    rate); a checkpoint with other values ends the job, and is not changed. `parts` have a
    state_dict(); rank 0's is saved. `stops` are the numbers of the signals that told this rank to
    stop: the script's handler appends to it. With folder "" nothing is saved. Only after
    join_group().
    """

    def __init__(self, folder, made_for, parts, stops):
        self.folder, self.made_for, self.parts, self.stops = folder, made_for, parts, stops
        # For messages between ranks: in main memory, they do not wait for a GPU.
        self._group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        self._saved = ""  # the newest one's path
        self._writer = None
        self._error = ""

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self._settle()
        elif self._writer:
            self._writer.join()

    def leave_if_stopped(self, progress):
        """Save and end this process if any rank was told to stop.

        Ranks notice a stop at different steps, and all must leave after the same step. So they ask
        one another in every step, which costs little: it is one number.
        """
        number = torch.tensor(max(self.stops, default=0))
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group)
        if not number:
            return
        self.save(progress)
        self._settle()
        if dist.get_rank() == 0:
            saved = f"saved {self._saved}" if self.folder else "nothing saved: no --checkpoint-dir"
            print(f"stopped by {signal.Signals(int(number)).name}; {saved}", flush=True)
        sys.exit(128 + int(number))

    def save(self, progress):
        """Copy the state and write it in the background; end the job if the last one failed."""
        name = f"checkpoint-{progress.epoch:06}-{progress.samples:012}.pt"
        path = os.path.join(self.folder, name)
        if not self.folder or path == self._saved:
            return
        self._saved = path
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        random_states = [None] * dist.get_world_size()
        mine = {"cpu": torch.get_rng_state(), "cuda": cuda}
        dist.all_gather_object(random_states, mine, group=self._group)
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state["random"] = random_states
        state["progress"] = {**vars(progress), "sums": progress.sums_of_all().cpu()}
        state["made_for"] = self.made_for
        self._settle()
        if dist.get_rank() == 0:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            self._writer = threading.Thread(target=self._write, args=(path, buffer.getbuffer()))
            self._writer.start()

    def _write(self, path, data):
        """Write another file, flush it to disk, rename: readers see a whole one or none."""
        temporary = os.path.join(self.folder, "checkpoint.tmp")
        try:
            os.makedirs(self.folder, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            older = [one for one in self._names() if one < os.path.basename(path)]
            for name in older[: -(KEEP - 1)]:
                os.remove(os.path.join(self.folder, name))
        except Exception as error:
            reason = getattr(error, "strerror", None) or repr(error)
            self._error = f"cannot write the checkpoint {path}: {reason}"

    def _names(self):
        """Return the names of the checkpoints in the folder, the oldest first."""
        there = os.listdir(self.folder) if os.path.isdir(self.folder) else ()
        return sorted(name for name in there if NAME.fullmatch(name))

    def _settle(self):
        """Wait until the last checkpoint is on disk; all ranks end if it could not be written."""
        if self._writer:
            self._writer.join()
            self._writer = None
        end_together(self._error, self._group)

    def load(self, progress):
        """Resume all ranks from the last checkpoint, if there is one."""
        found = [None]
        try:
            if dist.get_rank() == 0:
                found = [self._read()]
        except OSError as error:
            self._error = f"cannot read the checkpoint {error.filename}: {error.strerror}"
        end_together(self._error, self._group)
        dist.broadcast_object_list(found, 0, group=self._group)
        if not found[0]:
            return
        state = _unpack(found[0])
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        sums = state["progress"].pop("sums")
        vars(progress).update(state["progress"])
        if dist.get_rank() == 0:
            progress.sums += sums.to(progress.sums.device)
        if len(state["random"]) == dist.get_world_size():
            mine = state["random"][dist.get_rank()]
            torch.set_rng_state(mine["cpu"])
            if torch.cuda.is_initialized() and mine["cuda"] is not None:
                torch.cuda.set_rng_state(mine["cuda"])

    def _read(self):
        """Return the bytes of the newest complete checkpoint; name those that are skipped."""
        for name in reversed(self._names()):
            path = os.path.join(self.folder, name)
            try:
                with open(path, "rb") as file:
                    data = file.read()
                damaged = zipfile.ZipFile(io.BytesIO(data)).testzip()  # torch does not look
                if damaged:
                    raise ValueError(f"{damaged} is damaged")
                state = _unpack(data)
                if not {"made_for", "progress", "random", *self.parts} <= set(state):
                    raise ValueError("checkpoints.py did not write it, or for other parts")
            except OSError:
                raise  # it may be whole
            except Exception as error:  # torch raises many kinds for a file that is not its own
                reason = str(error).partition("\n")[0] or type(error).__name__
                print(f"passing over {path}, no whole checkpoint: {reason}", flush=True)
                continue
            theirs, ours = state["made_for"], self.made_for
            differ = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
            if differ:
                was, is_now = ({name: one.get(name) for name in differ} for one in (theirs, ours))
                self._error = f"{path} is a checkpoint of {was}, and this is {is_now}; "
                self._error += "choose another --checkpoint-dir"
                break
            print(f"resuming from {path}", flush=True)
            return data
        return None


def _unpack(data):
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def prime(ddp_model, forward):
    """Run one step of a DistributedDataParallel model that changes nothing, before load().

    After its first step it rearranges its buckets (Reducer::rebuild_buckets), and the place of a
    number in a bucket decides in which order gloo adds the ranks' numbers. So without this step a
    resumed job would round its first step differently from one that never stopped.
    """
    before = copy.deepcopy(ddp_model.module.state_dict())
    forward(ddp_model).sum().backward()
    ddp_model.zero_grad()
    ddp_model.module.load_state_dict(before)


def join_group():
    """Join the group of torchrun's variables, or make a group of one; return our device."""
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "nccl"
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def end_together(error, group=None):
    """End all ranks if rank 0 has an error; none is left waiting in a collective."""
    errors = [error]
    dist.broadcast_object_list(errors, 0, group=group)
    if errors[0]:
        end_host(errors[0])


def end_host(message):
    """End this rank, as all ranks of this host do; the first of them says why.

    torchrun reports the rank that ended first, and ends the others.
    """
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)
        sys.exit(1)
    sys.exit(message)


def leave_group():
    """Destroy the process group, in main()'s `finally`, once its threads have nothing left to do.

    DistributedDataParallel refers to itself, and the frames of an error or a stop hold it. Gloo's
    threads live as long as it does, and a thread that frees its last work too late aborts the
    process at exit (torch 2.13, 1 run in 10). destroy_process_group() waits for these threads while
    it holds Python's lock, for which a thread with a tensor to free waits (torch 2.4): a deadlock.
    """
    traceback.clear_frames(sys.exc_info()[2])
    gc.collect()
    time.sleep(0.1)  # without the lock
    dist.destroy_process_group()
