"""datasets: a function of this script's runs in two processes more, by dill and multiprocess."""

from datasets import Dataset
from values import say

FACTOR = 3


class Scaled:
    def __init__(self, number):
        self.value = number * FACTOR


def scale(row):
    return {"scaled": Scaled(row["number"]).value, "module": Scaled.__module__}


def main():
    data = Dataset.from_dict({"number": list(range(16))})
    mapped = data.map(scale, num_proc=2)
    again = data.map(lambda row: {"scaled": scale(row)["scaled"] + 1}, num_proc=2)
    say(scaled=list(mapped["scaled"]), modules=list(mapped["module"]), again=list(again["scaled"]))
    say(fingerprints=[mapped._fingerprint, again._fingerprint])  # names of files in its cache


if __name__ == "__main__":
    main()
