"""Loading: what is right becomes values; what is wrong names file, line, fault and remedy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvstrata.configs import Config, load_config
from kvstrata.configs.checks import MIN_STAGING_PAGES
from kvstrata.configs.schema import HOST_ALIGN_BYTES
from kvstrata.errors import ConfigError

Load = Callable[..., Config]
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


# ── what is right ────────────────────────────────────────────────────────────────────────────────


def test_a_small_file_and_its_defaults(load: Load) -> None:
    config = load()
    assert config.identity.model == "m"
    assert config.pools.pages == 8
    assert config.device.kind == "auto"
    assert config.staging.bytes == 64 * 1024
    assert config.staging.mode == "cache"
    assert config.policies.write == "write_through"
    assert config.scheduler.max_batch == 8
    assert config.l3.backend == "ram"
    assert config.l3_backend is config.backends["ram"]
    assert config.backends["ram"].on_full == "block"
    assert isinstance(config.backends["ram"].options, msgspec.Struct)


def test_geometry(load: Load) -> None:
    config = load()
    (kv,) = config.components
    assert kv.page_bytes == 2 * 2 * 1 * 8 * 16 * 2
    assert config.page_bytes == kv.page_bytes
    assert config.staging_page_bytes == HOST_ALIGN_BYTES
    assert config.staging_pages == 16
    assert config.l1_bytes == 8 * kv.page_bytes + 64 * 64 * 4


@pytest.mark.parametrize(
    ("dtype", "item_bytes"),
    [("float32", 4), ("float16", 2), ("float8_e4m3fn", 1), ("float8_e5m2", 1), ("int8", 1)],
)
def test_dtypes(load: Load, dtype: str, item_bytes: int) -> None:
    config = load(("head_dim = 8", f'head_dim = 8\ndtype = "{dtype}"'))
    assert config.page_bytes == 2 * 2 * 8 * 16 * item_bytes


def test_two_components(load: Load) -> None:
    second = '[[pools.components]]\nname = "b"\nlayers = 1\nkv_heads = 2\nhead_dim = 4\n\n[staging]'
    config = load(("[staging]", second))
    assert [c.name for c in config.components] == ["kv", "b"]
    assert config.page_bytes == sum(c.page_bytes for c in config.components)


def test_namespace_holds_the_whole_identity(load: Load) -> None:
    base = load().namespace()
    changes = [
        [('model = "m"', 'model = "other"')],
        [('revision = "1"', 'revision = "2"')],
        [('revision = "1"', 'revision = "1"\nadapter = "a"')],
        [('revision = "1"', 'revision = "1"\nsalt = "s"')],
        [('revision = "1"', 'revision = "1"\nepoch = 1')],
        [('revision = "1"', 'revision = "1"\nparallel_size = 2')],
        [('revision = "1"', 'revision = "1"\nparallel_size = 2\nparallel_rank = 1')],
        [("page_tokens = 16", "page_tokens = 32")],
        [("layers = 2", "layers = 1")],
        [("kv_heads = 1", "kv_heads = 2")],
        [("head_dim = 8", "head_dim = 16")],
        [("head_dim = 8", 'head_dim = 8\ndtype = "float16"')],
        [("head_dim = 8", 'head_dim = 8\nlayout = "HND"')],
        [('name = "kv"', 'name = "vk"')],
    ]
    prints = {load(*change).namespace().fingerprint() for change in changes}
    assert len(prints) == len(changes)
    assert base.fingerprint() not in prints
    assert load().namespace().fingerprint() == base.fingerprint()


def test_pages_and_policies_are_no_part_of_the_identity(load: Load) -> None:
    assert load(("pages = 8", "pages = 9")).namespace() == load().namespace()


def test_revision_of_a_model_directory(load: Load, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    change = ('model = "m"\nrevision = "1"', f'model = "{model}"')
    first = load(change).namespace()
    (model / "config.json").write_text('{"a": 1}')
    assert load(change).namespace().fingerprint() != first.fingerprint()


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_configurations_are_right(path: Path) -> None:
    config = load_config(path)
    assert path.read_text().startswith("# "), "say what it is for"
    assert config.staging_pages >= MIN_STAGING_PAGES


def test_shipped_configurations_share_no_folder() -> None:
    paths = []
    for path in CONFIGS.glob("*.toml"):
        options = load_config(path).backends
        paths += [b.options.path for b in options.values() if b.plugin == "filesystem"]
    assert len(set(paths)) == len(paths)
    assert all(str(p).removeprefix("./").startswith("var/") for p in paths)


def test_replay_configurations_are_as_the_gates_ask() -> None:
    cache, window, small = (
        load_config(CONFIGS / f"replay-{name}.toml")
        for name in ("cache", "buffer-only", "small-window")
    )
    for config in (cache, window, small):
        assert config.pools.page_tokens == 512
        assert config.policies.write == "write_through"
        assert config.policies.restore == "always"
        backend = config.l3_backend
        assert backend is not None
        assert backend.on_full == "block"
        assert getattr(backend.options, "max_bytes", None) in (None, 0)
    assert cache.staging.mode == "cache"
    assert window.staging.mode == small.staging.mode == "buffer_only"
    assert window.staging.bytes == 64 * 2**20
    assert small.staging.bytes == 4 * 2**20


def test_byte_order_mark_and_crlf(load: Load, base: str) -> None:
    assert load(text="\ufeff" + base.replace("\n", "\r\n")).pools.pages == 8


# ── overrides ────────────────────────────────────────────────────────────────────────────────────


def test_overrides(load: Load) -> None:
    config = load(
        overrides=[
            "pools.page_tokens=32",
            "staging.bytes=1MiB",
            'namespace.model="x=y"',
            "namespace.revision=main",
            "pools.components.0.head_dim = 4",
            "staging.load_reserve=0.5",
            "scheduler.max_batch=2",
            "scheduler.max_batch=3",
        ]
    )
    assert config.pools.page_tokens == 32
    assert config.staging.bytes == 2**20
    assert config.identity.model == "x=y"
    assert config.identity.revision == "main"
    assert config.pools.components[0].head_dim == 4
    assert config.staging.load_reserve == 0.5
    assert config.scheduler.max_batch == 3


def test_override_makes_a_backend(load: Load) -> None:
    config = load(overrides=["backends.other.plugin=memory", "l3.backend=other"])
    assert set(config.backends) == {"ram", "other"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pools.page_tokens", "not an override"),
        ("pages=3", "not an override"),
        ("a b=3", "not an override"),
        ("=3", "not an override"),
        ("pools.pgaes=3", "did you mean pages"),
        ("pols.pages=3", "did you mean pools"),
        ("pools.pages=x", "expected int, got str"),
        ("pools.pages=[1", "the value is not TOML"),
        ("pools.pages=1\nx=2", "more than one value"),
        ("pools.pages.deep=1", "is a value, not a table"),
        ("pools.components.7.layers=1", "a list of 1"),
        ("pools.components.x=1", "a list of 1"),
        ("backends.ram.options.nope=1", "no such setting"),
    ],
)
def test_override_that_is_wrong(load: Load, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(overrides=[override])
    assert message in str(caught.value)
    assert str(caught.value).startswith("--set ")


# ── files that are none ──────────────────────────────────────────────────────────────────────────


def _fault(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    return caught.value


def test_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("")
    error = _fault(tmp_path / "none.toml")
    assert error.message == "there is no such file"
    assert "other.toml" in error.remedy
    assert "relative" in _fault(tmp_path / "no" / "such.toml").remedy


def test_directory(tmp_path: Path) -> None:
    assert "directory" in _fault(tmp_path).message


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b'[a]\nb = 1\nc = "\xff"\n')
    error = _fault(path)
    assert error.where.line == 3
    assert "0xff" in error.message


def test_huge_file(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(b"#" * (2 << 20))
    assert "larger" in _fault(path).message
    assert "larger" in _fault(Path("/dev/zero")).message


def test_path_with_a_null_byte() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config("a\0b")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[a\n", 1),
        ("[a]\nb = \n", 2),
        ("[a]\nb = 1\nb = 2\n", 3),
        ("[a]\n[a]\n", 2),
        ("[a]\nb = [1,\n", 2),
        ('[a]\nb = """\n', 2),
        ("a = " + "[" * 5000, None),
        ("a = " + "9" * 5000, None),
    ],
)
def test_malformed(tmp_path: Path, text: str, line: int | None) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    assert _fault(path).where.line == line
