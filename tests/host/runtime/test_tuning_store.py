"""Tuning tables: look-up by distance, files that survive being broken, and the config chosen."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from plait.device import device_info
from plait.errors import SettingError
from plait.ops.matmul import tuned
from plait.ops.matmul.configs import Config, default_config
from plait.ops.matmul.tuned import choose_config, config_dict, config_of, config_text, tuning_key
from plait.runtime.tuning_store import (
    TuningEntry,
    TuningTable,
    forget_tables,
    gpu_slug,
    read_table,
    tuning_table,
    user_table_path,
    write_table,
)
from plait.settings import Settings, override, user_cache_dir

GPU = replace(device_info("cpu"), arch="sm90", num_sms=132, name="NVIDIA H200")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TILE = Config(128, 128, 64, 4, 5, 4, True)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Empty folders for the user's and for shipped tables."""
    monkeypatch.setattr(tuned, "SHIPPED_TABLES", tmp_path / "shipped")
    forget_tables()
    with override(tuning_dir=str(tmp_path / "own")):
        yield
    forget_tables()


def entry(M=1024, N=4096, K=2048, *, config=TILE, time_us=10.0, **key) -> TuningEntry:
    return TuningEntry(
        operator="matmul",
        key=tuning_key(key.pop("dtype", BF16), **key),
        shape={"M": M, "N": N, "K": K},
        config=config_dict(config),
        time_us=time_us,
        baseline_us=9.5,
        versions={"torch": "2.11"},
        date="2026-12-01",
    )


def find(table, M, N, K, **key):
    return table.find("matmul", tuning_key(BF16, **key), M, N, K)


def test_exact_before_nearest_before_nothing():
    table = TuningTable([entry(1024), entry(1536), entry(8192)])
    assert find(table, 1536, 4096, 2048) == (entry(1536), "exact")
    assert find(table, 1100, 4096, 2048) == (entry(1024), "nearest")
    assert find(table, 2048, 8192, 1024) == (entry(1536), "nearest")
    assert find(table, 3073, 4096, 2048) is None
    assert find(table, 1024, 8193, 2048) is None
    assert find(table, 1024, 4096, 1023) is None
    assert find(table, 1024, 4096, 2048, layout="kn") is None
    assert find(table, 1024, 4096, 2048, scales="rows") is None
    assert table.find("other", tuning_key(BF16), 1024, 4096, 2048) is None
    assert find(TuningTable(), 1, 1, 1) is None


def test_rows_weigh_most():
    few_rows, other_n = entry(1024, 4096), entry(1448, 2900)
    table = TuningTable([few_rows, other_n])
    # Half a factor of 2 in M outweighs the same in N.
    assert find(table, 1448, 4096, 2048) == (other_n, "nearest")
    assert find(table, 1024, 2900, 2048) == (few_rows, "nearest")


def test_a_later_entry_replaces_an_earlier_one():
    table = TuningTable([entry(time_us=10.0), entry(time_us=8.0), entry(layout="kn")])
    assert [each.time_us for each in table.entries] == [8.0, 10.0]


def test_a_file_keeps_everything(tmp_path):
    path = tmp_path / "new" / "gpu.json"
    entries = [entry(), entry(16, dtype=torch.float8_e4m3fn, scales="rows")]
    write_table(path, TuningTable(entries), "NVIDIA H200")
    assert read_table(path).entries == entries
    assert json.loads(path.read_text())["gpu"] == "NVIDIA H200"
    assert len(path.read_text().splitlines()) == 2 + len(entries)
    assert list(path.parent.iterdir()) == [path]
    write_table(path, TuningTable(), "NVIDIA H200")
    assert read_table(path).entries == []


def test_no_file_is_an_empty_table(tmp_path):
    assert read_table(tmp_path / "none.json").entries == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"format": 2, "entries": []}',
        '{"format": 1}',
        '{"format": 1, "entries": [{}]}',
        '{"format": 1, "entries": [3]}',
        "\x00\xff",
    ],
)
def test_a_broken_file_is_named(tmp_path, text):
    path = tmp_path / "gpu.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(SettingError, match=r"gpu\.json.*plait tune"):
        read_table(path)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": {"M": 1, "N": 2}},
        {"shape": {"M": 1, "N": 2, "K": 0}},
        {"shape": {"M": 1, "N": 2, "K": "3"}},
        {"config": []},
        {"key": {"dtype": ["bf16"]}},
        {"unknown": 1},
    ],
)
def test_a_broken_entry_is_found(tmp_path, change):
    path = tmp_path / "gpu.json"
    values = {**entry().__dict__, **change}
    path.write_text(json.dumps({"format": 1, "gpu": "x", "entries": [values]}))
    with pytest.raises(SettingError, match=r"gpu\.json"):
        read_table(path)


def test_the_users_table_hides_the_shipped_one():
    shipped = tuned.SHIPPED_TABLES / "nvidia-h200.json"
    write_table(shipped, TuningTable([entry(512), entry(1024)]), GPU.name)
    own = user_table_path(GPU.name)
    assert own.name == shipped.name
    write_table(own, TuningTable([entry(1024, time_us=5.0)]), GPU.name)
    table = tuning_table(GPU.name, tuned.SHIPPED_TABLES)
    assert [each.time_us for each in table.entries] == [10.0, 5.0]
    assert tuning_table("NVIDIA H100", tuned.SHIPPED_TABLES).entries == []


