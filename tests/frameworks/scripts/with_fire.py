"""A command line made by fire, with values that it reads as Python."""

import fire
from values import say


def train(folder, *files, lr=0.1, layers=(1,), **more):
    say(folder=folder, files=files, lr=lr, layers=layers, more=more)


if __name__ == "__main__":
    fire.Fire(train)
