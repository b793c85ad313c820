"""The contenders of a benchmark: the engine, transformers, and a bound for both."""

from __future__ import annotations

import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch

from vllm.bench import peer
from vllm.bench.linear_weights import LinearWeights, load_linear_weights
from vllm.bench.profile import Profile, profile_run
from vllm.platforms.interface import Platform

Prompts = list[list[int]]


@dataclass(frozen=True)
class Workload:
    """The work that every contender does."""

    checkpoint: Path
    vocabulary: int
    layer_ids: tuple[int, ...]
    num_prompts: int
    prompt_len: int
    output_len: int = 1
    """Tokens generated for each prompt. 0: none, and layers above the deepest id do not run."""
    max_num_batched_tokens: int = Platform.default_max_num_batched_tokens
    peer_batch_sizes: tuple[int, ...] = (1, 2, 4)
    """Batch sizes that transformers may choose from."""
    peer_python: Path | None = None
    """Interpreter that has vLLM."""
    storage_root: Path | None = None
    """Folder for the hidden-state files; None: the system's temporary folder."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of ``LLM``."""
    counts_cpu_time: bool = False
    """True if seconds are CPU seconds of the process on all of its cores, not wall-clock time."""
    bound_dtype: torch.dtype | None = None
    """Data type of the bound's products; None: the checkpoint's."""

    def now(self) -> float:
        """Return the seconds of the clock that measures rounds."""
        return time.process_time() if self.counts_cpu_time else time.perf_counter()

    @property
    def num_tokens(self) -> int:
        """Tokens that one round computes."""
        return self.num_prompts * (self.prompt_len + self.num_decode_steps)

    @property
    def max_model_len(self) -> int:
        """The engine's ``max_model_len``."""
        return self.prompt_len + self.output_len + 1

    @property
    def num_decode_steps(self) -> int:
        return max(self.output_len - 1, 0)

    def prompts(self, seed: int) -> Prompts:
        """Return random token ids without the first few, which are often special tokens."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.num_prompts, self.prompt_len)
        prompts: Prompts = torch.randint(8, self.vocabulary, shape, generator=generator).tolist()
        return prompts

    def warm_up_prompts(self) -> Prompts:
        """Return as many prompts as fill one step."""
        return self.prompts(seed=0)[: -(-self.max_num_batched_tokens // self.prompt_len)]


class Round(NamedTuple):
    """One timed run."""

    seconds: float
    bytes_written: int = 0


def find_memory_folder(least_free_bytes: int) -> Path | None:
    """Find a folder in memory with room; writing back to a disk would disturb the next run."""
    folder = Path("/dev/shm")
    has_room = folder.is_dir() and shutil.disk_usage(folder).free >= least_free_bytes
    return folder if has_room else None


class Contender(ABC):
    """One side of the comparison; the constructor loads it, and the first run warms it up."""

    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables with which its process starts."""

    note: str

    @abstractmethod
    def __init__(self, workload: Workload) -> None: ...

    @abstractmethod
    def run(self, prompts: Prompts) -> Round:
        """Process all prompts once; only the work itself is timed."""

    def close(self) -> None:  # noqa: B027
        """Remove files that were left on disk."""


class EngineContender(Contender):
    """``LLM.generate`` with extraction; the time includes writing the files."""

    def __init__(self, workload: Workload) -> None:
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._storage = Path(tempfile.mkdtemp(prefix="benchmark-", dir=workload.storage_root))
        self._workload = workload
        self._sampling = SamplingParams(
            max_tokens=workload.output_len,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        options = self._extraction_options()
        self._extracts = bool(options)
        self.llm = LLM(
            model=str(workload.checkpoint),
            skip_tokenizer_init=True,
            max_model_len=workload.max_model_len,
            max_num_batched_tokens=workload.max_num_batched_tokens,
            max_num_seqs=workload.num_prompts,
            **options,
            **workload.engine_options,
        )
        dtype = str(self.llm.model_config.dtype).removeprefix("torch.")
        self.note = f"{dtype}, chunks of {workload.max_num_batched_tokens} tokens"

    def _extraction_options(self) -> dict[str, Any]:
        hf_config = {"eagle_aux_hidden_state_layer_ids": list(self._workload.layer_ids)}
        return {
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": hf_config},
            },
            "kv_transfer_config": {
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(self._storage)},
            },
        }

    def run(self, prompts: Prompts) -> Round:
        start = self._workload.now()
        self._generate(prompts)
        seconds = self._workload.now() - start
        files = list(self._storage.glob("*.safetensors"))
        num_expected = len(prompts) if self._extracts else 0
        if len(files) != num_expected:
            raise RuntimeError(f"{len(files)} files written instead of {num_expected}")
        bytes_written = sum(file.stat().st_size for file in files)
        self._clear_storage()
        return Round(seconds, bytes_written)

    def profile(self, prompts: Prompts) -> Profile:
        """Run once more with a profile of the time."""
        profile = profile_run(self.llm, lambda: self._generate(prompts))
        self._clear_storage()
        return profile

    def _generate(self, prompts: Prompts) -> None:
        from vllm import TokensPrompt

        requests = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        self.llm.generate(requests, self._sampling, use_tqdm=False)

    def _clear_storage(self) -> None:
        for file in self._storage.iterdir():
            file.unlink()

    def close(self) -> None:
        self.llm.shutdown()
        shutil.rmtree(self._storage, ignore_errors=True)


