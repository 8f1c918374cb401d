"""A job on Spot instances that goes on where it was: version 3 of SageMaker's Python SDK.

make bundle; mkdir src; cp dist/launcher.py train_scripts/*.py src
On AWS:  python spot_v3.py --data s3://BUCKET/hymenoptera_data
             --checkpoints s3://BUCKET/NAME --role ROLE_ARN

The command makes the launcher's init the container's PID 1, in AWS's own image, too: it passes on
the SIGTERM that comes two minutes before an instance is taken back, and every rank saves. (With
an entry_script PID 1 is the SDK's own shell, which does not.) More arguments are the script's.
"""

import argparse
import os
import tempfile

import boto3
from sagemaker.core import image_uris
from sagemaker.core.training.configs import (
    CheckpointConfig,
    Compute,
    InputData,
    SourceCode,
    StoppingCondition,
)
from sagemaker.train.model_trainer import Mode, ModelTrainer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
place = parser.add_mutually_exclusive_group(required=True)
place.add_argument("--local", metavar="IMAGE", help="run on this machine, to try a docker stop")
place.add_argument("--role", metavar="ROLE_ARN", help="run on AWS")
parser.add_argument("--data", required=True, help="folder with train/ and val/")
parser.add_argument("--checkpoints", required=True, help="in S3: a folder of this job alone")
args, more = parser.parse_known_args()

if args.local:
    instance, image, where = "local", args.local, {"training_mode": Mode.LOCAL_CONTAINER}
    where["local_container_root"] = tempfile.mkdtemp(prefix="run-", dir=os.getcwd())
else:
    instance, region, where = "ml.g5.xlarge", boto3.Session().region_name, {"role": args.role}
    version = {"version": "2.8", "py_version": "py312", "image_scope": "training"}
    image = image_uris.retrieve("pytorch", region, instance_type=instance, **version)

trainer = ModelTrainer(
    training_image=image,
    source_code=SourceCode(
        source_dir="src",
        command="exec python3 launcher.py init python3 launcher.py",
        args=["--train-script", "train_hymenoptera.py", "--epochs", 100, *more],
    ),
    compute=Compute(instance_type=instance, instance_count=2, enable_managed_spot_training=True),
    stopping_condition=StoppingCondition(
        max_runtime_in_seconds=4 * 3600,  # of training
        max_wait_time_in_seconds=12 * 3600,  # the same and the waits for instances
    ),
    # Kept in step with /opt/ml/checkpoints.
    checkpoint_config=CheckpointConfig(s3_uri=args.checkpoints),
    **where,
)
channels = ((name, f"{args.data}/{name}") for name in ("train", "val"))
trainer.train([InputData(channel_name=name, data_source=data) for name, data in channels])
