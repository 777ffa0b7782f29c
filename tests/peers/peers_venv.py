# SPDX-License-Identifier: Apache-2.0
"""Where the peers are installed when python3 itself does not have them."""
import os
import pathlib
import sys

VENV = pathlib.Path(__file__).resolve().parents[2] / "build" / "peers-venv"  # made by scripts/peers.sh


def try_again_there():
    """Runs this script again with the Python of that place; returns where there is none, or this is it."""
    python = str(VENV / "bin" / "python")
    if os.path.exists(python) and "TREEATTN_IN_PEERS_VENV" not in os.environ:
        os.environ["TREEATTN_IN_PEERS_VENV"] = "1"
        os.execv(python, [python, *sys.argv])  # its own path as argv[0] is how it knows that it is in a venv


def skip(why, packages):
    """Ends the script as one that could not run. packages: what pip has to install for it."""
    print(f"*** SKIPPED: {why}. To get what is missing: run scripts/peers.sh, or pip install {packages} for "
          f"{sys.executable} ***")
    sys.exit(77)


def missing(error, packages):
    """The packages cannot be imported by this Python: tries the other place, or skips."""
    try_again_there()
    skip(f"a package cannot be imported ({error})", packages)
