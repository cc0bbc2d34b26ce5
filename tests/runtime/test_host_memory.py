"""Freed memory stays with the process once that was asked for."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
if sys.argv[1] == "keep":
    from zerojax.runtime.memory import keep_freed_memory
    print(keep_freed_memory())
faults = []
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    piece = bytearray(100 << 20)
    del piece
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[-1])
"""


def _run(mode: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is what is asked")
def test_a_piece_that_was_freed_is_used_again_without_page_faults():
    said, kept = _run("keep")
    if said == "False":
        pytest.skip("the C library is not glibc")
    (given_back,) = _run("leave")
    pages = (100 << 20) // 4096
    assert int(given_back) > 0.01 * pages, "the plain allocator gives such pieces back"
    assert int(kept) < 0.001 * pages
