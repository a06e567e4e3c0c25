"""What a page of KV belongs to: the complete identity under which its key means anything.

Two pages may be taken for each other only if every field here is equal: any difference is another
namespace with another fingerprint, and so other page keys, in the tree and in every store.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from pathlib import Path
from typing import Any

import msgspec

from kvstrata.errors import ConfigError, Where

_NAMESPACE_TAG = b"kvstrata/namespace/1\0"
_COMPONENT_TAG = b"kvstrata/component/1\0"
_SALT_TAG = b"kvstrata/salt/1\0"
_MODEL_TAG = b"kvstrata/model-dir/1\0"

_CONFIG_PATTERNS = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.safetensors.index.json",
)
"""Files of a model directory that are read in full: they decide what tokens and weights mean."""

_WEIGHT_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_SAMPLES, _SAMPLE_BYTES = 16, 4096


class ComponentIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of state a page has, and the exact form of its bytes."""

    name: str
    """The pool's name ("kv", …)."""
    kind: str
    """What it is ("full_attention", …)."""
    dtype: str
    """Element type, quantisation included ("bfloat16", "fp8_e4m3", …)."""
    layout: str
    """Order of the bytes of a page ("page_first/NHD", …)."""
    layers: int
    kv_heads: int
    head_dim: int
    page_bytes: int
    """Payload of one page."""

    def __post_init__(self) -> None:
        _check_types(self, "component")
        for field in ("name", "kind", "dtype", "layout"):
            _require(getattr(self, field) != "", f"component.{field}", "is empty", "name it")
        for field in ("layers", "kv_heads", "head_dim", "page_bytes"):
            value = getattr(self, field)
            _require(value >= 1, f"component.{field}", f"is {value}", "it must be at least 1")


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """The complete identity of a family of pages. Every field is part of the fingerprint."""

    model: str
    """Name of the model, or the name it goes by when it is a local directory."""
    revision: str
    """Commit, tag or digest of the weights (`revision_of_path` for a local directory)."""
    page_tokens: int
    components: tuple[ComponentIdentity, ...]
    parallel_rank: int
    parallel_size: int
    adapter: str = ""
    """LoRA or the like; "" is the base model."""
    salt: str = ""
    """Tenant or any other boundary that pages must not cross."""
    epoch: int = 0
    """Grows when weights change in a running server."""
    format_version: int = 1
    """Version of how pages are written."""
    engine: str = ""
    """Engine and version, where its kernels decide what the bytes mean."""

    def __post_init__(self) -> None:
        _check_types(self, "namespace")
        _require(self.model != "", "namespace.model", "is empty", "name the model")
        _require(self.revision != "", "namespace.revision", "is empty", "name the revision")
        for field, least in (("page_tokens", 1), ("parallel_size", 1), ("format_version", 1)):
            value = getattr(self, field)
            _require(
                value >= least, f"namespace.{field}", f"is {value}", f"it must be at least {least}"
            )
        _require(self.epoch >= 0, "namespace.epoch", f"is {self.epoch}", "it must be at least 0")
        _require(
            0 <= self.parallel_rank < self.parallel_size,
            "namespace.parallel_rank",
            f"{self.parallel_rank} is not a rank of {self.parallel_size}",
            "ranks count from 0 to parallel_size - 1",
        )
        names = [c.name for c in self.components]
        _require(bool(names), "namespace.components", "is empty", "describe at least one")
        _require(
            len(set(names)) == len(names),
            "namespace.components",
            f"two components have one name: {', '.join(names)}",
            "give each its own",
        )

    def fingerprint(self) -> bytes:
        """SHA-256 of the canonical encoding: 32 bytes, the same in every process."""
        return _fingerprint(self)

    def encode(self) -> bytes:
        """The canonical encoding. Injective: no two different namespaces share one."""
        return _NAMESPACE_TAG + _encode(self)

    def with_request(self, *, salt: str, adapter: str) -> Namespace:
        """The namespace of one request. Both have no default, so neither can be forgotten.

        "" keeps what the server has. An adapter takes the place of the server's; a salt narrows
        the server's: both stay part of the identity.
        """
        if salt and self.salt:
            salt = hashlib.sha256(_SALT_TAG + _encode((self.salt, salt))).hexdigest()
        return msgspec.structs.replace(
            self, salt=salt or self.salt, adapter=adapter or self.adapter
        )


