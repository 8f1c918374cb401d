"""Draw ants and bees in torchvision's layout, to train with where the real ones are not at hand.

    python examples/draw_pictures.py FOLDER [--train 240] [--val 80] [--size 160] [--seed 0]

They are then in FOLDER/train and FOLDER/val, CLASS/*.jpg in each, for train_hymenoptera.py --data
FOLDER. The same arguments give the same files. Needs numpy and Pillow.
"""

import argparse
import math
import os
import random

import numpy
from PIL import Image, ImageDraw, ImageFilter


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--train", type=int, default=240, help="pictures to train with")
    parser.add_argument("--val", type=int, default=80, help="pictures to validate with")
    parser.add_argument("--size", type=int, default=160, help="pixels")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw_all(args.folder, args.seed, args.train, args.val, args.size)


def draw_all(folder, seed, train, val, size):
    """Draw the pictures: half ants, half bees, on ground and on leaves alike."""
    for part, count in (("train", train), ("val", val)):
        for index in range(count):
            draw, label = ((_ant, "ants"), (_bee, "bees"))[index % 2]
            dice = random.Random(f"{seed} {part} {index}")
            path = os.path.join(folder, part, label)
            os.makedirs(path, exist_ok=True)
            _picture(draw, dice, size).save(os.path.join(path, f"{index:04}.jpg"), quality=85)


def _picture(draw, dice, size):
    ground = dice.choice([(120, 95, 60), (80, 130, 60), (150, 140, 120), (60, 100, 50)])
    noise = numpy.random.default_rng(dice.getrandbits(32)).normal(0, 60, (size, size, 1))
    ground = (numpy.array(ground) + noise).clip(0, 255).astype("uint8")
    image = Image.fromarray(ground).filter(ImageFilter.GaussianBlur(dice.uniform(1, 3)))
    # On a layer of its own, which is turned as a whole.
    layer = Image.new("RGBA", (size, size))
    draw(ImageDraw.Draw(layer), size / 2, size * dice.uniform(0.16, 0.26), dice)
    shift = (dice.uniform(-0.12, 0.12) * size, dice.uniform(-0.12, 0.12) * size)
    layer = layer.rotate(dice.uniform(0, 360), Image.Resampling.BICUBIC, translate=shift)
    image.paste(layer, mask=layer)
    return image


def _ellipse(drawing, x, y, width, height, **colours):
    drawing.ellipse((x - width, y - height, x + width, y + height), **colours)


def _legs(drawing, middle, unit, colour):
    for side in (-1, 1):
        for along in (-0.5, 0.1, 0.7):
            knee = (middle + unit * along * 1.3, middle + side * unit * 0.7)
            foot = (middle + unit * along * 1.9, middle + side * unit * 1.2)
            points = ((middle + unit * along * 0.4, middle), knee, foot)
            drawing.line(points, fill=colour, width=max(1, round(unit / 12)))


def _ant(drawing, middle, unit, dice):
    colour = dice.choice([(25, 15, 10), (90, 35, 15), (50, 20, 15)])
    _legs(drawing, middle, unit, colour)
    for along, length, width in ((-1.0, 0.42, 0.36), (-0.1, 0.5, 0.24), (1.0, 0.75, 0.5)):
        _ellipse(drawing, middle + unit * along, middle, unit * length, unit * width, fill=colour)


def _bee(drawing, middle, unit, dice):
    dark, yellow = (35, 25, 15), (225, dice.randint(150, 190), 40)
    _legs(drawing, middle, unit, dark)
    _ellipse(drawing, middle - unit * 1.1, middle, unit * 0.4, unit * 0.45, fill=dark)
    _ellipse(drawing, middle + unit * 0.15, middle, unit, unit * 0.62, fill=yellow)
    for along in (-0.45, 0.05, 0.55, 0.95):
        half = 0.6 * math.sqrt(max(0.0, 1 - ((along - 0.15) / 1.0) ** 2))
        x = middle + unit * along
        drawing.line(
            (x, middle - unit * half, x, middle + unit * half), fill=dark, width=round(unit / 5)
        )
    for side in (-1, 1):
        wing = (middle + unit * 0.1, middle + side * unit * 0.75, unit * 0.7, unit * 0.35)
        _ellipse(drawing, *wing, fill=(235, 240, 245, 170))


if __name__ == "__main__":
    main()
