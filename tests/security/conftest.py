import os
import resource
from pathlib import Path

import pytest

GIB = 2**30


@pytest.fixture
def no_gigabytes():
    """Limits further allocations to one GiB, so that excess raises an error."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * os.sysconf("SC_PAGE_SIZE") + GIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A shared folder; files are overwritten."""
    return tmp_path_factory.mktemp("fuzz")
