"""Layouts of attention caches: token by token or head by head, layer by layer or as one view."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.harness import core_of, engine, extraction_config, greedy, random_prompts
from tests.kv_connector import slot_connector
from tests.kv_connector.loading import FAMILIES, OFFLOADING, ask, beside_extraction, forget, same
from tests.kv_connector.slot_connector import SlotConnector
from tests.kv_connector.test_published_views import GatheringConnector
from vllm.v1.attention.backend import AttentionBackend

Checkpoint = Callable[..., Path]
PROMPTS = [p["prompt_token_ids"] for p in random_prompts(91, [150, 33, 64, 20])]


class CrossLayerConnector(SlotConnector):
    """Takes all layers as one view, and finds each in it."""

    taken: list[tuple[torch.Tensor, type[AttentionBackend]]] = []  # noqa: RUF012

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return True

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: Any) -> None:
        self.taken.append((kv_cache, attn_backend))
        assert self._kv_cache_config is not None
        (tensor,) = self._kv_cache_config.kv_cache_tensors
        self.register_kv_caches(dict(zip(tensor.layers, kv_cache, strict=True)))


class GatheringAcross(GatheringConnector):
    """Would take one view."""

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        return True

    def register_cross_layers_kv_cache(self, kv_cache: Any, attn_backend: Any) -> None:
        raise AssertionError("there is no such view")


class OnlyCrossLayers(CrossLayerConnector):
    register_kv_caches = SlotConnector.__mro__[1].register_kv_caches  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _nothing_stored() -> Iterator[None]:
    yield
    slot_connector.store.clear()
    slot_connector.calls.clear()
    CrossLayerConnector.taken.clear()


def connector(name: str, module: str = slot_connector.__name__) -> dict[str, Any]:
    return {
        "kv_transfer_config": {
            "kv_connector": name,
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
        }
    }


def caches_of(llm: Any) -> dict[str, torch.Tensor]:
    """By layer: those of attention."""
    runner = core_of(llm).executor.worker.model_runner
    caches = {name: layer.kv_cache for name, layer in runner._cache_layers.items()}
    return {n: c for n, c in caches.items() if isinstance(c, torch.Tensor) and c.dim() == 5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_the_layout(
    family: str, dtype: torch.dtype, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Nor do chunks, prefix hits and loads from the host."""
    folder = checkpoint(family, dtype=dtype)
    options: dict[str, Any] = {"dtype": "auto", "max_num_batched_tokens": 64}
    arguments = {**options, **beside_extraction(tmp_path / "nhd")}
    with engine(folder, enable_prefix_caching=False, **arguments) as llm:
        assert all(cache.stride(2) > cache.stride(3) for cache in caches_of(llm).values())
        expected = ask(llm, PROMPTS, 20)
    arguments = {**options, **beside_extraction(tmp_path / "hnd", OFFLOADING)}
    with engine(folder, kv_cache_layout="HND", block_size=48, **arguments) as llm:
        caches = caches_of(llm).values()
        assert caches
        assert all(cache.stride(3) >= cache.stride(1) > cache.stride(2) for cache in caches)
        same(ask(llm, PROMPTS, 20), expected)
        same(ask(llm, PROMPTS, 20), expected)
        forget(llm)
        same(ask(llm, PROMPTS, 20), expected)


@pytest.mark.parametrize("name", ["SlotConnector", "WantsHeadsFirst", "CrossLayerConnector"])
@pytest.mark.parametrize("asked", [None, "NHD", "HND"])
def test_a_connector_gets_the_order_it_requires(
    name: str, asked: str | None, checkpoint: Checkpoint
) -> None:
    folder = checkpoint("llama")
    module = __name__ if name == "CrossLayerConnector" else slot_connector.__name__
    arguments: dict[str, Any] = connector(name, module)
    if asked is not None:
        arguments["kv_cache_layout"] = asked
    with engine(folder, block_size=16) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy(8))]
    if name == "WantsHeadsFirst" and asked == "NHD":
        with (
            pytest.raises(ValueError, match=r"kv_cache_layout='NHD'.*requires 'HND'"),
            engine(folder, **arguments),
        ):
            pass
        return
    with engine(folder, block_size=16, **arguments) as llm:
        layout = llm.llm_engine.vllm_config.cache_config.kv_cache_layout
        assert layout == ("HND" if name == "WantsHeadsFirst" else asked or "NHD")
        for _ in range(2):  # saved, then loaded
            outputs = llm.generate(PROMPTS, greedy(8), use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outputs] == expected
            llm.reset_prefix_cache()
        assert outputs[0].num_cached_tokens == 48
        if name == "CrossLayerConnector":
            _check_cross_layers(llm, layout)


def _check_cross_layers(llm: Any, layout: str) -> None:
    ((whole, backend),) = CrossLayerConnector.taken
    for view, own in zip(whole, caches_of(llm).values(), strict=True):
        assert view.data_ptr() == own.data_ptr()
        assert (view.shape, view.stride()) == (own.shape, own.stride())
    assert backend.get_name() == layout
    order = backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    strides = [whole.stride(dimension) for dimension in order]
    assert strides == sorted(strides, reverse=True)
    of_layer = [whole[0].stride(d) for d in backend.get_kv_cache_stride_order()]
    assert of_layer == sorted(of_layer, reverse=True)
    blocks, pages, tokens, heads, content = whole.shape[1:]
    shape = backend.get_kv_cache_shape(blocks, pages * tokens, heads, content // 2)
    assert shape == whole.shape[1:]


def test_layers_that_do_not_lie_alike_come_one_by_one(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Rows of hidden states have a group of their own."""
    arguments = extraction_config([1], tmp_path) | connector("GatheringAcross", __name__)
    GatheringAcross.views.clear()
    with engine(checkpoint("llama"), **arguments) as llm:
        llm.generate(PROMPTS[:1], greedy(1), use_tqdm=False)
        assert GatheringAcross.views.keys() == {*caches_of(llm), "cache_only_layers.4"}


def test_a_connector_that_takes_nothing_else_is_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "vllm.v1.cache_kinds.base.KVCacheConfig.cross_layers_view", lambda self, pool: None
    )
    with (
        pytest.raises(ValueError, match="OnlyCrossLayers takes one view over all layers"),
        engine(checkpoint("llama"), **connector("OnlyCrossLayers", __name__)),
    ):
        pass
