"""Targets of this engine on one GPU, row by row: the figure, the target, and whether it is met.

Models have published shapes and random weights, made on the device: no checkpoint is needed.
Everything but vLLM runs in this process, one model after another; what is compared takes turns.
A missed target is printed and does not change the exit status; a row that cannot be measured does.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import torch

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.bench.contenders import (
    EngineContender,
    PlainContender,
    Prompts,
    TransformersContender,
    Workload,
    find_memory_folder,
)
from vllm.bench.peer import PeerMissing, Round, measure_peer
from vllm.model_executor.layers.linear import LinearBase
from vllm.v1.core.kv_cache_utils import blocks_per_request
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec

GIB = 2**30
PEER_SECONDS = 300.0
"""For vLLM to start, to compile what it wants and to be measured, once for each row."""
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3.5-0.8B": (
        "qwen3_5_text",
        {
            "architectures": ["Qwen3_5ForCausalLM"],
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen3.5-9B": (
        "qwen3_5_text",
        {"architectures": ["Qwen3_5ForCausalLM"], "max_position_embeddings": 262_144},
    ),
    "Llama-3.1-8B": (
        "llama",
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 128_256,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
}
"""Name -> transformers' model type, and where its config differs from transformers' defaults."""
TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TINY_HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@dataclass(frozen=True)
class Row:
    """One figure. ``target`` empty: there is none."""

    name: str
    work: str
    measured: str
    target: str
    is_met: bool
    note: str
    details: dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """The device, folders and size of a run; makes the models of the rows."""

    device: str
    is_tiny: bool
    rounds: int
    storage: Path | None
    folder: Path
    """For configs and small checkpoints."""
    peer: Path | None = None
    """Interpreter of an environment that has vLLM."""

    def size(self, real: int, tiny: int) -> int:
        """``real``, or ``tiny`` where only the code is tried."""
        return tiny if self.is_tiny else real

    def checkpoint(self, shape: str, **changes: Any) -> Path:
        """A folder with a config.json and nothing else."""
        from transformers import AutoConfig

        model_type, settings = SHAPES[shape]
        tiny = {**TINY, **(TINY_HYBRID if "Qwen" in shape else {})} if self.is_tiny else {}
        config = AutoConfig.for_model(model_type, **{**settings, **tiny, **changes})
        folder = Path(tempfile.mkdtemp(prefix=f"{shape}-", dir=self.folder))
        config.save_pretrained(folder)
        return folder

    def workload(self, shape: str, num_prompts: int, prompt_len: int, num_ids: int) -> Workload:
        """Layers spread evenly, the last boundary among them; one output token."""
        checkpoint = self.checkpoint(shape)
        config = json.loads((checkpoint / "config.json").read_text())
        depth = config["num_hidden_layers"]
        return Workload(
            checkpoint=checkpoint,
            vocabulary=config["vocab_size"],
            layer_ids=tuple(depth * (n + 1) // num_ids for n in range(num_ids)),
            num_prompts=num_prompts,
            prompt_len=prompt_len,
            max_num_batched_tokens=self.size(16_384, 128),
            peer_batch_sizes=(1, 4),
            storage_root=self.storage,
            engine_options=self.options(enforce_eager=True),
        )

    def options(self, **more: Any) -> dict[str, Any]:
        """Arguments of ``LLM``."""
        pool_bytes = self.size(16 * GIB, 2**24)
        common = {"device": self.device, "dtype": "bfloat16", "load_format": "dummy"}
        return {**common, "kv_cache_memory_bytes": pool_bytes, **more}

    def settle(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object], times: int) -> float:
        """Median time of ``run`` on the device, after one more to warm up."""
        taken = []
        for _ in range(times + 1):
            self.settle()
            start = time.perf_counter()
            run()
            self.settle()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])

    def matrix_rate(self) -> float:
        """FLOP/s of one large bfloat16 product."""
        n = self.size(8192, 256)
        a, b = torch.randn(2, n, n, device=self.device, dtype=torch.bfloat16)
        return 2 * n**3 / self.seconds(lambda: torch.mm(a, b), 30)

    def copy_rate(self) -> float:
        """Bytes read and written a second by a copy on the device."""
        num_bytes = self.size(4 * GIB, 2**20)
        source = torch.ones(num_bytes // 8, device=self.device, dtype=torch.int64)
        target = torch.empty_like(source)
        return 2 * num_bytes / self.seconds(lambda: target.copy_(source), 10)


def over_vllm(
    bench: Bench,
    name: str,
    work: str,
    workload: Workload,
    rounds: Sequence[Round],
    ratio: Callable[[list[float]], float],
) -> Row:
    """``ratio``: how much faster this engine was, from vLLM's seconds for the rounds.

    vLLM keeps its defaults, but for sizes. What it cannot do is told and fails nothing here.
    """
    options = {
        "dtype": "bfloat16",
        "load_format": "dummy",
        "max_num_seqs": workload.num_prompts,
        "max_model_len": workload.prompt_len + workload.output_len + 1,
        "max_num_batched_tokens": workload.max_num_batched_tokens,
        **({"kv_cache_memory_bytes": 2**24} if bench.is_tiny else {}),
    }
    work = f"{work}, speed over vLLM"
    try:
        if bench.peer is None:
            raise PeerMissing("name the interpreter that has it: --peer-python")
        give_memory_back()
        peer = measure_peer(
            bench.peer, workload.checkpoint, options, rounds, PEER_SECONDS, stand_in=bench.is_tiny
        )
    except PeerMissing as missing:
        return Row(name, work, "not there", "", True, str(missing), {})
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        return Row(name, work, "failed", "", True, str(error).splitlines()[-1], {})
    details = {"peer": peer.name, "seconds": peer.seconds}
    return Row(name, work, f"{ratio(peer.seconds):.2f}", "", True, peer.name, details)


class OnDevice(TransformersContender):
    """transformers with random weights of the same shape on the same device."""

    def __init__(self, workload: Workload) -> None:
        self._device = workload.engine_options["device"]
        super().__init__(workload)

    def _load_model(self, checkpoint: Path) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(checkpoint)
        with torch.device(self._device):
            return AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="sdpa"
            )


@contextmanager
def models_freed() -> Iterator[None]:
    """Free at the end of the block what it made."""
    try:
        yield
    finally:
        give_memory_back()


def give_memory_back() -> None:
    """Free what nothing refers to; the allocator of the device keeps nothing, either."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def runner_of(llm: LLM) -> Any:
    core: Any = llm.llm_engine.engine_core
    return core.executor.worker.model_runner


