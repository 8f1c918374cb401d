"""Checkpoints: a job that is stopped at any step saves, and the next start goes on from there.

    progress = Progress(device)  # of metrics.py
    with Checkpoints(folder, made_for, {"model": model, "optimizer": optimizer}) as checkpoints:
        checkpoints.load(progress)  # nothing at the first start
        for epoch in range(progress.epoch, epochs):
            sampler.set_epoch(epoch, progress.samples)
            for ... in loader:
                ...
                progress.count(loss, logits, labels)
                checkpoints.leave_if_stopped(progress)
            loss, accuracy = progress.end_epoch()
            checkpoints.save(progress)  # or before a long validation, which it then repeats

All ranks call these together. Rank 0 alone reads and writes files, so that the folder need be there
on the first host only, which is what SageMaker keeps for the next start (checkpoint_s3_uri). It
needs torch alone.
"""

import contextlib
import io
import itertools
import os
import re
import signal
import sys
import threading
import zipfile

import torch
import torch.distributed as dist
from process_group import end_together
from torch.utils.data import DistributedSampler

KEEP = 2  # checkpoints; older ones of this job are removed
NAME = re.compile(r"checkpoint-\d{6}-\d{12}\.pt(\.tmp)?")


class Checkpoints:
    """Writes checkpoints, finds the newest whole one, and hears of a stop.

    `made_for` says in plain values what a checkpoint can be used for (script, model, classes,
    seed, learning rate); with one made for something else the job ends, and leaves it as it is.
    `parts` are what has a state_dict(), which all ranks call; rank 0's is saved. With folder ""
    nothing is kept. Only in the main thread, and after join_group().
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
        """End this process, once all is saved, if any rank was told to stop.

        Ranks hear of a stop at different steps, and all have to leave after the same one. So they
        ask one another in every step, which costs little: it is one number.
        """
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
        """Copy the state and write it in the background; end the job if the last one failed.

        It is written under another name, flushed to disk and renamed: a reader sees a whole one or
        none.
        """
        name = f"checkpoint-{progress.epoch:06}-{progress.samples:012}.pt"
        path = os.path.join(self.folder, name)
        if not self.folder or path == self._saved:
            return
        self._saved = path
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state.update(made_for=self.made_for, progress=progress.state_dict())
        self._settle()
        if dist.get_rank() == 0:
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
        end_together(self._error, self._group)

    def load(self, progress):
        """Go on from what was saved last, if anything was, on all ranks alike."""
        data = self._read() if dist.get_rank() == 0 and self.folder else b""
        end_together(self._error, self._group)
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
        progress.load_state_dict(state["progress"])

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
                state = _unpack(data)
                made_for = state.get("made_for")
                if not made_for:
                    raise ValueError("checkpoints.py did not write it")
            except PermissionError as error:
                self._error = f"cannot read the checkpoint {path}: {error.strerror}"
                return b""
            except Exception as error:  # torch raises many kinds for a file that is not its own
                reason = str(error).partition("\n")[0] or type(error).__name__
                print(f"passing over {path}, no whole checkpoint: {reason}", flush=True)
                continue
            if "progress" not in state:
                self._error = f"an older script wrote {path}; choose another --checkpoint-dir"
                return b""
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


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that can go on in the middle of an epoch."""

    start = 0

    def set_epoch(self, epoch, start=0):
        """Choose the epoch's order, and how many samples of it all ranks together have seen."""
        super().set_epoch(epoch)
        self.start = start

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.start // self.num_replicas, None)


def _unpack(data):
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _remove(path):
    try:
        os.remove(path)
    except OSError:
        pass  # it may be gone, or never have been
