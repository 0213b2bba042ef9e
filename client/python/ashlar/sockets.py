# SPDX-License-Identifier: Apache-2.0
"""The locations of a daemon's sockets if no path is given."""

from __future__ import annotations

import os

SYSTEM_FOLDER = "/run/ashlar"


def user_folder() -> str:
    """Returns the socket folder of a daemon run by this user, or an empty string if there is no suitable folder.

    For root: /run/ashlar. For others: ashlar in $XDG_RUNTIME_DIR.
    """
    if os.geteuid() == 0:
        return SYSTEM_FOLDER
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return os.path.join(runtime, "ashlar") if os.path.isabs(runtime) else ""


def default_sockets() -> tuple[str, str]:
    """Returns the paths of the RPC socket and the session socket that an engine connects to.

    These are $ASHLAR_RPC_SOCKET and $ASHLAR_SESSION_SOCKET if set; else those in /run/ashlar if a daemon has created
    them; else those in the user's folder.
    """
    user = user_folder()
    system = os.path.exists(os.path.join(SYSTEM_FOLDER, "rpc.sock"))
    folder = SYSTEM_FOLDER if system or not user else user
    return (
        os.environ.get("ASHLAR_RPC_SOCKET") or os.path.join(folder, "rpc.sock"),
        os.environ.get("ASHLAR_SESSION_SOCKET") or os.path.join(folder, "session.sock"),
    )
