"""SageMaker's Python SDK as tests run it: two versions, which cannot share an environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from aws import ACCOUNT, REGION, Aws
from conftest import REPO, make_one_file

EXAMPLES = REPO / "examples" / "sagemaker"
VERSIONS = ("v2", "v3")


def python(version: str) -> str:
    """Return the Python that has a version of the SDK: `make test-systems` installs it."""
    path = REPO / f".venv-sdk-{version}" / "bin" / "python"
    assert path.exists(), f"{path} does not exist: make test-systems makes it"
    return str(path)


def environment(aws: Aws, folder: Path) -> dict[str, str]:
    """Return the environment of somebody with an account, of which nothing is on this machine."""
    config = folder / "sagemaker-config.yaml"
    # Without its bucket the SDK asks another address, its own, who this is.
    modules = "{TelemetryOptOut: true, Session: {DefaultS3Bucket: bucket}}"
    config.write_text(f"SchemaVersion: '1.0'\nSageMaker: {{PythonSDK: {{Modules: {modules}}}}}\n")
    own = ("AWS_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")
    others = {name: value for name, value in os.environ.items() if not name.upper().startswith(own)}
    return {
        **others,
        **aws.environment,
        "AWS_ACCESS_KEY_ID": ACCOUNT,
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(config),
        "PYTHONUNBUFFERED": "1",
    }


def make_source(folder: Path, *scripts: Path) -> None:
    """Make src/ of the launcher in one file and scripts, as the examples say."""
    (folder / "src").mkdir()
    make_one_file(folder / "src" / "launcher.py")
    for path in scripts:
        shutil.copy(path, folder / "src")


def start(name: str, *args: str, env: Mapping[str, str], cwd: Path) -> subprocess.Popen[str]:
    """Start an example, whose name ends with the version of the SDK; its log is cwd/log."""
    path = EXAMPLES / name
    with open(cwd / "log", "w") as log:
        return subprocess.Popen(
            [python(path.stem[-2:]), str(path), *args],
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