class PlainContender(EngineContender):
    """The same engine without extraction."""

    def _extraction_options(self) -> dict[str, Any]:
        return {}


class TransformersContender(Contender):
    """transformers with ``output_hidden_states`` and logits of the last position only.

    It tries the batch sizes first and keeps the fastest, then whether it is faster to ask for the
    states of all layers or of those that count. All prompts have the same length, so a batch needs
    no padding. Nothing is written to disk.
    """

    # torch as it is without this package's setting (vllm/platforms/cpu.py).
    environment = MappingProxyType({"THP_MEM_ALLOC_ENABLE": "0"})

    def __init__(self, workload: Workload) -> None:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        self._layer_ids, self._now = workload.layer_ids, workload.now
        self._model = self._load_model(workload.checkpoint).eval()
        sizes = [n for n in workload.peer_batch_sizes if n <= workload.num_prompts]
        trial = workload.prompts(seed=0)[: max(sizes)]
        self._batch_size = sizes[0]
        self._asked: bool | list[int] = True
        self.run(trial)
        if len(sizes) > 1:
            self._batch_size = min(sizes, key=lambda size: self._seconds_with(size, True, trial))
        forms: tuple[bool | list[int], ...] = (True, list(self._layer_ids))
        self._asked = min(
            forms, key=lambda asked: self._seconds_with(self._batch_size, asked, trial)
        )
        layers = "all layers" if self._asked is True else "selected layers"
        self.note = f"batches of {self._batch_size}, {layers}"

    def _load_model(self, checkpoint: Path) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype="auto", attn_implementation="sdpa"
        )

    def _seconds_with(self, batch_size: int, asked: bool | list[int], prompts: Prompts) -> float:
        self._batch_size, self._asked = batch_size, asked
        return self.run(prompts).seconds

    @torch.inference_mode()
    def run(self, prompts: Prompts) -> Round:
        start = self._now()
        for first in range(0, len(prompts), self._batch_size):
            batch = torch.tensor(prompts[first : first + self._batch_size])
            batch = batch.to(self._model.device)
            output = self._model(
                input_ids=batch,
                use_cache=False,
                output_hidden_states=self._asked,
                logits_to_keep=1,
            )
            rows = torch.stack([output.hidden_states[i] for i in self._layer_ids], dim=2)
            del output, rows
        if self._model.device.type != "cpu":
            torch.accelerator.synchronize()
        return Round(self._now() - start)


class PeerContender(Contender):
    """vLLM without extraction, in an interpreter of its own.

    Each round loads the model anew and fills one step first; neither is timed. vLLM keeps its
    defaults, but for sizes. PeerMissing: the interpreter does not have it.
    """

    MOST_SECONDS = 3600.0
    """Seconds that loading and a round may take."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.note = self._measure(()).name

    def run(self, prompts: Prompts) -> Round:
        return Round(self._measure((prompts,)).seconds[-1])

    def _measure(self, rounds: tuple[Prompts, ...]) -> peer.Measured:
        workload = self._workload
        assert workload.peer_python is not None
        options = {
            "max_num_seqs": workload.num_prompts,
            "max_model_len": workload.max_model_len,
            "max_num_batched_tokens": workload.max_num_batched_tokens,
        }
        num_tokens = max(workload.output_len, 1)  # vLLM generates one at least
        prompts = [workload.warm_up_prompts(), *rounds]
        return peer.measure_peer(
            workload.peer_python,
            workload.checkpoint,
            options,
            [peer.Round(each, num_tokens) for each in prompts],
            self.MOST_SECONDS,
        )


class BoundContender(Contender):
    """The matrix products of the layers and the LM head, and nothing else.

    Projections that read the same input are joined, as an engine would join them. Every layer
    has its own weights, so they come from memory as in the model. Weights have the fastest of
    the orders in :data:`Form` on this machine.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        depth = max(workload.layer_ids) if workload.output_len == 0 else None
        weights = load_linear_weights(workload.checkpoint, depth, workload.bound_dtype)
        chunk = torch.randn(workload.max_num_batched_tokens, weights.max_width)
        self._inputs = {
            width: chunk[:, :width].to(weights.head.dtype).contiguous() for width in weights.widths
        }
        self._form = weights.fastest_form(self._inputs)
        self._weights: LinearWeights = weights.in_form(self._form)
        self.note = f"{len(weights.layers)} products, {weights.num_elements / 1e6:,.0f} M weights, "
        self.note += f"{str(weights.head.dtype).removeprefix('torch.')}, {self._form}"

    @torch.inference_mode()
    def run(self, prompts: Prompts) -> Round:
        prompt_steps = self._steps(sum(len(prompt) for prompt in prompts))
        token_steps = self._steps(len(prompts))
        workload = self._workload
        start = workload.now()
        for num_rows in prompt_steps + workload.num_decode_steps * token_steps:
            self._weights.multiply_layers(self._inputs, num_rows)
        for num_rows in workload.output_len * token_steps:
            self._weights.multiply_head(self._inputs, num_rows)
        return Round(workload.now() - start)

    def _steps(self, num_rows: int) -> list[int]:
        """Return the number of rows of each step for ``num_rows`` rows."""
        most = self._workload.max_num_batched_tokens
        return [min(most, num_rows - first) for first in range(0, num_rows, most)]


CONTENDERS: dict[str, type[Contender]] = {
    "extraction": EngineContender,
    "plain": PlainContender,
    "transformers": TransformersContender,
    "vllm": PeerContender,
    "bound": BoundContender,
}
