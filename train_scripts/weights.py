"""The weights that a ResNet18 starts from: --weights, or the channel of that name.

train_hymenoptera.py uses it. It needs torchvision.
"""

import os
import socket
from pathlib import Path

import torch
from torchvision.models import ResNet18_Weights


def load_weights(model, weights):
    """Load a state_dict into the model; return what went wrong, or "".

    A head for other classes than ours is left out.
    """
    channel = os.environ.get("SM_CHANNEL_WEIGHTS")
    if channel and not weights:
        files = [path for path in Path(channel).glob("*") if path.suffix in (".pt", ".pth")]
        if len(files) != 1:
            names = [path.name for path in files]
            return f"the channel 'weights' ({channel}) holds {names}; expected one .pt or .pth file"
        weights = files[0]
    weights = weights or "imagenet"
    if weights == "none":
        return ""
    try:
        if weights == "imagenet":
            socket.setdefaulttimeout(30)  # seconds; a network that drops packets gives no answer
            state = ResNet18_Weights.IMAGENET1K_V1.get_state_dict(progress=False, check_hash=True)
        else:
            state = torch.load(weights, map_location="cpu", weights_only=True)
        own = model.state_dict()
        if state["fc.bias"].shape != own["fc.bias"].shape:
            state.update({name: own[name] for name in ("fc.weight", "fc.bias")})
        model.load_state_dict(state)
    except Exception as error:  # no network, no such file, no state_dict, or not one of a ResNet18
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return (
            f"cannot load the weights {weights} ({reason[:300]}); expected --weights imagenet, "
            "which needs network or a cache, --weights FILE or a channel 'weights' with a "
            "ResNet18's state_dict, or --weights none"
        )
    finally:
        socket.setdefaulttimeout(None)
    return ""
