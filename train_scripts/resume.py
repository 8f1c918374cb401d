"""What lets a training job stop at any step and go on later as if nothing had happened.

Both reference scripts use it; copy it with either. It needs torch alone.

    with Checkpoints(folder, made_for, {"model": model, "optimizer": optimizer}) as checkpoints:
        progress = Progress(device)
        checkpoints.load(progress)                # nothing at the first start
        for epoch in range(progress.epoch, epochs):
            sampler.set_epoch(epoch, progress.samples)
            for ... in loader:
                ...
                progress.count(loss, logits, labels)
                checkpoints.leave_if_stopped(progress)
            loss, accuracy = progress.end_epoch()
            checkpoints.save(progress)        # or before a long validation, which it then repeats

All ranks call these together. Rank 0 alone reads and writes files, so that the folder need be there
on the first host only, which is what SageMaker keeps for the next start (checkpoint_s3_uri).
"""

import contextlib
import copy
import io
import itertools
import os
import random
import re
import signal
import sys
import threading
import zipfile

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

# SageMaker's, where this runs there; elsewhere nothing is kept unless somebody asks for it.
CHECKPOINT_DIR = "/opt/ml/checkpoints" if os.path.isdir("/opt/ml") else ""
KEEP = 2  # checkpoints; older ones of this job are removed
NAME = re.compile(r"checkpoint-\d{6}-\d{12}\.pt(\.tmp)?")


class Totals:
    """Sums [loss, correct, samples] over what this rank has seen."""

    def __init__(self, device):
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, loss, logits, labels):
        """Count a batch: its mean loss, the model's output [N, classes], the classes [N]."""
        correct = (logits.argmax(dim=1) == labels).sum()
        count = torch.full_like(correct, len(labels))  # a copy from here would wait for the GPU
        self.sums += torch.stack((loss.detach() * len(labels), correct, count))

    def over_all_ranks(self):
        sums = self.sums.clone()
        dist.all_reduce(sums)
        return sums

    def means(self):
        """Return mean loss and accuracy over all ranks, not those of rank 0."""
        sums = self.over_all_ranks()
        return (sums[:2] / sums[2]).tolist()


class Progress:
    """Where a job is: in which epoch, how many samples of it all ranks together have seen.

    `totals` are those of the epoch so far; `history` is the script's own, a list of plain values.
    """

    def __init__(self, device):
        self.epoch = 0
        self.samples = 0
        self.totals = Totals(device)
        self.history = []

    def count(self, loss, logits, labels):
        """Count a batch of this rank, and those of the others, which are as large."""
        self.totals.add(loss, logits, labels)
        self.samples += len(labels) * dist.get_world_size()

    def end_epoch(self):
        """Return mean loss and accuracy of the epoch, and go on to the next."""
        means = self.totals.means()
        self.totals.sums.zero_()
        self.epoch, self.samples = self.epoch + 1, 0
        return means


