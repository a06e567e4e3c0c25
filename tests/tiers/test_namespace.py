"""A namespace is the whole identity: whatever differs, nothing is shared."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvstrata.errors import ConfigError
from kvstrata.tiers.keys import page_keys
from kvstrata.tiers.namespace import (
    ComponentIdentity,
    Namespace,
    component_fingerprint,
    revision_of_path,
)

KV = ComponentIdentity(
    name="kv",
    kind="full_attention",
    dtype="bfloat16",
    layout="page_first/NHD",
    layers=32,
    kv_heads=8,
    head_dim=128,
    page_bytes=8 << 20,
)
BASE = Namespace(
    model="org/model",
    revision="abc",
    page_tokens=64,
    components=(KV,),
    parallel_rank=0,
    parallel_size=2,
)
TOKENS = bytes(range(256)) * 4

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
small = st.integers(1, 4)
components = st.builds(
    ComponentIdentity,
    name=names,
    kind=names,
    dtype=names,
    layout=names,
    layers=small,
    kv_heads=small,
    head_dim=small,
    page_bytes=small,
)
namespaces = st.builds(
    Namespace,
    model=names,
    revision=names,
    page_tokens=small,
    components=st.lists(components, min_size=1, max_size=2, unique_by=lambda c: c.name).map(tuple),
    parallel_rank=st.just(0),
    parallel_size=small,
    adapter=st.just("") | names,
    salt=st.just("") | names,
    epoch=small,
    format_version=small,
    engine=st.just("") | names,
)


def variants() -> list[tuple[str, Namespace]]:
    """BASE with one field changed, for every field, those of its component included."""
    out = []
    for field in Namespace.__struct_fields__:
        if field != "components":
            value = getattr(BASE, field)
            other = value + "x" if isinstance(value, str) else value + 1
            out.append((field, msgspec.structs.replace(BASE, **{field: other})))
    for field in ComponentIdentity.__struct_fields__:
        value = getattr(KV, field)
        other = value + "x" if isinstance(value, str) else value + 1
        changed = msgspec.structs.replace(KV, **{field: other})
        out.append((f"component.{field}", msgspec.structs.replace(BASE, components=(changed,))))
    second = msgspec.structs.replace(KV, name="state")
    out.append(("one more", msgspec.structs.replace(BASE, components=(KV, second))))
    return out


@pytest.mark.parametrize(("field", "other"), variants(), ids=[name for name, _ in variants()])
def test_any_field_is_another_namespace(field: str, other: Namespace) -> None:
    """B012 dtype, B013 revision, B014 layout, B015 and B007 parallel rank and size, B016 adapter
    and salt; and every other field: no key, no fingerprint, no stored component is shared."""
    ours, theirs = BASE.fingerprint(), other.fingerprint()
    assert ours != theirs
    assert component_fingerprint(ours, "kv") != component_fingerprint(theirs, "kv")
    ours_keys, theirs_keys = page_keys(ours, TOKENS, 64), page_keys(theirs, TOKENS, 64)
    assert not {ours_keys[i : i + 32] for i in range(0, len(ours_keys), 32)} & {
        theirs_keys[i : i + 32] for i in range(0, len(theirs_keys), 32)
    }


def test_all_variants_differ_from_each_other() -> None:
    prints = [BASE.fingerprint(), *(other.fingerprint() for _, other in variants())]
    assert len(set(prints)) == len(prints)


@given(namespaces, namespaces)
def test_encoding_is_injective(one: Namespace, two: Namespace) -> None:
    assume(one != two)
    assert one.encode() != two.encode()
    assert one.fingerprint() != two.fingerprint()


@given(st.text(max_size=4), st.text(max_size=4))
def test_text_does_not_run_into_the_next_field(a: str, b: str) -> None:
    """ "ab" + "c" and "a" + "bc" are not the same two fields."""
    one = msgspec.structs.replace(BASE, adapter=a, salt=b)
    two = msgspec.structs.replace(BASE, adapter=a + b, salt="")
    assert (one == two) == (one.encode() == two.encode())


def test_components_have_their_own_place() -> None:
    base = BASE.fingerprint()
    prints = {component_fingerprint(base, name) for name in ("kv", "state", "", "k", "v")}
    assert len(prints) == 5
    assert base not in prints
    assert all(len(print_) == 32 for print_ in prints)


def test_four_requests_share_nothing() -> None:
    """B016: the same tokens under {none, lora-a, lora-b, a salt} have disjoint keys."""
    requests = [("", ""), ("", "lora-a"), ("", "lora-b"), ("x", "")]
    keys = [
        page_keys(BASE.with_request(salt=salt, adapter=adapter).fingerprint(), TOKENS, 64)
        for salt, adapter in requests
    ]
    assert len(set(keys)) == 4


def test_nothing_about_the_request_can_be_forgotten() -> None:
    """B017: whoever makes a request's namespace must say salt and adapter; there is no default."""
    with pytest.raises(TypeError):
        BASE.with_request(salt="tenant")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        BASE.with_request(adapter="lora-a")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        page_keys(tokens=TOKENS, page_tokens=64)  # type: ignore[call-arg]


