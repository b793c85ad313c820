"""Layers by themselves: what they keep in the pool, and their slices under tensor parallelism."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.checkpoints import make_checkpoint
from tests.models.harness import SingleRequest, make_config
from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.forward_context import ForwardContext, set_forward_context
from vllm.model_executor.layers import linear, vocab_parallel_embedding, weight
from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layer import Layer, settle_attributes
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm, WideRMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.model_executor.layers.mamba.gdn import GatedDeltaNet
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
    prepare_heads,
)
from vllm.model_executor.layers.weight import finish_weights
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.ops.linear import make_panels
from vllm.ops.rotary import norm_and_rotate
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)


@pytest.fixture
def hybrid(tmp_path: Path) -> VllmConfig:
    return make_config(make_checkpoint(tmp_path, "qwen3_5", tokenizer=False))


def be_rank(monkeypatch: pytest.MonkeyPatch, rank: int, world_size: int) -> None:
    monkeypatch.setattr(parallel_state._current, "stage_group", GroupCoordinator(rank, world_size))


def test_specs_follow_the_config_as_it_is_when_they_are_asked_for(hybrid: VllmConfig) -> None:
    request = SingleRequest(hybrid, 4)
    attention = next(iter(get_layers_from_vllm_config(hybrid, Attention).values()))
    recurrent = next(iter(get_layers_from_vllm_config(hybrid, GatedDeltaNet).values()))
    assert attention.get_kv_cache_spec(hybrid).block_size == 16
    assert recurrent.get_kv_cache_spec(hybrid).block_size == 512
    request.config.cache_config.block_size = 144
    request.config.cache_config.mamba_block_size = 64
    assert attention.get_kv_cache_spec(hybrid) == FullAttentionSpec(
        block_size=144, num_kv_heads=2, head_size=16, dtype=torch.float32
    )
    assert recurrent.get_kv_cache_spec(hybrid) == MambaSpec(
        block_size=64,
        shapes=((3, 2 * 2 * 16 + 6 * 24), (6, 16, 24)),
        dtypes=(torch.float32, torch.float32),
    )


def test_layers_are_registered_under_their_prefix(hybrid: VllmConfig) -> None:
    SingleRequest(hybrid, 4)
    names = list(hybrid.compilation_config.static_forward_context)
    kinds = ["linear_attn", "self_attn.attn", "linear_attn", "linear_attn", "self_attn.attn"]
    assert names == [f"model.layers.{i}.{kind}" for i, kind in enumerate(kinds)]
    with (
        set_current_vllm_config(hybrid),
        pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.attn"),
    ):
        Attention(2, 16, 0.25, prefix="model.layers.1.self_attn.attn")


def test_a_soft_cap_of_zero_is_none(hybrid: VllmConfig) -> None:
    with set_current_vllm_config(hybrid):
        assert Attention(2, 16, 0.25, logits_soft_cap=0.0, prefix="a").logits_soft_cap is None


@pytest.mark.parametrize("soft_cap", [-1.0, float("inf"), float("nan")])
def test_a_soft_cap_that_caps_nothing_is_refused(soft_cap: float, hybrid: VllmConfig) -> None:
    with (
        set_current_vllm_config(hybrid),
        pytest.raises(ValueError, match=rf"'a': logits_soft_cap={soft_cap} is not a finite"),
    ):
        Attention(2, 16, 0.25, logits_soft_cap=soft_cap, prefix="a")


@pytest.mark.parametrize(
    "sinks",
    [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32), torch.zeros(4)[::2]],
    ids=["number", "shape", "dtype", "stride"],
)
def test_sinks_are_one_float_for_each_head(sinks: torch.Tensor, hybrid: VllmConfig) -> None:
    said = re.escape(f"{sinks.dtype} of shape {tuple(sinks.shape)} and strides {sinks.stride()}")
    with (
        set_current_vllm_config(hybrid),
        pytest.raises(ValueError, match=rf"'a': sinks are {said}; .* num_heads=2 "),
    ):
        Attention(2, 16, 0.25, prefix="a", sinks=sinks)


def test_sinks_belong_to_the_model_that_loads_them(hybrid: VllmConfig) -> None:
    """A parameter keeps its owner's name and is not kept twice; other tensors are buffers."""
    owner = torch.nn.Module()
    owner.sinks = torch.nn.Parameter(torch.zeros(2))
    with set_current_vllm_config(hybrid):
        owner.attn = Attention(2, 16, 0.25, prefix="a", sinks=owner.sinks)
        other = Attention(2, 16, 0.25, prefix="b", sinks=torch.zeros(2, dtype=torch.float64))
    assert [name for name, _ in owner.named_parameters()] == ["sinks"]
    owner.to(torch.bfloat16)
    assert owner.attn.sinks is owner.sinks
    assert owner.sinks.dtype is torch.bfloat16
    assert [name for name, _ in other.named_buffers()] == ["sinks"]
    assert not other.state_dict()


