"""Classify pictures with a model that train_hymenoptera.py has saved; needs torch and Pillow.

python examples/classify.py MODEL_DIR PICTURE ...
"""

import json
import sys

import numpy
import torch
from PIL import Image, ImageOps

folder, *pictures = sys.argv[1:]
with open(f"{folder}/labels.json") as file:
    about = json.load(file)
network = torch.export.load(f"{folder}/model.pt2").module()
for path in pictures:
    # The middle of the picture, as in validation.
    image = Image.open(path).convert("RGB")
    image = ImageOps.fit(image, [about["image_size"]] * 2, Image.Resampling.BILINEAR, bleed=0.0625)
    sure, label = network(torch.tensor(numpy.array(image)).permute(2, 0, 1)[None])[0].max(dim=0)
    print(f"{path}: {about['labels'][label]}, {sure:.0%}")
