"""Settings that are unknown or impossible, plugins and secrets: file, line, fault and remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstrata.configs import Config
from kvstrata.errors import ConfigError, PluginError, UserError

Load = Callable[..., Config]

# ── settings that are unknown or impossible ──────────────────────────────────────────────────────

Case = tuple[str, str, int, str, list[str]]
WRONG: list[Case] = [
    # (old, new, line, key, words of the message and the remedy)
    ("pages = 8", "pgaes = 8", 6, "pools.pgaes", ["no such setting", "did you mean pages"]),
    ("pages = 8\n", "", 5, "pools", ["pages is missing"]),
    ("[pools]", "[pool]", 5, "pool", ["no such section", "did you mean pools"]),
    ("pages = 8", "pages = 0", 6, "pools.pages", ["0: expected int >= 1"]),
    ("pages = 8", "pages = -3", 6, "pools.pages", ["-3: expected int >= 1"]),
    ("pages = 8", 'pages = "8"', 6, "pools.pages", ["expected int, got str"]),
    ("pages = 8", "pages = true", 6, "pools.pages", ["expected int, got bool"]),
    ("page_tokens = 16", "page_tokens = 0", 7, "pools.page_tokens", ["default is 512"]),
    ("page_tokens = 16", "page_tokens = nan", 7, "pools.page_tokens", ["got float"]),
    ("= 64\n", "= 15\n", 8, "pools.max_context_tokens", ["less than one page"]),
    ("pages = 8", "pages = 134217728", 6, "pools.pages", ["int32", "at most 134217727"]),
    ("pages = 8", "pages = 999999999999", 6, "pools.pages", ["int32"]),
    ("layers = 2", "layers = 2.5", 12, "pools.components[0].layers", ["got float"]),
    ("layers = 2\n", "", 10, "pools.components[0]", ["layers is missing"]),
    ('name = "kv"', 'name = "k v"', 11, "pools.components[0].name", ["matching regex"]),
    ("head_dim = 8", 'head_dim = 8\ndtype = "bf16"', 15, "pools.components[0].dtype",
     ['no dtype "bf16"', "did you mean bfloat16"]),
    ("head_dim = 8", 'head_dim = 8\nlayout = "NDH"', 15, "pools.components[0].layout",
     ["no layout", "NHD"]),
    ("head_dim = 8", 'head_dim = 8\nkind = "mamba"', 15, "pools.components[0].kind",
     ["Mamba", "not available in this version", "use full"]),
    ("head_dim = 8", 'head_dim = 8\nkind = "wat"', 15, "pools.components[0].kind",
     ['no kind "wat"', "known: full, mla"]),
    ("[staging]", '[device]\nkind = "gpu"\n[staging]', 17, "device.kind",
     ["known: auto, cpu, cuda"]),
    ('"64KiB"', '"64KiBs"', 17, "staging.bytes", ["not a size"]),
    ('"64KiB"', "true", 17, "staging.bytes", ["size in bytes"]),
    ('"64KiB"', "0", 17, "staging.bytes", ["above 0"]),
    ('"64KiB"', '"15KiB"', 17, "staging.bytes", ["at least 4", "16KiB"]),
    ("[staging]", "[staging]\nload_reserve = 1.0", 17, "staging.load_reserve", ["< 1.0"]),
    ("[staging]", "[staging]\nload_reserve = nan", 17, "staging.load_reserve", ["> 0.0"]),
    ("[staging]", "[staging]\nbackend_cap = 0.0", 17, "staging.backend_cap", ["> 0.0"]),
    ("[staging]", '[staging]\nmode = "window"', 17, "staging.mode", ["cache"]),
    ('backend = "ram"', 'backend = "rma"', 20, "l3.backend", ["no [backends.rma]", "mean ram"]),
    ('[l3]\nbackend = "ram"', '[staging.x]\n[l3]', 19, "staging.x", ["no such setting"]),
    ("[backends.ram]", '[backends."r/m"]', 22, "backends.r/m", ["not a name"]),
    ('"memory"', '"memory"\nqueue_pages = 0', 24, "backends.ram.queue_pages", [">= 1"]),
    ('"memory"', '"memory"\ndeadline_s = 0.0', 24, "backends.ram.deadline_s", ["> 0"]),
    ('"memory"', '"memory"\ndeadline_s = inf', 24, "backends.ram.deadline_s", ["<= 86400"]),
    ('"memory"', '"memory"\non_full = "wait"', 24, "backends.ram.on_full", ["block, drop"]),
    ('"memory"', '"memory"\nisolation = "jail"', 24, "backends.ram.isolation", ["process"]),
    ('"memory"', '"memory"\nretry.attempts = 0', 24, "backends.ram.retry.attempts", [">= 1"]),
    ('"memory"', '"memory"\nbreaker.fails = 1', 24, "backends.ram.breaker.fails", ["failures"]),
    ('"memory"', '"memory"\noptions = 3', 24, "backends.ram.options", ["expected object"]),
    ('"memory"', '"memory"\n[backends.ram.options]\nzzz = 3', 25, "backends.ram.options.zzz",
     ["no such setting"]),
    ('"memory"', '"memory"\n[policies]\neviction = "lfu"', 25, "policies.eviction", ["lru"]),
    ('"memory"', '"memory"\n[policies]\nwrite = "write_back"', 25, "policies.write",
     ["not available in this version"]),
    ('"memory"', '"memory"\n[policies]\nwrite = "write_thru"', 25, "policies.write",
     ["did you mean write_through"]),
    ('"memory"', '"memory"\n[policies]\nprefetch = "never"', 25, "policies.prefetch",
     ["wait_complete"]),
    ('"memory"', '"memory"\n[policies]\nrestore = "measured"', 25, "policies.restore",
     ["not available"]),
    ('"memory"', '"memory"\n[scheduler]\nmax_batch = 0', 25, "scheduler.max_batch", [">= 1"]),
    ('"memory"\n', '"memory"\n[scheduler]\nlookahead = -1', 25, "scheduler.lookahead", [">= 0"]),
    ('model = "m"', 'model = ""', 2, "namespace.model", ["length >= 1"]),
    ('revision = "1"\n', "", 1, "namespace", ["revision", "missing"]),
    ('revision = "1"', 'revision = "1"\nparallel_rank = 1', 4, "namespace.parallel_rank",
     ["rank 1 of 1"]),
]  # fmt: skip


@pytest.mark.parametrize("case", WRONG, ids=[f"{w[3]}-{i}" for i, w in enumerate(WRONG)])
def test_wrong_setting(load: Load, tmp_path: Path, case: Case) -> None:
    old, new, line, key, words = case
    with pytest.raises(UserError) as caught:
        load((old, new))
    error = caught.value
    assert (error.where.file, error.where.line) == (tmp_path / "c.toml", line), str(error)
    assert error.where.key == key
    for word in words:
        assert word in str(error)
    assert error.remedy


def test_section_that_is_no_table(load: Load) -> None:
    with pytest.raises(ConfigError, match="is a section, not a value") as caught:
        load(("[namespace]", "device = 3\n[namespace]"))
    assert caught.value.where.line == 1
    with pytest.raises(ConfigError, match="is missing"):
        load(text="")


def test_two_components_of_one_name(load: Load) -> None:
    second = '[[pools.components]]\nname="kv"\nlayers=1\nkv_heads=1\nhead_dim=1\n[staging]'
    with pytest.raises(ConfigError, match="two components") as caught:
        load(("[staging]", second))
    assert caught.value.where.line == 17


def test_write_back_with_buffer_only_says_why(load: Load) -> None:
    policy = '"memory"\n[policies]\nwrite = "write_back"'
    with pytest.raises(ConfigError, match="would have no copy") as caught:
        load(('"memory"', policy), ("[staging]", '[staging]\nmode = "buffer_only"'))
    assert caught.value.where.key == "policies.write"


def test_buffer_only_needs_l3(load: Load) -> None:
    with pytest.raises(ConfigError, match="without L3"):
        load(('backend = "ram"', ""), ("[staging]", '[staging]\nmode = "buffer_only"'))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (("head_dim = 8", "head_dim = 1073741824"), "pools.pages"),
        (('"64KiB"', '"900TiB"'), "staging.bytes"),
        (("pages = 8", "pages = 8\nmax_requests = 99999999999"), "pools.pages"),
    ],
)
def test_pools_larger_than_memory(load: Load, change: tuple[str, str], key: str) -> None:
    more = [('"64KiB"', '"600GiB"')] if "head_dim" in change[0] else []
    with pytest.raises(ConfigError, match="are available") as caught:
        load(change, *more)
    assert caught.value.where.key == key


def test_memory_that_is_not_known_is_not_checked(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstrata.configs.checks.available_memory_bytes", lambda: None)
    assert load(('"64KiB"', '"900TiB"')).staging_pages > 0
    monkeypatch.setattr("kvstrata.configs.checks.available_memory_bytes", lambda: 1000)
    with pytest.raises(ConfigError, match="1000 B are available"):
        load()


# ── plugins ──────────────────────────────────────────────────────────────────────────────────────


def test_unknown_plugin_names_the_line(load: Load, tmp_path: Path) -> None:
    with pytest.raises(PluginError) as caught:
        load(('"memory"', '"memroy"'))
    assert (caught.value.where.file, caught.value.where.line) == (tmp_path / "c.toml", 23)
    assert "memory" in caught.value.remedy


def test_every_backend_is_checked_also_one_that_is_not_used(load: Load) -> None:
    with pytest.raises(PluginError):
        load(overrides=["backends.other.plugin=nothing"])


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────


def test_salt_from_the_environment(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    change = ('revision = "1"', 'revision = "1"\nsalt_env = "TEST_SALT"')
    monkeypatch.delenv("TEST_SALT", raising=False)
    with pytest.raises(ConfigError, match="TEST_SALT is not set") as caught:
        load(change)
    assert caught.value.where.line == 4
    monkeypatch.setenv("TEST_SALT", "hush-hush")
    config = load(change)
    assert config.namespace().salt == "hush-hush"
    assert type(config.namespace().salt) is str
    assert "hush-hush" not in repr(config)
    assert (
        config.namespace()
        == load(('revision = "1"', 'revision = "1"\nsalt = "hush-hush"')).namespace()
    )


def test_salt_that_is_wrong_is_not_shown(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        load(('revision = "1"', 'revision = "1"\nsalt = 424242'))
    assert "424242" not in str(caught.value)
    with pytest.raises(ConfigError, match="both given"):
        load(('revision = "1"', 'revision = "1"\nsalt = "x"\nsalt_env = "X"'))
    with pytest.raises(ConfigError, match="not the name"):
        load(('revision = "1"', 'revision = "1"\nsalt_env = 3'))
    monkeypatch.setitem(os.environ, "TEST_SALT", "\udcff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(('revision = "1"', 'revision = "1"\nsalt_env = "TEST_SALT"'))


def test_option_from_the_environment(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    change = ('"memory"', '"filesystem"\n[backends.ram.options]\npath = { env = "TEST_PATH" }')
    monkeypatch.setenv("TEST_PATH", "/tmp/some-where")
    config = load(change)
    assert str(config.backends["ram"].options.path) == "/tmp/some-where"
    assert ("backends", "ram", "options", "path") in config.source.secrets
    monkeypatch.delenv("TEST_PATH")
    with pytest.raises(ConfigError, match="TEST_PATH is not set"):
        load(change)


def test_option_from_the_environment_that_is_wrong_is_not_shown(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_BYTES", "hush-hush")
    options = 'path = "x"\nmax_bytes = { env = "TEST_BYTES" }'
    with pytest.raises(ConfigError) as caught:
        load(('"memory"', f'"filesystem"\n[backends.ram.options]\n{options}'))
    assert "hush-hush" not in str(caught.value)
    assert "backends show filesystem" in caught.value.remedy


# ── places ───────────────────────────────────────────────────────────────────────────────────────


def test_place_of_a_setting_for_later_errors(load: Load, tmp_path: Path) -> None:
    config = load(overrides=["pools.pages=9"])
    assert str(config.where("l3", "backend")) == f"{tmp_path / 'c.toml'}:20: l3.backend"
    assert str(config.where("pools", "pages")) == "--set pools.pages"
    assert config.where("backends", "ram", "options", "path").line == 22
    assert config.where("scheduler", "max_batch").line is None