def test_windows_reach_the_spec_unless_disabled(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "mistral", tokenizer=False)
    for disabled, spec_type in ((False, SlidingWindowSpec), (True, FullAttentionSpec)):
        config = make_config(folder, disable_sliding_window=disabled)
        SingleRequest(config, 4)
        for layer in get_layers_from_vllm_config(config, Attention).values():
            spec = layer.get_kv_cache_spec(config)
            assert isinstance(spec, spec_type)
            assert not isinstance(spec, SlidingWindowSpec) or spec.sliding_window == 24


def test_chunks_reach_the_spec(hybrid: VllmConfig) -> None:
    with set_current_vllm_config(hybrid):
        layer = Attention(2, 16, 0.25, prefix="a", attention_chunk_size=40)
        with pytest.raises(ValueError, match="'b': attention_chunk_size=0 has to be above 0"):
            Attention(2, 16, 0.25, prefix="b", attention_chunk_size=0)
        both = {"attention_chunk_size": 40, "per_layer_sliding_window": 7}
        with pytest.raises(ValueError, match="per_layer_sliding_window=7 has to be None with it"):
            Attention(2, 16, 0.25, prefix="c", **both)
    assert layer.get_kv_cache_spec(hybrid) == ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=16, dtype=torch.float32, attention_chunk_size=40
    )
    hybrid.scheduler_config.disable_hybrid_kv_cache_manager = True
    assert isinstance(layer.get_kv_cache_spec(hybrid), FullAttentionSpec)


def test_a_layer_that_shares_a_cache_has_to_read_it_as_its_owner_does(hybrid: VllmConfig) -> None:
    shares = {"kv_sharing_target_layer_name": "a"}
    with set_current_vllm_config(hybrid):
        with pytest.raises(ValueError, match="name='a' is not an attention layer that was made"):
            Attention(2, 16, 0.25, prefix="b", **shares)
        owner = Attention(4, 16, 0.25, num_kv_heads=2, prefix="a")
        reader = Attention(2, 16, 0.5, prefix="b", **shares)  # other queries, another scale
        with pytest.raises(ValueError, match=r"'c' cannot share .* 'a': .* are \(16, 16, 4, None"):
            Attention(4, 16, 0.25, prefix="c", **shares)
        with pytest.raises(ValueError, match="cannot share"):
            Attention(2, 16, 0.25, prefix="c", per_layer_sliding_window=7, **shares)
        with pytest.raises(ValueError, match="stores keys and values"):
            Attention(2, 16, 0.25, prefix="c", kv_sharing_target_layer_name="b")
    found = get_layers_from_vllm_config(hybrid, Attention)
    assert list(found.values()) == [owner]
    assert not list(reader.children())


def test_the_hidden_state_layer_has_a_spec_of_its_own(hybrid: VllmConfig) -> None:
    with set_current_vllm_config(hybrid):
        layer = CacheOnlyAttentionLayer(3, 72, prefix="rows", max_resident_tokens=40)
    hybrid.cache_config.block_size = 32
    assert layer.get_kv_cache_spec(hybrid) == HiddenStateCacheSpec(
        block_size=32, num_kv_heads=3, head_size=72, dtype=torch.float32, max_resident_tokens=40
    )
    assert get_layers_from_vllm_config(hybrid, CacheOnlyAttentionLayer) == {"rows": layer}