def test_files_are_read_once():
    own = user_table_path(GPU.name)
    write_table(own, TuningTable([entry()]), GPU.name)
    first = tuning_table(GPU.name, tuned.SHIPPED_TABLES)
    own.write_text("broken")
    assert tuning_table(GPU.name, tuned.SHIPPED_TABLES) is first
    forget_tables()
    with pytest.raises(SettingError):
        tuning_table(GPU.name, tuned.SHIPPED_TABLES)


def test_names_and_folders(tmp_path, monkeypatch):
    assert gpu_slug("NVIDIA H200") == "nvidia-h200"
    assert gpu_slug("NVIDIA A100-SXM4-80GB ") == "nvidia-a100-sxm4-80gb"
    assert user_table_path("NVIDIA H200") == tmp_path / "own" / "nvidia-h200.json"
    with override(tuning_dir=""):
        assert user_table_path("a b") == user_cache_dir() / "tuning" / "a-b.json"
    assert Settings.from_environ({"PLAIT_TUNING_DIR": "some/where"}).tuning_dir == "some/where"
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_dir() == tmp_path / "plait"


def choose(M=1024, N=4096, K=2048, info=GPU, allowed=True, **options):
    return choose_config(M, N, K, BF16, info, allowed, **options)


def test_choice_says_where_it_comes_from():
    write_table(user_table_path(GPU.name), TuningTable([entry()]), GPU.name)
    assert choose() == (TILE, "tuned")
    assert choose(M=1000) == (TILE, "nearest")
    default = default_config(100, 4096, 2048, BF16, "sm90", True)
    assert choose(M=100) == (default, "default")
    assert choose(use_tables=False)[1] == "default"
    assert choose(layout="kn")[1] == "default"
    assert choose(M=0)[1] == "default"
    cpu = replace(GPU, arch="cpu")
    assert choose(info=cpu)[1] == "default"


def test_a_config_that_does_not_fit_is_not_chosen():
    unfit = replace(TILE, num_stages=9)
    entries = [entry(), entry(8192, config=unfit), entry(64, num_weights=2)]
    write_table(user_table_path(GPU.name), TuningTable(entries), GPU.name)
    config, source = choose(allowed=False)
    assert source == "default"
    assert not config.desc
    assert choose(M=8192)[1] == "default"
    assert choose(M=64, num_weights=2)[1] == "default"  # 160 KiB of one, 240 of a pair


def test_a_config_of_another_version_is_not_chosen():
    assert config_of(entry()) == TILE
    for change in ({"new_field": 1}, {"block_m": 128.0}, {"desc": 1}, {"splits": None}):
        assert config_of(replace(entry(), config={**config_dict(TILE), **change})) is None
    for name, found in (("block_m", None), ("splits", TILE)):  # what came later has a default
        fewer = {field: value for field, value in config_dict(TILE).items() if field != name}
        assert config_of(replace(entry(), config=fewer)) == found


def test_a_batch_has_entries_of_its_own():
    small = replace(TILE, block_n=64)
    entries = [entry(1024), entry(128), entry(128, config=small, batch=8)]
    write_table(user_table_path(GPU.name), TuningTable(entries), GPU.name)
    assert choose(M=128, batch=8) == (small, "tuned")
    assert choose(M=100, batch=8) == (small, "nearest")
    assert choose(M=128, batch=9) == choose(M=128, batch=5) == (small, "nearest")
    assert choose(M=128, batch=2)[1] == choose(M=128, batch=17)[1] == "default"
    assert choose(M=128, batch=1) == choose(M=128) == (TILE, "tuned")
    default = default_config(128, 4096, 2048, BF16, "sm90", True, batch=8)
    assert choose(M=128, batch=8, use_tables=False) == (default, "default")


def test_the_short_accumulator_has_entries_of_its_own():
    large = replace(TILE, block_k=128, num_stages=4)
    small = replace(large, block_m=64, num_stages=3, blocks_per_sm=3)
    options = {"dtype": E4M3, "scales": "rows"}
    entries = [entry(config=small, **options), entry(config=large, fast_accum=True, **options)]
    write_table(user_table_path(GPU.name), TuningTable(entries), GPU.name)
    for fast, config in ((False, small), (True, large)):
        found = choose_config(1024, 4096, 2048, E4M3, GPU, True, scales="rows", fast_accum=fast)
        assert found == (config, "tuned")


def test_text_tells_configs_apart():
    changes = [{"group_m": 8}, {"desc": False}, {"splits": 2}, {"blocks_per_sm": 2}]
    changes += [{"splits": 2, "split_tail": True}, {"desc_store": True}]
    configs = [TILE, *(replace(TILE, **change) for change in changes)]
    assert config_text(TILE) == "128x128x64 w4 s5 g4 desc"
    assert len({config_text(each) for each in configs}) == len(configs)
