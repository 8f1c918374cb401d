"""A job of an image that has it all, script and launcher: version 2 of SageMaker's Python SDK.

make image TAG=IMAGE (it has the reference scripts; with FROM IMAGE and COPY you add yours)
On this machine:  python own_image_v2.py --image IMAGE --data data/hymenoptera_data
On AWS:           python own_image_v2.py --image IMAGE --data s3://BUCKET/hymenoptera_data
                      --role ROLE_ARN

There IMAGE is what you pushed to ECR: ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG.
"""

import argparse
import os
import tempfile

from sagemaker.estimator import Estimator
from sagemaker.local import LocalSession

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--image", required=True)
parser.add_argument("--data", required=True, help="folder with train/ and val/")
parser.add_argument("--role", metavar="ROLE_ARN", help="run on AWS, not on this machine")
parser.add_argument("hyperparameters", nargs="*", metavar="NAME=VALUE")
args = parser.parse_args()

where = {"instance_type": "ml.g5.xlarge", "role": args.role}
if not args.role:
    run, args.data = tempfile.mkdtemp(prefix="run-", dir=os.getcwd()), os.path.abspath(args.data)
    where = {"instance_type": "local", "role": "arn:aws:iam::111122223333:role/not-used"}
    where.update(sagemaker_session=LocalSession(), output_path=f"file://{run}")
    where["sagemaker_session"].config = {"local": {"local_code": True, "container_root": run}}
    args.data = f"file://{args.data}"

hyperparameters = {"train-script": "train_hymenoptera.py", "epochs": 25}
hyperparameters.update(pair.split("=", 1) for pair in args.hyperparameters)
estimator = Estimator(args.image, instance_count=2, hyperparameters=hyperparameters, **where)
estimator.fit({name: f"{args.data}/{name}" for name in ("train", "val")})
print("the model:", estimator.model_data)
