"""Chooses the ranks' smdistributed.dataparallel for --launcher-smddp-compat true.

AWS's library is closed, and few images have it. smddp/, next to launcher/, holds an open
implementation of its PyTorch API; ranks use it if AWS's is missing.
"""

from __future__ import annotations

import importlib.machinery
import os
from collections.abc import Mapping

from launcher import PACKAGE

OURS = os.path.join(os.path.dirname(PACKAGE), "smddp")  # next to launcher/
_API = "1.0.0"  # the version in the labels of AWS's "PyTorch Guide" to SMDDP v1
_PARENT = "smdistributed"
_LIBRARY = f"{_PARENT}.dataparallel"


def chosen(environ: Mapping[str, str]) -> tuple[str, dict[str, str], str]:
    """Return the library's owner, the ranks' variables for it, and a log line.

    Nothing is imported: AWS's library imports torch.
    """
    parent = importlib.machinery.PathFinder.find_spec(_PARENT)
    for folder in (parent and parent.submodule_search_locations) or ():
        library = os.path.join(folder, "dataparallel")
        if os.path.isdir(os.path.join(library, "torch")):
            return "installed", {}, f"{_LIBRARY}: using the installed one, in {library}."
    # In PYTHONPATH, which comes before site-packages, since only a variable reaches all that a
    # script may start: spawned data loaders and Python programs. It hides no library that another
    # Python has or that is installed later: without __init__.py, `smdistributed` and
    # `dataparallel` are namespace packages, which give way to a regular package anywhere in
    # sys.path (PEP 420).
    paths = [path for path in (environ.get("PYTHONPATH"), OURS) if path]
    remark = (
        f"{_LIBRARY}: AWS's is not installed; using the launcher's own, an open-source "
        f"implementation of its PyTorch API {_API} on torch.distributed."
    )
    return "the launcher's own", {"PYTHONPATH": os.pathsep.join(paths)}, remark
