"""Discards output to a closed terminal or a full disk."""

import os


def write_to_nobody(*outputs: int) -> None:
    """Redirects file descriptors (1: stdout, 2: stderr), with pending buffers, to /dev/null.

    Otherwise writes fail, at the latest when Python flushes its buffers at exit.
    """
    nobody = os.open(os.devnull, os.O_WRONLY)
    for output in outputs:
        os.dup2(nobody, output)
    os.close(nobody)
