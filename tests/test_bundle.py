"""The launcher as one file (`make bundle`): how it is made, and where it can lie.

What the program does is in the other tests; here is what differs for one file.
"""

import os
import shlex
import shutil
import stat
import sys
import zipfile
from pathlib import Path

import pytest
from conftest import REPO, completed, findings, make_one_file

DRY = ["--train-script", "script.py", "--launcher-dry-run"]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    return make_one_file(tmp_path_factory.mktemp("built") / "launcher.py")


@pytest.fixture
def one_file(tmp_path, built) -> Path:
    """The file beside a script, as in a source_dir."""
    return Path(shutil.copy(built, tmp_path))


def launch(*argv, code=0, **environ):
    """Run a command without torch, which leaves nothing, whatever its end; return what it did."""
    done = completed(*argv, code=code, timeout=60, **environ)
    assert os.listdir(os.environ["TMPDIR"]) == []
    return done


# How it is made


def test_the_same_sources_give_the_same_bytes(tmp_path, one_file):
    copy = tmp_path / "elsewhere" / "clone"
    for folder in ("bundle", "launcher", "launcher_tools", "smddp"):
        shutil.copytree(REPO / folder, copy / folder, copy_function=shutil.copyfile)
    shutil.copy(REPO / "LICENSE", copy)
    (copy / "launcher" / "__pycache__").mkdir(exist_ok=True)
    (copy / "launcher" / "__pycache__" / "cli.cpython-39.pyc").write_bytes(b"of another Python")
    command = f"cd {copy.parent}; umask 077; {sys.executable} clone/bundle/build.py other.py"
    completed("sh", "-c", command, LC_ALL="C", PYTHONUTF8="0", TZ="Asia/Tokyo")
    other = copy.parent / "other.py"
    assert other.read_bytes() == one_file.read_bytes()
    assert stat.S_IMODE(other.stat().st_mode) == stat.S_IMODE(one_file.stat().st_mode) == 0o755
    assert sorted(os.listdir(copy.parent)) == ["clone", "other.py"]


def test_it_holds_the_launcher_and_its_licence(one_file):
    packages = {
        str(path.relative_to(REPO))
        for package in ("launcher", "launcher_tools", "smddp")
        for path in (REPO / package).rglob("*.py")
    }
    with zipfile.ZipFile(one_file) as archive:
        assert archive.namelist() == sorted({*packages, "__main__.py", "LICENSE", "FILES"})
        assert archive.read("FILES").decode().split() == sorted(packages)
        assert archive.testzip() is None


# Where it can lie


PLACES = {
    "as it is": lambda path: path,
    "a name with spaces and without .py": lambda path: path.rename(path.parent / "a $ b 'é"),
    "a relative path": lambda path: Path(os.path.relpath(path)),
}


@pytest.mark.parametrize("place", PLACES)
def test_whatever_it_is_called(script, one_file, pretend_torch, place):
    pretend_torch("2.13.0")
    script("")
    path = PLACES[place](one_file)
    done = launch(sys.executable, path, *DRY)
    assert done.stdout.endswith(" -- script.py\n")
    assert launch(sys.executable, path, "local", "--help").stdout.startswith("usage: sm-launch lo")


@pytest.mark.parametrize("options", [["-I"], ["-E", "-s", "-B", "-X", "utf8"]], ids=str)
def test_pythons_options(script, one_file, options):
    """-I and -E leave PYTHONPATH out, and so torch may be missing: a line of the program's own."""
    script("")
    done = launch(sys.executable, *options, one_file, "--launcher-help")
    assert done.stdout.startswith("usage: sm-launch") and done.stderr == ""


def test_no_module_of_the_source_folder_takes_the_place_of_ours_or_of_pythons(
    script, one_file, pretend_torch, tmp_path
):
    pretend_torch("2.13.0")
    script("")
    names = ("json", "socket", "selectors", "subprocess", "cli", "plan", "errors", "program")
    for name in (*names, "launcher/__init__", "launcher/cli", "launcher/__main__"):
        (tmp_path / "launcher").mkdir(exist_ok=True)
        script("raise SystemExit('shadowed')", f"{name}.py")
    for path in (str(tmp_path), f"{tmp_path}:{one_file}"):
        path += f":{os.environ['PYTHONPATH']}"
        done = launch(sys.executable, one_file, *DRY, PYTHONPATH=path, PYTHONSAFEPATH="1")
        assert done.stdout.endswith(" -- script.py\n")
    # The ranks would not find a module of the launcher's.
    refused = launch(sys.executable, one_file, "--train-module", "launcher.host.folders", code=2)
    assert "launcher.host.folders: there is no such module" in refused.stderr