def mixer_outputs(request: SingleRequest, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Outputs of the token mixers and MLPs of the first two layers for the same input."""
    model: Any = request.model.model
    positions = torch.arange(len(hidden))
    first, second = model.layers[0], model.layers[1]
    with (
        torch.inference_mode(),
        set_forward_context(ForwardContext(request._metadata(0, len(hidden)))),
    ):
        return [
            first.linear_attn(hidden),
            second.self_attn(positions, hidden),
            first.mlp(hidden),
        ]


def test_the_ranks_outputs_add_up_to_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, "qwen3_5", tokenizer=False, attention_bias=True)
    hidden = torch.randn(21, 72, generator=torch.Generator().manual_seed(0))
    whole = mixer_outputs(SingleRequest(make_config(folder), 21), hidden)
    monkeypatch.setattr(linear, "sum_over_ranks", lambda values, *, ends_branch: values)
    parts = []
    for rank in range(2):
        be_rank(monkeypatch, rank, 2)
        parts.append(mixer_outputs(SingleRequest(make_config(folder), 21), hidden))
    for expected, *pieces in zip(whole, *parts, strict=True):
        torch.testing.assert_close(sum(pieces), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_values", [True, False])
@pytest.mark.parametrize(("rank", "kv_head"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_more_ranks_than_kv_heads_share_them(
    rank: int, kv_head: int, has_values: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_rank(monkeypatch, rank, 4)
    layer = QKVParallelLinear(5, 3, 8, 2, bias=False, has_values=has_values)
    parts = [torch.randn(24, 5), torch.randn(6, 5), torch.randn(6, 5)][: 3 if has_values else 2]
    for shard_id, rows in zip("qkv", parts, strict=False):
        layer.weight_loader(layer.weight, rows, shard_id)
    kv_rows = slice(3 * kv_head, 3 * kv_head + 3)
    expected = [parts[0][6 * rank : 6 * rank + 6], *(part[kv_rows] for part in parts[1:])]
    assert torch.equal(layer.weight, torch.cat(expected))


def test_a_size_that_the_ranks_cannot_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    be_rank(monkeypatch, 0, 3)
    with pytest.raises(ValueError, match="tensor_parallel_size=3"):
        QKVParallelLinear(5, 3, 6, 2, bias=False, prefix="qkv")
    with pytest.raises(ValueError, match="tensor_parallel_size=3 does not divide"):
        linear.RowParallelLinear(8, 4, prefix="down")


def test_embedding_rows_are_found_on_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(
        vocab_parallel_embedding, "tensor_model_parallel_all_reduce", lambda tensor: tensor
    )
    table, ids = torch.randn(7, 3), torch.tensor([6, 0, 3, 4, 6])
    total = torch.zeros(5, 3)
    for rank in range(2):
        be_rank(monkeypatch, rank, 2)
        layer = VocabParallelEmbedding(7, 3)
        layer.weight_loader(layer.weight, table)
        total += layer(ids)
    assert torch.equal(total, table[ids])


def test_dynamic_rope_refuses_positions_where_it_would_not_be_exact() -> None:
    parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    get_rope(16, 64, rope_parameters=parameters, num_positions=64)
    with pytest.raises(ValueError, match=r"max_model_len=65 .*max_model_len<=64"):
        get_rope(16, 64, rope_parameters=parameters, num_positions=65)


def test_unknown_rope_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rope_type='spiral'.*default, linear, dynamic"):
        get_rope(16, 64, rope_parameters={"rope_type": "spiral"})
    with pytest.raises(ValueError, match="factor"):
        get_rope(16, 64, rope_parameters={"rope_type": "linear"})


def test_layers_share_one_rotary_table() -> None:
    assert get_rope(16, 64) is get_rope(16, 64)
    assert get_rope(16, 64) is not get_rope(16, 64, num_positions=32)


def test_interleaved_pairs_rotate_as_complex_numbers() -> None:
    rope = get_rope(8, 32, is_neox_style=False, rope_parameters={"rope_theta": 100.0})
    heads = torch.randn(5, 2, 8)
    positions = torch.tensor([0, 3, 31, 7, 1])
    frequencies = 100.0 ** (-torch.arange(0, 8, 2) / 8)
    turn = torch.polar(torch.ones(5, 4), positions[:, None] * frequencies)
    pairs = torch.view_as_complex(heads.view(5, 2, 4, 2))
    expected = torch.view_as_real(pairs * turn[:, None]).flatten(-2)
    query, key = rope(positions, heads.clone().flatten(1), heads.clone())
    torch.testing.assert_close(query.view(5, 2, 8), expected)
    torch.testing.assert_close(key, expected)


@pytest.mark.parametrize("case", ["untied", "tied", "two heads", "held by another", "of others"])
def test_heads_end_in_panels_with_the_embeddings_that_they_are_tied_to(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding, head, second = VocabParallelEmbedding(8, 4), ParallelLMHead(8, 4), None
    modules: list[torch.nn.Module] = [embedding, head]
    if case != "untied":
        head.tie_weights(embedding)
    if case == "two heads":
        second = ParallelLMHead(8, 4).tie_weights(embedding)
        modules.append(second)
    if case == "held by another":
        other = torch.nn.Linear(4, 8, bias=False)
        other.weight = head.weight
        modules.append(other)
    if case == "of others":
        modules.append(type("Other", (torch.nn.Module,), {"__module__": "others.model"})())
    table = head.weight.data.normal_().clone()
    monkeypatch.setattr(weight, "prefers_panels", lambda device: True)
    model = torch.nn.Sequential(*modules)
    prepare_heads(model)
    finish_weights(model)
    if case in ("held by another", "of others"):
        assert embedding.weight is head.weight
        assert torch.equal(head.weight, table)
        return
    assert torch.equal(head.weight, make_panels(table))
    assert (embedding.weight is head.weight) == (case != "untied")
    assert (embedding.weight.dim() == 4) == (case != "untied")
    assert second is None or second.weight is head.weight
    rows = torch.tensor([7, 0, 3])
    assert case == "untied" or torch.equal(embedding(rows), table[rows])


def test_hooks_of_a_layer_are_called() -> None:
    layer, seen = get_act_and_mul_fn("silu"), []
    x = torch.randn(3, 8)
    expected = layer(x)
    hooks = torch.nn.modules.module
    for register in (
        layer.register_forward_pre_hook,
        layer.register_forward_hook,
        hooks.register_module_forward_pre_hook,
        hooks.register_module_forward_hook,
    ):
        handle = register(lambda module, *_: seen.append(module))
        assert torch.equal(layer(x), expected)
        assert seen == [layer]
        handle.remove()
        seen.clear()
    assert torch.equal(layer(x), expected)
    assert not seen
    layer.register_forward_hook(lambda *_: torch.zeros(1))
    assert torch.equal(layer(x), torch.zeros(1))


class TwoNorms(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = RMSNorm(4), RMSNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_what_takes_the_place_of_a_settled_parameter_or_module_is_used() -> None:
    model, x = TwoNorms(), torch.randn(3, 4)
    names = list(model.state_dict())
    settle_attributes(model)
    assert vars(model)["first"] is model.first
    assert vars(model.first)["weight"] is model.first.weight
    assert list(model.state_dict()) == names
    before = model(x)
    model.second = RMSNorm(4)
    model.second.weight = torch.nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
    assert torch.equal(model(x), 2.0 * before)
    model.first.weight = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    assert not model(x).any()


@pytest.mark.parametrize("norm", [RMSNorm, GemmaRMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_heads_are_taken_with_the_rotation(
    norm: type[RMSNorm], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits as one after another; whoever looks at what is between sees it."""
    rope, positions = (
        get_rope(16, 64, rope_parameters={"partial_rotary_factor": 0.5}),
        torch.arange(9),
    )
    wide = torch.randn(9, 7, 16).to(dtype)
    query, key = wide[:, :4], wide[:, 4:6]
    norms = [norm(16, dtype=dtype) for _ in range(2)]
    for one in norms:
        assert one.weight is not None
        one.weight.normal_()
    taken: list[Any] = []
    expected = rope(positions, norms[0](query), norms[1](key))
    found = rope.after_norms(positions, query, key, *norms)  # here three operations are as good
    assert all(map(torch.equal, found, expected))

    def better(*args: Any) -> None:
        taken.append(norm_and_rotate.body(*args))

    monkeypatch.setitem(norm_and_rotate._by_device, query.device, better)
    found = rope.after_norms(positions, query, key, *norms)
    assert all(map(torch.equal, found, expected)) and len(taken) == 1
    seen: list[torch.Tensor] = []
    with norms[1].register_forward_hook(lambda module, args, out: seen.append(out.clone())):
        found = rope.after_norms(positions, query, key, *norms)
    assert all(map(torch.equal, found, expected)) and len(seen) == len(taken) == 1
    wider = [WideRMSNorm(64, dtype=dtype), WideRMSNorm(32, dtype=dtype)]
    expected = rope(positions, wider[0](query), wider[1](key))
    found = rope.after_norms(positions, query, key, *wider)
    assert all(map(torch.equal, found, expected)) and len(taken) == 1
