"""Trainium: neuron_parallel_compile in front of torchrun, by stand-ins for it. No hardware."""

import signal
import sys

import pytest
from conftest import SAVES, ended_by, more, slow
from test_own_errors import MISTAKEN, RAISES_AND_SAVES

pytestmark = pytest.mark.torch

# As the real one does it (torch-neuronx's neuron_parallel_compile.py): it runs its arguments as a
# child once, with NEURON_EXTRACT_GRAPHS_ONLY=1, reads the child's output to its end, and passes no
# signal on. If the child fails, it exits with 1; else it compiles, and exits with the number of
# graphs that it could not compile.
STAND_IN = f"""#!{sys.executable}
import argparse, os, subprocess, sys, time
parser = argparse.ArgumentParser(prog="neuron_parallel_compile")
parser.add_argument("--command", default="collect-and-compile")
parser.add_argument("--world_size", type=int)
parser.add_argument("--node_id", type=int, default=0)
_, command = parser.parse_known_args()
os.environ["NEURON_EXTRACT_GRAPHS_ONLY"] = "1"
print("collects", flush=True)
with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
    while line := child.stdout.readline():
        sys.stdout.buffer.write(line)
        sys.stdout.flush()
if child.returncode:
    sys.exit(1)
print("compiles", flush=True)
compiler = "import time; time.sleep({{}})".format(os.environ.get("COMPILES_FOR", "0"))
subprocess.run([sys.executable, "-c", compiler])
"""
# Others that could stand there.
VARIANTS = {
    "as the real one": STAND_IN,
    "exec": '#!/bin/sh\nexec "$@"\n',
    "deaf": "#!/bin/sh\ntrap '' TERM INT\n\"$@\"\n",
}


@pytest.fixture
def stand_in(program, monkeypatch):
    """Put a neuron_parallel_compile first in PATH: stand_in(text)."""

    def put(text=STAND_IN):
        monkeypatch.setenv("PATH", program("neuron_parallel_compile", text)["PATH"])
        monkeypatch.setenv("RUN_NEURON_PARALLEL_COMPILE", "1")
        monkeypatch.setenv("SM_NUM_NEURONS", "2")
        monkeypatch.setenv("SM_NUM_GPUS", "0")

    return put


@pytest.mark.parametrize("variant", ["as the real one", more("exec"), more("deaf")])
def test_a_stop_reaches_each_rank_once_and_lets_it_save(start, script, stand_in, variant):
    stand_in(VARIANTS[variant])
    path = script("import sys; print(sys.argv[1:], flush=True)\n" + SAVES)
    host = start("--train-script", path, "--world_size", "8")
    host.wait_for("runs", count=2)  # a rank for each Neuron core
    host.signal(signal.SIGTERM)
    host.ends(ended_by(signal.SIGTERM))
    assert host.out.count("saved") == 2, host.log()
    assert host.out.count("['--world_size', '8']") == 2  # the script's, not the stand-in's


LEAVES_A_PROCESS = """
import os, subprocess, sys
print("collected", flush=True)
if os.environ["RANK"] == "0":  # it holds the output that the stand-in reads to its end
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
"""


@pytest.mark.systems
def test_graphs_are_compiled_though_a_rank_has_left_a_process_behind(start, script, stand_in):
    stand_in()
    host = start("--train-script", script(LEAVES_A_PROCESS))
    host.ends(0)
    assert host.out.count("collected") == 2 and host.out.endswith("compiles\n")
    assert "which rank 0 left running" in host.err


@pytest.mark.systems
def test_a_mistake_of_ours_gives_the_ranks_their_grace(start, script, stand_in, tmp_path):
    stand_in()
    saves = f"import pathlib, os\n{RAISES_AND_SAVES}".replace(
        'print("saved", flush=True)',
        f"time.sleep(1); pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).touch()",
    )
    host = start("--train-script", script(saves), command=[*MISTAKEN, "once"])
    host.ends(70)
    # A rank that runs; the other may not have got there yet.
    saved = {path.name for path in tmp_path.iterdir()} & {"0", "1"}
    assert len(saved) >= host.out.count("runs") > 0, host.log()


IMPORTS = "#!/bin/sh\ntrap '' TERM\necho imports\nsleep 1000\n"


@pytest.mark.parametrize(("text", "moment"), [(IMPORTS, "imports"), slow(STAND_IN, "compiles")])
def test_a_stop_before_and_after_torchrun(start, script, stand_in, text, moment):
    stand_in(text)
    words = ("--train-script", script("print('ran')"), "--launcher-grace", "3")
    host = start(*words, COMPILES_FOR="1000")
    host.wait_for(moment)
    host.signal(signal.SIGTERM)
    host.ends(ended_by(signal.SIGTERM))


def test_a_program_that_cannot_run(start, script, stand_in):
    stand_in("#!/no/such/interpreter\n")
    host = start("--train-script", script("print('ran')"))
    assert host.wait() == 127, host.log()
    assert "its `#!` interpreter does not exist" in host.failure
