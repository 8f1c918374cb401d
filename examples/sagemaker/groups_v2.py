"""A heterogeneous cluster, whose GPU hosts train: version 2 of SageMaker's Python SDK.

make bundle; mkdir src; cp dist/launcher.py train_scripts/*.py src
On AWS:  python groups_v2.py --data s3://BUCKET/hymenoptera_data --role ROLE_ARN

The launcher runs on all hosts; on those of other groups it says so and ends with 0.
"""

import argparse

from sagemaker.instance_group import InstanceGroup
from sagemaker.pytorch import PyTorch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--data", required=True, help="folder with train/ and val/")
parser.add_argument("--role", required=True, metavar="ROLE_ARN")
args = parser.parse_args()

estimator = PyTorch(
    source_dir="src",
    entry_point="launcher.py",
    hyperparameters={"train-script": "train_hymenoptera.py", "epochs": 25},
    environment={"LAUNCHER_INSTANCE_GROUPS": "gpu"},  # --launcher-instance-groups
    instance_groups=[
        InstanceGroup("gpu", "ml.g5.xlarge", 2),
        InstanceGroup("cpu", "ml.c5.2xlarge", 1),
    ],
    framework_version="2.8",
    py_version="py312",
    role=args.role,
)
estimator.fit({name: f"{args.data}/{name}" for name in ("train", "val")})
