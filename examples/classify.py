"""Classify a picture with a model that train_hymenoptera.py has saved; needs torch and Pillow.

python examples/classify.py MODEL_DIR PICTURE
"""

import json
import sys
from pathlib import Path

import numpy
import torch
from PIL import Image

folder, picture = map(Path, sys.argv[1:])
about = json.loads((folder / "labels.json").read_text())
# The middle of the picture, as in validation: torchvision's Resize and CenterCrop.
image = Image.open(picture).convert("RGB")
size, shorter = about["image_size"], min(image.size)
side = round(size * 256 / 224)
image = image.resize([side * length // shorter for length in image.size], Image.Resampling.BILINEAR)
left, top = (round((length - size) / 2) for length in image.size)
image = image.crop((left, top, left + size, top + size))
batch = torch.tensor(numpy.array(image)).permute(2, 0, 1)[None]
(chances,) = torch.export.load(folder / "model.pt2").module()(batch)
print(f"{about['labels'][chances.argmax()]}, {chances.max():.0%}")
