"""How far a job is, and its loss and accuracy over all ranks. Needs torch alone."""

import torch
import torch.distributed as dist


class Totals:
    """Sums [loss, correct, samples] over what this rank has seen."""

    def __init__(self, device):
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, loss, logits, labels):
        """Count a batch: its mean loss, the model's output [N, classes], the classes [N]."""
        correct = (logits.argmax(dim=1) == labels).sum()
        # On the device: a tensor copied there from the CPU would wait for the GPU.
        count = torch.full_like(correct, len(labels))
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

    def state_dict(self):
        """Return what a checkpoint keeps; all ranks call it, since the totals are those of all."""
        totals = self.totals.over_all_ranks().cpu()
        return {**vars(self), "totals": totals}

    def load_state_dict(self, state):
        self.epoch, self.samples, self.history = state["epoch"], state["samples"], state["history"]
        if dist.get_rank() == 0:
            self.totals.sums += state["totals"].to(self.totals.sums.device)

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
