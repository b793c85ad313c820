"""ExtractOptions: every option of ``vllm extract`` except those of the engine."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from vllm.entrypoints.extract.records import InputFormat
from vllm.hidden_states.names import FORMATS, MOST_LOGPROBS, NUM_GENERATED, Pooling
from vllm.utils.checked import (
    ABOVE_0,
    FINITE,
    FolderPath,
    at_least,
    at_most,
    config,
    refuse_unless,
)
from vllm.utils.options import Group, Option

if TYPE_CHECKING:
    from vllm.transformers_utils.answer_masks import MaskRule

_INPUT = Group("Input", "The records to read, and their conversion to prompts.")
_MASKS = Group("Loss mask", "The tokens of a sample that count in training.")
_WINDOWS = Group("Windows", "Samples of one fixed length, made of many texts.")
_OUTPUT = Group("Output", "The rows to keep, and the dataset that they go to.")
_DISTRIBUTION = Group(
    "Distribution", "Several engines, on one machine (--data-parallel-size) or many."
)
_GENERATION = Group(
    "Generation", "Continue each prompt, and keep the rows of prompt and output (--generate)."
)
_CHECKS = Group("Checks", "Checks before and after the work.")
_OF_LOGPROBS = {"logprob_temperature": 1.0, "logprob_dtype": "float32"}
"""Options that mean nothing without top_logprobs, and their defaults."""

_STREAM_SECONDS = 600.0
_OF_DATASETS = (
    *("output", "format", "append", "merge", "dry_run", "verify", "id_column", "check_disk"),
    *(
        "rank",
        "world_size",
        "distributed",
        "ray_address",
        "mixed_kernels",
        "resume_check",
        "shard_size_gib",
    ),
)
"""Options that belong to a stored dataset."""


@config(frozen=True)
class ExtractOptions:
    """Options of ``vllm extract``.

    Raises ValueError that names the option, the value and what would work.
    """

    input: Annotated[list[str], Option(group=_INPUT)] = field(default_factory=list)
    """Files and folders with the prompts, read in the order of this list. Formats: JSONL, JSON,
    Parquet, Arrow (also a dataset that save_to_disk wrote), text. "-": standard input, read as
    JSONL unless input_format says otherwise."""
    input_format: InputFormat = "auto"
    """Format of the files. "auto": by the endings of their names. "text": each file is one prompt;
    "lines": each line is one."""
    messages_column: str | None = None
    """Column with conversations, for the chat template. Default: "messages" or "conversations"."""
    prompt_column: str | None = None
    """Column with text. Default: "prompt", or "text"."""
    token_ids_column: str | None = None
    """Column with token ids. Default: "input_ids", "token_ids", or "prompt_token_ids"."""
    id_column: str | None = None
    """Column with the names of the files of format "files". Default: the numbers of the samples."""
    chat_template: str | None = None
    """Chat template: path of a file, or the template itself. Default: the tokenizer's template."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template in addition to the messages."""
    add_generation_prompt: bool = False
    """End each conversation with the template's beginning of an answer."""
    add_special_tokens: bool = True
    """Give texts the tokenizer's special tokens, such as BOS; a chat template writes its own."""
    max_samples: Annotated[int, at_least(1)] | None = None
    """Most records to read: the first ones, or those that shuffle_seed selects."""
    shuffle_seed: Annotated[int, at_least(0), at_most(2**32 - 1)] | None = None
    """Seed of a random order of the samples. Default: the order of the input."""
    max_length: Annotated[int, at_least(1)] | None = None
    """Most tokens in a sample. Default: max_model_len."""
    on_long: Literal["truncate", "skip", "error"] = "skip"
    """Treatment of longer samples: keep their first tokens, skip them, or stop with an error before
    anything runs."""
    on_error: Literal["skip", "fail"] = "skip"
    """Treatment of records that cannot be used: skip and list them, or stop with an error."""
    mask: Annotated[str, Option(group=_MASKS)] = "answers"
    """Tokens of a conversation that count: "answers" of the assistant, or its "last-answer". Add
    ",before" for the token before each of them as well, ",no-boilerplate" to leave out empty
    reasoning blocks and headers that the template marks."""
    mask_column: str | None = None
    """Column with an integer for each token, 0 for tokens that do not count; it is used instead of
    mask. Default: "loss_mask", if a record has it."""
    loss_mask: bool = True
    """Store the loss mask beside the rows if a record has a conversation or a column for it."""
    split_turns: bool = False
    """Make a sample of each answer in a conversation: the conversation up to that answer, as the
    template renders it, with a mask of that answer alone."""
    pack: Annotated[Annotated[int, at_least(2)] | None, Option(group=_WINDOWS)] = None
    """Join the texts and cut them into windows of this number of tokens; a window is a sample."""
    pack_separator: str = "eos"
    """Token between two texts in a window: "eos", "bos", "sep", "none", or a token id."""
    pack_bos: bool = False
    """Begin each window with the BOS token."""
    pack_last: Literal["drop", "pad"] = "drop"
    """Treatment of the last window if the texts do not fill it: leave it out, or add padding, which
    the loss mask leaves out."""
    layers: Annotated[str | None, Option(group=_OUTPUT)] = None
    """Layer ids, separated by commas: numbers from 0 (the embedding) to the number of layers,
    negative numbers from the end, ranges (0:24:4), "embed", "last", or the layers of a draft model:
    "eagle3" (the same as "speculators-eagle3"), "specforge-eagle3", "modelopt-eagle3", "dflash",
    "modelopt-dflash". Required unless there are hooks."""
    hooks: str | None = None
    """Hook points inside layers, separated by commas, whose values to store with each row, such as
    "blocks.3.hook_attn_out,model.layers.3.mlp"; vllm models MODEL --hooks lists all."""
    positions: str = "all"
    """Tokens whose rows are kept: "all", "last", "every:K", "mask", or with generate "generated",
    those of the output. The others then count over prompt and output."""
    pooling: Pooling = "none"
    """Store one row for each sample: the "mean" of its rows at these positions, computed in
    float32, or the "last" of them. "none": store all of them."""
    keep_columns: list[str] = field(default_factory=list)
    """Columns of the input, such as labels, to store with the samples."""
    top_logprobs: Annotated[int, at_least(0), at_most(MOST_LOGPROBS)] = 0
    """Store with each row the ids and log-probabilities of so many most likely next tokens, the
    most likely first, and the log-probability of the token that follows. 0: none."""
    logprob_temperature: Annotated[float, at_least(1e-4), at_most(1e4)] = 1.0
    """Divides the logits before the softmax of top_logprobs."""
    logprob_dtype: Literal["float32", "float16"] = "float32"
    """Dtype of the stored top_logprobs; the token that follows always has float32."""
    storage_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = "auto"
    """Dtype of the stored rows. "auto": the model's. "fp8": e4m3 with a scale for each row and
    layer."""
    output: FolderPath | None = None
    """Folder of the dataset. A folder that an interrupted command left is continued."""
    stream: str | None = None
    """Path of a Unix socket: publish the samples there to a trainer that reads them with
    StreamedDataset(PATH), instead of storing them."""
    stream_timeout: Annotated[float, ABOVE_0, FINITE] = _STREAM_SECONDS
    """Seconds to wait for the reader of the stream."""
    append: bool = False
    """Add the records of the input to a finished dataset, as new units after the others. The input
    has only the new records; all other settings have to be the same."""
    format: str = "sharded"
    """"sharded": safetensors files with many samples each. "files": one file per sample. Others are
    layouts of other programs, such as "speculators", "modelopt" and "numpy"; a wrong name lists
    them all. Formats for draft models have default layers."""
    shard_size_gib: Annotated[float, ABOVE_0, FINITE] = 1.0
    """Largest size of a shard in GiB; a sample is never divided."""
    resume_check: Literal["full", "size"] = "full"
    """Check of the files that exist already: by their checksums, or only by their size."""
    mixed_kernels: bool = False
    """Let machines with different kernels, such as another instruction set, work on one dataset.
    Rows then differ in their last bits between machines; index.json names the kernels of each
    unit."""
    generate: Annotated[bool, Option(group=_GENERATION)] = False
    """Let the model continue each text and answer each conversation. Answers at the end of a
    conversation are left out before. Columns: "messages" or "text" with the answer,
    "finish_reason", "num_generated_tokens"; the loss mask marks the generated tokens."""
    max_tokens: Annotated[int, at_least(1)] = 256
    """Most tokens to generate for each prompt. Prompts without room for them are too long."""
    temperature: float = 1.0
    """Divides the logits before sampling. 0: always the most likely token."""
    top_p: float = 1.0
    """Sample from the most likely tokens that together have this probability."""
    top_k: int = 0
    """Sample from so many most likely tokens. 0: from all."""
    n: Annotated[int, at_least(1)] = 1
    """Continuations of each prompt, a sample each, with the column "choice". The seed of each
    follows from --seed, the number of the record and the choice."""
    stop: list[str] = field(default_factory=list)
    """Strings that end the output."""
    distributed: Annotated[Literal["processes", "ray"], Option(group=_DISTRIBUTION)] = "processes"
    """Run the data_parallel_size engines in processes of this machine, or on a Ray cluster, which
    must have access to the output folder."""
    ray_address: str | None = None
    """Address of the Ray cluster, such as "10.0.0.5:6379". Default: that of RAY_ADDRESS, else the
    cluster of which this machine is a node, else a new one on it."""
    rank: Annotated[int, at_least(0)] = 0
    """Number of this command among the world_size commands, each of which does its share of the
    same input. Run --merge afterwards."""
    world_size: Annotated[int, at_least(1)] = 1
    """Number of commands that share the work."""
    merge: bool = False
    """Make one dataset of the units that all ranks wrote to the output folder; needs no model.
    Options of the ranks, such as the input and layers, may stay; they are not looked at."""
    dry_run: Annotated[bool, Option(group=_CHECKS)] = False
    """Read the input, print the plan and the space and memory that it needs, and stop."""
    check_disk: bool = True
    """Refuse to start if the disk of the output folder has too little room for the dataset."""
    verify: Annotated[int, at_least(0)] = 0
    """Number of samples, drawn by seed, to compute again with transformers and compare."""

    def __post_init__(self) -> None:
        if self.stream is None:
            self._require("output", self.output, "name the folder of the dataset")
            is_default = self.stream_timeout == _STREAM_SECONDS
            self._require("stream_timeout", is_default, "it belongs to stream")
        else:
            self._check_stream()
        self._require("rank", self.rank < self.world_size, f"world_size is {self.world_size}")
        if self.merge:
            for name in ("append", "dry_run", "verify"):
                advice = "merge computes nothing and reads no input: run it first, without this"
                refuse_unless(not getattr(self, name), self, name, advice)
            return
        self._require("input", self.input, "name files, folders, or - for standard input")
        self.hook_names  # noqa: B018  raises for a mistake
        self._check_format()
        from vllm.hidden_states.positions import parse_positions

        parse_positions(self.positions)
        self.mask_rule  # noqa: B018  raises for a mistake
        self._check_parts()
        self._check_generation()
        if self.mask_column is not None:
            is_read = self.positions == "mask" or self.stores_loss_mask
            advice = "set positions='mask', or store masks: loss_mask, no pooling"
            self._require("mask_column", is_read, advice)
        for name, default in _OF_LOGPROBS.items():
            is_used = bool(self.top_logprobs) or getattr(self, name) == default
            self._require(name, is_used, "it belongs to top_logprobs, which is 0")
        has_rows = self.pooling != "mean" or not self.top_logprobs
        self._require("top_logprobs", has_rows, "with pooling='mean': they have no mean")
        if self.verify:
            later = "after --merge, run the command once more with it, without rank and world_size"
            self._require("verify", self.world_size == 1, later)
            has_rows = self.pooling != "mean"
            self._require("verify", has_rows, "it compares rows of tokens, not means of them")
        if self.distributed == "ray" and self.world_size > 1:
            raise ValueError("distributed='ray' shares the work by itself; leave out world_size")
        is_used = self.ray_address is None or self.distributed == "ray"
        self._require("ray_address", is_used, "it belongs to distributed='ray'")
        if self.format == "speculators":
            reason = "format='speculators' trains from "
            has_layers = self.layers or not self.hooks  # without both it has its usual ones
            self._require("layers", has_layers, f"{reason}hidden states: name layers")
            self._require("positions", self.positions == "all", f"{reason}all of them")
            self._require("pooling", self.pooling == "none", f"{reason}a row for each token")
            self._require("keep_columns", not self.keep_columns, f"{reason}rows and token ids only")
            is_exact = self.storage_dtype != "fp8"
            self._require("storage_dtype", is_exact, f"{reason}bfloat16, float16 or float32")

    def _check_format(self) -> None:
        from vllm.hidden_states.units import writer_of

        writer = writer_of(self.format)
        has_layers = self.layers or self.hooks or writer.has_default_layers
        self._require("layers", has_layers, 'name layers, for instance "2,12,last"')
        is_named = self.id_column is None or writer.takes_names
        self._require("id_column", is_named, "it names the files of format='files'")
        if self.format not in FORMATS:
            is_read = f"rows of format={self.format!r} are not read back"
            self._require("append", not self.append, is_read)
            self._require("verify", not self.verify, is_read)

    def _check_stream(self) -> None:
        """Raise ValueError for options of a stored dataset."""
        for name in _OF_DATASETS:
            default = ExtractOptions.__dataclass_fields__[name].default
            is_unset = getattr(self, name) == default
            refuse_unless(is_unset, self, name, "with stream nothing is stored")

    def _check_parts(self) -> None:
        """Raise ValueError for options that do not go with parts of records, or need them."""
        if self.split_turns:
            self._require("keep_columns", "turn" not in self.keep_columns, "split_turns makes it")
        if self.pack is None:
            for name, default in (("separator", "eos"), ("bos", False), ("last", "drop")):
                is_default = getattr(self, f"pack_{name}") == default
                self._require(f"pack_{name}", is_default, "it needs pack, the length of windows")
        else:
            of_records = "a window has texts of several records, which its column texts names"
            self._require("keep_columns", not self.keep_columns, of_records)
            self._require("id_column", self.id_column is None, of_records)
            self._require("max_length", self.max_length is None, "pack is the length of samples")
            self._require("on_long", self.on_long == "skip", "pack divides long texts")
        if self.pack_last == "pad":
            is_told = self.positions == "mask" or self.stores_loss_mask
            self._require("pack_last", is_told, "the loss mask tells padding: store it")
        if self.format == "speculators":
            its_names = "format='speculators' has one file for each record"
            self._require("split_turns", not self.split_turns, its_names)
            self._require("pack", self.pack is None, its_names)

    @property
    def mask_rule(self) -> MaskRule:
        """The rule that masks of conversations are made by."""
        from vllm.transformers_utils.answer_masks import parse_mask_rule

        rule = parse_mask_rule(self.mask)
        return rule._replace(last_only=True) if self.split_turns else rule

    def _check_generation(self) -> None:
        from vllm.entrypoints.extract.generation import COLUMNS, SAMPLING, sampling_of

        defaults = {one.name: one for one in dataclasses.fields(self)}
        if not self.generate:
            for name in SAMPLING:
                is_unset = getattr(self, name) == (defaults[name].default if name != "stop" else [])
                refuse_unless(is_unset, self, name, "it needs generate")
            is_possible = self.positions != "generated"
            refuse_unless(is_possible, self, "positions", "nothing is generated: use generate")
            is_free = NUM_GENERATED not in self.keep_columns
            advice = f"{NUM_GENERATED} tells how many tokens of a sample generate made: rename it"
            refuse_unless(is_free, self, "keep_columns", advice)
            return
        sampling_of(self.sampling)  # raises ValueError
        is_marked = "the mask marks the generated tokens; use positions='generated'"
        taken = [name for name in self.keep_columns if name in COLUMNS]
        for name, fits, advice in (
            ("mask", self.mask == "answers", is_marked),
            ("mask_column", self.mask_column is None, is_marked),
            ("positions", self.positions != "mask", is_marked),
            ("on_long", self.on_long != "truncate", "a prompt that is cut has no answer"),
            ("keep_columns", not taken, f"{taken} are columns of generated samples"),
            ("split_turns", not self.split_turns, "a conversation ends with its generated answer"),
            ("pack", self.pack is None, "windows are not continued"),
            ("format", self.format != "speculators", "its trainer has its own texts"),
        ):
            refuse_unless(fits, self, name, f"with generate, {advice}")

    @property
    def sampling(self) -> dict[str, Any]:
        """The options that choose the tokens to generate."""
        from vllm.entrypoints.extract.generation import SAMPLING

        return {name: getattr(self, name) for name in SAMPLING}

    @property
    def request_options(self) -> dict[str, Any]:
        """Options for more than hidden states of a token; empty if only those are stored."""
        names = ("top_logprobs", *_OF_LOGPROBS) if self.top_logprobs else ()
        options = {name: getattr(self, name) for name in names}
        return options | ({"hooks": list(self.hook_names)} if self.hooks else {})

    @property
    def hook_names(self) -> tuple[str, ...]:
        """The names in ``hooks``, each once."""
        from vllm.v1.rows.fields.activations import checked_hooks

        if self.hooks is None:
            return ()
        return checked_hooks([name.strip() for name in self.hooks.split(",")])

    @property
    def stores_loss_mask(self) -> bool:
        """True if masks that are known are stored beside rows; speculators has its own."""
        is_redundant = self.positions == "mask" or self.format == "speculators"
        return self.loss_mask and self.pooling == "none" and not is_redundant

    def _require(self, name: str, holds: object, advice: str) -> None:
        if not holds and not getattr(self, name):
            raise ValueError(f"--{name.replace('_', '-')} is missing; {advice}")
        refuse_unless(holds, self, name, advice)
