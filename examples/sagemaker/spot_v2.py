"""A job on Spot instances that goes on where it was: version 2 of SageMaker's Python SDK.

On AWS:  python spot_v2.py --image IMAGE --data s3://BUCKET/hymenoptera_data
             --checkpoints s3://BUCKET/NAME --role ROLE_ARN

IMAGE is one of `make image` in ECR: its PID 1 passes on the SIGTERM that comes two minutes before
an instance is taken back, and every rank saves. In AWS's own image the last epoch is what is left.
"""

import argparse

from sagemaker.estimator import Estimator

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--image", required=True)
parser.add_argument("--data", required=True, help="folder with train/ and val/")
parser.add_argument("--checkpoints", required=True, help="a folder of this job alone")
parser.add_argument("--role", required=True, metavar="ROLE_ARN")
args = parser.parse_args()

estimator = Estimator(
    args.image,
    role=args.role,
    instance_count=2,
    instance_type="ml.g5.xlarge",
    hyperparameters={"train-script": "train_hymenoptera.py", "epochs": 100},
    use_spot_instances=True,
    max_run=4 * 3600,  # seconds of training
    max_wait=12 * 3600,  # the same and the waits for instances
    checkpoint_s3_uri=args.checkpoints,  # /opt/ml/checkpoints, kept in step with it
)
estimator.fit({name: f"{args.data}/{name}" for name in ("train", "val")})
