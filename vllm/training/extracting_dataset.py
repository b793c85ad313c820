"""A torch dataset whose samples an engine extracts while a trainer reads them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import xxhash
from torch.utils.data import IterableDataset, get_worker_info

from vllm.config.identity import value_identity
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import Failure, FailureKind
from vllm.hidden_states.sample import (
    ExtractRequest,
    FailedSample,
    HiddenStatesError,
    HiddenStatesSample,
)
from vllm.logger import init_logger
from vllm.ops.sources import kernels_of
from vllm.training.background_engine import BackgroundEngine, Item
from vllm.training.order import epoch_order
from vllm.training.sample_cache import SampleCache, digest_of
from vllm.transformers_utils.tokenizer import stated_in_full
from vllm.utils.text import brief, check_truth_values, whole_number
from vllm.v1.engine.extraction_settings import ExtractionSettings

if TYPE_CHECKING:
    from vllm.hidden_states.layer_ids import Layers
    from vllm.hidden_states.names import Pooling
    from vllm.sampling_params import SamplingParams
    from vllm.steering import SteeringType

logger = init_logger(__name__)

_STATE_KEYS = ("num_prompts", "prompts", "shuffle", "seed", "rank", "world_size")
_MOST_COMPARED = 16
_CACHE_BYTES = 64 << 30


class ExtractingDataset(IterableDataset[Any]):
    """Yields a :class:`HiddenStatesSample` for each prompt, extracted in another process.

    The engine starts with the first iteration and stays until :meth:`close`, or the end of the
    ``with`` block. It runs ahead of the trainer by ``prefetch_bytes``. Each iteration is an epoch
    over all prompts; ``sample.index`` is the number of the prompt. A DataLoader has to read it
    with ``num_workers=0``.

    Args:
        model: a checkpoint, or an ``AsyncEngineArgs`` with further options of the engine.
        prompts: a sequence of anything that :meth:`vllm.LLM.extract` takes: texts, token ids,
            conversations, or :class:`ExtractRequest` with options of their own.
        layers, positions, dtype, pooling, add_special_tokens, top_logprobs, logprob_temperature,
            sampling_params, hooks, mask, steering: as for :meth:`vllm.LLM.extract`.
        columns: values to attach to the samples, one for each prompt, such as labels.
        transform: is called with each sample, on the engine's side; its results are yielded.
        shuffle: True for another order in each epoch, which ``seed`` and the epoch's number decide.
        rank, world_size: the part of the samples that this process gets. Each rank has an engine,
            and all get the same number: of the epoch's order, up to ``world_size - 1`` samples at
            the end are left out. Needed if torch.distributed runs with several ranks.
        prefetch_bytes: most bytes of samples that wait for the trainer.
        cache: a folder in which samples are stored, so that later epochs and later runs read them.
        cache_bytes: most bytes of the folder, by default 64 GiB; samples that do not fit are
            computed in each epoch.
        on_error: ``"raise"``, or ``"skip"`` to go on with the next sample; the log has the reason.

    ValueError: an argument cannot be used.
    """

    num_skipped: int
    """Samples that failed and were left out."""
    waited_seconds: float
    """Time that the trainer waited for samples, not counting the first of each iteration."""

    def __init__(
        self,
        model: str | AsyncEngineArgs,
        prompts: Sequence[Any],
        layers: Layers | None = None,
        positions: str | Sequence[int] = "all",
        dtype: str | torch.dtype | None = None,
        *,
        pooling: Pooling = "none",
        add_special_tokens: bool = True,
        top_logprobs: int = 0,
        logprob_temperature: float = 1.0,
        sampling_params: SamplingParams | None = None,
        hooks: Sequence[str] | str | None = None,
        mask: str | None = None,
        steering: SteeringType | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
        transform: Callable[[HiddenStatesSample], Any] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        prefetch_bytes: int = 1 << 30,
        cache: str | None = None,
        cache_bytes: int | None = None,
        on_error: Literal["raise", "skip"] = "raise",
    ) -> None:
        super().__init__()
        self._engine_args = AsyncEngineArgs(model=model) if isinstance(model, str) else model
        self._prompts = _checked_prompts(prompts)
        self._settings = ExtractionSettings(
            *(layers, positions, dtype, True, "yield", None, pooling, add_special_tokens),
            *(top_logprobs, logprob_temperature, sampling_params, hooks, mask, steering),
        )
        self._columns = _checked_columns(columns or {}, len(prompts))
        if transform is not None and not callable(transform):
            raise ValueError(f"transform={brief(transform)}: has to be a function of a sample")
        self._transform = transform
        check_truth_values(shuffle=shuffle)
        self._shuffle, self._seed = shuffle, whole_number("seed", seed)
        self._rank, self._world_size = _checked_rank(rank, world_size)
        if on_error not in ("raise", "skip"):
            raise ValueError(f'on_error={on_error!r}: use "raise" or "skip"')
        if cache_bytes is not None and cache is None:
            raise ValueError(f"cache_bytes={cache_bytes!r}: is of use only with cache=FOLDER")
        if cache_bytes is None:
            cache_bytes = _CACHE_BYTES
        if sampling_params is not None:
            _check_one_text(sampling_params)
        if cache is not None and sampling_params is not None:
            raise ValueError("cache: not together with sampling_params; each epoch generates anew")
        self._prefetch_bytes = whole_number("prefetch_bytes", prefetch_bytes, 1)
        self._cache_folder = cache
        self._cache_bytes = whole_number("cache_bytes", cache_bytes, 1)
        self._skips = on_error == "skip"
        self._epoch = 0
        self._next_epoch: int | None = None  # chosen while an iteration is under way
        self._start = 0  # place in the epoch's order with which the next iteration begins
        self._num_read = 0  # places of the epoch's order that were read
        self._is_under_way = False
        self._engine: BackgroundEngine | None = None
        self._cache: SampleCache | None = None
        self._prompts_digest: str | None = None
        self.num_skipped = 0
        self.waited_seconds = 0.0

    def __len__(self) -> int:
        """The number of samples of an epoch of this rank; fewer are yielded if some fail."""
        return len(self._prompts) // self._world_size

    def __enter__(self) -> ExtractingDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine. The next iteration starts another one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, counted from 0, whose order the next iteration has.

        ValueError: it is not a whole number from 0 on.
        """
        epoch = whole_number("set_epoch: epoch", epoch, 0)
        if self._is_under_way:
            self._next_epoch = epoch
        elif epoch != self._epoch:
            self._epoch, self._num_read, self._start = epoch, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the last sample that was yielded, for :meth:`load_state_dict`."""
        return {"epoch": self._epoch, "num_read": self._num_read, **self._own_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on after the last sample of another run.

        ValueError: that run had other samples, or another order. RuntimeError: an iteration is
        under way.
        """
        if self._is_under_way:
            raise RuntimeError("load_state_dict: an iteration is under way; end it first")
        if not isinstance(state, Mapping):
            raise ValueError(f"state_dict={state!r}: has to be what state_dict() returned")
        own = self._own_state()
        for key in _STATE_KEYS:
            if state.get(key) != own[key]:
                raise ValueError(
                    f"state_dict: {key} was {state.get(key)!r}, and is {own[key]!r} now"
                )
        epoch = whole_number("state_dict: epoch", state.get("epoch"), 0)
        num_read = whole_number("state_dict: num_read", state.get("num_read"), 0)
        if num_read > len(self):
            raise ValueError(f"state_dict: num_read={num_read}: has to be at most {len(self)}")
        self._epoch, self._start, self._num_read = epoch, num_read, num_read

    def _own_state(self) -> dict[str, Any]:
        if self._prompts_digest is None:
            self._prompts_digest = _digest_of_some(self._prompts)
        prompts = (len(self._prompts), self._prompts_digest)
        values = (*prompts, self._shuffle, self._seed, self._rank, self._world_size)
        return dict(zip(_STATE_KEYS, values, strict=True))

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise RuntimeError(
                "DataLoader(num_workers=...): ExtractingDataset reads ahead by itself, and each "
                "worker would start an engine; use num_workers=0"
            )
        if self._is_under_way:
            raise RuntimeError("ExtractingDataset: another iteration is under way; end it first")
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        if self._is_under_way:  # another one of several that were made before any began
            raise RuntimeError("ExtractingDataset: another iteration is under way; end it first")
        self._is_under_way = True
        self._num_read, self._start = self._start, 0
        order = self._order()[self._num_read :]
        try:
            if self._engine is not None and self._engine.llm.errored:
                self.close()
            if self._engine is None:
                self._engine = BackgroundEngine(self._engine_args)
                self._cache = None  # the checkpoint may have other weights now
            items = self._engine.iterate(
                lambda: self._samples(order), self._prefetch_bytes, self._add_wait
            )
            with closing(items):  # a caller may keep an error, and with it this frame
                for item in items:
                    self._num_read += 1
                    if not isinstance(item, FailedSample):
                        yield item if self._transform is None else self._transform(item)
                    elif self._skips:
                        self.num_skipped += 1
                        logger.warning("prompt %d is skipped: %s", item.index, item.reason)
                    else:
                        raise HiddenStatesError(item.index, item.failure)
            self._epoch, self._num_read = self._epoch + 1, 0
        finally:
            self._is_under_way = False
            chosen, self._next_epoch = self._next_epoch, None
            if chosen is not None:
                self.set_epoch(chosen)

    def _add_wait(self, seconds: float) -> None:
        self.waited_seconds += seconds

    def _order(self) -> list[int]:
        """Return the numbers of this rank's prompts in the order of the epoch."""
        count = len(self._prompts)
        order: Sequence[int] = range(count)
        if self._shuffle:
            order = epoch_order(count, self._seed, self._epoch)
        even = count - count % self._world_size
        return list(order[self._rank : even : self._world_size])

    async def _samples(self, order: Sequence[int]) -> AsyncGenerator[Item, None]:
        """Yield the samples of these prompts, from the cache or the engine."""
        assert self._engine is not None
        cache = await asyncio.to_thread(self._open_cache, self._engine)
        wanted: dict[int, str] = {}  # digests of requests whose samples are not in the cache

        async def requests() -> AsyncGenerator[Any, None]:
            for index in order:
                request = self._prompt(index)
                stored = None
                if cache is not None and _may_be_stored(request):
                    digest = digest_of(request)
                    stored = await asyncio.to_thread(cache.read, index, digest)
                    if stored is None:
                        wanted[index] = digest
                yield request if stored is None else stored

        async with aclosing(self._engine.llm.extract_with(requests(), self._settings)) as items:
            async for item in items:
                index = order[item.index]
                item = dataclasses.replace(item, index=index)
                if isinstance(item, HiddenStatesSample):
                    if cache is not None and (digest := wanted.pop(index, None)) is not None:
                        await asyncio.to_thread(cache.write, item, digest)
                    columns = {name: values[index] for name, values in self._columns.items()}
                    item = dataclasses.replace(item, columns=columns)
                yield item

    def _prompt(self, index: int) -> Any:
        """Return a prompt. RuntimeError: reading it raised what would end the event loop."""
        try:
            request = self._prompts[index]
        except BaseException as error:
            is_told = isinstance(error, Exception)
            if is_told and not isinstance(error, StopIteration | StopAsyncIteration):
                raise
            raise RuntimeError(f"prompts[{index}] raised {error!r}") from error
        if isinstance(request, ExtractRequest) and request.sampling_params is not None:
            try:
                _check_one_text(request.sampling_params)
            except ValueError as error:
                failure = Failure(FailureKind.BAD_REQUEST, str(error))
                return FailedSample(index, f"prompt {index}", failure)
        return request

    def _runs_as_module(self) -> bool:
        """Tell whether transformers' module computes in the engine's process."""
        from vllm.model_report.outline import outline_model

        config = dataclasses.replace(self._engine_args, data_parallel_size=1).create_engine_config()
        outline_model(config)
        return config.model_config.runs_as_module

    def _open_cache(self, engine: BackgroundEngine) -> SampleCache | None:
        if self._cache_folder is None or self._cache is not None:
            return self._cache
        config = engine.llm.vllm_config
        config.model_config.runs_as_module = self._runs_as_module()
        values = value_identity(config, kernels_of(config.device_config.device_type))
        tokenizer = engine.llm.tokenizer
        text_rules = "" if tokenizer is None else stated_in_full(tokenizer)
        identity = digest_of((values, text_rules, dataclasses.astuple(self._settings)))
        self._cache = SampleCache(self._cache_folder, identity, self._cache_bytes, self._world_size)
        return self._cache


