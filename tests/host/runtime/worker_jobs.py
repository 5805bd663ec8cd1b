"""Jobs for compile workers that compile nothing; a worker imports them by name."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Fine:
    number: int

    def compile(self) -> None:
        print("a compiler's chatter")  # must not come between the answers
        assert "tests.host.runtime.worker_jobs" in sys.modules


@dataclass(frozen=True)
class Wrong:
    text: str

    def compile(self) -> None:
        raise ValueError(f"{self.text}\nand more")


@dataclass(frozen=True)
class Crash:
    number: int

    def compile(self) -> None:
        os._exit(7)


@dataclass(frozen=True)
class Target:
    def compile(self) -> None:
        from triton.runtime import driver

        raise ValueError(str(driver.active.get_current_target().arch))
