"""train_transformer.py: every way to share the work computes what one process does."""

import os
import re
import shutil
from pathlib import Path

import pytest
from conftest import REPO, TORCH, slow

SCRIPT = REPO / "train_scripts" / "train_transformer.py"
STRATEGIES = ("ddp", "fsdp", "tensor", "pipeline")
SMALL = ("--width", "32", "--length", "16", "--steps", "20")


pytestmark = [pytest.mark.torch]


def losses(out: str) -> list[float]:
    """Return the losses in the order of their steps, each of which is there once."""
    found = re.findall(r"^step=(\d+) loss=(\d+\.\d{6})$", out, re.MULTILINE)
    assert [int(step) for step, _ in found] == list(range(len(found)))
    return [float(loss) for _, loss in found]


def close(one: list[float], other: list[float]) -> bool:
    return one == pytest.approx(other, abs=1e-4, rel=0)


def same_models(one: str, other: str) -> bool:
    import torch

    ours, theirs = (torch.load(Path(folder, "model.pt")) for folder in (one, other))
    assert list(ours) == list(theirs)
    return all(torch.allclose(ours[name], theirs[name], atol=1e-4, rtol=0) for name in ours)


@pytest.fixture
def job(ranks):
    """Run the script to its end: job("--parallel", "fsdp", count=2) -> what it printed."""
    if TORCH < (2, 6):
        pytest.skip("an older torch gets one line: the last test")

    def run(*args: object, count: int = 0, code: int = 0, script: Path = SCRIPT, **env: str):
        done = ranks.run(script, *SMALL, *args, count=count, **env)
        assert done.codes == [code] * max(1, count), done.err
        return done

    return run


def test_every_strategy_computes_what_one_process_does(job):
    count, steps = 2, 6
    size = ("--layers", count, "--steps", steps)
    alone = losses(job(*size, "--model-dir", "alone").out)
    assert len(alone) == steps and alone[-1] < alone[0] - 0.01 * steps
    for way in (*(f"--parallel {name}" for name in STRATEGIES), "--shard-optimizer True"):
        done = job(*size, *way.split(), "--model-dir", "shared", count=count)
        assert close(losses(done.out), alone), way
        assert same_models("shared", "alone"), way
        assert "Warning" not in done.err, way


@pytest.mark.systems
def test_one_process_can_have_any_strategy(job):
    first, *others = (losses(job("--parallel", strategy).out) for strategy in STRATEGIES)
    assert all(close(first, other) for other in others)


@pytest.mark.systems
@pytest.mark.parametrize(("before", "after"), [("fsdp", "fsdp"), ("tensor", "pipeline")])
def test_a_checkpoint_is_for_any_strategy_and_number_of_ranks(job, before, after):
    alone = losses(job("--model-dir", "alone").out)
    keep = ("--checkpoint-dir", "checkpoints", "--checkpoint-every", "3")
    out = ""
    for strategy, count, steps in ((before, 4, 13), (after, 2, 20)):
        options = ("--parallel", strategy, "--steps", steps, "--model-dir", "model")
        out += job(*options, *keep, count=count).out
    assert "resuming from checkpoints/step-000000012\n" in out
    done = re.findall(r"^step=12 .*\n", out, re.MULTILINE)  # it was not in the checkpoint
    assert len(done) == 2
    assert close(losses(out.replace(done[0], "", 1)), alone)
    assert same_models("model", "alone")
    assert sorted(os.listdir("checkpoints")) == ["step-000000015", "step-000000018"]


STOPPED = f"""
import os, signal, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import train_transformer as script

make_batch = script.make_batch

def stopped(args, step):
    if step == 6 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return make_batch(args, step)

script.make_batch = stopped
script.main()
"""


@pytest.mark.systems
def test_a_stop_of_one_rank_is_one_of_all_and_saves(job, script):
    alone = losses(job().out)
    keep = ("--parallel", "fsdp", "--checkpoint-dir", "kept")
    first = job(*keep, count=4, code=143, script=script(STOPPED))
    assert first.out.endswith("stopped by SIGTERM; saved kept/step-000000007\n")
    second = job(*keep, count=2)
    assert second.out.startswith("resuming from kept/step-000000007\nstep=7 ")
    assert close(losses(first.out + second.out), alone)
    unkept = job(count=2, code=143, script=script(STOPPED))
    assert unkept.out.endswith("stopped by SIGTERM; nothing saved: no --checkpoint-dir\n")


@pytest.mark.systems
def test_a_checkpoint_that_is_not_whole_is_passed_over(job):
    keep = ("--parallel", "fsdp", "--checkpoint-dir", "kept", "--checkpoint-every", "5")
    job(*keep, count=2)
    newest = Path("kept", "step-000000020")
    part = newest / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:-1])
    out = job(*keep, "--steps", "16", count=2).out
    reason = "not whole for rank 0: __1_0.distcp has been cut off"
    assert out.startswith(f"passing over {newest}, {reason}\nresuming from kept/step-000000015\n")
    part.unlink()
    Path("kept", "step-000000015", ".metadata").unlink()
    Path("kept", "notes").mkdir()
    out = job(*keep, "--steps", "1", count=2).out
    assert "not whole for rank 0: __1_0.distcp is missing\n" in out
    assert "not whole for rank 0: .metadata is missing\n" in out
    assert "going on" not in out and "step=0 " in out


