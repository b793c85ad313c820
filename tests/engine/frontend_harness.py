"""Small tokenizers, a stand-in for the config, and an engine core that follows a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from vllm.config import LoadConfig, LoRAConfig, ParallelConfig, SchedulerConfig
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.outputs import LogprobsLists

TEXTS = ["hello world, hello there", "stop here and stop there", "12 34 the end"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im|>assistant: {% endif %}"
)


def byte_level_tokenizer(**settings: Any) -> Any:
    """Byte-level BPE, as Qwen and Llama 3 have it: 256 bytes, a few merges, two specials."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|end|>", "<|im|>"],
        show_progress=False,
    )
    core.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|end|>",
        additional_special_tokens=["<|im|>"],
        chat_template=CHAT_TEMPLATE,
        **settings,
    )


def byte_fallback_tokenizer() -> Any:
    """As Llama 2 has it: words that start with a mark for the space, bytes for the rest."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁hello", "▁world", "▁", "a", "b", "c"]
    core = Tokenizer(
        models.BPE(
            {word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"
        )
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", unk_token="<unk>")


def make_config(extracts: bool = False, **changes: Any) -> Any:
    """The part of a VllmConfig that the front end reads."""
    model = {
        "model": "nowhere",
        "tokenizer": "nowhere",
        "tokenizer_mode": "auto",
        "tokenizer_revision": None,
        "revision": None,
        "hf_token": None,
        "trust_remote_code": False,
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "max_logprobs": 20,
        "get_vocab_size": lambda: 320,
        "get_eos_token_ids": lambda: (310,),
        "get_diff_sampling_param": lambda: {"temperature": 0.25, "max_tokens": 7},
    }
    speculative = SimpleNamespace(method="extract_hidden_states") if extracts else None
    return SimpleNamespace(
        model_config=SimpleNamespace(**model | changes),
        load_config=LoadConfig(load_format="dummy"),
        lora_config=LoRAConfig(),
        speculative_config=speculative,
        scheduler_config=SchedulerConfig(),
        parallel_config=ParallelConfig(),
    )


Script = Callable[[EngineCoreRequest], list[int]]


class FakeCore:
    """Gives each request the tokens of a script, one a step; later requests go first.

    A request ends with its script, with ``max_tokens``, or when it is told to finish; its
    last output is held for one step, as for a file that is being written.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.running: dict[str, tuple[EngineCoreRequest, list[int]]] = {}
        self.held: list[EngineCoreOutput] = []
        self.seen: list[EngineCoreRequest] = []
        self.aborted: list[str] = []
        self.num_steps = 0
        self.num_shutdowns = 0
        self.interrupt_at_step: int | None = None
        self.refuse_id_prefix: str | None = None

    def add_request(self, request: EngineCoreRequest) -> None:
        if self.refuse_id_prefix and request.request_id.startswith(self.refuse_id_prefix):
            raise ValueError("it can never fit the pool")
        self.seen.append(request)
        self.running[request.request_id] = (request, list(self.script(request)))

    def abort_requests(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.aborted.append(request_id)
            self.running.pop(request_id, None)

    def finish_requests(self, stops: Mapping[str, str]) -> None:
        for request_id, stop in stops.items():
            del self.running[request_id]
            self.held.append(self._final(request_id, [], FinishReason.STOP, stop))

    def has_unfinished_requests(self) -> bool:
        return bool(self.running or self.held)

    def step(self) -> EngineCoreOutputs:
        self.num_steps += 1
        if self.num_steps == self.interrupt_at_step:
            raise KeyboardInterrupt
        outputs, self.held = self.held, []
        for request_id, (request, tokens) in reversed(list(self.running.items())):
            new = [tokens.pop(0)] if tokens else []
            if tokens:
                outputs.append(
                    EngineCoreOutput(
                        request_id=request_id, new_token_ids=new, new_logprobs=rows_of(new)
                    )
                )
                continue
            del self.running[request_id]
            is_stop = bool(new) and new[0] in request.eos_token_ids
            reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
            self.held.append(self._final(request_id, new, reason, None))
        return EngineCoreOutputs(outputs=outputs)

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        return not reset_connector

    def shutdown(self) -> None:
        self.num_shutdowns += 1

    def _final(
        self, request_id: str, tokens: list[int], reason: FinishReason, stop: str | None
    ) -> EngineCoreOutput:
        return EngineCoreOutput(
            request_id=request_id,
            new_token_ids=tokens,
            new_logprobs=rows_of(tokens),
            finish_reason=reason,
            stop_reason=stop,
            kv_transfer_params={"hidden_states_path": f"/files/{request_id}.safetensors"},
            num_cached_tokens=3,
        )


def rows_of(token_ids: list[int]) -> LogprobsLists:
    """Each token with logprob -0.5 and rank 2, beside the most likely token 65."""
    return LogprobsLists(
        token_ids=[[token, 65] for token in token_ids],
        logprobs=[[-0.5, -0.25] for _ in token_ids],
        ranks=[2 for _ in token_ids],
    )
