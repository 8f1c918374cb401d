"""A job of an image that has it all, script and launcher: version 3 of SageMaker's Python SDK.

make image TAG=IMAGE (it has the reference scripts; with FROM IMAGE and COPY you add yours)
On this machine:  python own_image_v3.py --image IMAGE --data data/hymenoptera_data
On AWS:           python own_image_v3.py --image IMAGE --data s3://BUCKET/hymenoptera_data
                      --role ROLE_ARN

There IMAGE is what you pushed to ECR: ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG.
"""

import argparse
import os
import tempfile

from sagemaker.core.training.configs import Compute, InputData
from sagemaker.train.model_trainer import Mode, ModelTrainer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--image", required=True)
parser.add_argument("--data", required=True, help="folder with train/ and val/")
parser.add_argument("--role", metavar="ROLE_ARN", help="run on AWS, not on this machine")
parser.add_argument("hyperparameters", nargs="*", metavar="NAME=VALUE")
args = parser.parse_args()

where = {"role": args.role}
if not args.role:
    run = tempfile.mkdtemp(prefix="run-", dir=os.getcwd())
    where = {"training_mode": Mode.LOCAL_CONTAINER, "local_container_root": run}

hyperparameters = {"train-script": "train_hymenoptera.py", "epochs": 25}
hyperparameters.update(pair.split("=", 1) for pair in args.hyperparameters)
trainer = ModelTrainer(  # without source_code the image starts as it is, and so a stop is heard
    training_image=args.image,
    hyperparameters=hyperparameters,
    compute=Compute(instance_type="ml.g5.xlarge" if args.role else "local", instance_count=2),
    **where,
)
channels = ((name, f"{args.data}/{name}") for name in ("train", "val"))
trainer.train([InputData(channel_name=name, data_source=data) for name, data in channels])
