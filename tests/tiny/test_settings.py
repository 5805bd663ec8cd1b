"""Settings: defaults, reading, refusing, overriding, and the generated page."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import threading

import pytest

from plait.device import device_info
from plait.errors import SettingError
from plait.settings import Settings, markdown_table, override, settings
from tests.tiny.tree import ROOT, texts


def test_defaults():
    assert Settings.from_environ({}) == Settings(2**30, 30.0, False, 8, 2, 0.0)


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("PLAIT_WORKSPACE_BYTES", "1048576", "workspace_bytes", 2**20),
        ("PLAIT_WORKSPACE_BYTES", "64MiB", "workspace_bytes", 64 * 2**20),
        ("PLAIT_WORKSPACE_BYTES", " 3 gib ", "workspace_bytes", 3 * 2**30),
        ("PLAIT_DEADLINE_S", "2.5", "deadline_s", 2.5),
        ("PLAIT_DEBUG", "1", "debug", True),
        ("PLAIT_DEBUG", "off", "debug", False),
        ("PLAIT_FREE_SMS", "0", "free_sms", 0),
        ("PLAIT_CPU_BLOCKS", "5", "cpu_blocks", 5),
        ("PLAIT_PROLOGUE_DELAY_US", "50", "prologue_delay_us", 50.0),
    ],
)
def test_reads(name, text, field, value):
    read = getattr(Settings.from_environ({name: text}), field)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PLAIT_WORKSPACE_BYTES", "64MB"),
        ("PLAIT_WORKSPACE_BYTES", "0"),
        ("PLAIT_WORKSPACE_BYTES", "1.5GiB"),
        ("PLAIT_DEADLINE_S", "soon"),
        ("PLAIT_DEADLINE_S", "nan"),
        ("PLAIT_DEADLINE_S", "0"),
        ("PLAIT_DEBUG", "maybe"),
        ("PLAIT_FREE_SMS", "-1"),
        ("PLAIT_CPU_BLOCKS", "0"),
        ("PLAIT_PROLOGUE_DELAY_US", "-1"),
    ],
)
def test_refuses_and_names_the_variable(name, text):
    with pytest.raises(SettingError) as caught:
        Settings.from_environ({name: text})
    assert caught.value.argument == name
    assert repr(text) in str(caught.value)


def test_a_misspelt_variable_warns():
    with pytest.warns(UserWarning, match=r"PLAIT_DEBUGG .*did you mean PLAIT_DEBUG\?"):
        Settings.from_environ({"PLAIT_DEBUGG": "1"})


def test_override_nests_and_is_seen_by_other_threads():
    before = settings()
    seen = []
    with override(cpu_blocks=3), override(deadline_s=1.0):
        thread = threading.Thread(target=lambda: seen.append(settings()))
        thread.start()
        thread.join()
        assert device_info("cpu").num_sms == 3
    assert seen == [dataclasses.replace(before, cpu_blocks=3, deadline_s=1.0)]
    assert settings() is before


@pytest.mark.parametrize("values", [{"cpu_block": 3}, {"cpu_blocks": 0}, {"debug": 1}])
def test_override_refuses(values):
    before = settings()
    with pytest.raises(SettingError), override(**values):
        pass
    assert settings() is before


def test_the_environment_is_read_at_the_first_use():
    code = (
        "import os, plait\n"
        "from plait.settings import settings\n"
        "os.environ['PLAIT_CPU_BLOCKS'] = '4'\n"
        "assert settings().cpu_blocks == 4\n"
        "os.environ['PLAIT_CPU_BLOCKS'] = '5'\n"
        "assert settings().cpu_blocks == 4\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_page_is_up_to_date():
    page = (ROOT / "docs" / "settings.md").read_text()
    assert page == markdown_table(), "run: python -m plait.settings > docs/settings.md"


def test_every_variable_named_anywhere_is_a_setting():
    known = {spec.metadata["env"] for spec in dataclasses.fields(Settings)}
    here = "tests/tiny/test_settings.py"
    for path, text in texts():
        named = set(re.findall(r"\bPLAIT_[A-Z0-9_]*[A-Z0-9]\b", text))
        assert path == here or named <= known, f"{path}: {sorted(named - known)}"