def test_salts_nest_and_adapters_replace() -> None:
    """B017: a tenant's salt narrows that of the server and cannot shed or forge it."""
    server = msgspec.structs.replace(BASE, salt="server", adapter="lora-a")
    assert server.with_request(salt="", adapter="") == server
    both = server.with_request(salt="tenant", adapter="lora-b")
    assert both.adapter == "lora-b"
    plain = [BASE.with_request(salt=s, adapter="lora-b") for s in ("tenant", "server", "")]
    forged = BASE.with_request(salt="servertenant", adapter="lora-b")
    assert both.fingerprint() not in {n.fingerprint() for n in (*plain, forged)}


def test_same_in_every_process() -> None:
    """B020: three fresh interpreters with different hash seeds derive the same fingerprint."""
    code = (
        "import sys, msgspec; from kvstrata.tiers.namespace import Namespace;"
        "n = msgspec.json.decode(sys.argv[1], type=Namespace);"
        "sys.stdout.write(n.fingerprint().hex())"
    )
    source = str(Path(__file__).parents[2] / "src")
    prints = {
        subprocess.run(
            [sys.executable, "-c", code, msgspec.json.encode(BASE).decode()],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": source},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert prints == {BASE.fingerprint().hex()}


def test_fingerprint_is_pinned() -> None:
    """What is on disk stays valid: a change of the encoding needs a new tag, and this line."""
    pinned = "6b1e8b9667d172dcf554d8baaa372a9520bbe21fb500b0a4d04997e869ca0fae"
    assert BASE.fingerprint().hex() == pinned


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": ""}, "namespace.model"),
        ({"revision": ""}, "namespace.revision"),
        ({"page_tokens": 0}, "namespace.page_tokens"),
        ({"page_tokens": True}, "namespace.page_tokens"),
        ({"page_tokens": "64"}, "namespace.page_tokens"),
        ({"parallel_rank": 2}, "namespace.parallel_rank"),
        ({"parallel_rank": -1}, "namespace.parallel_rank"),
        ({"parallel_size": 0}, "namespace.parallel_size"),
        ({"epoch": -1}, "namespace.epoch"),
        ({"format_version": 0}, "namespace.format_version"),
        ({"components": ()}, "namespace.components"),
        ({"components": [KV]}, "namespace.components"),
        ({"components": (KV, KV)}, "namespace.components"),
        ({"salt": None}, "namespace.salt"),
        ({"salt": "\ud800"}, "namespace.salt"),
    ],
)
def test_incomplete_identity_is_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        msgspec.structs.replace(BASE, **change)
    assert caught.value.remedy


@pytest.mark.parametrize("field", ["name", "dtype", "layers", "page_bytes"])
def test_incomplete_component_is_refused(field: str) -> None:
    empty: object = "" if isinstance(getattr(KV, field), str) else 0
    with pytest.raises(ConfigError, match=f"component.{field}"):
        msgspec.structs.replace(KV, **{field: empty})


# ── local models ─────────────────────────────────────────────────────────────────────────────────


def model_at(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"rope_theta": 10000}')
    (path / "tokenizer.json").write_text("{}")
    (path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (path / "model-00001.safetensors").write_bytes(bytes(300_000))
    (path / "README.md").write_text("about")
    return path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("edit", "same"),
    [
        (lambda p: (p / "config.json").write_text('{"rope_theta": 20000}'), False),
        (lambda p: (p / "tokenizer.json").write_text('{"a": 1}'), False),
        (lambda p: (p / "tokenizer_config.json").write_text("{}"), False),
        (lambda p: (p / "model.safetensors.index.json").write_text("{}"), False),
        (lambda p: (p / "config.json").rename(p / "generation_config.json"), None),
        (lambda p: flip(p / "model-00001.safetensors", 0), False),
        (lambda p: flip(p / "model-00001.safetensors", 299_999), False),
        (lambda p: (p / "model-00001.safetensors").write_bytes(bytes(300_001)), False),
        (lambda p: (p / "README.md").write_text("other"), True),
        (lambda p: (p / "config.json").touch(), True),
    ],
    ids=itertools.count(),
)
def test_revision_of_a_directory(
    tmp_path: Path, edit: Callable[[Path], object], same: bool | None
) -> None:
    """B013: edit config.json (tokenizer, index, weights) in place: another revision."""
    model = model_at(tmp_path / "model")
    before = revision_of_path(model)
    assert before == revision_of_path(model_at(tmp_path / "the same elsewhere"))
    edit(model)
    if same is None:
        with pytest.raises(ConfigError, match=r"config\.json"):
            revision_of_path(model)
    else:
        assert (revision_of_path(model) == before) is same


def test_revision_of_what_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        revision_of_path(tmp_path / "absent")


def test_empty_weights(tmp_path: Path) -> None:
    model = model_at(tmp_path / "model")
    (model / "model-00001.safetensors").write_bytes(b"")
    assert revision_of_path(model)