@pytest.mark.systems
def test_a_checkpoint_of_another_model_is_left_alone(job):
    keep = ("--parallel", "fsdp", "--checkpoint-dir", "kept", "--steps", "2")
    job(*keep, "--checkpoint-every", "2", count=2)
    done = job(*keep, "--lr", "0.1", count=2, code=1)
    assert done.err.count('"lr": 0.003') == done.err.count('"lr": 0.1') == 1
    assert "; choose another --checkpoint-dir\n" in done.err and "Traceback" not in done.err
    assert os.listdir("kept") == ["step-000000002"]


@pytest.mark.systems
def test_a_checkpoint_that_cannot_be_written_ends_the_job(job):
    keep = ("--parallel", "fsdp", "--checkpoint-dir", "/proc/kept", "--checkpoint-every", "2")
    done = job(*keep, count=2, code=1)
    says = "cannot write the checkpoint /proc/kept/step-000000002: [Errno 2] No such file"
    assert done.err.count(says) == 1 and "Traceback" not in done.err


REFUSED = [
    (3, "--parallel tensor", "3 ranks cannot share --heads 4 equally; use one of 1, 2, 4"),
    slow(3, "--parallel ddp", "--batch-size 16 cannot be divided by 3 ranks"),
    slow(2, "--parallel pipeline --batch-size 6", "6 cannot be divided by 4 micro-batches"),
    slow(4, "--parallel pipeline --micro-batches 2", "a pipeline of 4 ranks needs 4 or more"),
    slow(0, "--width 30", "--width 30 cannot be divided by --heads 4"),
    slow(2, "--shard-optimizer true --checkpoint-dir kept", "use --parallel fsdp"),
]


@pytest.mark.parametrize(("count", "args", "says"), REFUSED)
def test_what_the_ranks_cannot_share_is_refused_once_and_at_once(job, count, args, says):
    # No rank finds another one at this address: none gets so far as to look.
    done = job(*args.split(), count=count, code=2)
    assert done.out == ""
    assert done.err.startswith("train_transformer.py: ") and done.err.count("\n") == 1
    assert says in done.err
    assert not os.path.exists("kept")


OWN = f"""
sys.path.insert(0, {str(SCRIPT.parent)!r})
import train_transformer
train_transformer.main()
"""


@pytest.mark.systems
def test_two_hosts_with_folders_of_their_own(job, start_two, script, tmp_path):
    alone = losses(job("--model-dir", "alone").out)
    folders = [tmp_path / f"kept-{number}" for number in (1, 2)]
    # --checkpoint-dir comes last; on SageMaker it has the same name on both.
    own_folder = "import os, sys; sys.argv[-1] += '-' + os.environ['SM_CURRENT_HOST'][-1]"
    wrapper = script(own_folder + OWN)
    options = ("--launcher-nproc-per-node", "2", "--train-script", wrapper, *SMALL)
    options += ("--parallel", "fsdp", "--checkpoint-every", "12")
    hosts = start_two(*options, "--steps", "14", "--checkpoint-dir", tmp_path / "kept")
    for host, folder in zip(hosts, folders):
        assert host.wait() == 0, host.log()
        lacking = f"{folder}/step-000000012 lacks the other hosts' parts, which resuming needs\n"
        assert host.out.count(lacking) == 1
    first, second = hosts[0].out.replace("\r", ""), hosts[1].out
    assert "step=" not in second and "saved" not in second
    own = re.findall(r"^step=.*\n", first, re.MULTILINE)
    assert close(losses("".join(own)), alone[:14])

    # What is in S3 then, and so on each host of the next job.
    for file in (folders[1] / "step-000000012").iterdir():
        shutil.copy(file, folders[0] / "step-000000012")
    out = job("--parallel", "fsdp", "--checkpoint-dir", folders[0], count=2).out
    assert out.startswith(f"resuming from {folders[0]}/step-000000012\nstep=12 ")
    assert close(losses("".join(own[:12]) + out), alone)


OLD = f"""
import runpy, sys
import torch.distributed.fsdp

vars(torch.distributed.fsdp).pop("fully_shard", None)  # as before 2.6
sys.path.insert(0, {str(SCRIPT.parent)!r})
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def test_an_older_torch_gets_one_line(ranks, script):
    import torch

    done = ranks.run(script(OLD), count=2)
    assert done.codes == [2, 2]
    says = f"needs torch 2.6 or later; this is torch {torch.__version__}"
    assert done.err == f"train_transformer.py: {says}\n"
