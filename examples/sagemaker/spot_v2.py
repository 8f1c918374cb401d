"""A job on Spot instances that goes on where it was: version 2 of SageMaker's Python SDK.

make bundle; mkdir src; cp dist/launcher.py train_scripts/*.py src
On AWS:  python spot_v2.py --data s3://BUCKET/hymenoptera_data
             --checkpoints s3://BUCKET/NAME --role ROLE_ARN

container_entry_point makes the launcher's init the container's PID 1, in AWS's own image, too: it
passes on the SIGTERM that comes two minutes before an instance is taken back, and every rank saves.
The channel "launcher" brings the file for it, since the source folder is unpacked later, by the
toolkit. NAME=VALUE at the end are more hyperparameters.
"""

import argparse
import os
import shutil
import tempfile
import uuid

from sagemaker.local import LocalSession
from sagemaker.pytorch import PyTorch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
place = parser.add_mutually_exclusive_group(required=True)
place.add_argument("--local", metavar="IMAGE", help="run on this machine, to try a docker stop")
place.add_argument("--role", metavar="ROLE_ARN", help="run on AWS")
parser.add_argument("--data", required=True, help="folder with train/ and val/")
parser.add_argument("--checkpoints", required=True, help="in S3: a folder of this job alone")
parser.add_argument("hyperparameters", nargs="*", metavar="NAME=VALUE")
args = parser.parse_args()

if args.local:  # which has no checkpoints in S3
    run, data = tempfile.mkdtemp(prefix="run-", dir=os.getcwd()), os.path.abspath(args.data)
    where = {"image_uri": args.local, "instance_type": "local", "output_path": f"file://{run}"}
    where["sagemaker_session"] = LocalSession()
    where["sagemaker_session"].config = {"local": {"local_code": True, "container_root": run}}
    args.role, args.data = "arn:aws:iam::111122223333:role/not-used", f"file://{data}"
else:
    where = {
        "framework_version": "2.8",
        "py_version": "py312",
        "instance_type": "ml.g5.xlarge",
        "use_spot_instances": True,
        "max_run": 4 * 3600,  # seconds of training
        "max_wait": 12 * 3600,  # the same and the waits for instances
        "checkpoint_s3_uri": args.checkpoints,  # /opt/ml/checkpoints, kept in step with it
    }

init = ["python3", "/opt/ml/input/data/launcher/launcher.py", "init"]
estimator = PyTorch(
    source_dir="src",
    entry_point="launcher.py",
    container_entry_point=[*init, "bash", "-m", "start_with_right_hostname.sh", "train"],
    hyperparameters={
        "train-script": "train_hymenoptera.py",
        "epochs": 100,
        **dict(pair.split("=", 1) for pair in args.hyperparameters),
    },
    instance_count=2,
    role=args.role,
    **where,
)
if args.local:
    os.mkdir(f"{run}/launcher")
    launcher = "file://" + shutil.copy("src/launcher.py", f"{run}/launcher")
else:  # into the bucket that src goes to
    prefix = f"launcher-{uuid.uuid4()}"  # of this job alone: nobody else's upload takes its place
    launcher = estimator.sagemaker_session.upload_data("src/launcher.py", key_prefix=prefix)
channels = {name: f"{args.data}/{name}" for name in ("train", "val")}
estimator.fit({**channels, "launcher": os.path.dirname(launcher)})