def take_turns(workload: Workload, rounds: int) -> tuple[list[float], list[float], int]:
    """Seconds of extraction and of plain prefill, round by round; elements of the products."""
    ours: list[float] = []
    plain: list[float] = []
    with ExitStack() as stack:
        extraction = stack.enter_context(closing(EngineContender(workload)))
        prefill = stack.enter_context(closing(PlainContender(workload)))
        modules = runner_of(prefill.llm).model.modules()
        num_elements = sum(m.weight.numel() for m in modules if isinstance(m, LinearBase))
        pairs = [(extraction, ours), (prefill, plain)]
        for number in range(rounds + 1):
            prompts = workload.prompts(number)
            for contender, seconds in pairs if number % 2 else reversed(pairs):
                seconds.append(contender.run(prompts).seconds)
    return ours[1:], plain[1:], num_elements


def measure_prefill(
    bench: Bench, shape: str, share: float, over_transformers: float | None
) -> Iterator[Row]:
    """64 x 2,048 tokens: against the matrix products, plain prefill, and transformers."""
    workload = bench.workload(shape, bench.size(64, 6), bench.size(2048, 50), num_ids=4)
    work = f"{shape}, {workload.num_prompts} x {workload.prompt_len}"
    with models_freed():
        ours, plain, num_elements = take_turns(workload, bench.rounds)
    seconds, rate = statistics.median(ours), bench.matrix_rate()
    share_reached = 2 * num_elements * workload.num_tokens / seconds / rate
    yield Row(
        *(shape, f"{work}: share of the matrix rate", f"{share_reached:.3f}", f">= {share}"),
        is_met=share_reached >= share,
        note=f"{workload.num_tokens / seconds:,.0f} tokens/s; rate {rate / 1e12:,.0f} TFLOP/s",
        details={"seconds": ours, "matrix_flops_per_second": rate},
    )
    yield against_plain(shape, work, ours, plain)
    rounds = [Round(workload.prompts(n), workload.output_len) for n in range(bench.rounds + 1)]
    yield over_vllm(
        *(bench, shape, f"{work}: plain prefill", workload, rounds),
        lambda seconds: statistics.median(seconds[1:]) / statistics.median(plain),
    )
    few = dataclasses.replace(workload, num_prompts=bench.size(8, 4))
    with models_freed(), closing(OnDevice(few)) as peer:
        taken = [peer.run(few.prompts(n)).seconds for n in range(3)][1:]
        note = f"{few.num_prompts} prompts in {peer.note}, rows stay on the device"
    ratio = min(taken) / few.num_tokens * workload.num_tokens / seconds
    target = "" if over_transformers is None else f">= {over_transformers:g}"
    yield Row(
        *(shape, f"{work}: speed over transformers", f"{ratio:.2f}", target),
        is_met=ratio >= (over_transformers or 0),
        note=note,
        details={"seconds": taken},
    )


