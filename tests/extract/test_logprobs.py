"""The teacher's log-probabilities in datasets: stored, read, converted, verified, resumed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extract.job_harness import digests, rewrite, token_lists, write_token_ids
from tests.models.oracle import reference_run
from vllm.config import ModelConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.extract.job import load_llm, run_job
from vllm.entrypoints.extract.options import ExtractOptions
from vllm.entrypoints.extract.recompute import verify_samples
from vllm.hidden_states import (
    HiddenStatesDataset,
    HiddenStatesError,
    HiddenStatesSample,
    pack_samples,
    pad_samples,
)
from vllm.hidden_states.convert import convert_dataset
from vllm.hidden_states.inspection import describe
from vllm.hidden_states.metadata import DatasetSettings
from vllm.hidden_states.units import open_unit_writer
from vllm.hidden_states.verify import verify_dataset

LISTS = token_lists(41, 9)
TEMPERATURE = 1.7
NAMES = ("top_token_ids", "top_logprobs", "token_logprobs")
Extract = Callable[..., Path]


@pytest.fixture(scope="module")
def extract(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Extract:
    """Run a job with a real engine; returns its folder."""
    data = write_token_ids(tmp_path_factory.mktemp("data") / "data.jsonl", LISTS)

    def run(output: Path | None = None, engine_dtype: str = "float32", **options: Any) -> Path:
        output = output or tmp_path_factory.mktemp("job") / "out"
        merged: dict[str, Any] = {
            "input": [str(data)],
            "output": str(output),
            "layers": "1",
            "shard_size_gib": 2e-5,
            "top_logprobs": 6,
            "logprob_temperature": TEMPERATURE,
            **options,
        }
        args = EngineArgs(model=str(tiny_llama), max_num_batched_tokens=48, dtype=engine_dtype)
        assert run_job(ExtractOptions(**merged), args, load_llm) == 0
        return output

    return run


@pytest.fixture(scope="module")
def made(extract: Extract) -> Path:
    return extract()


def tensors_of(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [dict(sample.tensors) for sample in HiddenStatesDataset(folder, verify="first_read")]


def check(model: Path, sample: HiddenStatesSample, k: int, tolerance: float) -> None:
    logits = reference_run(model, sample.token_ids.tolist()).logits.float()
    logprobs = (logits / TEMPERATURE).log_softmax(-1)
    ids, top, following = (sample.tensors[name] for name in NAMES)
    rows = sample.positions
    expected = logprobs.sort(dim=-1, descending=True, stable=True).values[rows, :k]
    assert ids.dtype is torch.int32 and following.dtype is torch.float32
    torch.testing.assert_close(top.float(), expected, rtol=0, atol=tolerance)
    own = logprobs[rows].gather(1, ids.long())
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-4)
    has_next = rows < len(logprobs) - 1
    next_ids = sample.token_ids[rows[has_next] + 1]
    right = logprobs[rows[has_next]].gather(1, next_ids[:, None])[:, 0]
    torch.testing.assert_close(following[has_next], right, rtol=0, atol=1e-4)
    assert following[~has_next].isnan().all()


@pytest.mark.parametrize("form", ["sharded", "files", "speculators"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 1e-2)])
def test_they_are_those_of_transformers(
    form: str, dtype: str, tolerance: float, extract: Extract, tiny_llama: Path
) -> None:
    layers = {"layers": "0,1,2,last"} if form == "speculators" else {}
    folder = extract(format=form, logprob_dtype=dtype, **layers)
    assert list(verify_dataset(str(folder))) == []
    dataset = HiddenStatesDataset(folder, verify="first_read")
    assert [sample.token_ids.tolist() for sample in dataset] == LISTS
    for sample in dataset:
        assert str(sample.tensors["top_logprobs"].dtype) == f"torch.{dtype}"
        check(tiny_llama, sample, 6, tolerance)


@pytest.mark.parametrize("options", [{"positions": "every:3"}, {"pooling": "last"}])
def test_rows_of_some_positions(
    options: dict[str, Any], extract: Extract, tiny_llama: Path, made: Path
) -> None:
    for sample, whole in zip(
        HiddenStatesDataset(extract(storage_dtype="fp8", **options)),
        HiddenStatesDataset(made),
        strict=True,
    ):
        check(tiny_llama, sample, 6, 1e-4)
        for name in NAMES:
            kept = whole.tensors[name][sample.positions]
            assert torch.equal(sample.tensors[name].nan_to_num(9), kept.nan_to_num(9))


def test_settings_and_summary_say_it(made: Path) -> None:
    settings = DatasetSettings.read(str(made))
    assert settings.request_options == {"top_logprobs": 6, "logprob_temperature": TEMPERATURE}
    summary = describe(HiddenStatesDataset(made))
    assert "top_logprobs        6" in summary
    assert f"logprob_temperature {TEMPERATURE}" in summary
    forms = "token_logprobs float32 [], top_logprobs float32 [6], top_token_ids int32 [6]"
    assert forms in summary
    assert settings.row_bytes == settings.hidden_size * 4 + 6 * (4 + 4) + 4


def test_converted_there_and_back(made: Path, tmp_path: Path) -> None:
    files, plain, back = tmp_path / "files", tmp_path / "plain", tmp_path / "back"
    convert_dataset(str(made), str(files), "files", "fp8")
    plain.mkdir()
    for path in files.glob("*.safetensors"):
        shutil.copy(path, plain / path.name)
    convert_dataset(str(plain), str(back), "sharded")
    right = tensors_of(made)
    for folder in (files, plain, back):
        if folder is not plain:
            assert list(verify_dataset(str(folder))) == []
        for found, expected in zip(tensors_of(folder), right, strict=True):
            for name in NAMES:
                assert torch.equal(found[name].nan_to_num(9), expected[name].nan_to_num(9))


def test_batches_have_them(made: Path) -> None:
    samples = list(HiddenStatesDataset(made))
    padded, packed = pad_samples(samples), pack_samples(samples)
    for name in NAMES:
        each = [sample.tensors[name].nan_to_num(9) for sample in samples]
        assert torch.equal(packed.tensors[name].nan_to_num(9), torch.cat(each))
        assert torch.equal(padded.tensors[name][padded.mask].nan_to_num(9), torch.cat(each))
    (rows,) = HiddenStatesDataset(made).iter_rows(10**6)
    assert torch.equal(rows.tensors["top_token_ids"], packed.tensors["top_token_ids"])


def test_a_job_goes_on_where_it_ended(made: Path, extract: Extract, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(made, broken)
    shard = next(iter(sorted(broken.glob("shard-*.safetensors"))))
    shard.write_bytes(shard.read_bytes()[:-1])
    extract(broken)
    assert digests(broken) == digests(made)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_logprobs": 7}, "top_logprobs: '6' there, '7' now"),
        ({"logprob_temperature": 2.0}, "logprob_temperature: '1.7' there, '2.0' now"),
        ({"logprob_dtype": "float16"}, "logprob_dtype: '\"float32\"' there, '\"float16\"' now"),
        ({"top_logprobs": 0, "logprob_temperature": 1.0}, "top_logprobs: '6' there, None now"),
    ],
)
def test_other_options_do_not_continue(
    options: dict[str, Any], message: str, made: Path, extract: Extract
) -> None:
    before = digests(made)
    with pytest.raises(ValueError, match="holds a dataset of other settings") as error:
        extract(made, **options)
    assert message in str(error.value)
    assert "request_tensors" not in str(error.value)
    assert digests(made) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_logprobs": -1}, "top_logprobs=-1 is not valid"),
        ({"top_logprobs": 1025}, "top_logprobs=1025 is not valid"),
        ({"top_logprobs": 400}, "top_logprobs=400 is not valid; the vocabulary has 307 tokens"),
        ({"logprob_temperature": float("nan")}, "logprob_temperature=nan is not valid"),
        ({"logprob_temperature": 0}, "logprob_temperature=0 is not valid"),
        ({"logprob_dtype": "int8"}, "logprob_dtype='int8' is not valid"),
        ({"top_logprobs": 0}, "logprob_temperature=1.7 is not valid; it belongs to top_logprobs"),
        ({"pooling": "mean"}, "top_logprobs=6 is not valid; with pooling='mean'"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str, extract: Extract) -> None:
    with pytest.raises(ValueError) as error:
        extract(**options)
    assert message in str(error.value)


def test_what_float16_does_not_hold_is_refused_by_name(extract: Extract, tmp_path: Path) -> None:
    folder = extract(logprob_dtype="float16")
    (sample, *_), settings = HiddenStatesDataset(folder), DatasetSettings.read(str(folder))
    tensors = [sample.tensors[name] for name in NAMES]
    bad = [
        ({"top_logprobs": tensors[1].float() - 7e4}, "beyond the range of float16"),
        ({"top_token_ids": tensors[0][:, :5]}, r"shape \(5,\), not \(6,\)"),
    ]
    for changed, message in bad:
        with open_unit_writer(str(tmp_path), 0, settings) as writer:
            with pytest.raises(HiddenStatesError, match=message):
                writer.append(sample.with_tensors(**changed), 0, 0)
            writer.append(sample, 1, 1)
            assert writer.commit().num_rows == len(sample.positions)


def test_verify_finds_another_form(made: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(made, other)
    settings = json.loads((other / "settings.json").read_text())
    changed = settings["options"]["request_tensors"].replace("float32", "float16")
    settings["options"]["request_tensors"] = changed
    del settings["checksum"]
    (other / "settings.json").write_text(json.dumps(settings))
    problems = [*verify_dataset(str(other))]
    assert any("top_logprobs are not torch.float16 [6]" in one for one in problems)


def model_config(model: Path, dtype: str = "float32") -> ModelConfig:
    return ModelConfig(model=str(model), dtype=dtype)


@pytest.mark.parametrize(
    ("engine_dtype", "stored"),
    [("float32", "float32"), ("float32", "float16"), ("bfloat16", "float32")],
)
@pytest.mark.parametrize("positions", ["all", "every:3"])
def test_recomputed(
    engine_dtype: str,
    stored: str,
    positions: str,
    extract: Extract,
    tiny_llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = {"logprob_dtype": stored, "positions": positions, "layers": "1,norm"}
    made = extract(engine_dtype=engine_dtype, verify=5, **options)
    assert capsys.readouterr().out.count("within") == 3
    config = model_config(tiny_llama, engine_dtype)

    def change(sample: HiddenStatesSample) -> HiddenStatesSample:
        tensors = dict(sample.tensors)
        tensors["top_logprobs"] = tensors["top_logprobs"] - 0.25  # sound, but of another model
        return dataclasses.replace(sample, tensors=tensors)

    other = rewrite(made, tmp_path / "other", change)
    assert verify_samples(other, 5, 0, config) == 1
    lines = [one for one in capsys.readouterr().out.splitlines() if "BEYOND" in one]
    assert len(lines) == 1 and "log-probabilities" in lines[0]


DAMAGE: dict[str, tuple[Callable[[dict[str, torch.Tensor]], torch.Tensor], str]] = {
    "swapped": (lambda t: t["top_logprobs"].flip(-1), "top_logprobs do not fall"),
    "twice": (lambda t: t["top_token_ids"][:, [0, 0, 2, 3, 4, 5]], "are not different tokens"),
    "negative": (lambda t: t["top_token_ids"] - 400, "are not different tokens"),
    "certain": (lambda t: t["top_logprobs"] + 9, "are more than certain"),
    "shifted": (lambda t: t["token_logprobs"].roll(1), "NaN exactly where no token follows"),
    "likely": (lambda t: t["token_logprobs"] * 1e-3, "token_logprobs contradict top_logprobs"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_verify_finds_a_column_that_contradicts_itself(
    kind: str, extract: Extract, tmp_path: Path
) -> None:
    """The checksums of these files are right."""
    made, (damage, message) = extract(logprob_dtype="float16"), DAMAGE[kind]
    name = {"twice": NAMES[0], "negative": NAMES[0], "shifted": NAMES[2], "likely": NAMES[2]}

    def change(sample: HiddenStatesSample) -> HiddenStatesSample:
        return sample.with_tensors(**{name.get(kind, NAMES[1]): damage(dict(sample.tensors))})

    other = rewrite(made, tmp_path / "other", change)
    problems = [*verify_dataset(str(other))]
    assert problems and all(message in one or "shard" in one for one in problems)
    assert any(message in one for one in problems)
    assert [*verify_dataset(str(rewrite(made, tmp_path / "same", lambda one: one)))] == []


def test_columns_that_are_not_finite(made: Path, tmp_path: Path) -> None:
    def change(sample: HiddenStatesSample) -> HiddenStatesSample:
        return sample.with_tensors(top_logprobs=sample.tensors["top_logprobs"] / 0)

    other = rewrite(made, tmp_path / "other", change)
    assert any("top_logprobs are not finite" in one for one in verify_dataset(str(other)))
