"""Hugging Face's Trainer with a small BERT of random weights."""

import sys

import torch
import torch.distributed as dist
from small import digest
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from values import Event, say

SMALL = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
event = Event("".join(sys.argv[2:]))


class SaveAtStop(TrainerCallback):
    """Has all ranks save after the same step."""

    def on_step_end(self, args, state, control, **_):
        count = torch.tensor(len(event.stops), device=args.device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        if count.item():
            control.should_save = control.should_training_stop = True


class Events(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        self.resumed = state.global_step

    def on_step_end(self, args, state, control, **_):
        event.happens(state.global_step)


def main(**more):
    folder, events = sys.argv[1], Events()
    args = TrainingArguments(
        folder,
        use_cpu=True,
        num_train_epochs=2,
        per_device_train_batch_size=8,
        dataloader_num_workers=2,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no" if event.name == "stop" else "epoch",
        seed=7,
        **more,
    )
    set_seed(7)
    model = BertForSequenceClassification(SMALL)
    examples = [
        {"input_ids": torch.arange(8) + number % 16, "labels": number % 2} for number in range(64)
    ]
    trainer = Trainer(model, args, train_dataset=examples)
    trainer.add_callback(events)
    if event.name == "stop":
        trainer.add_callback(SaveAtStop())
    # True would fail in a job's first start, which has no checkpoint yet.
    result = trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    say(
        ranks=[args.process_index, args.local_process_index, args.world_size],
        mode=str(args.parallel_mode),
        resumed=events.resumed,
        steps=result.global_step,
        loss=result.training_loss,
        weights=digest(model),
    )


if __name__ == "__main__":
    main()
