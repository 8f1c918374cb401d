"""The reference job, with version 2 of SageMaker's Python SDK: two hosts learn ants from bees.

make bundle; mkdir src; cp dist/launcher.py train_scripts/*.py src
On this machine:  python hymenoptera_v2.py --local IMAGE --data data/hymenoptera_data
On AWS:           python hymenoptera_v2.py --role ROLE_ARN --data s3://BUCKET/hymenoptera_data

NAME=VALUE at the end are more hyperparameters, for example epochs=1. IMAGE: see docs/guide.md.
"""

import argparse
import os
import tempfile

from sagemaker.local import LocalSession
from sagemaker.pytorch import PyTorch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
place = parser.add_mutually_exclusive_group(required=True)
place.add_argument("--local", metavar="IMAGE", help="run on this machine, in containers")
place.add_argument("--role", metavar="ROLE_ARN", help="run on AWS")
parser.add_argument("--data", required=True, help="folder with train/ and val/")
parser.add_argument("hyperparameters", nargs="*", metavar="NAME=VALUE")
args = parser.parse_args()

if args.local:
    run, data = tempfile.mkdtemp(prefix="run-", dir=os.getcwd()), os.path.abspath(args.data)
    where = {"image_uri": args.local, "instance_type": "local", "output_path": f"file://{run}"}
    where["sagemaker_session"] = LocalSession()
    where["sagemaker_session"].config = {"local": {"local_code": True, "container_root": run}}
    args.role, args.data = "arn:aws:iam::111122223333:role/not-used", f"file://{data}"
else:
    where = {"framework_version": "2.8", "py_version": "py312", "instance_type": "ml.g5.xlarge"}

names = ("train_loss", "train_accuracy", "val_loss", "val_accuracy")  # in the log, once an epoch
estimator = PyTorch(
    source_dir="src",
    entry_point="launcher.py",  # no distribution=: that would be another launcher
    hyperparameters={
        "train-script": "train_hymenoptera.py",
        "epochs": 25,
        **dict(pair.split("=", 1) for pair in args.hyperparameters),
    },
    instance_count=2,
    metric_definitions=[{"Name": name, "Regex": rf"\b{name}=([0-9.e+-]+)"} for name in names],
    role=args.role,
    **where,
)
estimator.fit({name: f"{args.data}/{name}" for name in ("train", "val")})
print("the model:", estimator.model_data)
