"""The frame of every decoder-only model: embeddings, layers, norm, LM head.

A family defines the layer at each index and the norm at the end; everything else, with the
capture of rows, is here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional

from vllm.config.model_facts import num_decoder_layers
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.language_part import has_others_beside, name_in_language_part
from vllm.model_executor.layers.layer import Layer
from vllm.model_executor.layers.layernorm import LayerNorm, RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.shared_tokens import all_tokens, own_tokens
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.layers.weight_share import Stored
from vllm.model_executor.model_loader.weight_utils import log_skipped
from vllm.model_executor.models.decoder_block import (
    AttentionOptions,
    BlockLayout,
    DecoderBlock,
    GatedMLP,
    PlainMLP,
    SelfAttention,
)
from vllm.model_executor.models.decoder_loop import DecoderLayer, run_decoder_layers
from vllm.model_executor.models.head_tie import HeadTie
from vllm.model_executor.models.interfaces import has_aux_layers
from vllm.model_executor.models.utils import (
    STACKED_GATE_UP,
    STACKED_QKV,
    AutoWeightsLoader,
    CheckpointNames,
    StackedParams,
    WeightPlace,
    layer_kind,
    make_layers,
    maybe_prefix,
    other_bases,
    other_heads,
    require_option,
)
from vllm.model_executor.pipeline import keep_parameters
from vllm.model_executor.utils import is_all_ours, make_parameter
from vllm.ops.packed_linear import PackedWeight
from vllm.sequence import IntermediateTensors
from vllm.utils.pipeline_stage import PipelineStage

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)


class LearnedPositions(Layer):
    """A table with a vector for each position; position 0 has row ``offset``."""

    def __init__(self, num_positions: int, hidden_size: int, offset: int = 0) -> None:
        super().__init__()
        self.offset = offset
        rows = torch.empty(num_positions + offset, hidden_size)
        self.weight = make_parameter(rows)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] -> [tokens, hidden]."""
        return functional.embedding(positions + self.offset, self.weight)


