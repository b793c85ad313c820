"""LLM: the engine inside a Python program."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypeAlias, TypeVar, Unpack, overload

from vllm.engine.arg_utils import EngineArgs
from vllm.hidden_states.layer_ids import Layers
from vllm.hidden_states.names import Pooling
from vllm.hidden_states.sample import FailedSample, HiddenStatesSample
from vllm.inputs import PromptType, as_prompt_list
from vllm.lora.request import LoRARequest
from vllm.outputs import ClassificationRequestOutput, EmbeddingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.steering import SteeringType
from vllm.transformers_utils.chat_template import (
    ChatMessage,
    ContentFormat,
    as_conversations,
    load_chat_template,
    render_chat,
)
from vllm.transformers_utils.pooling_config import VectorPooling
from vllm.transformers_utils.tokenizer import TokenizerLike
from vllm.utils.progress import Bar
from vllm.utils.text import brief, check_truth_values
from vllm.v1.engine.extraction import ExtractionFeed
from vllm.v1.engine.extraction_settings import ExtractionSettings, OnError
from vllm.v1.engine.input_processor import ProcessedInput
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.pooling import (
    Pooled,
    PoolingOptions,
    PoolingTask,
    PromptOptions,
    stacked,
)
from vllm.v1.engine.shared_engine import Call, SharedEngine
from vllm.v1.engine.worker_calls import WorkerCalls

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
InitT = TypeVar("InitT", bound=Callable[..., None])
ParamsType: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
AdapterType: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None
ProgressBar: TypeAlias = bool | Callable[..., Any]
Positions: TypeAlias = str | Sequence[int]


def _with_engine_options(init: InitT) -> InitT:
    """Give ``help()`` and ``inspect`` all options of an engine instead of ``**kwargs``."""
    shown = dict(inspect.signature(init).parameters)
    kind = shown.pop("kwargs").kind.KEYWORD_ONLY
    for option in EngineArgs.options():
        parameter = inspect.Parameter(option.name, kind, default=option.default())
        shown.setdefault(option.name, parameter.replace(annotation=option.hint))
    vars(init)["__signature__"] = inspect.Signature(list(shown.values()), return_annotation=None)
    return init


class LLM(WorkerCalls):
    """A model with its engine, in this process.

    Args:
        model: a local folder or a hub id.
        chat_template: template for conversations: the path of a file, or the template itself.
        **kwargs: any other option of :class:`vllm.EngineArgs`, such as
            ``max_model_len``, ``speculative_config`` and ``kv_transfer_config``.

    Raises:
        ValueError: an option is unknown or cannot work; names the option and what would work.

    The engine is freed by :meth:`shutdown`, at the end of a ``with`` block, or with the
    object.
    """

    @_with_engine_options
    def __init__(
        self,
        model: str,
        *,
        chat_template: str | None = None,
        hf_overrides: dict[str, Any] | Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._chat_template = load_chat_template(chat_template)
        kwargs["hf_overrides"] = {} if hf_overrides is None else hf_overrides
        engine_args = EngineArgs.from_kwargs(model=model, **kwargs)
        self.llm_engine = LLMEngine.from_engine_args(engine_args)
        self.model_config = self.llm_engine.model_config
        self._request_numbers = itertools.count()
        self._engine = SharedEngine(self.llm_engine)

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: ParamsType = None,
        *,
        use_tqdm: ProgressBar = True,
        lora_request: AdapterType = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their end; returns one output per prompt, in their order.

        Args:
            prompts: text, token ids, a dict with either, or a list of these.
            sampling_params: one for all prompts, one for each prompt, or None for the model's
                defaults.
            use_tqdm: whether to show a progress bar, or a callable to make it instead of ``tqdm``.
            lora_request: adapter for all prompts, or a list with one or None for each prompt.
            priority: one for each prompt.

        Raises:
            ValueError: a prompt or its settings are wrong; names the prompt's index. In this
                case no prompt has run.

        An interrupt (Ctrl-C) drops all prompts of the call, with their files; the engine can
        continue.
        """
        return self._run(as_prompt_list(prompts), sampling_params, use_tqdm, priority, lora_request)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: ParamsType = None,
        use_tqdm: ProgressBar = True,
        lora_request: AdapterType = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: :meth:`generate` for the rendered prompts."""
        tokenizer, own_template = self.get_tokenizer(), load_chat_template(chat_template)
        prompts: list[PromptType] = [
            render_chat(
                tokenizer,
                conversation,
                chat_template=own_template or self._chat_template,
                content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in as_conversations(messages)
        ]
        return self._run(prompts, sampling_params, use_tqdm, None, lora_request)

    @overload
    def extract(
        self,
        prompts: Any,
        layers: Layers | None = ...,
        positions: Positions = ...,
        dtype: str | torch.dtype | None = ...,
        *,
        ordered: bool = ...,
        on_error: Literal["raise"] = ...,
        max_in_flight: int | None = ...,
        pooling: Pooling = ...,
        add_special_tokens: bool = ...,
        top_logprobs: int = ...,
        logprob_temperature: float = ...,
        sampling_params: SamplingParams | None = ...,
        hooks: Sequence[str] | str | None = ...,
        mask: str | None = ...,
        steering: SteeringType | None = ...,
        lora_request: LoRARequest | None = ...,
        use_tqdm: ProgressBar = ...,
    ) -> Iterator[HiddenStatesSample]: ...

    @overload
    def extract(
        self,
        prompts: Any,
        layers: Layers | None = ...,
        positions: Positions = ...,
        dtype: str | torch.dtype | None = ...,
        *,
        ordered: bool = ...,
        on_error: Literal["yield"],
        max_in_flight: int | None = ...,
        pooling: Pooling = ...,
        add_special_tokens: bool = ...,
        top_logprobs: int = ...,
        logprob_temperature: float = ...,
        sampling_params: SamplingParams | None = ...,
        hooks: Sequence[str] | str | None = ...,
        mask: str | None = ...,
        steering: SteeringType | None = ...,
        lora_request: LoRARequest | None = ...,
        use_tqdm: ProgressBar = ...,
    ) -> Iterator[HiddenStatesSample | FailedSample]: ...

    def extract(
        self,
        prompts: Any,
        layers: Layers | None = None,
        positions: Positions = "all",
        dtype: str | torch.dtype | None = None,
        *,
        ordered: bool = True,
        on_error: OnError = "raise",
        max_in_flight: int | None = None,
        pooling: Pooling = "none",
        add_special_tokens: bool = True,
        top_logprobs: int = 0,
        logprob_temperature: float = 1.0,
        sampling_params: SamplingParams | None = None,
        hooks: Sequence[str] | str | None = None,
        mask: str | None = None,
        steering: SteeringType | None = None,
        lora_request: LoRARequest | None = None,
        use_tqdm: ProgressBar = False,
    ) -> Iterator[HiddenStatesSample | FailedSample]:
        """Yield the hidden states of prompts, one sample per prompt, as they are computed.

        The iterator drives the engine: it computes only while the caller (or another thread with
        its own call) waits for the next sample, and a bounded number of prompts is in flight at
        any time. Layers above the deepest requested one, and tokens after the last requested
        position, are not computed.

        Args:
            prompts: an iterable of prompts (as for :meth:`generate`), of conversations (lists
                of messages, or dicts with ``messages`` and ``tools``) for the chat template,
                or of :class:`vllm.hidden_states.ExtractRequest` with their own layers and
                positions; it is read as the engine needs prompts.
            layers: such as ``5``, ``[2, 12, -1]`` or ``"0:24:4,last"`` (``resolve_layer_ids``).
            positions: ``"all"``, ``"last"``, ``"every:K"``, ``"mask"``, ``"generated"``, or
                positions.
            dtype: dtype of the rows: ``"auto"`` (the model's), ``"float32"``, ``"bfloat16"``,
                ``"float16"``, or ``"fp8"`` with a scale for each row and layer.
            ordered: yield samples in the order of the prompts. False: yield them as they finish,
                with ``sample.index`` to identify them; then a long prompt does not delay others.
                In order, samples after it wait in memory and count for ``max_in_flight``.
            on_error: ``"yield"`` yields a ``FailedSample`` for a prompt that cannot be served or
                that failed.
            max_in_flight: most prompts in flight; by default ``max_num_seqs``.
            pooling: reduce the rows of a prompt to one: their ``"mean"``, computed in float32, or
                the ``"last"`` of them. ``"none"``: keep all of them.
            add_special_tokens: give texts the tokenizer's special tokens, such as BOS.
            top_logprobs: keep the ids and log-probabilities of so many most likely next tokens with
                each row, and the log-probability of the token that follows; up to 1,024. -1: keep
                ``sample.logprobs`` of the whole vocabulary.
            logprob_temperature: divides the logits before their softmax.
            sampling_params: generate after each prompt; the rows are those of prompt and output,
                ``sample.output`` has the text. ``n`` continuations give ``n`` samples in a row.
            hooks: places inside layers whose values to keep with each row, such as
                ``"blocks.3.hook_attn_out"`` or ``"model.layers.3.mlp"``; ``vllm models MODEL
                --hooks`` lists them. ``sample.activations`` has them by name. With hooks, layers
                may be left out.
            mask: rule of the loss mask of conversations: ``"answers"`` or ``"last-answer"``, with
                ``",before"`` and ``",no-boilerplate"`` behind it.
            steering: :class:`vllm.SteeringVector`, or a list of them, that are added to the stream.
            lora_request: adapter of the model for all prompts (``enable_lora``).
            use_tqdm: as for :meth:`generate`.

        Raises:
            ValueError: a prompt or its settings are wrong; names the prompt's index.
            HiddenStatesError: the rows of a prompt are wrong (not finite, all zero).

        An iterator that is closed or dropped aborts the prompts in flight.
        """
        settings = ExtractionSettings(
            *(layers, positions, dtype, ordered, on_error, max_in_flight, pooling),
            *(add_special_tokens, top_logprobs, logprob_temperature, sampling_params, hooks),
            *(mask, steering, lora_request),
        )
        feed = self._feed(prompts, settings)
        return self._extract(feed, _Progress(feed.num_prompts, use_tqdm))

    def _feed(self, prompts: Any, settings: ExtractionSettings) -> ExtractionFeed:
        config, processor = self.llm_engine.vllm_config, self.llm_engine.input_processor
        return ExtractionFeed(config, processor, prompts, settings, self._chat_template)

    def _extract(
        self, feed: ExtractionFeed, progress: _Progress
    ) -> Iterator[HiddenStatesSample | FailedSample]:
        call = Call()
        try:
            while not feed.is_done:
                while (sample := feed.pop()) is not None:
                    yield sample
                self._submit_prompts(feed, call)
                if feed.pending_ids:
                    for output in self._engine.wait(call):
                        progress.add(output)
                        feed.take(output)
        finally:
            progress.close()
            self._engine.close(call)

    def _submit_prompts(self, feed: ExtractionFeed, call: Call) -> None:
        """Submit as many prompts as there is room for."""
        requests = []
        while feed.has_room:
            prepared = feed.prepare_next(str(next(self._request_numbers)))
            processed = feed.accept(prepared) if prepared is not None else None
            if processed is not None:
                requests.append(processed)
        if not requests:
            return
        for request, error in zip(requests, self._engine.submit(call, requests), strict=True):
            if error is not None:
                feed.refuse(request.external_id, error)

    def encode(
        self,
        prompts: Any,
        pooling_task: PoolingTask = "embed",
        *,
        pooling: VectorPooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        use_activation: bool | None = None,
        use_tqdm: ProgressBar = False,
        **options: Unpack[PromptOptions],
    ) -> list[Pooled]:
        """Reduce prompts to tensors, ``output.outputs.data``: one per prompt, in their order.

        Args:
            prompts: as for :meth:`extract`.
            pooling_task: ``"embed"``, ``"classify"``: see :meth:`embed` and :meth:`classify`;
                ``"token_embed"``, ``"token_classify"``: the same of each token.
            pooling, normalize, dimensions: see :meth:`embed`.
            use_activation: False: raw scores; see :meth:`classify`.
            use_tqdm: as for :meth:`generate`.
            options: ``truncate_prompt_tokens``, ``truncation_side``, ``add_special_tokens`` and
                ``lora_request``.

        Raises:
            ValueError: the checkpoint cannot serve the task, or a prompt is wrong.
            HiddenStatesError: the states of a prompt are wrong (not finite, all zero).
        """
        task = (pooling_task, pooling, normalize, dimensions, use_activation)
        return self._encode(prompts, PoolingOptions(*task, **options), use_tqdm)

    @overload
    def embed(
        self,
        prompts: Any,
        pooling: VectorPooling | None = ...,
        normalize: bool | None = ...,
        dimensions: int | None = ...,
        *,
        as_tensor: Literal[False] = ...,
        use_tqdm: ProgressBar = ...,
        **options: Unpack[PromptOptions],
    ) -> list[EmbeddingRequestOutput]: ...

    @overload
    def embed(
        self,
        prompts: Any,
        pooling: VectorPooling | None = ...,
        normalize: bool | None = ...,
        dimensions: int | None = ...,
        *,
        as_tensor: Literal[True],
        use_tqdm: ProgressBar = ...,
        **options: Unpack[PromptOptions],
    ) -> torch.Tensor: ...

    def embed(
        self,
        prompts: Any,
        pooling: VectorPooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        *,
        as_tensor: bool = False,
        use_tqdm: ProgressBar = False,
        **options: Unpack[PromptOptions],
    ) -> list[EmbeddingRequestOutput] | torch.Tensor:
        """Return a vector of each prompt: the pooled state after the final norm, in float32.

        Args:
            prompts: as for :meth:`extract`.
            pooling: ``"last"``: the state of the last token; ``"mean"``: the mean over all tokens.
                Default: what the checkpoint says (modules.json), else ``"last"``.
            normalize: give vectors the length 1. Default: what the checkpoint says, else True.
            dimensions: keep only so many elements, before normalising, if config.json says that
                the model was trained for this.
            as_tensor: return one tensor [prompts, hidden] instead of a list of outputs.
            use_tqdm: as for :meth:`generate`.
            options: as for :meth:`encode`.
        """
        check_truth_values(as_tensor=as_tensor)
        settings = PoolingOptions("embed", pooling, normalize, dimensions, **options)
        results = self._encode(prompts, settings, use_tqdm)
        if not as_tensor:
            return [EmbeddingRequestOutput.of(result) for result in results]
        return stacked(results, dimensions or self.model_config.get_hidden_size())

    def classify(
        self,
        prompts: Any,
        *,
        use_activation: bool | None = None,
        use_tqdm: ProgressBar = False,
        **options: Unpack[PromptOptions],
    ) -> list[ClassificationRequestOutput]:
        """Return the classes of each prompt, by the head of ``*ForSequenceClassification``.

        ``outputs.probs`` has a probability for each label (softmax; sigmoid for
        ``multi_label_classification``), or the raw score of a head with one label or of a
        regression. ``use_activation=False``: always raw scores.
        """
        settings = PoolingOptions("classify", use_activation=use_activation, **options)
        labels = self.llm_engine.pooler.head.labels
        results = self._encode(prompts, settings, use_tqdm)
        return [ClassificationRequestOutput.of(result, labels) for result in results]

    def reward(
        self, prompts: Any, *, use_tqdm: ProgressBar = False, **options: Unpack[PromptOptions]
    ) -> list[Pooled]:
        """Return the raw scores of each prompt, ``outputs.data`` float32 [labels]: the reward of
        ``*ForSequenceClassification``, or the value of its last token by TRL's value head."""
        settings = PoolingOptions("classify", use_activation=False, **options)
        return self._encode(prompts, settings, use_tqdm)

    def _encode(self, prompts: Any, options: PoolingOptions, use_tqdm: ProgressBar) -> list[Pooled]:
        call = self.llm_engine.pooler.call(options)
        feed = self._feed(prompts, call.settings)
        return [
            call.output(one) for one in self._extract(feed, _Progress(feed.num_prompts, use_tqdm))
        ]

    def get_tokenizer(self) -> TokenizerLike:
        """Return the transformers tokenizer of the model."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the settings in the model's generation_config.json."""
        return SamplingParams.from_optional(**self.model_config.get_diff_sampling_param())

    def shutdown(self) -> None:
        """Free the engine: threads, memory, files. It may be called again.

        Calls in progress on other threads end with a RuntimeError.
        """
        self._engine.shutdown()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an LLM cannot be copied or pickled: make one in the process that uses it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _run(
        self,
        prompts: list[PromptType],
        sampling_params: ParamsType,
        use_tqdm: ProgressBar,
        priority: Sequence[int] | None,
        lora_request: AdapterType,
    ) -> list[RequestOutput]:
        requests = self._check_all(prompts, sampling_params, priority, lora_request)
        call = Call()
        try:
            for index, error in enumerate(self._engine.submit(call, requests)):
                if error is not None:
                    raise ValueError(f"prompt {index}: {error}") from error
            return self._collect(call, requests, use_tqdm)
        finally:
            self._engine.close(call)

    def _check_all(
        self,
        prompts: list[PromptType],
        sampling_params: ParamsType,
        priority: Sequence[int] | None,
        lora_request: AdapterType,
    ) -> list[ProcessedInput]:
        """Make a request of every prompt, without submitting any."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        all_params = _one_per_prompt("sampling_params", sampling_params, len(prompts))
        if not isinstance(priority, Iterable | None):
            raise ValueError(f"priority={brief(priority)}: has to be a list, a number per prompt")
        priorities = _one_per_prompt(
            "priority", 0 if priority is None else list(priority), len(prompts)
        )
        adapters = _one_per_prompt("lora_request", lora_request, len(prompts))
        requests = []
        for index, prompt in enumerate(prompts):
            number, params = str(next(self._request_numbers)), all_params[index]
            try:
                request = self.llm_engine.input_processor.process(
                    number,
                    prompt,
                    params,
                    priority=priorities[index],
                    lora_request=adapters[index],
                )
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
            request.request.sampling_params.output_kind = RequestOutputKind.FINAL_ONLY
            requests.append(request)
        return requests

    def _collect(
        self, call: Call, requests: list[ProcessedInput], use_tqdm: ProgressBar
    ) -> list[RequestOutput]:
        """Step until every request has its output."""
        outputs: dict[str, RequestOutput] = {}
        with closing(_Progress(len(requests), use_tqdm)) as progress:
            while len(outputs) < len(requests):
                for output in self._engine.wait(call):
                    progress.add(output)
                    outputs[output.request_id] = output
        return [outputs[item.external_id] for item in requests]


def _one_per_prompt(name: str, values: T | Sequence[T], num_prompts: int) -> Sequence[T]:
    """Return a value for each prompt, from a list of them or one for all."""
    if not isinstance(values, Sequence):
        return [values] * num_prompts
    if len(values) != num_prompts:
        raise ValueError(f"{name} has {len(values)} entries for {num_prompts} prompts")
    return values


class _Progress:
    """The progress bar of one call, with tokens per second."""

    def __init__(self, num_requests: int | None, use_tqdm: ProgressBar) -> None:
        if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
            raise ValueError(
                f"use_tqdm={brief(use_tqdm)}: has to be True, False or a callable that takes the "
                "arguments of tqdm and makes a bar"
            )
        make_bar = use_tqdm if callable(use_tqdm) else Bar
        self._bar: Any = None
        if use_tqdm:
            self._bar = make_bar(
                total=num_requests, desc="Processed prompts", unit="prompt", dynamic_ncols=True
            )
        self._start_seconds = time.monotonic()
        self._num_input_tokens = 0
        self._num_output_tokens = 0

    def add(self, output: RequestOutput) -> None:
        """Count an output that has ended."""
        if self._bar is None or not output.finished:
            return
        self._num_input_tokens += len(output.prompt_token_ids or ())
        self._num_output_tokens += sum(len(one.token_ids) for one in output.outputs)
        seconds = max(time.monotonic() - self._start_seconds, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._num_input_tokens / seconds:.1f} tokens/s, "
            f"output: {self._num_output_tokens / seconds:.1f} tokens/s",
            refresh=False,
        )
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
