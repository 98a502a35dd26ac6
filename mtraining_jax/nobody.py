"""Output for nobody: a terminal that is gone, a disk that is full."""

import os


def write_to_nobody(*outputs: int) -> None:
    """Sends what is written from now on, and what is still in buffers, nowhere.

    Writing to what is gone fails, at the latest when Python empties its buffers at its end.

    Args:
        outputs: file descriptors, 1 and 2 being standard output and standard error.
    """
    nobody = os.open(os.devnull, os.O_WRONLY)
    for output in outputs:
        os.dup2(nobody, output)
    os.close(nobody)
