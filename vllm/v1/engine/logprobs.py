"""Log-probabilities of one request: rows of numbers become the user's entries."""

from __future__ import annotations

from collections.abc import Callable

from vllm.outputs import Logprob, PromptLogprobs, SampleLogprobs
from vllm.sampling_params import SamplingParams
from vllm.transformers_utils.token_texts import TokenTexts
from vllm.transformers_utils.tokenizer import TokenizerLike
from vllm.v1.outputs import LogprobsLists


class RequestLogprobs:
    """Collects the log-probabilities that a request asked for; None: it asked for none."""

    def __init__(self, params: SamplingParams, tokenizer: TokenizerLike | None) -> None:
        wants_samples = params.logprobs is not None
        self.samples: SampleLogprobs | None = [] if wants_samples else None
        self.cumulative: float | None = 0.0 if wants_samples else None
        self.prompt: PromptLogprobs | None = [None] if params.prompt_logprobs is not None else None
        self._token_text: Callable[[int], str] | None = None
        wants_any = wants_samples or self.prompt is not None
        if wants_any and tokenizer is not None and params.detokenize:
            self._token_text = TokenTexts(tokenizer).text

    def add_samples(self, rows: LogprobsLists | None, num_tokens: int) -> None:
        """Take the rows of the first ``num_tokens`` new tokens."""
        if self.samples is None or num_tokens == 0:
            return
        assert rows is not None, "the engine core sent sampled tokens without their logprobs"
        for row in range(num_tokens):
            self.samples.append(self._entry(rows, row))
            self.cumulative = (self.cumulative or 0.0) + rows.logprobs[row][0]

    def add_prompt(self, rows: LogprobsLists | None) -> None:
        """Take the rows of the next prompt positions."""
        if self.prompt is not None and rows is not None:
            self.prompt.extend(self._entry(rows, row) for row in range(len(rows.ranks)))

    def _entry(self, rows: LogprobsLists, row: int) -> dict[int, Logprob]:
        """Entries of one position: its token (column 0) with its rank, then the likeliest ones."""
        entries: dict[int, Logprob] = {}
        pairs = zip(rows.token_ids[row], rows.logprobs[row], strict=True)
        for column, (token, logprob) in enumerate(pairs):
            text = self._token_text(token) if self._token_text else None
            entries.setdefault(token, Logprob(logprob, column or rows.ranks[row], text))
        return entries
