"""Connectors that cannot handle several groups of layers switch the hybrid manager off."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig

TOY_MODULE = "toy_kv_connectors"
TOY_SOURCE = """
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA


class PlainConnector(KVConnectorBase_V1):
    pass


class GroupConnector(KVConnectorBase_V1, SupportsHMA):
    pass
"""


@pytest.fixture(autouse=True)
def toy_connectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out_of_tree"
    folder.mkdir()
    (folder / f"{TOY_MODULE}.py").write_text(TOY_SOURCE)
    monkeypatch.syspath_prepend(folder)


def connector(name: str) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=name, kv_role="kv_producer", kv_connector_module_path=TOY_MODULE
    )


def multi(*names: str) -> KVTransferConfig:
    parts: list[dict[str, Any]] = [
        {"kv_connector": n, "kv_role": "kv_both", "kv_connector_module_path": TOY_MODULE}
        for n in names
    ]
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": parts},
    )


def is_disabled(config: VllmConfig) -> bool | None:
    return config.scheduler_config.disable_hybrid_kv_cache_manager


def test_on_without_a_connector(llama: str) -> None:
    assert is_disabled(VllmConfig()) is False
    assert is_disabled(VllmConfig(model_config=ModelConfig(model=llama))) is False


def test_on_with_a_connector_that_supports_it(hybrid: str, mixed: str) -> None:
    for model in (hybrid, mixed):
        config = VllmConfig(
            model_config=ModelConfig(model=model), kv_transfer_config=connector("GroupConnector")
        )
        assert is_disabled(config) is False


def test_off_with_a_warning_that_names_the_connector(
    llama: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm"):
        config = VllmConfig(
            model_config=ModelConfig(model=llama), kv_transfer_config=connector("PlainConnector")
        )
    assert is_disabled(config) is True
    assert "PlainConnector does not subclass SupportsHMA" in caplog.text


@pytest.mark.parametrize(
    ("fixture", "reason"), [("hybrid", "recurrent layers"), ("mixed", "mixes sliding-window")]
)
def test_a_model_that_needs_it_is_refused(
    fixture: str, reason: str, request: pytest.FixtureRequest
) -> None:
    model = ModelConfig(model=request.getfixturevalue(fixture))
    with pytest.raises(ValueError, match=rf"'PlainConnector' .* SupportsHMA, .* {reason}"):
        VllmConfig(model_config=model, kv_transfer_config=connector("PlainConnector"))
    with pytest.raises(ValueError, match=rf"disable_hybrid_kv_cache_manager=True, .* {reason}"):
        VllmConfig(
            model_config=model,
            scheduler_config=SchedulerConfig(disable_hybrid_kv_cache_manager=True),
        )


def test_the_user_may_switch_it_off_but_not_on_against_the_connector() -> None:
    off = SchedulerConfig(disable_hybrid_kv_cache_manager=True)
    config = VllmConfig(scheduler_config=off, kv_transfer_config=connector("GroupConnector"))
    assert is_disabled(config) is True
    on = SchedulerConfig(disable_hybrid_kv_cache_manager=False)
    with pytest.raises(ValueError, match=r"manager=False, .* 'PlainConnector'"):
        VllmConfig(scheduler_config=on, kv_transfer_config=connector("PlainConnector"))


@pytest.mark.parametrize(
    ("names", "disabled"),
    [
        (("GroupConnector", "GroupConnector"), False),
        (("GroupConnector", "PlainConnector"), True),
        (("PlainConnector",), True),
    ],
)
def test_multi_connector_needs_every_part(names: tuple[str, ...], disabled: bool) -> None:
    assert is_disabled(VllmConfig(kv_transfer_config=multi(*names))) is disabled


def test_unknown_connector_is_named() -> None:
    with pytest.raises(ValueError, match="NoSuchConnector"):
        VllmConfig(
            kv_transfer_config=KVTransferConfig(kv_connector="NoSuchConnector", kv_role="kv_both")
        )


# The gate sees the connector that an offloading option named (never a half-built config)


@pytest.mark.parametrize(
    ("backend", "name", "option"),
    [
        (None, "OffloadingConnector", ("cpu_bytes_to_use", 3 << 29)),
        ("native", "OffloadingConnector", ("cpu_bytes_to_use", 3 << 29)),
        ("lmcache", "LMCacheConnectorV1", ("lmcache.max_local_cpu_size", 1.5)),
        ("PlainConnector", "PlainConnector", ("cpu_bytes_to_use", 3 << 29)),
    ],
)
@pytest.mark.parametrize("supported", [True, False])
def test_gate_runs_after_offloading_set_the_connector(
    backend: str | None,
    name: str,
    option: tuple[str, float],
    supported: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str | None] = []

    def supports(config: KVTransferConfig) -> bool:
        asked.append(config.kv_connector)
        return supported

    monkeypatch.setattr("vllm.config.capabilities.connector_supports_hma", supports)
    monkeypatch.setattr("vllm.config.capabilities._check_connector", lambda config: None)
    config = VllmConfig(
        cache_config=CacheConfig(kv_offloading_size=1.5, kv_offloading_backend=backend)
    )
    assert asked == [name]
    assert is_disabled(config) is not supported
    assert config.kv_transfer_config is not None
    assert config.kv_transfer_config.get_from_extra_config(option[0], None) == option[1]


def test_a_transfer_config_without_a_connector_takes_the_option_s() -> None:
    config = VllmConfig(
        cache_config=CacheConfig(kv_offloading_size=1.5),
        kv_transfer_config=KVTransferConfig(kv_load_failure_policy="recompute"),
    )
    transfer = config.kv_transfer_config
    assert transfer is not None
    assert transfer.kv_connector == "OffloadingConnector"
    assert transfer.kv_load_failure_policy == "recompute"
    assert is_disabled(config) is False


def test_two_connectors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_offloading_size=2\.0 .* 'GroupConnector'"):
        VllmConfig(
            cache_config=CacheConfig(kv_offloading_size=2.0),
            kv_transfer_config=connector("GroupConnector"),
        )
