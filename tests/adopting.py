"""Runs a command that makes an orphan, as a launcher does with a rank, and ends as the orphan does.

    python adopting.py COMMAND ...

Without an orphan it ends as the command.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
process = subprocess.Popen(sys.argv[1:])
codes = {}
try:
    while True:
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
except ChildProcessError:
    first = codes.pop(process.pid)
code = next(iter(codes.values()), first)
if code < 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
