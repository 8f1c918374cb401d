"""What people look at while a job trains and after it: a line per epoch, curves, predictions.

train_hymenoptera.py uses it. Rank 0 alone writes. Events, pictures and the progress bar of a
terminal need tensorboard, matplotlib and tqdm; without them a line says so, and the rest is there.
"""

import contextlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist


class Results:
    """Prints a line for each epoch, and writes to folder metrics.jsonl and TensorBoard's events.

    `history` are the metrics of the epochs before this start; they are written anew, because
    SageMaker keeps what is in the folder only when a job ends.
    """

    def __init__(self, folder, history, log_every):
        self._here = dist.get_rank() == 0
        self._folder = folder
        self._history = history
        self._every = log_every
        self._events = None
        if not self._here:
            return
        os.makedirs(folder, exist_ok=True)
        open(self._path("metrics.jsonl"), "w").close()
        with _optional("tensorboard", "no TensorBoard events"):
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard is not to show what an earlier start wrote here, and this one writes anew.
            self._events = SummaryWriter(self._path("tensorboard"), purge_step=0)
        for metrics in history:
            self._write(metrics)

    def begin(self, epoch, samples, total):
        """An epoch of total pictures begins; samples of them were seen before this start."""
        self._epoch, self._total, self._first = epoch, total, min(samples, total)
        self._began = self._said = time.monotonic()
        self._bar = None
        if self._here and sys.stderr.isatty():
            with _optional("tqdm", "no progress bar"):
                from tqdm import tqdm

                options = {"unit": " pictures", "leave": False}
                self._bar = tqdm(None, f"epoch {epoch}", total, initial=self._first, **options)

    def step(self, samples):
        """Ranks have seen so many pictures of the epoch by now."""
        if not self._here:
            return
        samples = min(samples, self._total)  # the last ones are padded
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(samples - self._bar.n)
        elif now - self._said >= self._every:
            self._said = now
            speed = (samples - self._first) / (now - self._began)
            at = f"{samples} of {self._total} pictures, {speed:.1f}/s"
            print(f"in epoch {self._epoch}: {at}", flush=True)

    def end(self, metrics):
        """Print and write what the epoch came to; its speed includes the validation."""
        if not self._here:
            return
        if self._bar is not None:
            self._bar.close()
        speed = (self._total - self._first) / (time.monotonic() - self._began)
        metrics["images_per_second"] = round(speed, 2)
        print(metrics_line(metrics), flush=True)
        self._write(metrics)

    def _write(self, metrics):
        with open(self._path("metrics.jsonl"), "a") as file:
            print(json.dumps(metrics), file=file)
        if self._events:
            for name, value in metrics.items():
                if name != "epoch":
                    self._events.add_scalar(name, value, metrics["epoch"])
            self._events.flush()

    def draw(self, classifier, val_data):
        """Draw curves.png and predictions.png; close TensorBoard's file.

        The classifier turns uint8 pictures [N, 3, H, W] into probabilities [N, classes].
        """
        if self._events:
            self._events.close()
        with _optional("matplotlib", "no curves.png and predictions.png"):
            self._draw_curves()
            self._draw_predictions(classifier, val_data)

    def _draw_curves(self):
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(10, 4), layout="constrained")
        epochs = [metrics["epoch"] for metrics in self._history]
        for axes, what in zip(figure.subplots(1, 2), ("loss", "accuracy")):
            for part, label in (("train", "training"), ("val", "validation")):
                values = [metrics[f"{part}_{what}"] for metrics in self._history]
                axes.plot(epochs, values, label=label, marker="." if len(epochs) < 30 else "")
            axes.set(title=what, xlabel="epoch")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(alpha=0.3)
            axes.legend(frameon=False)
        self._save(figure, "curves.png")

    @torch.inference_mode()
    def _draw_predictions(self, classifier, val_data, count=12):
        from matplotlib.figure import Figure

        count = min(count, len(val_data))
        shown = [val_data[index * len(val_data) // count] for index in range(count)]
        pictures = torch.stack([picture for picture, _ in shown])
        confidence, predicted = classifier(pictures).max(dim=1)
        columns = 4
        rows = -(-count // columns)
        figure = Figure(figsize=(2.6 * columns, 2.9 * rows), layout="constrained")
        for axes in figure.subplots(rows, columns, squeeze=False).flat:
            axes.axis("off")
        for axes, (picture, label), guess, sure in zip(
            figure.axes, shown, predicted.tolist(), confidence.tolist()
        ):
            axes.imshow(picture.permute(1, 2, 0).numpy())
            names = val_data.classes
            said = f"{names[guess]}, {sure:.0%}"
            title = said if guess == label else f"{said}\n(it shows {names[label]})"
            axes.set_title(title, color="darkgreen" if guess == label else "darkred")
        self._save(figure, "predictions.png")

    def _save(self, figure, name):
        figure.savefig(self._path(name), dpi=110)
        print(f"saved {self._path(name)}", flush=True)

    def _path(self, name):
        return os.path.join(self._folder, name)


def metrics_line(metrics):
    """Return the line for metric_definitions: NAME=VALUE, the same names in the same order."""
    return " ".join(
        f"{name}={value}"
        if isinstance(value, int)
        else f"{name}={value:.4g}"
        if name == "lr"
        else f"{name}={value:.4f}"
        for name, value in metrics.items()
    )


@contextlib.contextmanager
def _optional(package, without):
    try:
        yield
    except ModuleNotFoundError as error:
        print(f"warning: {without}: {error}; pip install {package}", flush=True)
