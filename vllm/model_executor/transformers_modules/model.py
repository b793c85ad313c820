"""The model class that runs a module of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from vllm.config import set_current_vllm_config
from vllm.config.model_facts import config_value
from vllm.distributed.parallel_state import (
    get_pp_group,
    get_tensor_model_parallel_world_size,
    get_world_group,
)
from vllm.forward_context import RowSink
from vllm.logger import init_logger
from vllm.model_executor.hook_points import HookPoint, HookPoints, with_stream
from vllm.model_executor.pipeline import keep_parameters_of
from vllm.model_executor.transformers_modules.boundaries import (
    Boundaries,
    NotServableError,
    drop_encoders,
    failures_refuse,
    find_decoder,
    find_decoder_layers,
    reads_more_than_text,
)
from vllm.model_executor.transformers_modules.cuts import CutEmbedding, cut_modules
from vllm.model_executor.transformers_modules.experts import replace_experts
from vllm.model_executor.transformers_modules.hooks import find_module_points
from vllm.model_executor.transformers_modules.loading import load_causal_lm, wanted_by
from vllm.model_executor.transformers_modules.mlps import replace_mlps
from vllm.model_executor.transformers_modules.one_by_one import OneByOne
from vllm.model_executor.transformers_modules.one_sequence import OneSequence
from vllm.model_executor.transformers_modules.parts import replace_linear_layers, replace_norms
from vllm.model_executor.transformers_modules.positions import follow_lengths
from vllm.model_executor.transformers_modules.references import Reference, reference_prompts
from vllm.model_executor.transformers_modules.rotations import replace_rotations
from vllm.model_executor.transformers_modules.row_by_row import RowByRow
from vllm.model_executor.transformers_modules.sequences import Sequences
from vllm.model_executor.transformers_modules.stages import Division
from vllm.model_executor.transformers_modules.survey import (
    attending_by,
    register_functions,
    set_attention,
)
from vllm.model_executor.transformers_modules.without_cache import WithoutCache
from vllm.sequence import IntermediateTensors
from vllm.utils.boundaries import LayerId
from vllm.utils.pipeline_stage import PipelineStage

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)


Prepared = tuple[Sequences, dict[str, Any]]
"""The object that runs requests in some way, and its layers in the pool, by name."""


class TransformersForCausalLM(nn.Module):
    """A causal model of transformers; :attr:`way` names the way in which requests run."""

    supports_row_capture: ClassVar[Literal[True]] = True
    supports_ranks: ClassVar[Literal[True]] = True
    knows_reference: ClassVar[Literal[True]] = True
    why_weights_stay: str | None = (
        "transformers loaded them when it made its module; make a new engine"
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.vllm_config = vllm_config
        self.stage = _stage_of(vllm_config)
        self.causal_lm: Any = self.load(vllm_config, self.stage).requires_grad_(False).eval()
        self.why_no_head: str | None = vars(self.causal_lm).get("why_no_head")
        self._lacks_head_layers: bool = vars(self.causal_lm).get("lacks_head_layers", False)
        self._reasons: list[str] = []
        self._division: Division | None = None
        self._ways = list(_WAYS)
        register_functions()
        model_config = vllm_config.model_config
        try:
            if reads_more_than_text(self.causal_lm):
                drop_encoders(self.causal_lm)
            num_layers = model_config.get_total_num_hidden_layers()
            layers = find_decoder_layers(self.causal_lm, num_layers)
            self._decoder_path = find_decoder(self.causal_lm, layers)
        except NotServableError as error:
            self._reasons.append(str(error))
            raise self._refusal() from error
        follow_lengths(self.causal_lm, model_config.max_model_len, model_config.longrope_limit)
        replace_linear_layers(self.causal_lm)
        replace_norms(self.causal_lm)
        replace_mlps(self.causal_lm)
        replace_rotations(self.causal_lm)
        replace_experts(self.causal_lm)
        # Layers that read an encoder's output do nothing to a text.
        skipped = config_value(model_config.hf_text_config, ("cross_attention_layers",)) or ()
        self.boundaries = Boundaries(
            layers,
            model_config.get_hidden_size(),
            model_config.dtype,
            num_streams=model_config.get_num_streams(),
            skipped=skipped,
        )
        self.sequences: Sequences
        self._output_class: type
        """Class of the decoder's result."""
        self._references: dict[tuple[int, ...], Reference] = {}
        self._points: list[HookPoint] | None = None
        self._why_no_norm: tuple[str | None] | None = None
        self._takes_embeddings: bool | None = None
        self._cut_embeddings: list[CutEmbedding] = []
        if get_world_group().world_size > 1:
            self._divide()
        self._prepared: dict[str, Prepared] = {}
        if not self.stage.is_whole:
            self._prepare_ways()
        self._choose_way()

    @staticmethod
    def load(vllm_config: VllmConfig, stage: PipelineStage) -> Any:
        """Load the module that runs, with the weights of a stage."""
        return load_causal_lm(vllm_config, stage)

    @torch.inference_mode()
    def _divide(self) -> None:
        """Look at the whole module, for what a part of it cannot tell, and cut it.

        ValueError: it cannot be cut so.
        """
        if self.vllm_config.load_config.load_format == "dummy":
            raise self._not_divided('load_format="dummy" makes whole layers; use a checkpoint')
        model_config = self.vllm_config.model_config
        prompts = reference_prompts(model_config.get_vocab_size(), model_config.max_model_len)
        division = Division(self.causal_lm, self.boundaries, self.stage, self._plain_pass)
        try:
            with failures_refuse():
                references = division.references(prompts)
        except ValueError as error:
            raise self._not_divided(str(error)) from error
        self._references = {
            tuple(p): reference for p, reference in zip(prompts, references, strict=True)
        }
        self._points = self._find_points()
        self._why_no_norm = (self.why_no_norm(),)
        if model_config.enable_prompt_embeds:
            self._takes_embeddings = self._decoder_takes_embeddings()
        self._division = division
        if get_tensor_model_parallel_world_size() > 1:
            try:
                self._cut()
            except ValueError as error:
                raise self._not_divided(str(error)) from error

    def _cut(self) -> None:
        """Keep this rank's part of each layer."""
        if self.vllm_config.parallel_config.enable_expert_parallel:
            raise ValueError("enable_expert_parallel needs a class of this engine; leave it out")
        self._cut_embeddings = cut_modules(self.causal_lm, self.boundaries.layers)
        assert self._points is not None
        with failures_refuse():
            found = {point.names: point.form for point in self._find_points()}
        self._points = [replace(p, is_scattered=found.get(p.names) != p.form) for p in self._points]

    def _not_divided(self, reason: str) -> ValueError:
        parallel = self.vllm_config.parallel_config
        ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        named = [f"tensor_parallel_size={ranks}"] * (ranks > 1)
        named += [f"pipeline_parallel_size={stages}"] * (stages > 1)
        instead = "use 1, or pipeline_parallel_size" if stages == 1 else "use 1"
        return ValueError(
            f"{', '.join(named)}: {self.description} is not divided: {reason}; {instead}"
        )

    def keep_stage(self, stage: PipelineStage) -> None:
        """Keep the weights of this stage, and run it alone from now on."""
        assert self._division is not None and stage == self.stage
        self._division.install()
        kept = self._division.kept_modules(self)
        keep_parameters_of(self, kept)

    @property
    def layers_read_embeddings(self) -> bool:
        """True if this stage needs embeddings."""
        return self._division is None or bool(self._division.reads_embeddings)

    @property
    def decoder(self) -> Any:
        """The module that turns token ids into hidden states."""
        return self.causal_lm.get_submodule(self._decoder_path)

    @property
    def description(self) -> str:
        return f"{type(self.causal_lm).__name__} of transformers"

    @property
    def supports_prompt_embeds(self) -> bool:
        """True if the decoder computes the same from embeddings as from their token ids, and
        takes other embeddings, too."""
        if not self.sequences.takes_embeddings:
            return False
        if "inputs_embeds" not in inspect.signature(self.decoder.forward).parameters:
            return False
        text_config = self.vllm_config.model_config.hf_text_config
        if config_value(text_config, ("hidden_size_per_layer_input",)):
            return False
        if self._takes_embeddings is not None:
            return self._takes_embeddings
        return self._decoder_takes_embeddings()

    def _decoder_takes_embeddings(self) -> bool:
        ids = torch.arange(1, 4, device=next(self.causal_lm.parameters()).device)[None]
        try:
            with torch.inference_mode(), attending_by("eager", self.causal_lm):
                embeds = self.embed_input_ids(ids)
                by_ids = self.decoder(input_ids=ids, use_cache=False)[0]
                by_embeds = self.decoder(inputs_embeds=embeds, use_cache=False)[0]
                self.decoder(inputs_embeds=embeds.flip(2), use_cache=False)  # no token's
        except Exception:
            logger.exception("%s does not take embeddings", self.description)
            return False
        return torch.allclose(by_ids, by_embeds, rtol=1e-3, atol=1e-3)

    def fall_back(self, reason: str) -> None:
        """Take the next way, because the present one is not right. ValueError: there is none."""
        registered = self.vllm_config.compilation_config.static_forward_context
        for name in self.sequences.layer_names:
            del registered[name]
        self._note(reason)
        with set_current_vllm_config(self.vllm_config):
            self._choose_way()

    @property
    def num_ways_given_up(self) -> int:
        """Ways before the present one."""
        return [way for way, _ in _WAYS].index(self.way)

    def _choose_way(self) -> None:
        while self._ways:
            way, make = self._ways.pop(0)
            made = self._prepared.get(way) or self._make(way, make)
            if made is not None:
                self.way = way
                self.sequences, layers = made
                self._output_class = self.sequences.output_class
                self.vllm_config.compilation_config.static_forward_context.update(layers)
                set_attention(self.causal_lm, self.sequences.attends_by)
                logger.info("%s runs %s.", self.description, self.way_in_words)
                return
        raise self._refusal()

    def _make(self, way: str, make: Callable[..., Sequences]) -> Prepared | None:
        """Make what runs requests in that way, with its layers in the pool, by name. None: the
        module cannot; the reason is noted."""
        self.way = way
        registered = self.vllm_config.compilation_config.static_forward_context
        before = set(registered)
        try:
            sequences = make(self.vllm_config, self.causal_lm, self.decoder, self.boundaries)
        except NotServableError as error:
            self._note(str(error))
            sequences = None
        added = [name for name in registered if name not in before]
        layers = {name: registered.pop(name) for name in added}
        return None if sequences is None else (sequences, layers)

    def _prepare_ways(self) -> None:
        """Make all ways that there may be need of, while all layers have values."""
        for way, make in self._ways:
            keeps_states = any(one.keeps_states for one, _ in self._prepared.values())
            if make is WithoutCache and _WAYS[0][0] in self._prepared and not keeps_states:
                continue  # its check takes long passes, and attention goes well in other ways
            reasons = list(self._reasons)
            made = self._make(way, make)
            if made is not None:
                self._prepared[way] = made
            elif self._prepared:
                self._reasons = reasons
        self._ways = [one for one in self._ways if one[0] in self._prepared]

    def _note(self, reason: str) -> None:
        """Note a reason against a way once; similar ways have the same reason."""
        if not any(known.endswith(f": {reason}") for known in self._reasons):
            self._reasons.append(f"{self.way}: {reason}")

    @property
    def way_in_words(self) -> str:
        """The way in which requests of a step run, and the reasons against better ways."""
        if not self._reasons:
            return self.way
        return (
            f"{self.way}. It is slower, and the last bits of rows differ with chunks and prefix "
            f"hits; because: {'; '.join(self._reasons)}"
        )

    def _refusal(self) -> ValueError:
        if self._division is not None:
            return self._not_divided("; ".join(self._reasons))
        return ValueError(f"{self.description} cannot be served ({'; '.join(self._reasons)})")

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [tokens] -> [tokens, hidden]."""
        embedded: torch.Tensor = self.causal_lm.get_input_embeddings()(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """input_ids, positions: int64 [tokens] of the flat batch -> [tokens, hidden]; from a stage
        that is not the last one the stream."""
        stream = None if intermediate_tensors is None else intermediate_tensors["hidden_states"]
        tokens = {"input_ids": input_ids}
        if inputs_embeds is not None:
            tokens = {"inputs_embeds": inputs_embeds}
        with _row_by_row(positions):
            hidden = self.sequences.run(tokens, positions, stream)
        return hidden if self.stage.is_last else IntermediateTensors({"hidden_states": hidden})

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocabulary], by the model's own head and what follows it."""
        with self._decoder_returns(hidden_states[None]), _row_by_row(hidden_states):
            ids = torch.zeros(1, len(hidden_states), dtype=torch.int64, device=hidden_states.device)
            logits: torch.Tensor = self.causal_lm(input_ids=ids, use_cache=False).logits[0]
        return logits

    def head_input(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] of the decoder -> [rows, width] as the LM head reads them. If its first
        layers are not in the checkpoint, these are the decoder's."""
        head = self.causal_lm.get_output_embeddings()
        if head is None or self._lacks_head_layers:
            return hidden_states
        read: list[torch.Tensor] = []

        def stop(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            read.append(args[0] if args else next(iter(named.values())))
            raise _HeadReachedError

        handle = head.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.compute_logits(hidden_states)
        except _HeadReachedError:
            return read[0].reshape(*hidden_states.shape[:-1], read[0].shape[-1])
        finally:
            handle.remove()
        return hidden_states

    @torch.inference_mode()
    def why_no_norm(self) -> str | None:
        """Return why no row can be the state after a final norm: the decoder returns the stream as
        it is, or the head reads another width. None: it can."""
        if self._why_no_norm is not None:
            return self._why_no_norm[0]
        last = _LastStream(self.boundaries.num_layers)
        returned: list[Any] = []
        handle = self.decoder.register_forward_hook(lambda *call: returned.append(call[2]))
        try:
            self._plain_pass([0, 1, 2], last)
        finally:
            handle.remove()
        self._output_class = type(returned[0])  # before the way is chosen, which knows it, too
        hidden = returned[0][0][0]
        width, row = self.head_input(hidden).shape[-1], last.stream.shape[-1]
        if width != row:  # OPT 350M projects what its head reads
            return f"its head reads {width} elements of a token, and a row has {row}"
        if not torch.equal(hidden, last.stream):
            return None
        return "no norm follows its last layer, so 'last' is what comes before the head"

    def why_no_steering(self) -> str | None:
        """Return why vectors cannot be added to the stream; None: they can."""
        if self.boundaries.num_streams > 1:
            return "it has several residual streams"
        return None

    def find_hook_points(self, dtype: torch.dtype) -> HookPoints:
        """Find the modules of decoder layers that return one tensor of a row per token."""
        found = self._find_points() if self._points is None else self._points
        points = with_stream(found, self.vllm_config.model_config)
        return HookPoints(points, lambda: self.boundaries.sink)

    def _find_points(self) -> list[HookPoint]:
        names = {module: name for name, module in self.causal_lm.named_modules()}
        return list(find_module_points(self.boundaries.layers, names, self._run_few_tokens))

    @torch.inference_mode()
    def _run_few_tokens(self, num_tokens: int) -> None:
        self._plain_pass(list(range(num_tokens)), None)

    @contextmanager
    def _decoder_returns(self, hidden_states: torch.Tensor) -> Iterator[None]:
        """Let the module around the decoder run as if the decoder had computed these."""
        parent, _, name = self._decoder_path.rpartition(".")
        modules = self.causal_lm.get_submodule(parent)._modules
        decoder = modules[name]
        output = self._output_class(last_hidden_state=hidden_states)
        modules[name] = _Computed(decoder, output)
        for embedding in self._cut_embeddings:
            embedding.is_muted = True
        try:
            yield
        finally:
            modules[name] = decoder
            for embedding in self._cut_embeddings:
                embedding.is_muted = False

    def make_skipper(self) -> Callable[[str], str | None]:
        """Return a function that names the skipped part of the checkpoint that has a tensor."""
        reads = wanted_by(self.vllm_config.model_config, self.causal_lm)
        return lambda name: None if reads(name) else "of encoders, other heads or further layers"

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Return the parameters' names; transformers loaded them when the module was made."""
        return {name for name, _ in self.named_parameters()}

    @torch.inference_mode()
    def reference(self, token_ids: list[int], sink: RowSink) -> torch.Tensor | None:
        """Run plain transformers: rows of a prompt to ``sink``; -> logits [tokens, vocabulary].

        A stage puts rows of its own layers, and returns None unless it is the last one. A model
        that is cut knows the results of :func:`reference_prompts`, from before.
        """
        if self._division is not None:
            known = self._references[tuple(token_ids)]
            known.put_into(sink)
            return known.logits
        return self._plain_pass(token_ids, sink)

    def reference_stream(self, token_ids: list[int], begin: int, end: int) -> torch.Tensor | None:
        """Return the stream that enters this stage at tokens of a reference, with all before them
        if the way in which requests run needs these; None: it is the first stage."""
        incoming = self._references[tuple(token_ids)].incoming if self._references else None
        if incoming is None:
            return None
        return incoming[0 if self.sequences.reads_all_tokens else begin : end]

    def _plain_pass(
        self, token_ids: list[int], sink: RowSink | None, incoming: torch.Tensor | None = None
    ) -> torch.Tensor:
        device = next(self.causal_lm.parameters()).device
        watched = self.boundaries.watch(sink, None, incoming=incoming)
        with attending_by("eager", self.causal_lm), watched:
            ids = torch.tensor([token_ids], device=device)
            logits: torch.Tensor = self.causal_lm(input_ids=ids, use_cache=False).logits[0]
        return logits


class _HeadReachedError(Exception):
    """Ends a pass at the LM head."""


class _LastStream(RowSink):
    """Keeps the stream after the last layer."""

    def __init__(self, num_layers: int) -> None:
        self.layer_ids = frozenset({num_layers})
        self.stream = torch.empty(0)

    def put(self, source: str, index: LayerId, *values: Any) -> None:
        self.stream = values[0].clone()


class _Computed(nn.Module):
    """Stands in for a decoder that has already computed its hidden states."""

    def __init__(self, decoder: Any, output: Any) -> None:
        super().__init__()
        self._decoder = [decoder]  # not a submodule
        self._output = output
        # The module around it may ask for device and dtype of any parameter.
        self.place = nn.Parameter(output.last_hidden_state[:0], requires_grad=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._decoder[0], name)


def _stage_of(vllm_config: VllmConfig) -> PipelineStage:
    """Return this process's stage; a process without others has all layers."""
    model_config = vllm_config.model_config
    if get_pp_group().world_size > 1:
        return model_config.stage_of(vllm_config.parallel_config)
    num_layers = model_config.get_total_num_hidden_layers()
    return PipelineStage(0, num_layers, num_layers)


def _row_by_row(x: torch.Tensor) -> Any:
    return RowByRow() if x.device.type == "cpu" else nullcontext()


_WAYS: list[tuple[str, Callable[..., Sequences]]] = [
    ("all requests of a step as one sequence", OneSequence),
    ("one request after another", OneByOne),
    ("one request after another, positions given", partial(OneByOne, gives_positions=True)),
    (
        "one request after another, token by token after the first chunk",
        partial(OneByOne, token_by_token=True),
    ),
    (
        "one request after another, all of its tokens again in each step, as nothing is cached",
        WithoutCache,
    ),
]
"""Ways in the order in which they are tried."""
