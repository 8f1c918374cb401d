"""Lightning's Trainer with its own loop, sampler, checkpoints and handler of SIGTERM."""

import sys

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from small import digest, network, points
from values import fail_once, say, wait_for_stop


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network()

    def training_step(self, batch, _):
        loss = torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Events(Callback):
    def __init__(self, event):
        self.event = event

    def on_train_start(self, trainer, *_):
        self.resumed = trainer.global_step

    def on_train_batch_end(self, trainer, *_):
        if self.event == "unset" and trainer.global_step == 3:
            wait_for_stop(lambda: trainer.received_sigterm)
        if self.event == "fail":
            fail_once(trainer.global_step)


def main():
    lightning.seed_everything(7, workers=True, verbose=False)
    folder, event = sys.argv[1], "".join(sys.argv[2:])
    events = Events(event)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, save_last=event == "fail"), events],
    )
    model = Model()
    loader = torch.utils.data.DataLoader(
        points(), batch_size=8, num_workers=2, persistent_workers=True
    )
    # With "last" the first start begins anew, and a later one where the newest checkpoint was.
    trainer.fit(model, loader, ckpt_path="last" if event == "fail" else None)
    say(
        environment=type(trainer.strategy.cluster_environment).__name__,
        ranks=[trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size],
        resumed=events.resumed,
        steps=trainer.global_step,
        loss=float(trainer.callback_metrics["loss"]),
        weights=digest(model),
        checkpoint=trainer.checkpoint_callback.best_model_path,
    )


if __name__ == "__main__":
    main()
