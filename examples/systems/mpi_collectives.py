"""How ranks exchange values with MPI: send, broadcast, gather, and the mean of all.

One host:       mpirun -n 6 python mpi_collectives.py
Several hosts:  mpirun -n 6 --host algo-1:2,algo-2:2,algo-3:2 python -m mpi4py mpi_collectives.py
On SageMaker:   distribution={"mpi": {"enabled": True, "processes_per_host": 2}}

With fewer than 6 cores mpirun asks for --oversubscribe, and root for --allow-run-as-root.

The twin of collectives.py; it needs mpi4py, numpy and the MPI that mpirun belongs to. Every rank
checks what it gets; if that is wrong, a line says so and the job ends with 1.
"""

import os
import sys
import time


def end_host(message):
    """End this rank, as all ranks of this host do; the first of them says why."""
    if int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)) > 0:
        time.sleep(30)  # mpirun kills all ranks when the first ends
        sys.exit(1)
    sys.exit(message)


try:
    import numpy as np
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # one of them is missing; or the MPI that mpi4py needs
    reason = str(error).splitlines()[0]
    install = "pip install numpy mpi4py, apt-get install openmpi-bin"
    end_host(f"mpi_collectives.py needs numpy, mpi4py and Open MPI ({reason}): {install}")

comm = MPI.COMM_WORLD


def point_to_point(rank):
    """Rank 0 sends an array to rank 1; the other ranks do nothing."""
    if rank == 0:
        comm.Send(np.arange(3), dest=1)
    elif rank == 1:
        data = np.empty(3, dtype=np.int64)
        comm.Recv(data, source=0)
        check("what rank 0 sent", data, np.arange(3))


def broadcast(rank):
    """Rank 0 gives an array to all ranks."""
    data = np.arange(10) if rank == 0 else np.empty(10, dtype=np.int64)
    comm.Bcast(data, root=0)
    check("what rank 0 broadcast", data, np.arange(10))


def mean(rank, size):
    """Rank 0 gathers an array from every rank and gives their mean to all.

    So weights or gradients are averaged by hand; comm.Allreduce() sums them in one call.
    """
    mine = np.full(10, float(rank))
    gathered = np.empty((size, 10)) if rank == 0 else None
    comm.Gather(mine, gathered, root=0)
    if rank == 0:
        for other, data in enumerate(gathered):
            check(f"what rank {other} gave", data, np.full(10, float(other)))
        average = gathered.mean(axis=0)
    else:
        average = np.empty(10)
    comm.Bcast(average, root=0)
    check("the mean", average, np.full(10, (size - 1) / 2))


def check(what, data, expected):
    if not np.array_equal(data, expected):
        values = f"{data.tolist()}; expected {expected.tolist()}"
        print(f"rank {comm.Get_rank()}: {what} is {values}", file=sys.stderr, flush=True)
        comm.Abort(1)  # an exit would wait for the other ranks, which may wait for this one


def main():
    rank, size = comm.Get_rank(), comm.Get_size()
    if size < 2:
        # Each process is alone, too, where mpirun is of another MPI than the one mpi4py loaded.
        library = MPI.Get_library_version().split(",")[0]
        end_host(
            "mpi_collectives.py needs two ranks or more: mpirun -n 2 python mpi_collectives.py, "
            f"with the mpirun of {library}"
        )
    point_to_point(rank)
    broadcast(rank)
    mean(rank, size)
    print(f"rank {rank} of {size}: every value is right", flush=True)


if __name__ == "__main__":
    main()
