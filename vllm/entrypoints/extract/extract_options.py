"""ExtractOptions: every option of ``vllm extract`` beside those of the engine."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from vllm.entrypoints.extract.inputs import InputFormat
from vllm.hidden_states.positions import parse_positions
from vllm.hidden_states.records import DatasetFormat
from vllm.hidden_states.sample import Pooling
from vllm.utils.checked import ABOVE_0, FINITE, at_least, at_most, config, refuse_unless
from vllm.utils.options import Group, Option

_INPUT = Group("Input", "What is read, and how it becomes prompts.")
_OUTPUT = Group("Output", "What is kept, and where it goes.")
_DISTRIBUTION = Group(
    "Distribution", "Several engines, on one machine (--data-parallel-size) or many."
)
_CHECKS = Group("Checks", "Before and after.")


@config(frozen=True)
class ExtractOptions:
    """Options of ``vllm extract``.

    Raises ValueError that names the option, the value and what would work.
    """

    input: Annotated[list[str], Option(group=_INPUT)] = field(default_factory=list)
    """Files and folders with the prompts, read in this order: JSONL, JSON, Parquet, Arrow (a
    dataset that save_to_disk wrote, too), text. "-": the standard input, JSONL unless
    input_format says otherwise."""
    input_format: InputFormat = "auto"
    """What the files are. "auto": as their names end. "text": each file is one prompt;
    "lines": each line."""
    messages_column: str | None = None
    """Column with conversations, for the chat template. None: "messages"."""
    prompt_column: str | None = None
    """Column with text. None: "prompt", or "text"."""
    token_ids_column: str | None = None
    """Column with token ids. None: "input_ids", or "token_ids"."""
    mask_column: str | None = None
    """Column with an integer for each token, not 0 where positions=mask wants its row. None:
    "loss_mask", or else the answers of the assistant in a conversation."""
    mask_empty_reasoning: bool = True
    """Count a reasoning block with nothing in it, which templates write into answers without
    reasoning, as part of the answer where positions=mask finds answers in conversations."""
    id_column: str | None = None
    """Column that names the files of format "files". None: the samples' numbers."""
    chat_template: str | None = None
    """Chat template: the path of a file, or the template itself. None: the tokenizer's own."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """What the chat template gets beside the messages."""
    add_generation_prompt: bool = False
    """End conversations with the beginning of an answer."""
    max_samples: Annotated[int, at_least(1)] | None = None
    """Read so many records at most: the first, or those that shuffle_seed draws."""
    shuffle_seed: Annotated[int, at_least(0), at_most(2**32 - 1)] | None = None
    """Put the samples in an order drawn by this seed."""
    max_length: Annotated[int, at_least(1)] | None = None
    """Most tokens of a sample. None: max_model_len."""
    on_long: Literal["truncate", "skip", "error"] = "skip"
    """What becomes of longer ones: their first tokens are taken, they are left out, or the
    command ends before anything runs."""
    on_error: Literal["skip", "fail"] = "skip"
    """What becomes of records that cannot be used: they are left out and listed, or the command
    ends."""
    layers: Annotated[str | None, Option(group=_OUTPUT)] = None
    """Layer ids: numbers from 0 (the embedding) to the number of layers, from the end if
    negative, ranges (0:24:4), "embed", "last", or the layers of a draft model: "eagle3" (as
    "speculators-eagle3"), "specforge-eagle3", "modelopt-eagle3", "dflash", "modelopt-dflash"; with
    commas between."""
    positions: str = "all"
    """Tokens whose rows are kept: "all", "last", "every:K", or "mask"."""
    pooling: Pooling = "none"
    """One row for each sample: the "mean" of those that positions names, formed in float32, or
    the "last" of them. "none": all of them."""
    keep_columns: list[str] = field(default_factory=list)
    """Columns of the input, such as labels, that the samples of the dataset carry."""
    storage_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = "auto"
    """Dtype of the rows. "auto": the model's. "fp8": e4m3 with a scale for each row and layer."""
    output: str | None = None
    """Folder of the dataset. One that an interrupted command left is continued."""
    format: DatasetFormat = "sharded"
    """"sharded": safetensors files with many samples each. "files": one file for each sample.
    "speculators": hs_{i}.safetensors, which speculators trains from."""
    shard_size_gib: Annotated[float, ABOVE_0, FINITE] = 1.0
    """Size of a shard in GiB, at most; one sample is never divided."""
    resume_check: Literal["full", "size"] = "full"
    """How files that are there already are checked: by their checksums, or only by their size."""
    mixed_kernels: bool = False
    """Let machines with other kernels, such as another instruction set, work on one dataset. Rows
    then differ in their last bits by the machine; index.json says which kernels made each unit."""
    distributed: Annotated[Literal["processes", "ray"], Option(group=_DISTRIBUTION)] = "processes"
    """Where the data_parallel_size engines run: in processes of this machine, or on a Ray
    cluster, which has to see the output folder."""
    rank: Annotated[int, at_least(0)] = 0
    """Number of this command among world_size ones, each with its share of the same input; then
    --merge."""
    world_size: Annotated[int, at_least(1)] = 1
    """How many commands share the work."""
    merge: bool = False
    """Make one dataset of what all ranks wrote to the output folder; needs no model."""
    dry_run: Annotated[bool, Option(group=_CHECKS)] = False
    """Read the input, print what would be done and what it would take, and end."""
    check_disk: bool = True
    """Refuse what the free space of the output folder's disk does not hold, before anything is
    computed."""
    verify: Annotated[int, at_least(0)] = 0
    """Compute so many samples, drawn by seed, again with transformers, and compare."""

    def __post_init__(self) -> None:
        self._require("output", self.output, "name the folder of the dataset")
        self._require("rank", self.rank < self.world_size, f"world_size is {self.world_size}")
        if self.merge:
            return
        self._require("input", self.input, "name files, folders, or - for standard input")
        self._require("layers", self.layers, 'name some, for instance "2,12,last"')
        parse_positions(self.positions)
        if self.mask_column is not None:
            self._require("mask_column", self.positions == "mask", "set positions='mask'")
        if self.id_column is not None:
            is_named = self.format == "files"
            self._require("id_column", is_named, "it names the files of format='files'")
        if self.verify:
            later = "after --merge, run the command once more with it, without rank and world_size"
            self._require("verify", self.world_size == 1, later)
            has_rows = self.pooling != "mean"
            self._require("verify", has_rows, "it compares rows of tokens, not means of them")
        if self.distributed == "ray" and self.world_size > 1:
            raise ValueError("distributed='ray' shares the work by itself; use no world_size")
        if self.format == "speculators":
            reason = "format='speculators' trains from "
            self._require("positions", self.positions == "all", f"{reason}all of them")
            self._require("pooling", self.pooling == "none", f"{reason}a row for each token")
            self._require("keep_columns", not self.keep_columns, f"{reason}rows and token ids only")
            is_exact = self.storage_dtype != "fp8"
            self._require("storage_dtype", is_exact, f"{reason}bfloat16, float16 or float32")

    def _require(self, name: str, holds: object, advice: str) -> None:
        if not holds and not getattr(self, name):
            raise ValueError(f"--{name.replace('_', '-')} is missing; {advice}")
        refuse_unless(holds, self, name, advice)