@functools.lru_cache(maxsize=4096)
def _fingerprint(namespace: Namespace) -> bytes:
    return hashlib.sha256(namespace.encode()).digest()


def component_fingerprint(fingerprint: bytes, component: str) -> bytes:
    """What the stored pages of one component live under: 32 bytes that bind the whole identity."""
    assert len(fingerprint) == 32, "not a namespace fingerprint"
    return hashlib.sha256(_COMPONENT_TAG + fingerprint + _encode(component)).digest()


def revision_of_path(path: Path) -> str:
    """The revision of a model in a local directory, from what is in it.

    Reads config, tokenizer and index files in full. Of each file of weights it takes name, size
    and 64 KiB in 16 places: enough to see a retrained model, not a proof. Raises `ConfigError`
    when the directory cannot be read or has no `config.json`.
    """
    where = Where(file=path, key="namespace.revision")
    if not (path / "config.json").is_file():
        raise ConfigError(
            "no config.json there, so the model cannot be identified",
            remedy="give the model's directory, or set namespace.revision",
            where=where,
        )
    digest = hashlib.sha256(_MODEL_TAG)
    try:
        for file in _files(path, _CONFIG_PATTERNS):
            digest.update(_encode((file.name, hashlib.sha256(file.read_bytes()).hexdigest())))
        for file in _files(path, _WEIGHT_PATTERNS):
            digest.update(_encode((file.name, file.stat().st_size, _sample(file))))
    except OSError as exc:
        raise ConfigError(
            f"cannot read the model: {exc}", remedy="make it readable", where=where
        ) from exc
    return "dir-" + digest.hexdigest()


def _files(path: Path, patterns: tuple[str, ...]) -> list[Path]:
    found = {file for pattern in patterns for file in path.glob(pattern) if file.is_file()}
    return sorted(found, key=lambda file: file.name)


def _sample(file: Path) -> str:
    """Digest of `_SAMPLES` blocks, spread evenly from the first byte to the last."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        last = max(file.stat().st_size - _SAMPLE_BYTES, 0)
        for i in range(_SAMPLES):
            stream.seek(last * i // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _encode(value: Any) -> bytes:
    """Type, length, content: injective, and free of anything a process could do differently."""
    if isinstance(value, str):
        kind, body = b"s", value.encode()
    elif isinstance(value, int):
        kind, body = b"i", b"%d" % value
    elif isinstance(value, tuple):
        kind, body = b"t", b"".join(map(_encode, value))
    else:
        fields = value.__struct_fields__
        kind, body = b"d", b"".join(_encode(f) + _encode(getattr(value, f)) for f in fields)
    return kind + struct.pack("<Q", len(body)) + body


def _check_types(value: msgspec.Struct, what: str) -> None:
    """Constructors of msgspec structs do not check; `1`, `True` and "1" must not mix here."""
    for field in msgspec.structs.fields(value):
        given = getattr(value, field.name)
        wanted = field.type if isinstance(field.type, type) else tuple
        fits = type(given) is wanted
        if fits and wanted is tuple:
            fits = all(type(item) is ComponentIdentity for item in given)
        _require(fits, f"{what}.{field.name}", f"is {given!r}", f"give it a {wanted.__name__}")
        if wanted is str:
            try:
                given.encode()
            except UnicodeEncodeError as exc:
                where = Where(key=f"{what}.{field.name}")
                raise ConfigError("is not text", remedy="use UTF-8", where=where) from exc


def _require(holds: bool, key: str, message: str, remedy: str) -> None:
    if not holds:
        raise ConfigError(message, remedy=remedy, where=Where(key=key))
