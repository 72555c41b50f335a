"""The order of calls at the end of a program, and the calls in a forked child."""

from __future__ import annotations

import os
import subprocess
import sys

PRINTED = """
import threading
from zeropp.comm.threads import Threads, at_exit
stopped = threading.Event()
def work():
    stopped.wait()
    print("thread ended", flush=True)
threads = Threads(stopped.set)
threads.start("test", work)
def fail():
    print("first, and the thread runs:", not stopped.is_set(), flush=True)
    raise OSError("of the test")
at_exit(fail, forget=lambda: None)
at_exit(lambda: print("second", flush=True), forget=lambda: None)
writer = threading.Timer(0.2, lambda: print("written", flush=True))
writer.start()
"""

FORKED = """
import os, sys
from zeropp.comm.threads import PROCESS, ForkedError, at_exit, require_same_process
owed = ["of the parent"]
at_exit(lambda: print(*owed, flush=True), forget=owed.clear)
made_in = PROCESS.forks
child = os.fork()
if child:
    require_same_process(made_in)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
require_same_process(PROCESS.forks)
try:
    require_same_process(made_in)
except ForkedError:
    owed.append("of the child")
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env=os.environ)


def test_writers_end_then_owners_are_called_then_threads_end() -> None:
    """If the call of one owner fails, the other owners are still called."""
    done = run(PRINTED)
    assert done.stdout == "written\nfirst, and the thread runs: True\nsecond\nthread ended\n", done.stderr
    assert "OSError: of the test" in done.stderr


def test_a_forked_child_runs_only_calls_that_it_registered_itself() -> None:
    done = run(FORKED)
    assert (done.returncode, done.stdout) == (0, "of the child\nof the parent\n"), done.stderr
