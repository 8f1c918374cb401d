"""A heterogeneous cluster, whose GPU hosts train: version 3 of SageMaker's Python SDK.

make bundle; mkdir src; cp dist/launcher.py train_scripts/*.py src
On AWS:  python groups_v3.py --data s3://BUCKET/hymenoptera_data --role ROLE_ARN

The launcher runs on all hosts; on those of other groups it says so and ends with 0.
"""

import argparse

import boto3
from sagemaker.core import image_uris
from sagemaker.core.training.configs import Compute, InputData, InstanceGroup, SourceCode
from sagemaker.train.model_trainer import ModelTrainer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", required=True, help="folder with train/ and val/")
parser.add_argument("--role", required=True, metavar="ROLE_ARN")
args = parser.parse_args()

region = boto3.Session().region_name
version = {"version": "2.8", "py_version": "py312", "image_scope": "training"}
groups = {"gpu": ("ml.g5.xlarge", 2), "cpu": ("ml.c5.2xlarge", 1)}
trainer = ModelTrainer(
    training_image=image_uris.retrieve(
        "pytorch", region, instance_type=groups["gpu"][0], **version
    ),
    source_code=SourceCode(
        source_dir="src", command="exec python3 launcher.py init python3 launcher.py"
    ),
    hyperparameters={"train-script": "train_hymenoptera.py", "epochs": 25},
    environment={"LAUNCHER_INSTANCE_GROUPS": "gpu"},  # --launcher-instance-groups
    compute=Compute(
        instance_groups=[
            InstanceGroup(instance_group_name=name, instance_type=kind, instance_count=count)
            for name, (kind, count) in groups.items()
        ]
    ),
    role=args.role,
)
channels = ((name, f"{args.data}/{name}") for name in ("train", "val"))
trainer.train([InputData(channel_name=name, data_source=data) for name, data in channels])
