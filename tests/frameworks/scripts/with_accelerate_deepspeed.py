"""accelerate as in with_accelerate.py, with DeepSpeed's ZeRO through its plugin, on CPU."""

import deepspeed
import with_accelerate
from accelerate import PartialState
from accelerate.utils import DeepSpeedPlugin

# As in with_deepspeed.py.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}

if __name__ == "__main__":
    # Without a GPU, DeepSpeed's plugin has accelerate count one rank, unless this comes first.
    PartialState(cpu=True)
    with_accelerate.main(cpu=False, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=CONFIG))
