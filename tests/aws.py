"""An AWS that starts nothing and records what it is asked: one server that answers for all of it.

SDKs reach it through AWS_ENDPOINT_URL: their own code, boto's included, runs as it is, to the bytes
on a socket. As a proxy it refuses what does not come that way.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

REGION = "us-east-1"
ACCOUNT = "111122223333"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/SageMakerRole"


class Request(NamedTuple):
    """One request: for an API in JSON, its name and parameters; else method and address."""

    action: str
    parameters: Mapping[str, object]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        target = self.headers.get("X-Amz-Target", "").partition(".")[2]
        if target:
            request = Request(target, json.loads(body))
        else:
            is_form = "x-www-form-urlencoded" in self.headers.get("Content-Type", "")
            form = body.decode() if is_form else ""
            request = Request(f"{self.command} {self.path} {form}".strip(), {})
        self.server.requests.append(request)
        kind, text = _answer(self.server.requests)
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text.encode())

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def log_message(self, *_: object) -> None:
        pass


WHO = {"Principal": {"Service": "sagemaker.amazonaws.com"}, "Action": "sts:AssumeRole"}
TRUST = json.dumps({"Statement": [{"Effect": "Allow", **WHO}]}).replace('"', "%22")
A_ROLE = f"""<GetRoleResponse><GetRoleResult><Role>
<RoleName>SageMakerRole</RoleName><Arn>{ROLE}</Arn>
<AssumeRolePolicyDocument>{TRUST}</AssumeRolePolicyDocument>
</Role></GetRoleResult></GetRoleResponse>"""
ALLOWED = """<SimulatePrincipalPolicyResponse><SimulatePrincipalPolicyResult>
</SimulatePrincipalPolicyResult></SimulatePrincipalPolicyResponse>"""
BUCKETS = "<ListAllMyBucketsResult><Buckets></Buckets></ListAllMyBucketsResult>"
JOB = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/job"
DONE = {
    "TrainingJobArn": JOB,
    "TrainingJobStatus": "Completed",
    "SecondaryStatus": "Completed",
    "ModelArtifacts": {"S3ModelArtifacts": "s3://bucket/job/output/model.tar.gz"},
}


def _answer(requests: Sequence[Request]) -> tuple[str, str]:
    """Return content type and text: whoever asks may do all, and each job is done at once."""
    request = requests[-1]
    if request.parameters:
        made = [each.parameters for each in requests if each.action == "CreateTrainingJob"]
        known = {
            "CreateTrainingJob": {"TrainingJobArn": JOB},
            "DescribeTrainingJob": {**made[-1], **DONE} if made else {},
            "DescribeLogStreams": {"logStreams": []},
        }
        return "application/x-amz-json-1.1", json.dumps(known.get(request.action, {}))
    if request.action == "GET /":
        return "text/xml", BUCKETS
    for what, text in {
        "Action=GetRole": A_ROLE,
        "Action=SimulatePrincipalPolicy": ALLOWED,
    }.items():
        if what in request.action:
            return "text/xml", text
    return "text/plain", ""  # S3: whatever it is, it has been done


class Aws:
    """The server, from start to stop; `requests` are in the order in which they came."""

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self.requests: list[Request] = []
        self._server.requests = self.requests
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        url = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {"AWS_ENDPOINT_URL": url, "HTTPS_PROXY": url}

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def training_job(self) -> Mapping[str, object]:
        """Return the parameters of the only CreateTrainingJob."""
        (request,) = (each for each in self.requests if each.action == "CreateTrainingJob")
        return request.parameters
