"""The Trainer as in with_trainer.py, with DeepSpeed's ZeRO through TrainingArguments, on CPU."""

import deepspeed
import with_trainer

# As in with_deepspeed.py.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}

if __name__ == "__main__":
    with_trainer.main(deepspeed=CONFIG)
