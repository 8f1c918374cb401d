"""Arguments as SageMaker passes them: switches with a value, and where its folders are."""

import argparse
import os

# SageMaker's, where this runs there; elsewhere nothing is kept unless somebody asks for it.
CHECKPOINT_DIR = "/opt/ml/checkpoints" if os.path.isdir("/opt/ml") else ""
MODEL_DIR = os.environ.get("SM_MODEL_DIR", ".")
OUTPUT_DATA_DIR = os.environ.get("SM_OUTPUT_DATA_DIR", ".")


def switch(text):
    """Read a flag as SageMaker sends them, `--flag True`; auto is None."""
    words = {"true": True, "1": True, "false": False, "0": False, "auto": None}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r}; expected true, false or auto")
    return words[text.lower()]
