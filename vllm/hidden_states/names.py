"""Names in options and in files of hidden states. Reading them does not load torch."""

from __future__ import annotations

from typing import Literal, get_args

DatasetFormat = Literal["sharded", "files", "speculators"]
FORMATS: tuple[DatasetFormat, ...] = get_args(DatasetFormat)
"""Formats that HiddenStatesDataset reads."""
Pooling = Literal["none", "mean", "last"]
NUM_GENERATED = "num_generated_tokens"
"""Column of samples that end with tokens of the model."""
REQUEST_OPTIONS = ("top_logprobs", "logprob_temperature", "hooks")
"""Options of ``extract()`` with which requests ask for more than hidden states of their tokens."""
MOST_LOGPROBS = 1024
"""The largest ``top_logprobs``."""
CHECKSUM_KIND = "xxh3_128:"
"""The beginning of every checksum."""
