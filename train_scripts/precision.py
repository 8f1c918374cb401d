"""Whether a network computes in bf16 (autocast) or in float32: --bf16, and auto is what is faster.

train_hymenoptera.py uses it. It needs torch alone.
"""

import time

import torch
import torch.distributed as dist
from torch import nn

WORTH_IT = 1.2  # times as fast: for less, bf16 is not worth its rounding


class Precision:
    """Whether the network computes in bf16: as told, else as in the checkpoint, else if faster.

    It is a part of the checkpoint, so that a job that goes on computes as it began, wherever it is.
    """

    def __init__(self, told):
        self.told, self.bf16 = told, None

    def state_dict(self):
        return {"bf16": self.bf16}

    def load_state_dict(self, state):
        self.bf16 = state["bf16"]

    def choose(self, args, device):
        """Decide for all ranks alike, once a checkpoint is loaded; rank 0 says why."""
        before, why = self.bf16, ""
        if self.told is not None:
            self.bf16 = self.told
            if before not in (None, self.told):
                why = f", as --bf16 says; {_on(before)} in the checkpoint: from here on the "
                why += "numbers are others than without the stop"
        elif before is not None:
            why = ", as in the checkpoint"
        else:
            decision = [_faster(args, device) if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(decision, 0)  # the others wait here while rank 0 measures
            self.bf16, why = decision[0]
        if why and dist.get_rank() == 0:
            print(f"bf16 {_on(self.bf16)}{why}", flush=True)


def _on(switch):
    return "on" if switch else "off"


def _faster(args, device):
    """Return whether bf16 is worth it on this device, and why."""
    if device.type == "cuda":
        # is_bf16_supported() counts what older GPUs emulate, slowly.
        major, minor = torch.cuda.get_device_capability()
        return major >= 8, f": the GPU's compute capability is {major}.{minor}"
    plain, bf16 = seconds(args)
    took = f"{1000 * bf16:.1f} ms with it, {1000 * plain:.1f} ms without"
    why = f": a convolution takes {took} (it is to be {WORTH_IT} times as fast)"
    return plain / bf16 >= WORTH_IT, why


def seconds(args, budget=0.3):
    """Return how long a convolution of this network takes on this CPU, in float32 and in bf16.

    Forward and back, each the best of what fits into so many seconds, with as many pictures as do.
    What instructions a processor has does not tell: one had them, and was half as fast in bf16.
    """
    side = min(args.image_size, 224) // 8 or 1
    weights = torch.ones(128, 128, 3, 3).contiguous(memory_format=args.layout).requires_grad_()
    pictures = 1
    end = time.perf_counter() + budget
    while True:
        images = torch.ones(pictures, 128, side, side).contiguous(memory_format=args.layout)
        images.requires_grad_()
        taken = {False: [], True: []}
        while True:
            began = time.perf_counter()
            for bf16, times in taken.items():
                start = time.perf_counter()
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    output = nn.functional.conv2d(images, weights, padding=1)
                output.float().sum().backward()
                times.append(time.perf_counter() - start)
            now = time.perf_counter()
            if 2 * now - began > end:
                return min(taken[False]), min(taken[True])
            if pictures < args.batch_size and now - began < budget / 15:
                pictures *= 2
                break
