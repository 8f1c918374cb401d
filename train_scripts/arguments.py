"""Arguments as SageMaker passes them: flags with a value, and where its folders are."""

import argparse
import os

# SageMaker's, where this runs there; elsewhere nothing is kept unless somebody asks for it.
CHECKPOINT_DIR = "/opt/ml/checkpoints" if os.path.isdir("/opt/ml") else ""
MODEL_DIR = os.environ.get("SM_MODEL_DIR", ".")


def switch(text):
    """Read a flag as SageMaker sends it: `--flag True`."""
    words = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r}; expected true or false")
    return words[text.lower()]
