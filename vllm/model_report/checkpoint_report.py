"""A report on whether and how a checkpoint would run, made without reading its weights.

The model is built as an engine builds it, with parameters that have shapes but no memory. The names
and shapes of the checkpoint's tensors come from the headers of its files and go through the
model's own loading. The cache specs of the layers go through the planner of the pool.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from vllm.hidden_states.layer_ids import preset_layer_ids
from vllm.model_executor.layers.fused_moe import RoutedLayer
from vllm.model_report.outline import Outline, outline_model
from vllm.utils.boundaries import LayerId
from vllm.utils.mem_utils import format_bytes
from vllm.v1.core.kv_cache_utils import PoolLayout, blocks_per_request, plan_layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class GroupReport:
    """Layers that share a table of blocks."""

    kind: str
    layers: int
    tokens_per_block: int | None
    """None: a block holds one state of each layer, whatever the length."""
    blocks_per_request: int
    """Blocks that the longest request needs."""


@dataclass(frozen=True)
class CheckpointReport:
    """The facts that ``vllm models PATH`` prints."""

    model: str
    architectures: list[str]
    model_impl: str
    """"vllm" for a class of this engine or of a plugin, or "transformers"."""
    model_class: str
    way: str
    """The way in which the requests of a step run."""
    dtype: str
    storage: str
    """Format of the weights in the files."""
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    layer_kinds: dict[str, int]
    """Kind of cache -> number of layers that have it."""
    experts: str | None
    """For mixtures of experts: layers, experts, and experts per token."""
    stored_bytes: int | None
    """Bytes of the tensors in the files; None: the files are not on this machine, or not used."""
    weight_bytes: int
    """Bytes of the parameters in memory; weights that stay packed take less."""
    block_bytes: int
    groups: list[GroupReport]
    token_bytes: int
    """Pool bytes per token of a request; windows stop growing at their length."""
    request_bytes: int
    """Pool bytes for a request of ``max_model_len`` tokens."""
    machine_bytes: int
    """Memory of the device that this process could ever use."""
    layer_presets: dict[str, tuple[LayerId, ...] | None]
    """Names of layers -> ids; None: the model has too few layers."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def to_text(self) -> str:
        """Return the report as text, one fact per line."""
        stored = "not on this machine"
        if self.stored_bytes is not None:
            stored = format_bytes(self.stored_bytes)
        weights = f"{stored} in the files, {format_bytes(self.weight_bytes)} as {self.dtype}"
        kinds = ", ".join(f"{count} x {kind}" for kind, count in self.layer_kinds.items())
        facts = [
            ("model", self.model),
            ("architecture", ", ".join(self.architectures)),
            ("runs", f"{self.model_class} (model_impl={self.model_impl}), {self.way}"),
            ("dtype", f"{self.dtype}, stored as {self.storage}"),
            (
                "sizes",
                f"{self.num_layers} layers, hidden size {self.hidden_size}, vocabulary "
                f"{self.vocab_size}, max_model_len {self.max_model_len}",
            ),
            ("layers keep", kinds),
            ("experts", self.experts or "none"),
            ("weights", weights),
            (
                "pool",
                f"blocks of {format_bytes(self.block_bytes)}; {format_bytes(self.token_bytes)}"
                f" per token, {format_bytes(self.request_bytes)} for the longest request",
            ),
            *((f"  {group.kind}", _describe_group(group)) for group in self.groups),
            ("this machine", format_bytes(self.machine_bytes)),
        ]
        for name, ids in self.layer_presets.items():
            facts.append((f"layers {name}", "too few layers" if ids is None else str(ids)[1:-1]))
        width = max(len(name) for name, _ in facts) + 2
        return "\n".join(f"{name:{width}}{value}" for name, value in facts)


def _describe_group(group: GroupReport) -> str:
    holds = "their states" if group.tokens_per_block is None else f"{group.tokens_per_block} tokens"
    return (
        f"{group.layers} layers, {holds} per block, {group.blocks_per_request} blocks for the "
        "longest request"
    )


def report_checkpoint(vllm_config: VllmConfig) -> CheckpointReport:
    """Report on the checkpoint of ``vllm_config``; raises ValueError if an engine would refuse it.

    The names and shapes of quantised tensors and of the weights of transformers' modules are
    checked only when they are loaded; so is the computation of a module of transformers.
    """
    model_config, platform = vllm_config.model_config, vllm_config.device_config.platform
    outline = outline_model(vllm_config)
    layers = vllm_config.compilation_config.static_forward_context
    specs = {name: layer.get_kv_cache_spec(vllm_config) for name, layer in layers.items()}
    layout = plan_layout(specs, vllm_config.cache_config)
    num_blocks = blocks_per_request(vllm_config, layout.groups)
    growing = [g.kv_cache_spec for g in layout.groups if not g.kv_cache_spec.is_recurrent]
    return CheckpointReport(
        model=model_config.model,
        architectures=model_config.architectures,
        model_impl=outline.model_impl,
        model_class=outline.description,
        way=outline.way,
        dtype=str(model_config.dtype).removeprefix("torch."),
        storage=_storage(vllm_config),
        num_layers=model_config.get_total_num_hidden_layers(),
        hidden_size=model_config.get_hidden_size(),
        vocab_size=model_config.get_vocab_size(),
        max_model_len=model_config.max_model_len,
        layer_kinds=dict(Counter(spec.kind for spec in specs.values())),
        experts=_experts(outline),
        stored_bytes=outline.stored_bytes,
        weight_bytes=sum(parameter.nbytes for parameter in outline.model.parameters()),
        block_bytes=layout.block_bytes,
        groups=_groups(vllm_config, layout),
        token_bytes=sum(layout.block_bytes // spec.tokens_per_block for spec in growing),
        request_bytes=num_blocks * layout.block_bytes,
        machine_bytes=platform.total_memory_bytes(),
        layer_presets=preset_layer_ids(model_config.get_total_num_hidden_layers()),
    )


def _storage(vllm_config: VllmConfig) -> str:
    model_config = vllm_config.model_config
    stored = model_config.quantization_config
    if vllm_config.load_config.load_format == "dummy":
        return "nothing: random weights"
    if stored is not None:
        return str(stored.get("quant_method"))
    storage_format = model_config.quantise_at_load
    return "floating point" + (
        f", quantised to {storage_format} while it loads" if storage_format else ""
    )


def _experts(outline: Outline) -> str | None:
    layers = [module for module in outline.model.modules() if isinstance(module, RoutedLayer)]
    shapes = Counter((layer.num_experts, layer.top_k) for layer in layers)
    parts = [f"{n} layers with {e}, {k} per token" for (e, k), n in shapes.items()]
    return ", ".join(parts) or None


def _groups(vllm_config: VllmConfig, layout: PoolLayout) -> list[GroupReport]:
    """Return the groups; those whose states of one kind were spread over blocks count as one."""
    merged: dict[tuple[str, int | None, int], GroupReport] = {}
    for group in layout.groups:
        spec = group.kv_cache_spec
        tokens = None if spec.is_recurrent else spec.tokens_per_block
        blocks = spec.max_blocks_per_request(vllm_config)
        key = (spec.kind, tokens, 0 if spec.is_recurrent else len(merged))
        known = merged.get(key, GroupReport(spec.kind, 0, tokens, 0))
        layers = known.layers + len(group.layer_names)
        merged[key] = GroupReport(spec.kind, layers, tokens, known.blocks_per_request + blocks)
    return list(merged.values())