OLD = """
import runpy, sys
sys.version_info = (3, 8, 18, "final", 0)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_a_python_that_is_too_old(one_file, tmp_path):
    done = launch(sys.executable, "-c", OLD, one_file, code=2)
    says = f"launcher: {sys.executable} is Python 3.8; expected 3.9 or later, the Python that has"
    assert done.stderr == f"{says} torch.\n"
    failure = tmp_path / "output" / "failure"
    assert failure.read_text() == done.stderr
    failure.write_text("somebody else's")
    launch(sys.executable, "-c", OLD, one_file, code=2)
    assert failure.read_text() == "somebody else's"
    launch("sh", "-c", f"{shlex.join([sys.executable, '-c', OLD, str(one_file)])} 2>&-", code=2)


def test_smddps_open_implementation_is_the_unpacked_one(script, one_file, pretend_torch):
    pretend_torch("2.13.0")
    script("")
    done = launch(sys.executable, one_file, *DRY, "--launcher-smddp-compat", "true")
    (path,) = (line for line in done.stdout.splitlines() if "PYTHONPATH=" in line)
    folder = path.partition("=")[2].split()[0].split(":")[-1]
    unpacked = os.path.join(os.environ["TMPDIR"], "sm-launch-")
    assert folder.startswith(unpacked) and folder.endswith("/smddp")


# A job

LOOK = """
import os, pathlib, stat, sys
folders = list(pathlib.Path(os.environ["TMPDIR"]).glob("sm-launch-*"))
modes = {oct(stat.S_IMODE(folder.stat().st_mode)) for folder in folders}
(unpacked,) = [folder for folder in folders if (folder / "launcher").is_dir()]
sys.stdout.write(f"{modes} {len(folders)}\\n")  # at once: the other rank writes, too
try:
    import launcher
except (SyntaxError, ValueError):  # it is in sys.path, but no module
    pass
if os.environ["RANK"] == "1":
    raise ValueError("loss is nan")
"""


@pytest.mark.torch
def test_a_job_from_a_folder_that_is_read_only(start, script, one_file, tmp_path):
    """And with an untidy name for the folder of temporary files."""
    source, short = tmp_path / "a source", Path(os.environ["TMPDIR"])
    temporary = short / "a" / "b"
    source.mkdir()
    temporary.mkdir(parents=True)
    one_file.rename(source / "launcher.py")
    shutil.copy(script(LOOK), source)
    source.chmod(0o555)
    os.chdir(source)
    words = ("--train-script", "script.py", "--launcher-nproc-per-node", 2)
    environ = {"PYTHONPATH": str(source), "TMPDIR": f"{os.path.relpath(short)}/a//../a/b"}
    host = start(*words, command=[sys.executable, "launcher.py"], **environ)
    assert host.wait() == 1, host.log()
    assert "{'0o700'} 2\n" in host.out, host.log()
    first = "localhost, rank 1 (local rank 1) failed with ValueError: loss is nan"
    assert host.failure.startswith(first)
    assert "sm-launch-" not in host.log() + host.failure
    assert host.leftovers() == [] and os.listdir(temporary) == []
    assert sorted(os.listdir(source)) == ["launcher.py", "script.py"]


FAILS_ONCE = """
import os, sys
print("torch" in sys.modules, flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    raise ValueError("loss is nan")
"""


@pytest.mark.torch
def test_local_starts_the_same_file_whose_every_part_is_found(script, one_file):
    """The hosts' launchers, and all that these run in processes of their own."""
    words = ("--launcher-start", "warm", "--launcher-max-restarts", "1", "--launcher-log-dir", "l")
    done = completed(sys.executable, one_file, "local", "--", script(FAILS_ONCE), *words)
    assert "algo-1 | launcher: attempt 1 of 2 failed after " in done.stderr
    assert done.stdout.count(" | True\n") >= 3 and " cold" not in done.stderr
    assert Path("l/algo-2/attempt-2/rank-1.log").read_text() == "True\n"
    done = completed(sys.executable, one_file, "doctor", "--json")
    ((level, text),) = findings(done.stdout)["torch"]
    assert level == "ok" and text.startswith("torch ")


def test_no_room_to_unpack_it(start, script, one_file, pretend_torch):
    pretend_torch("2.13.0")
    limited = ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh", sys.executable, one_file]  # 4 KiB a file
    host = start("--train-script", script(""), command=limited)
    assert host.wait() == 2, host.log()
    says = f"launcher: cannot unpack {one_file} into {host.tmp} (File too large); set "
    assert says in host.failure
    assert host.leftovers() == [] and os.listdir(host.tmp) == []