def against_plain(name: str, work: str, ours: list[float], plain: list[float]) -> Row:
    ratio = statistics.median(p / o for o, p in zip(ours, plain, strict=True))
    return Row(
        *(name, f"{work}: speed over plain prefill", f"{ratio:.3f}", ">= 0.98"),
        is_met=ratio >= 0.98,
        note="",
        details={"seconds": ours, "plain_seconds": plain},
    )


def measure_long_prompts(bench: Bench) -> Iterator[Row]:
    """8,192-token prompts, 6 layers."""
    shape = "Qwen3.5-9B"
    workload = bench.workload(shape, bench.size(16, 3), bench.size(8192, 150), num_ids=6)
    with models_freed():
        ours, plain, _ = take_turns(workload, bench.rounds)
    work = f"{shape}, {workload.num_prompts} x {workload.prompt_len}, 6 layers"
    yield against_plain("8k", work, ours, plain)


@contextmanager
def host_growth() -> Iterator[list[int]]:
    """Fills the list with the bytes by which this process grows, at most, inside the block."""
    process, over, growth = psutil.Process(), Event(), [0]
    before = process.memory_info().rss

    def watch() -> None:
        while not over.wait(0.02):
            growth[0] = max(growth[0], process.memory_info().rss - before)

    thread = Thread(target=watch)
    thread.start()
    try:
        yield growth
    finally:
        over.set()
        thread.join()


def measure_one_long(bench: Bench) -> Iterator[Row]:
    """1 x 131,072 tokens, with all the memory that is left as the pool."""
    shape = "Qwen3.5-9B"
    workload = bench.workload(shape, 1, bench.size(131_072, 700), num_ids=4)
    # Prefix caching would fill what is free with recurrent states.
    options = {**workload.engine_options, "enable_prefix_caching": False}
    if not bench.is_tiny:
        options["kv_cache_memory_bytes"] = None
    workload = dataclasses.replace(workload, engine_options=options)
    most_used = 0
    with models_freed(), closing(EngineContender(workload)) as contender:
        core: Any = contender.llm.llm_engine.engine_core
        planned = blocks_per_request(core.vllm_config, core.kv_cache_config.kv_cache_groups)
        block_bytes, pool = core.kv_cache_config.block_bytes, core.scheduler.kv_cache_manager.pool
        schedule = core.scheduler.schedule

        def counting() -> Any:
            nonlocal most_used
            scheduled = schedule()
            most_used = max(most_used, pool.num_blocks - 1 - pool.num_free_blocks)
            return scheduled

        contender.run([workload.prompts(0)[0][: bench.size(20_000, 100)]])
        core.scheduler.schedule = counting
        with host_growth() as growth:
            done = contender.run(workload.prompts(1))
        size = core.kv_cache_config.size_bytes
    work, speed = f"{shape}, 1 x {workload.prompt_len}", workload.prompt_len / done.seconds
    note = f"pool {size / GIB:.1f} GiB, file {done.bytes_written / GIB:.1f} GiB"
    yield Row("131k", f"{work}: tokens/s", f"{speed:,.0f}", "", True, note, {"pool_bytes": size})
    used, plan = most_used * block_bytes / GIB, planned * block_bytes / GIB
    is_met, target = most_used <= planned, f"<= {plan:.3g} as planned"
    yield Row("131k", f"{work}: GiB of the pool", f"{used:.3g}", target, is_met, "", {})
    grown = growth[0] / GIB
    work = f"{work}: GiB by which the process grew"
    yield Row("131k", work, f"{grown:.2f}", "<= 2", grown <= 2, "", {})