def _digest_of_some(prompts: Sequence[Any]) -> str:
    """Return a digest of the first prompt and of others at even distances; settings of a prompt do
    not count."""

    def plain(value: Any) -> Any:
        if isinstance(value, ExtractRequest):
            return value.prompt
        is_array = isinstance(value, torch.Tensor | np.ndarray)
        return value.tolist() if is_array else type(value).__name__

    count = len(prompts)
    some = [prompts[index] for index in range(0, count, max(1, -(-count // _MOST_COMPARED)))]
    return xxhash.xxh3_128_hexdigest(json.dumps(some, default=plain).encode())


def _check_one_text(params: SamplingParams) -> None:
    if params.n != 1:
        raise ValueError(f"sampling_params: n={params.n}, but n has to be 1 here")


def _may_be_stored(request: object) -> bool:
    """Return False for requests that generate, and those whose adapter's files may change."""
    if not isinstance(request, ExtractRequest):
        return not isinstance(request, FailedSample)
    return request.sampling_params is None and request.lora_request is None


def _checked_prompts(prompts: Sequence[Any]) -> Sequence[Any]:
    """Return the prompts; ValueError: they are one prompt, or have no number."""
    if not isinstance(prompts, str | bytes | Mapping):
        with suppress(TypeError):
            len(prompts)
            return _by_place(prompts)
    raise ValueError(f"prompts={brief(prompts)}: has to be a list of prompts")


def _checked_columns(columns: Mapping[str, Sequence[Any]], count: int) -> dict[str, Sequence[Any]]:
    if not isinstance(columns, Mapping):
        raise ValueError(f"columns={brief(columns)}: has to be a dict, such as {{'label': labels}}")
    for name, values in columns.items():
        if len(values) != count:
            raise ValueError(f"columns[{name!r}]: {len(values)} values for {count} prompts")
    return {name: _by_place(values) for name, values in columns.items()}


def _by_place(values: Sequence[Any]) -> Sequence[Any]:
    """Return what gives the values by their places. A column of pandas gives them by its labels,
    which are others once it was shuffled or filtered."""
    pandas: Any = sys.modules.get("pandas")
    return list(values) if pandas and isinstance(values, pandas.Series) else values


def _checked_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    num_ranks = 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        num_ranks = torch.distributed.get_world_size()
    if world_size is None and num_ranks > 1:
        raise ValueError(
            f"rank, world_size: torch.distributed has {num_ranks} ranks; pass "
            "rank=torch.distributed.get_rank() and world_size=torch.distributed.get_world_size(), "
            "or world_size=1 if only one rank reads (as accelerate does with dispatch_batches)"
        )
    world_size = 1 if world_size is None else world_size
    world_size = whole_number("world_size", world_size, 1)
    rank = 0 if rank is None and world_size == 1 else rank
    with suppress(ValueError):
        rank = whole_number("rank", rank, 0)
    if type(rank) is not int or rank >= world_size:
        raise ValueError(f"rank={rank!r}: has to be from 0 to {world_size - 1} (world_size - 1)")
    return rank, world_size
