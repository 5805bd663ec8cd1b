"""What holds for all tests on one GPU."""

from __future__ import annotations

import os

# Virtual ranks have two streams each. Streams beyond CUDA's connections (8 unless set) share one,
# where a kernel that waits holds up the peer that it waits for. Read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
