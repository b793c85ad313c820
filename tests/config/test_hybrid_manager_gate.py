"""Connectors that cannot handle several groups of layers switch the hybrid manager off."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from vllm.config import (
    CacheConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    connectors,
)

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


def test_the_user_may_switch_it_off_but_not_on_against_the_connector() -> None:
    off = SchedulerConfig(disable_hybrid_kv_cache_manager=True)
    config = VllmConfig(scheduler_config=off, kv_transfer_config=connector("GroupConnector"))
    assert is_disabled(config) is True
    on = SchedulerConfig(disable_hybrid_kv_cache_manager=False)
    with pytest.raises(ValueError, match=r"manager=False, .* 'PlainConnector'"):
        VllmConfig(scheduler_config=on, kv_transfer_config=connector("PlainConnector"))


# ---- the whole table: connector x model x where the connector is named

SETTLED = {True: "off", False: "on"}
CONNECTORS: dict[str, tuple[str | None, ...]] = {
    "none": (),
    "hma": ("GroupConnector",),
    "non-hma": ("PlainConnector",),
    "multi-hma": ("GroupConnector", "GroupConnector"),
    "multi-mixed": ("GroupConnector", "PlainConnector"),
    "multi-non-hma": ("PlainConnector", "PlainConnector"),
    "unknown": ("NoSuchConnector",),
}
PLACES = ("kv_transfer_config", "kv_offloading_size", "plugin")


def named(kind: str, place: str) -> dict[str, Any]:
    """Fields of a VllmConfig that name the connector there."""
    names = CONNECTORS[kind]
    if not names:
        return {}
    if kind.startswith("multi"):
        return {"kv_transfer_config": multi(*(str(name) for name in names))}
    name = str(names[0])
    if place == "kv_offloading_size":
        return {"cache_config": CacheConfig(kv_offloading_size=1.0, kv_offloading_backend=name)}
    if place == "plugin" or name == "NoSuchConnector":
        return {"kv_transfer_config": KVTransferConfig(kv_connector=name, kv_role="kv_both")}
    return {"kv_transfer_config": connector(name)}


def expectation(kind: str, model: str) -> str:
    if kind == "unknown":
        return "NoSuchConnector"
    if kind in ("none", "hma", "multi-hma"):
        return "on"
    if model == "hybrid":
        name = "MultiConnector (PlainConnector in it)" if "multi" in kind else "PlainConnector"
        return re.escape(f"'{name}'") + ".*recurrent layers"
    return "off"


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("extracts", [False, True])
@pytest.mark.parametrize("model", ["llama", "mixed", "latent", "hybrid"])
@pytest.mark.parametrize("kind", CONNECTORS)
def test_the_table(
    kind: str,
    model: str,
    extracts: bool,
    place: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    registered = dict(connectors.REGISTERED)
    for name in ("PlainConnector", "GroupConnector"):  # as a plugin does
        registered[name] = connectors.Location(TOY_MODULE, name)
    monkeypatch.setattr("vllm.config.connectors.REGISTERED", registered)
    fields = named(kind, place)
    fields["model_config"] = ModelConfig(model=request.getfixturevalue(model))
    if extracts:
        fields["speculative_config"] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}},
        }
    expected = expectation(kind, model)
    if expected not in ("on", "off"):
        with pytest.raises(ValueError, match=expected):
            VllmConfig(**fields)
        return
    with caplog.at_level(logging.WARNING, logger="vllm"):
        config = VllmConfig(**fields)
    disabled = is_disabled(config)
    assert disabled is not None
    assert SETTLED[disabled] == expected
    warning = "PlainConnector in it)" if kind.startswith("multi") else "PlainConnector"
    assert (f"{warning} does not subclass SupportsHMA" in caplog.text) is (expected == "off")


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

    def lacking(config: KVTransferConfig) -> tuple[str, ...]:
        asked.append(config.kv_connector)
        return () if supported else ("Toy",)

    monkeypatch.setattr("vllm.config.capabilities.connectors_without_hma", lacking)
    for check in ("_check_connector", "settle_kv_cache_layout"):
        monkeypatch.setattr(f"vllm.config.capabilities.{check}", lambda config: None)
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
