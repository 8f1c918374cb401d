"""Classify a picture with a model that train_hymenoptera.py has saved; needs torch and Pillow.

python examples/classify.py MODEL_DIR PICTURE
"""

import json
import sys
from pathlib import Path

import numpy
import torch
from PIL import Image, ImageOps

folder, picture = map(Path, sys.argv[1:])
about = json.loads((folder / "labels.json").read_text())
# The middle of the picture, as in validation.
image = ImageOps.fit(
    Image.open(picture).convert("RGB"),
    [about["image_size"]] * 2,
    Image.Resampling.BILINEAR,
    bleed=0.0625,
)
batch = torch.tensor(numpy.array(image)).permute(2, 0, 1)[None]
(chances,) = torch.export.load(folder / "model.pt2").module()(batch)
print(f"{about['labels'][chances.argmax()]}, {chances.max():.0%}")