class DecoderModel(Layer):
    """Turns token ids into normed hidden states."""

    stage: PipelineStage | None = None
    """The part of the layers that this process runs; None: all of them."""

    def __init__(
        self,
        config: Any,
        make_layer: Callable[[int, str], nn.Module],
        norm: nn.Module,
        prefix: str,
        *,
        embedding_scale: float = 1.0,
        scales_given_embeddings: bool = False,
        learned_positions: LearnedPositions | None = None,
    ) -> None:
        super().__init__()
        self.lookup_scale = 1.0 if scales_given_embeddings else embedding_scale
        self.input_scale = embedding_scale if scales_given_embeddings else 1.0
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "embed_tokens")
        )
        self.layers = make_layers(
            num_decoder_layers(config), make_layer, maybe_prefix(prefix, "layers")
        )
        self.norm = norm
        self.learned_positions = learned_positions

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] -> [tokens, hidden], a new tensor."""
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        return embedded if self.lookup_scale == 1.0 else embedded.mul_(self.lookup_scale)

    @property
    def layers_read_embeddings(self) -> bool:
        """True if layers get more than the stream: made from the embeddings, at every stage."""
        return type(self).layer_calls is not DecoderModel.layer_calls

    def layer_calls(
        self, input_ids: torch.Tensor | None, hidden_states: torch.Tensor
    ) -> Iterable[DecoderLayer]:
        """Return the calls that run the layers; a subclass may bind more arguments to them.

        input_ids: int64 [tokens]; hidden_states: [tokens, hidden], the input of the first layer.
        """
        return self.layers

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """-> [tokens, hidden]; not normed if the context stops the layers early.

        A pipeline stage takes the stream of the one before it as ``intermediate_tensors``, and
        returns its own for the one after it.
        """
        stage = self.stage
        if stage is None or stage.is_first or self.layers_read_embeddings:
            # The first tensor becomes the residual stream, which layers change in place.
            hidden_states = (
                self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds.clone()
            )
            if self.input_scale != 1.0:
                hidden_states *= self.input_scale
            if self.learned_positions is not None:
                hidden_states += self.learned_positions(positions)
            layers = self.layer_calls(input_ids, hidden_states)
            hidden_states = own_tokens(hidden_states)
        else:
            layers = self.layers
        if stage is None:
            hidden_states, residual = run_decoder_layers(layers, positions, hidden_states)
        else:
            residual = None
            if not stage.is_first:
                hidden_states = intermediate_tensors["hidden_states"]
                residual = intermediate_tensors.tensors.get("residual")
            hidden_states, residual = run_decoder_layers(
                islice(layers, stage.first_layer, stage.end_layer),
                positions,
                hidden_states,
                residual,
                first_layer=stage.first_layer,
                is_last_stage=stage.is_last,
            )
            if not stage.is_last:
                stream = {"hidden_states": hidden_states}
                return IntermediateTensors(
                    stream if residual is None else {**stream, "residual": residual}
                )
        depth = get_forward_context().num_layers_to_run
        if depth is not None and depth <= len(self.layers):
            return all_tokens(hidden_states)
        normed: torch.Tensor
        if residual is None:
            normed = self.norm(hidden_states)
        else:
            normed, _ = self.norm(hidden_states, residual)
        return all_tokens(normed)


class DecoderForCausalLM(Layer):
    """A decoder with an LM head. It is Llama; a family overrides attributes and methods.

    :meth:`make_layer` makes its layers, by default of parts that the methods after it make.
    """

    model: Any
    """A DecoderModel, or another module that a subclass uses instead."""
    supports_row_capture: bool = True
    supports_prompt_embeds: bool = True
    """True if the layers need embeddings only; False: some need token ids, too."""
    scales_given_embeddings: ClassVar[bool] = False
    """True if embeddings of a prompt are scaled as those that are looked up."""
    supports_eagle3: bool = False
    why_no_head: str | None = None
    """The reason why the model computes no logits; None: it does."""
    supported_options: ClassVar[Mapping[str, Any]] = {}
    """The only supported values of options; the config may leave them out."""
    norm_class: ClassVar[type[RMSNorm | LayerNorm]] = RMSNorm
    norm_epsilon: ClassVar[str] = "rms_norm_eps"
    """Name of the config's option."""
    mlp_class: ClassVar[type[GatedMLP | PlainMLP]] = GatedMLP
    mlp_activation: ClassVar[str] = "hidden_act"
    """Name of the config's option."""
    mlp_bias: ClassVar[bool | str] = False
    """True if dense MLPs have biases; a string: the name of the config's option."""
    block_class: ClassVar[type[DecoderBlock]] = DecoderBlock
    model_class: ClassVar[type[DecoderModel]] = DecoderModel
    head_bias: ClassVar[bool] = False
    """True if the LM head has a bias."""
    stacked_params: ClassVar[StackedParams] = {**STACKED_QKV, **STACKED_GATE_UP}
    checkpoint_names: ClassVar[Mapping[str, str]] = {}
    """Parts of names that differ in the checkpoint: own -> the checkpoint's."""
    module_names: ClassVar[Mapping[str, str]] = {}
    """Parts of names that transformers' modules have instead of the checkpoint's: -> these."""
    checkpoint_prefixes: ClassVar[Mapping[str, str]] = {}
    floats_are_transposed: ClassVar[bool] = False
    """True if float weights of linear layers are stored [inputs, outputs]; convert_weight
    transposes them."""
    hooks_without_path: ClassVar[frozenset[str]] = frozenset()
    """Hook points whose module does not return the same in transformers, by their first names."""
    skipped_weights: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.config = config
        self.model = self._init_model(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self._settle_capture()
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            bias=self.head_bias,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        self.head_tie = HeadTie(self, self.ties_head(vllm_config.model_config))
        self.has_other_head = vllm_config.model_config.has_other_head
        self.has_others_beside = has_others_beside(vllm_config.model_config)
        self.logits_processor = self.make_logits_processor(config)

    def _init_model(
        self, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] | None = None
    ) -> nn.Module:
        """Make the model below the head; a subclass may return its own module instead.

        Such a module is called as upstream calls it, ``model(input_ids, positions,
        intermediate_tensors, inputs_embeds)``, and returns streams if it has
        ``aux_hidden_state_layers``. layer_type: a third-party decoder layer, which is refused
        here: :meth:`make_layer` makes layers.
        """
        if layer_type is not None:
            raise ValueError(
                f"{type(self).__name__}._init_model: layer_type={layer_type.__name__} is not "
                "supported; override make_layer(vllm_config, index, prefix)"
            )
        config = vllm_config.model_config.hf_text_config
        require_option(config, is_causal=True, **self.supported_options)
        return self.model_class(
            config,
            lambda index, layer_prefix: self.make_layer(vllm_config, index, layer_prefix),
            self.make_norm(config, config.hidden_size),
            prefix,
            embedding_scale=self.embedding_scale(config, vllm_config.model_config.dtype),
            scales_given_embeddings=self.scales_given_embeddings,
            learned_positions=self.learned_positions(config),
        )

    def _settle_capture(self) -> None:
        """Turn row capture off for a subclass that marks layers itself or contains another module:
        it returns streams instead."""
        marks_layers = type(self).set_aux_hidden_state_layers is not (
            DecoderForCausalLM.set_aux_hidden_state_layers
        )
        if marks_layers or not isinstance(self.model, DecoderModel):
            self.supports_row_capture = False
            self.supports_eagle3 = marks_layers or has_aux_layers(self.model)

    @property
    def layers_read_embeddings(self) -> bool:
        """True if layers of later stages need embeddings, too."""
        return isinstance(self.model, DecoderModel) and self.model.layers_read_embeddings

    def keep_stage(self, stage: PipelineStage) -> None:
        """Keep the weights of one pipeline stage: before there are any.

        The first stage has the embeddings, the last one the norm and the LM head.

        Raises:
            ValueError: another module replaces the decoder, or the stage reads another one's cache.
        """
        decoder = self.model
        if not isinstance(decoder, DecoderModel):
            raise ValueError(f"{type(self).__name__} has modules of other packages")
        own: list[nn.Module] = list(decoder.layers[stage.first_layer : stage.end_layer])
        if stage.is_first or decoder.layers_read_embeddings:
            own.append(decoder.embed_tokens)
        if stage.is_last:
            own += [decoder.norm, self.lm_head]
        divided = (decoder.layers, decoder.embed_tokens, decoder.norm, decoder, self.lm_head)
        others = (*decoder.children(), *self.children())
        keep_parameters(self, [*own, *(child for child in others if child not in divided)])
        decoder.stage = stage

    def why_tokens_are_whole(self) -> str | None:
        """Return why every rank has to have all tokens; None: ranks can share them."""
        decoder = self.model
        if not isinstance(decoder, DecoderModel) or not is_all_ours(self):
            return "it has modules of other packages"
        if decoder.layers_read_embeddings:
            return "its layers read more than the stream"
        others = {type(one).__name__ for one in decoder.layers if not isinstance(one, DecoderBlock)}
        return f"{' and '.join(others)} is no DecoderBlock" if others else None

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Set the streams that a third-party module returns from now on."""
        self.model.aux_hidden_state_layers = layers

    def make_layer(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        """Make the decoder layer at ``index``: ``forward(positions, hidden, residual)``."""
        config = vllm_config.model_config.hf_text_config
        mixers = self.make_mixers(vllm_config, index, prefix)
        attention = mixers.pop("self_attn", None)
        mlp = self.make_mlp(config, index, f"{prefix}.mlp")
        layout = self.block_layout(config, index)
        return self.block_class(config.hidden_size, attention, mlp, layout, recurrent=mixers)

    def block_layout(self, config: Any, index: int) -> BlockLayout:
        """Return the layout of the layer at ``index``: its norms and how branches are added."""
        return BlockLayout(norm=partial(self.make_norm, config))

    def make_mixers(self, vllm_config: VllmConfig, index: int, prefix: str) -> dict[str, nn.Module]:
        """Make the mixers of the layer at ``index`` (attention, recurrent layers), by their names
        in the block."""
        return {"self_attn": self.make_attention(vllm_config, index, f"{prefix}.self_attn")}

    def make_attention(self, vllm_config: VllmConfig, index: int, prefix: str) -> nn.Module:
        """Make the attention of the layer at ``index``: ``forward(positions, x)``."""
        config = vllm_config.model_config.hf_text_config
        options = self.attention_options(config, index)
        return SelfAttention(vllm_config, options, self.block_layout(config, index).norm, prefix)

    def attention_options(self, config: Any, index: int) -> AttentionOptions:
        """Return the options of that attention."""
        return AttentionOptions(bias=config.attention_bias)

    def make_mlp(self, config: Any, index: int, prefix: str) -> nn.Module | None:
        """Make the MLP of the layer at ``index``, or the module that replaces it."""
        return self.dense_mlp(config, prefix)

    def dense_mlp(self, config: Any, prefix: str, width: int | None = None) -> nn.Module:
        """Make an MLP without experts; width: None: the config's ``intermediate_size``."""
        activation, bias = self.mlp_activation, self.mlp_bias
        return self.mlp_class(
            config.hidden_size,
            config.intermediate_size if width is None else width,
            getattr(config, activation),
            option=activation,
            bias=getattr(config, bias) if isinstance(bias, str) else bias,
            prefix=prefix,
        )

    @classmethod
    def make_norm(cls, config: Any, size: int) -> nn.Module:
        """Make a norm of ``size`` elements; the model's last norm is made here too."""
        return cls.norm_class(size, eps=getattr(config, cls.norm_epsilon))

    def embedding_scale(self, config: Any, dtype: torch.dtype) -> float:
        """Return the factor of embeddings before they enter the first layer."""
        return 1.0

    def learned_positions(self, config: Any) -> LearnedPositions | None:
        """Make the table of positions that is added to the embeddings; None: there is none."""
        return None

    @staticmethod
    def ties_head(model_config: ModelConfig) -> bool:
        """Return whether the LM head shares its weight with the embeddings."""
        return model_config.ties_word_embeddings

    def make_logits_processor(self, config: Any) -> LogitsProcessor:
        """Make the module that scales and caps logits."""
        return LogitsProcessor(config.vocab_size)

    def stacked_in_checkpoint(self) -> StackedParams:
        """Return :attr:`stacked_params`; overridden if they depend on the config."""
        return self.stacked_params

    def names_in_checkpoint(self) -> Mapping[str, str]:
        """Return :attr:`checkpoint_names`; overridden if they depend on the config."""
        return self.checkpoint_names

    def published_name(self, name: str) -> str:
        """Return a tensor's name in the family's own checkpoints.

        Other checkpoints may differ: transformers renames tensors when it saves, sometimes too
        many. Adapters and trainers have the names of its modules (:attr:`module_names`).
        """
        for theirs, own in self.module_names.items():
            name = name.replace(theirs, own)
        return name

    def published_path(self, path: str) -> str:
        """Return a module's path as the family's own checkpoints spell it."""
        return CheckpointNames({}, self.names_in_checkpoint(), self.checkpoint_prefixes).spell(path)

    def weights_to_skip(self) -> tuple[str, ...]:
        """Return the prefixes of names in the checkpoint that the model does not use."""
        return self.skipped_weights

    def convert_weight(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Convert a tensor of the checkpoint to the layers' layout; overridden if they differ.

        Raises WeightShapeError (``check_shape``) for a shape that it cannot have.
        """
        return tensor

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] -> [tokens, hidden]."""
        embedded: torch.Tensor = self.model.embed_input_ids(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input_ids, positions: int64 [tokens] of the flat batch -> [tokens, hidden]; stages of a
        pipeline: see ``DecoderModel.forward``."""
        hidden_states: torch.Tensor = self.model(
            input_ids, positions, intermediate_tensors, inputs_embeds
        )
        return hidden_states

    def head_input(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] after the final norm -> the input of the LM head in transformers."""
        return hidden_states

    def why_no_norm(self) -> str | None:
        """Return why there is no final norm; None: there is one, or a third-party module."""
        if isinstance(self.model, DecoderModel) and isinstance(self.model.norm, nn.Identity):
            return "its layers norm the stream themselves, so 'last' is what the head reads"
        return None

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocabulary]."""
        logits: torch.Tensor = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor | PackedWeight]]) -> set[str]:
        """Load the weights strictly, see :class:`AutoWeightsLoader`."""
        # The checkpoint may contain a tied head too.
        names = CheckpointNames({}, self.names_in_checkpoint(), self.checkpoint_prefixes)
        tied = ("lm_head.", names.spell("lm_head.weight")) if self.head_tie.is_tied else ()
        heads: list[Stored] = []
        tables: list[Stored] = []
        skipped_part, skipped = self.make_skipper(), Counter[str]()

        def published() -> Iterator[tuple[str, torch.Tensor | PackedWeight]]:
            for written, tensor in weights:
                if (part := skipped_part(written)) is not None:
                    skipped[part] += 1
                    continue
                name = self._published(written)
                is_head = tied and name.startswith(tied) and name.endswith("weight")
                if is_head:
                    heads.append(tensor)
                elif tied and name == names.spell("model.embed_tokens.weight"):
                    tables.append(tensor)
                yield name, tensor

        loader = self._make_loader(tied, names.spell("lm_head."))
        loaded = loader.load_weights(published())
        log_skipped(skipped)
        if loader.lacks_head:
            self.head_tie.tie()  # its own would take memory
            self.why_no_head = f"the checkpoint has no tensors named {names.spell('lm_head.')}*"
            logger.warning("%s: rows can be extracted, nothing can be generated", self.why_no_head)
        if self.head_tie.follow(heads, tables, loaded):
            loaded.add("lm_head.weight")
        return loaded

    def begin_update(self) -> None:
        """Note that new weights come, in one or several calls of :meth:`load_weights`."""
        self.head_tie.begin_update()

    def _make_loader(
        self, skip_prefixes: tuple[str, ...] = (), head_prefix: str = ""
    ) -> AutoWeightsLoader:
        converts = type(self).convert_weight is not DecoderForCausalLM.convert_weight
        return AutoWeightsLoader(
            self,
            stacked=self.stacked_in_checkpoint(),
            renamed=self.names_in_checkpoint(),
            checkpoint_prefixes=self.checkpoint_prefixes,
            convert=self.convert_weight if converts else None,
            floats_are_transposed=self.floats_are_transposed,
            skip_prefixes=skip_prefixes,
            head_prefix=head_prefix,
            lacks_head=self.has_other_head,
        )

    def weight_finder(self) -> Callable[[str], WeightPlace | None]:
        """Return a function from a tensor's name in a checkpoint to its place; None: it has
        none."""
        loader = self._make_loader()
        return lambda written: loader.find(self._published(written))

    def make_skipper(self) -> Callable[[str], str | None]:
        """Return a function that names the skipped part of the checkpoint that has a tensor."""
        prefixes = (*self.weights_to_skip(), *other_heads(self.has_other_head))
        names = CheckpointNames({}, self.names_in_checkpoint(), self.checkpoint_prefixes)
        bases = names.bases()

        def skipped_part(written: str) -> str | None:
            for name in (written, *other_bases(written, bases)):
                for prefix in prefixes:
                    if name.startswith(prefix):
                        return f"named {prefix}*"
            if self.has_others_beside and name_in_language_part(written) is None:
                return "outside the language model"
            return None

        return skipped_part

    def _published(self, written: str) -> str:
        return self.published_name(self._name_in_own_checkpoint(written))

    def _name_in_own_checkpoint(self, written: str) -> str:
        """Return the name in this class's own checkpoints, for checkpoints that have the language
        model's tensors under another prefix."""
        if not self.has_others_beside:
            return written
        name = name_in_language_part(written) or written
        for own, theirs in self.checkpoint_prefixes.items():
            if name.startswith(own) and (name != written or own == "lm_head."):
                return theirs + name[len(own) :]
        return name


class HybridForCausalLM(DecoderForCausalLM):
    """A decoder with recurrent layers and attention layers."""

    has_inner_state: ClassVar[Literal[True]] = True
    is_hybrid: ClassVar[Literal[True]] = True
    recurrent_name: ClassVar[str]
    """Name of the recurrent layer in its block."""
    layer_kinds: ClassVar[tuple[str, str]] = ("linear_attention", "full_attention")
    """The config's names for recurrent layers and attention layers."""
    layer_kinds_option: ClassVar[str] = "layer_types"
    """Name of the config's list of them."""

    def make_mixers(self, vllm_config: VllmConfig, index: int, prefix: str) -> dict[str, nn.Module]:
        config, kinds = vllm_config.model_config.hf_text_config, self.layer_kinds
        if layer_kind(config, index, kinds, self.layer_kinds_option) == kinds[1]:
            return super().make_mixers(vllm_config, index, prefix)
        name = self.recurrent_name
        return {name: self.make_recurrent(config, index, f"{prefix}.{name}")}

    def make_recurrent(self, config: Any, index: int, prefix: str) -> nn.Module:
        """Make the recurrent layer at ``index``: ``forward(x)``."""
        raise NotImplementedError
