"""Options, environment, return codes and requirements."""

from __future__ import annotations

import builtins
import importlib
from pathlib import Path

import pytest

from kvstrata.backends.mooncake import MooncakeOptions, mooncake_requirements, requirements
from kvstrata.backends.mooncake import client as client_module
from kvstrata.backends.mooncake.client import apply_environment, transport
from kvstrata.backends.mooncake.codes import CODES, Cause, cause_of, failed_page, storage_error
from kvstrata.backends.registry import build_options, load_plugin
from kvstrata.boundary import Outcome
from kvstrata.errors import ConfigError, StorageBusyError, StorageUnavailableError


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"master": "here"}, "HOST:PORT"),
        ({"master": "here:0"}, "HOST:PORT"),
        ({"admin": "9003"}, "HOST:PORT"),
        ({"metadata": "etcd"}, "P2PHANDSHAKE"),
        ({"host": ""}, "not empty"),
        ({"replicas": 0}, "give 1 … 8"),
        ({"replicas": 2, "admin": "none"}, "HTTP server"),
        ({"replicas": 2, "preferred_segments": ["a:1"]}, "as many preferred_segments"),
        ({"role": "store", "segment_bytes": 0}, "gives memory"),
        ({"segment_bytes": "much"}, "is not a size"),
        ({"ssd_offload": True}, "nothing to offload"),
        ({"role": "store", "ssd_offload": True}, "give a folder"),
        ({"devices": ["mlx5_0"]}, 'protocol = "rdma"'),
        ({"hard_pin": True, "soft_pin_s": 5.0}, "choose one"),
        ({"environment": {"PATH": "/bin"}}, "names begin with MC_"),
        ({"environment": {"MC_RPC_TIMEOUT_MS": "5"}}, "option of its own"),
        ({"rpc_timeout_s": 0.0}, "rpc_timeout_s"),
        ({"call_bytes": 100}, "size of a page"),
        ({"protocol": "ib"}, "protocol"),
        ({"mtu": 1000}, "mtu"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_options_that_cannot_be(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_options(load_plugin("mooncake"), options)
    assert words in str(caught.value)


def test_rdma_settings_become_what_the_library_reads() -> None:
    options = MooncakeOptions(
        protocol="rdma", devices=("mlx5_0", "mlx5_1"), gid_index=3, mtu=4096, ib_port=1,
        huge_pages=True, memcpy=False, hot_cache_bytes="1MiB",
        environment={"MC_MAX_WR": "256"}, rpc_timeout_s=2.5,
    )  # fmt: skip
    found = options.client_environment()
    assert found["MC_GID_INDEX"] == "3"
    assert found["MC_MTU"] == "4096"
    assert found["MC_IB_PORT"] == "1"
    assert found["MC_STORE_USE_HUGEPAGE"] == "1"
    assert found["MC_STORE_MEMCPY"] == "0"
    assert found["MC_STORE_LOCAL_HOT_CACHE_SIZE"] == str(1 << 20)
    assert found["MC_MAX_WR"] == "256"
    assert found["MC_RPC_TIMEOUT_MS"] == "2500"
    assert found["MC_STORE_CLIENT_SETUP_RETRIES"] == "1"


def test_rdma_asks_for_the_devices_that_are_there(monkeypatch) -> None:
    monkeypatch.setattr(client_module, "rdma_devices", lambda: ["mlx5_0"])
    assert transport(MooncakeOptions(protocol="rdma")) == "rdma"
    assert transport(MooncakeOptions(protocol="rdma", devices=("mlx5_0",))) == "rdma"
    with pytest.raises(ConfigError, match="no RDMA device mlx5_7"):
        transport(MooncakeOptions(protocol="rdma", devices=("mlx5_7",)))
    monkeypatch.setattr(client_module, "rdma_devices", list)
    with pytest.raises(ConfigError, match="no RDMA device on this machine"):
        transport(MooncakeOptions(protocol="rdma"))
    assert transport(MooncakeOptions(protocol="rdma", tcp_fallback=True)) == "tcp"
    assert transport(MooncakeOptions()) == "tcp"


def test_one_process_has_one_environment(monkeypatch) -> None:
    monkeypatch.setattr(client_module, "_applied", {"MC_X": "1"})
    monkeypatch.setenv("MC_Y", "")
    apply_environment({"MC_X": "1", "MC_Y": "2"})
    with pytest.raises(ConfigError, match="another mooncake backend"):
        apply_environment({"MC_Y": "3"})


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (-704, Outcome.MISSING),
        (-703, Outcome.MISSING),
        (-712, Outcome.MISSING),
        (-705, Outcome.EXISTS),
        (-200, Outcome.FULL),
        (-707, Outcome.TIMEOUT),
        (-706, Outcome.OVERLOADED),
        (-800, Outcome.UNAVAILABLE),
        (-900, Outcome.UNAVAILABLE),
        (-901, Outcome.UNAVAILABLE),
        (-600, Outcome.ERROR),
        (-1103, Outcome.UNAVAILABLE),
        (-99999, Outcome.ERROR),
    ],
)
def test_codes_become_outcomes(code: int, outcome: Outcome) -> None:
    assert failed_page(code).outcome is outcome


def test_every_code_has_words_and_a_cause() -> None:
    assert all(code < 0 and words for code, (words, _) in CODES.items())
    assert {cause for _, cause in CODES.values()} == set(Cause)
    for code in (*CODES, -12345):
        page = failed_page(code)
        assert page.outcome is Outcome.MISSING or str(code) in page.message
        assert not page.outcome.is_stored or cause_of(code) is Cause.EXISTS
    assert isinstance(storage_error(-900, "x"), StorageUnavailableError)
    assert isinstance(storage_error(-706, "x"), StorageBusyError)


def test_requirements_say_what_is_missing(monkeypatch) -> None:
    assert all(r.is_met for r in mooncake_requirements() if not r.is_optional)
    monkeypatch.setattr(requirements, "_LIBRARIES", {"libnowhere.so.9": "libnowhere9"})
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    monkeypatch.setattr(requirements, "_INFINIBAND", Path("/nowhere"))
    found = {r.name: r for r in mooncake_requirements()}
    assert "apt-get install libnowhere9" in found["libnowhere.so.9"].remedy
    assert "pip install" in found["client library"].remedy
    assert found["RDMA device"].is_optional
    assert not any(found[name].is_met for name in ("libnowhere.so.9", "client library"))

    def refuse(name: str) -> object:
        raise builtins.ImportError("libnowhere.so.9: cannot open shared object file")

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(ConfigError) as caught:
        requirements.load_client()
    assert "apt-get install libnowhere9" in caught.value.remedy