def measure_decode(bench: Bench) -> Iterator[Row]:
    """Batch 64: what a step has to read and write, against the speed of a copy."""
    # Tiny steps are short: enough of them that a pause of the machine does not outweigh them.
    shape, batch, steps = "Qwen3.5-9B", bench.size(64, 4), bench.size(64, 200)
    base = bench.workload(shape, batch, bench.size(128, 10), num_ids=1)
    workload = dataclasses.replace(base, output_len=steps + 8, engine_options=bench.options())
    with models_freed(), closing(PlainContender(workload)) as contender:
        llm = contender.llm

        def seconds(num_tokens: int, seed: int) -> float:
            params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True,
                                    detokenize=False)  # fmt: skip
            prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in workload.prompts(seed)]
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - start

        seconds(8, 0)
        taken = [(seconds(steps + 8, 2 * n), seconds(8, 2 * n + 1))
                 for n in range(1, bench.rounds + 1)]  # fmt: skip
        num_bytes = step_bytes(llm, batch, workload.prompt_len + steps // 2)
    step, rate = median_step_seconds(taken, steps), bench.copy_rate()
    share = sum(num_bytes.values()) / step / rate
    note = ", ".join(f"{what} {n / 1e9:.1f} GB" for what, n in num_bytes.items())
    yield Row(
        *("decode", f"{shape}, batch {batch}: share of the bandwidth", f"{share:.3f}", ">= 0.6"),
        is_met=share >= 0.6,
        note=f"{step * 1e3:.2f} ms a step: {note}; copy {rate / 1e12:.2f} TB/s",
        details={"seconds": taken, "bytes": num_bytes, "copy_bytes_per_second": rate},
    )
    rounds = [Round(workload.prompts(0), 8)]
    for n in range(1, bench.rounds + 1):
        rounds += [Round(workload.prompts(2 * n), steps + 8), Round(workload.prompts(2 * n + 1), 8)]

    def step_ratio(peer: list[float]) -> float:
        pairs = zip(peer[1::2], peer[2::2], strict=True)
        return median_step_seconds(pairs, steps) / step

    work = f"{shape}, batch {batch}: decoding"
    yield over_vllm(bench, "decode", work, workload, rounds, step_ratio)


def median_step_seconds(pairs: Iterable[tuple[float, float]], num_steps: int) -> float:
    """Seconds of a step, from those of runs of which the first has ``num_steps`` steps more.

    Raises:
        RuntimeError: the longer runs took no more time, so other work outweighs the steps.
    """
    more_seconds = statistics.median(long - short for long, short in pairs)
    if more_seconds <= 0:
        raise RuntimeError(
            f"{num_steps} more steps took {more_seconds:.3f} s: other work on this machine "
            "outweighs them; run it again on an idle one"
        )
    return more_seconds / num_steps


def step_bytes(llm: LLM, batch: int, num_tokens: int) -> dict[str, int]:
    """Bytes that a decode step of requests of ``num_tokens`` tokens has to move."""
    runner = runner_of(llm)
    model = runner.model
    weights = sum(m.weight.nbytes for m in model.modules() if isinstance(m, LinearBase))
    specs = runner.get_kv_cache_spec().values()
    states = sum(
        torch.Size(shape).numel() * dtype.itemsize
        for spec in specs
        if isinstance(spec, MambaSpec)
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    )
    keys = sum(
        2 * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
        for spec in specs
        if isinstance(spec, AttentionSpec)
    )
    return {
        "weights": weights + model.lm_head.weight.nbytes,
        "states": 2 * batch * states,
        "keys and values": batch * num_tokens * keys,
    }


def measure_cuts(bench: Bench) -> Iterator[Row]:
    """Rows and tokens with other cuts of the pool, bit by bit."""
    for shape, option, values in (
        ("Qwen3.5-9B", "attn_pack_size", (None, 1, 2)),
        ("Llama-3.1-8B", "block_size", (None, 32, 128)),
    ):
        checkpoint = bench.checkpoint(shape, num_hidden_layers=8, vocab_size=300)
        workload = Workload(checkpoint, 300, (), 4, bench.size(1500, 60))
        results = []
        for value in values:
            options = bench.options(max_model_len=2048, max_num_seqs=4, skip_tokenizer_init=True)
            options[option] = value
            with models_freed(), LLM(str(checkpoint), **options) as llm:
                results.append(rows_and_tokens(llm, workload.prompts(1)))
        same = [tokens == results[0][1] and all(map(torch.equal, rows, results[0][0]))
                for rows, tokens in results[1:]]  # fmt: skip
        found, work = "identical" if all(same) else "different", f"{shape}, 8 layers: {option}"
        yield Row("cuts", work, found, "identical", all(same), f"{values}", {})


def rows_and_tokens(llm: LLM, prompts: Prompts) -> tuple[list[torch.Tensor], list[Any]]:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    samples: list[Any] = list(llm.extract(prompts, ":", ordered=True))
    outputs = llm.generate(inputs, params, use_tqdm=False)
    return [s.hidden_states for s in samples], [o.outputs[0].token_ids for o in outputs]


def measure_exactness(bench: Bench) -> Iterator[Row]:
    """bfloat16 against a float32 run of the same weights, beside transformers in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for shape in ("Qwen3.5-0.8B", "Llama-3.1-8B"):
        depth = 8
        checkpoint = bench.checkpoint(shape, num_hidden_layers=depth, vocab_size=300)
        (prompt,) = Workload(checkpoint, 300, (), 1, bench.size(1000, 70)).prompts(2)
        config = AutoConfig.from_pretrained(checkpoint)
        with models_freed(), torch.inference_mode(), torch.device(bench.device):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
            model.save_pretrained(checkpoint)
            theirs = streams(model, prompt, depth)
            exact = streams(model.float(), prompt, depth)
            del model
        options = bench.options(load_format="auto", skip_tokenizer_init=True, enforce_eager=True)
        with models_freed(), LLM(str(checkpoint), max_model_len=2048, **options) as llm:
            (sample,) = llm.extract([prompt], list(range(1, depth)))
        assert not isinstance(sample, Exception)
        mine, other = errors(sample.hidden_states, exact), errors(theirs, exact)
        is_met = all(m <= 1.1 * o for m, o in zip(mine, other, strict=True))
        work = f"{shape}, {depth} layers: error over rms, median, 90 %"
        found, target = f"{mine[0]:.2e}, {mine[1]:.2e}", f"<= 1.1 x {other[0]:.2e}, {other[1]:.2e}"
        yield Row("exactness", work, found, target, is_met, "beside transformers' own", {})


def streams(model: Any, prompt: list[int], depth: int) -> torch.Tensor:
    """The stream after 1 to ``depth - 1`` layers, float32 [tokens, layers, hidden]."""
    output = model(torch.tensor([prompt]), use_cache=False, output_hidden_states=True)
    return torch.stack(output.hidden_states[1:depth], dim=2)[0].float().cpu()


def errors(rows: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Median and 90th percentile of the absolute error, over the rms of each layer's rows."""
    rms = exact.square().mean(dim=(0, 2), keepdim=True).sqrt()
    ordered = ((rows.float() - exact).abs() / rms).flatten().sort().values
    return ordered[len(ordered) // 2].item(), ordered[len(ordered) * 9 // 10].item()


ROWS: Mapping[str, Callable[[Bench], Iterator[Row]]] = {
    "0.8b": lambda bench: measure_prefill(bench, "Qwen3.5-0.8B", 0.60, 4.0),
    "9b": lambda bench: measure_prefill(bench, "Qwen3.5-9B", 0.60, 4.0),
    "llama": lambda bench: measure_prefill(bench, "Llama-3.1-8B", 0.70, None),
    "8k": measure_long_prompts,
    "131k": measure_one_long,
    "decode": measure_decode,
    "cuts": measure_cuts,
    "exactness": measure_exactness,
}


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME",
        help=", ".join(ROWS))  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: try the code, no figures")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--storage", type=Path, metavar="DIR",
        help="where hidden states go; by default /dev/shm where it has 16 GiB of room")  # fmt: skip
    parser.add_argument("--peer-python", type=Path, metavar="FILE",
        help="interpreter of an environment that has vLLM, to be measured as well")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: use at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: there is no CUDA device; use --device cpu --tiny")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    storage = options.storage or find_memory_folder(16 * GIB)
    rows, num_failed = [], 0
    print(f"{'':64}{'measured':>20}  {'target':<30}")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            *(options.device, options.tiny, options.rounds, storage, Path(folder)),
            peer=options.peer_python,
        )
        for name in options.only:
            start = time.perf_counter()
            try:
                for row in ROWS[name](bench):
                    rows.append(row)
                    write_json(options, rows)  # a run that is stopped keeps what it measured
                    verdict = ("met" if row.is_met else "MISSED") if row.target else ""
                    line = f"{row.work:60}{row.measured:>20}  {row.target:<30}{verdict:8}{row.note}"
                    print(line.rstrip(), flush=True)
            except Exception:
                num_failed += 1
                print(f"{name}: FAILED\n{traceback.format_exc()}", flush=True)
            print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return 1 if num_failed else 0


def write_json(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    if options.json is None:
        return
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    document = {"device": device, "torch": torch.__version__,
                "rows": [dataclasses.asdict(row) for row in rows]}  # fmt: skip
    options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
