"""Upstream vLLM's own tests of hidden-state extraction and of connectors, run on this package.

    python -m tests.integration.upstream FOLDER [PYTEST ARGUMENT ...]

FOLDER is upstream's source tree, from its repository or an sdist (0.22 and 0.33 are known). Files
run as they are, beside a ``tests.utils`` of our own; the models that they name on the hub are
checkpoints made here, found where the hub's client would have put them. Prints what ran, file by
file, and why others do not apply. Status 1 when a test failed that is not listed as different.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tests.models.checkpoints import make_checkpoint

KV = Path("tests/v1/kv_connector")
EXTRACTION = KV / "extract_hidden_states_integration"
APPLICABLE = (EXTRACTION / "test_extraction.py", KV / "unit/test_config.py")
_INTERNALS = "looks at what upstream keeps inside VllmConfig"
_ELSEWHERE = "a connector that is not part of this package"
DIFFERENCES = {
    "test_kv_connector[native-None": "an option that would have no effect is refused",
    "test_kv_connector[lmcache": _ELSEWHERE,
    "test_kv_connector_": _INTERNALS,
    "test_no_kv_connector_": _INTERNALS,
    "test_sleep_mode_": _ELSEWHERE,
}
"""Beginnings of tests that hold upstream to what is otherwise here, and why."""
_DEEP = {"hidden_size": 1024, "num_hidden_layers": 20}
_PERIOD = ["linear_attention"] * 3 + ["full_attention"]
NEEDS_INTERNALS = ("KVConnectorFactory._registry",)
"""Files with these words do not run: they replace parts of upstream's own tables."""
HUB_MODELS = {
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": ("llama", {"vocab_size": 300}),
    "Qwen/Qwen3-0.6B": ("qwen3", _DEEP),
    "Qwen/Qwen3.5-0.8B": ("qwen3_5", {**_DEEP, "layer_types": _PERIOD * 5}),
}
"""Names that the tests load -> the family and sizes of what stands in."""
_REVISION = "0" * 40
_WORDS = "short medium length much longer prompt with many tokens word extra here hello world test"

IN_THE_ORDER_ASKED = '''
import pytest


@pytest.fixture(autouse=True)
def _layers_stay_in_the_order_asked(request):
    """Later releases sort the layers; here they keep the order in which they were asked for."""
    request.module.sorted = list
    yield
    del request.module.sorted
'''


class Outcome(NamedTuple):
    """One test."""

    file: str
    name: str
    result: str


def save_word_tokenizer(folder: Path) -> None:
    """Few ids, and one or two for each word of the prompts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaTokenizerFast, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    words = f"{_WORDS} {_WORDS.title()}"
    tokenizer.train_from_iterator([words] * 20, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    fast.save_pretrained(folder)
    assert LlamaTokenizerFast.from_pretrained(folder)("Short")["input_ids"]


def make_hub(home: Path) -> None:
    """Checkpoints below ``home`` where the hub's client looks when it is offline."""
    folders = [home / ".cache/huggingface", home / ".cache/huggingface/hub"]
    for name, (family, sizes) in HUB_MODELS.items():
        entry = "models--" + name.replace("/", "--")
        snapshot = folders[1] / entry / "snapshots" / _REVISION
        make_checkpoint(snapshot, family, dtype=torch.bfloat16, **sizes)
        save_word_tokenizer(snapshot)
        (folders[1] / entry / "refs").mkdir()
        (folders[1] / entry / "refs/main").write_text(_REVISION)
        (folders[0] / entry).symlink_to(folders[1] / entry)


def lay_out(upstream: Path, work: Path) -> list[Path]:
    """Copy what applies into ``work``; returns the files to run."""
    found = []
    for path in APPLICABLE:
        text = (upstream / path).read_text() if (upstream / path).is_file() else ""
        internals = [words for words in NEEDS_INTERNALS if words in text]
        if internals:
            print(f"{path}: not run, it needs {', '.join(internals)}")
        elif text:
            found.append(path)
    for path in found:
        for source in (upstream / path).parent.glob("*.py"):
            is_other = source.name.startswith("test_") and source.name != path.name
            if is_other or source.name == "conftest.py":  # which reaches into upstream
                continue
            target = work / source.relative_to(upstream)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    for folder in {parent for path in found for parent in (work / path).parents}:
        if work in folder.parents:
            (folder / "__init__.py").touch()
    shutil.copyfile(Path(__file__).with_name("upstream_utils.py"), work / "tests/utils.py")
    for path in found:
        if "sorted(layer_ids)" in (work / path).read_text():
            print(f"{path}: with sorted() leaving lists as they are (order of the layers)")
            (work / path).with_name("conftest.py").write_text(IN_THE_ORDER_ASKED)
    return found


def why_different(name: str) -> str | None:
    """Why a test may fail here; None: it may not."""
    found = (why for start, why in DIFFERENCES.items() if name.startswith(start))
    return next(found, None)


def read_outcomes(report: Path) -> list[Outcome]:
    """Read the outcomes in pytest's XML report."""
    outcomes = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        parts = {child.tag for child in case} & {"failure", "error", "skipped"}
        result = parts.pop() if parts else "passed"
        name = str(case.get("name"))
        if result in ("failure", "error") and why_different(name) is not None:
            result = "different"
        outcomes.append(Outcome(str(case.get("classname")), name, result))
    return outcomes


def run(upstream: Path, work: Path, arguments: Sequence[str]) -> list[Outcome]:
    """Run what applies in ``work``."""
    make_hub(work / "home")
    files = lay_out(upstream, work)
    report = work / "report.xml"
    environment = {
        **os.environ,
        "HOME": str(work / "home"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(work), os.getcwd()]),
    }
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(work)]
    command += ["--junitxml", str(report), *map(str, files), *arguments]
    subprocess.run(command, cwd=work, env=environment, check=False)
    if not report.exists():
        raise SystemExit("pytest did not run; what it said is above")
    return read_outcomes(report)


def main() -> int:
    """Prints the table; the status of the process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("upstream", type=Path, help="upstream's source tree")
    options, arguments = parser.parse_known_args()
    if not (options.upstream / EXTRACTION).is_dir():
        parser.error(
            f"{options.upstream} has no {EXTRACTION}: name a source tree of upstream vLLM, "
            "such as its sdist, unpacked"
        )
    with tempfile.TemporaryDirectory(prefix="upstream-") as folder:
        outcomes = run(options.upstream.resolve(), Path(folder), arguments)
    for file in sorted({outcome.file for outcome in outcomes}):
        counts = Counter(outcome.result for outcome in outcomes if outcome.file == file)
        print(f"{file}: " + ", ".join(f"{n} {result}" for result, n in sorted(counts.items())))
    for outcome in outcomes:
        if outcome.result == "different":
            print(f"  {outcome.name}: {why_different(outcome.name)}")
    failed = [outcome for outcome in outcomes if outcome.result in ("failure", "error")]
    return 1 if failed or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