class Checkpoints:
    """Writes checkpoints, finds the newest whole one, and hears of a stop.

    `made_for` says in plain values what a checkpoint can be used for (script, model, classes,
    seed, learning rate); with one made for something else the job ends, and leaves it as it is.
    `parts` are what has a state_dict. With folder "" nothing is kept. Only in the main thread, and
    after init_process_group.
    """

    def __init__(self, folder, made_for, parts):
        self.folder = folder
        self.made_for = made_for
        self.parts = parts
        # What is said here is in main memory, and must not wait for a GPU.
        self._group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
        self._signal = 0
        self._saved = ""  # the newest one's path
        self._whole = []  # paths of this job's, the oldest first
        self._writer = None
        self._error = ""

    def __enter__(self):
        stops = (signal.SIGTERM, signal.SIGINT)
        self._handlers = {number: signal.signal(number, self._note) for number in stops}
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                self._settle()
            elif self._writer:
                self._writer.join()
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def _note(self, number, _frame):
        self._signal = number

    def leave_if_stopped(self, progress):
        """End this process, once all is saved, if any rank was told to stop."""
        number = torch.tensor(self._signal)
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
        """Write a checkpoint, in the background but for the copying; ends the job if it cannot.

        It is written under another name, flushed to disk and renamed: a reader sees a whole one or
        none.
        """
        name = f"checkpoint-{progress.epoch:06}-{progress.samples:012}.pt"
        path = os.path.join(self.folder, name)
        if not self.folder or path == self._saved:
            return
        self._saved = path
        randoms = [None] * dist.get_world_size()
        dist.all_gather_object(randoms, _random_state(), group=self._group)
        totals = progress.totals.over_all_ranks().cpu()
        self._settle()
        if dist.get_rank() == 0:
            state = {
                "made_for": self.made_for,
                **{name: part.state_dict() for name, part in self.parts.items()},
                "epoch": progress.epoch,
                "samples": progress.samples,
                "totals": totals,
                "history": progress.history,
                "randoms": randoms,
            }
            buffer = io.BytesIO()
            torch.save(state, buffer)
            self._writer = threading.Thread(target=self._write, args=(path, buffer.getbuffer()))
            self._writer.start()

    def _write(self, path, data):
        temporary = path + ".tmp"
        try:
            os.makedirs(self.folder, exist_ok=True)
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except Exception as error:
            reason = getattr(error, "strerror", None) or repr(error)
            self._error = f"cannot write the checkpoint {path}: {reason}"
            _remove(temporary)
            return
        with contextlib.suppress(OSError):  # not every file system can
            folder = os.open(self.folder, os.O_RDONLY)
            os.fsync(folder)  # the new name, too, is to outlast a loss of power
            os.close(folder)
        self._whole = [old for old in self._whole if old != path] + [path]
        while len(self._whole) > KEEP:
            _remove(self._whole.pop(0))

    def _settle(self):
        """Wait until the last checkpoint is on disk; all ranks end if it could not be written."""
        if self._writer:
            self._writer.join()
            self._writer = None
        together(self._error, self._group)

    def load(self, progress):
        """Go on from what was saved last, if anything was, on all ranks alike.

        The random states are set if there are as many ranks as there were.
        """
        data = self._read() if dist.get_rank() == 0 and self.folder else b""
        together(self._error, self._group)
        size = torch.tensor(len(data))
        dist.broadcast(size, 0, group=self._group)
        if not size:
            return
        whole = torch.frombuffer(bytearray(data or int(size)), dtype=torch.uint8)
        dist.broadcast(whole, 0, group=self._group)
        state = _unpack(whole.numpy())
        for name, part in self.parts.items():
            if name in state:  # else the script had no such part when it wrote this
                part.load_state_dict(state[name])
        progress.epoch, progress.samples = state["epoch"], state["samples"]
        progress.history[:] = state["history"]
        if dist.get_rank() == 0:
            progress.totals.sums += state["totals"].to(progress.totals.sums.device)
        if len(state["randoms"]) == dist.get_world_size():
            _set_random_state(state["randoms"][dist.get_rank()])

    def _read(self):
        """Return the newest whole checkpoint's bytes; name those that are passed over."""
        there = sorted(os.listdir(self.folder)) if os.path.isdir(self.folder) else []
        names = [name for name in there if NAME.fullmatch(name)]
        foreign = ", ".join(name for name in there if not NAME.fullmatch(name))
        if foreign:
            print(f"passing over what no job wrote to {self.folder}: {foreign}", flush=True)
        while names:
            path = os.path.join(self.folder, names.pop())
            if path.endswith(".tmp"):
                _remove(path)  # a job was killed while it wrote
                continue
            try:
                with open(path, "rb") as file:
                    data = file.read()
                damaged = zipfile.ZipFile(io.BytesIO(data)).testzip()  # torch does not look
                if damaged:
                    raise ValueError(f"{damaged} is damaged")
                made_for = _unpack(data).get("made_for")
                if not made_for:
                    raise ValueError("resume.py did not write it")
            except PermissionError as error:
                self._error = f"cannot read the checkpoint {path}: {error.strerror}"
                return b""
            except Exception as error:  # torch has many for a file that is not its own
                reason = str(error).partition("\n")[0] or type(error).__name__
                print(f"passing over {path}, no whole checkpoint: {reason}", flush=True)
                continue
            if made_for != self.made_for:
                theirs, ours = (
                    {name: one[name] for name in one if one[name] != other.get(name)}
                    for one, other in ((made_for, self.made_for), (self.made_for, made_for))
                )
                self._error = (
                    f"{path} is a checkpoint of {theirs}, and this is {ours}; "
                    "choose another --checkpoint-dir"
                )
                return b""
            print(f"going on from {path}", flush=True)
            self._whole = [os.path.join(self.folder, name) for name in names] + [path]
            return data
        return b""


def together(error, group=None):
    """End all ranks if rank 0 has an error to tell; none is left behind in a collective."""
    errors = [error]
    dist.broadcast_object_list(errors, 0, group=group)
    if errors[0]:
        sys.exit(errors[0])


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that can go on in the middle of an epoch."""

    start = 0

    def set_epoch(self, epoch, start=0):
        """Choose the epoch's order, and how many samples of it all ranks together have seen."""
        super().set_epoch(epoch)
        self.start = start

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.start // self.num_replicas, None)


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


def _unpack(data):
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _random_state():
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return {"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda}


def _set_random_state(state):
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_initialized() and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"])


def _remove(path):
    try:
        os.remove(path)
    except OSError:
        pass  # it may be gone, or never have been
