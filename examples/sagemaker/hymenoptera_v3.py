"""The reference job, with version 3 of SageMaker's Python SDK: two hosts learn ants from bees.

make bundle; mkdir src; cp dist/launcher.py train_scripts/*.py src
On this machine:  python hymenoptera_v3.py --local IMAGE --data data/hymenoptera_data
On AWS:           python hymenoptera_v3.py --role ROLE_ARN --data s3://BUCKET/hymenoptera_data

NAME=VALUE at the end are more hyperparameters, for example epochs=1. IMAGE: see docs/guide.md.
"""

import argparse
import os
import tempfile

import boto3
from sagemaker.core import image_uris
from sagemaker.core.training.configs import Compute, InputData, MetricDefinition, SourceCode
from sagemaker.train.model_trainer import Mode, ModelTrainer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
place = parser.add_mutually_exclusive_group(required=True)
place.add_argument("--local", metavar="IMAGE", help="run on this machine, in containers")
place.add_argument("--role", metavar="ROLE_ARN", help="run on AWS")
parser.add_argument("--data", required=True, help="folder with train/ and val/")
parser.add_argument("hyperparameters", nargs="*", metavar="NAME=VALUE")
args = parser.parse_args()

if args.local:
    instance, image = "local", args.local
    where = {"training_mode": Mode.LOCAL_CONTAINER}
    where["local_container_root"] = tempfile.mkdtemp(prefix="run-", dir=os.getcwd())
else:
    instance, region = "ml.g5.xlarge", boto3.Session().region_name
    version = {"version": "2.8", "py_version": "py312", "image_scope": "training"}
    image = image_uris.retrieve("pytorch", region, instance_type=instance, **version)
    where = {"role": args.role}

names = ("train_loss", "train_accuracy", "val_loss", "val_accuracy")  # in the log, once an epoch
trainer = ModelTrainer(
    training_image=image,
    source_code=SourceCode(
        source_dir="src", command="exec python3 launcher.py init python3 launcher.py"
    ),
    hyperparameters={
        "train-script": "train_hymenoptera.py",
        "epochs": 25,
        **dict(pair.split("=", 1) for pair in args.hyperparameters),
    },
    compute=Compute(instance_type=instance, instance_count=2),
    **where,
)
regexes = [MetricDefinition(name=name, regex=rf"\b{name}=([0-9.e+-]+)") for name in names]
trainer.with_metric_definitions(regexes)
channels = ((name, f"{args.data}/{name}") for name in ("train", "val"))
trainer.train([InputData(channel_name=name, data_source=data) for name, data in channels])
