"""Start a script that expects torchrun's variables from Open MPI's mpirun.

One host:       mpirun -n 2 python under_mpirun.py --train-script train_ddp.py --epochs 5
On SageMaker:   PyTorch(entry_point="under_mpirun.py", distribution={"mpi": ...},
                        hyperparameters={"train-script": "train_ddp.py", "epochs": 5})

All other arguments are the script's. mpirun names no first host; SageMaker does, in SM_HOSTS, and
its smdistributed launcher in a variable of its own. It needs nothing but Python.
"""

import argparse
import json
import os
import sys
import time


def from_open_mpi(environ):
    """Return torchrun's variables for a rank that Open MPI's mpirun started."""
    names = {"RANK": "RANK", "WORLD_SIZE": "SIZE"}
    names.update(LOCAL_RANK="LOCAL_RANK", LOCAL_WORLD_SIZE="LOCAL_SIZE")
    variables = {name: environ[f"OMPI_COMM_WORLD_{theirs}"] for name, theirs in names.items()}
    first = environ.get("MASTER_ADDR") or environ.get("SMDATAPARALLEL_SERVER_ADDR")
    if not first and environ.get("SM_HOSTS"):
        first = json.loads(environ["SM_HOSTS"])[0]
    if not first and variables["LOCAL_WORLD_SIZE"] == variables["WORLD_SIZE"]:
        first = "localhost"
    if not first:
        if int(variables["LOCAL_RANK"]) > 0:  # mpirun ends all ranks when the first one has said it
            time.sleep(5)
            sys.exit(1)
        sys.exit("mpirun started several hosts; tell ranks the first: mpirun -x MASTER_ADDR=HOST")
    port = environ.get("MASTER_PORT") or "29500"
    return {**variables, "MASTER_ADDR": first, "MASTER_PORT": port}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--train-script", required=True)
    args, others = parser.parse_known_args()
    if "OMPI_COMM_WORLD_RANK" in os.environ:  # else it starts as one process, or under torchrun
        os.environ.update(from_open_mpi(os.environ))
    os.execv(sys.executable, [sys.executable, args.train_script, *others])


if __name__ == "__main__":
    main()
