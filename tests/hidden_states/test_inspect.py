"""``vllm hidden-states inspect``: figures of datasets with planted facts, and the report."""

from __future__ import annotations

import dataclasses
import html
import re
import shutil
import subprocess
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from tests.hidden_states.sample_data import LAYER_IDS, make_settings, write_missing
from vllm.entrypoints.cli.main import main
from vllm.hidden_states import HiddenStatesDataset, HiddenStatesSample
from vllm.hidden_states.plots import OTHERS, label_colors, label_text
from vllm.hidden_states.row_statistics import compare_rows, measure_rows, principal_components
from vllm.v1.rows.file import write_hidden_states

LENGTHS = [5, 300, 1, 17, 40, 33]
WIDTH = 48
HOSTILE = "<script>alert(1)</script>&\"'$x_{$\x00\n"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def planted(change: float = 0.0, columns: bool = False) -> list[HiddenStatesSample]:
    """Samples whose layers 3 and 8 are equal; dimension 7 of layer 0 is dead, 11 of layer 8 huge.

    change: is added to one value of layer 3 in sample 4.
    columns: add labels; samples of "b" lie elsewhere along dimension 2.
    """
    generator = torch.Generator().manual_seed(1)
    samples = []
    for index, length in enumerate(LENGTHS):
        rows = torch.randn(length, len(LAYER_IDS), WIDTH, generator=generator)
        rows[:, 0, 7] = 0.25
        rows[:, 2, 11] = 40 + rows[:, 2, 11]
        rows[:, 2, 5] = 0
        label = "b" if index % 2 else f"a{HOSTILE}"
        if columns:
            rows[:, 0, 2] += 20 if label == "b" else -20
        rows[:, 1] = rows[:, 2]
        if index == 4:
            rows[3, 1, 9] += change
        samples.append(
            HiddenStatesSample(
                index=index,
                request_id=f"r{index}",
                token_ids=torch.arange(length) + 10,
                positions=torch.arange(length),
                tensors={"hidden_states": rows},
                layer_ids=LAYER_IDS,
                columns={"label": label} if columns else {},
            )
        )
    return samples


def write(path: Path, samples: list[HiddenStatesSample], dtype: str = "float32") -> Path:
    if dtype == "bfloat16":
        samples = [s.with_tensors(hidden_states=s.hidden_states.bfloat16()) for s in samples]
    settings = make_settings(samples, dtype=dtype)
    if samples[0].columns:
        options = {**settings.options, "keep_columns": '["label"]'}
        settings = dataclasses.replace(settings, options=options, model=HOSTILE.replace("\0", ""))
    write_missing(path, samples, settings)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_planted_facts_are_found(tmp_path: Path, dtype: str) -> None:
    dataset = HiddenStatesDataset(write(tmp_path / "d", planted(), dtype))
    found = measure_rows(dataset, 100)
    assert len(found.norms) == sum(min(length, 256) for length in LENGTHS)
    # an fp8 value follows the scale of its row
    assert found.dead == [[] if dtype == "fp8" else [7], [5], [5]]
    assert [[number for number, _ in layer] for layer in found.huge] == [[], [11], [11]]
    rows = torch.cat([sample.hidden_states[:, 2] for sample in planted()])
    rms = rows.square().mean(0).sqrt()
    assert found.huge[2][0][1] == pytest.approx(float(rms[11] / rms.median()), rel=0.05)
    assert float(found.cosines[1, 2]) == pytest.approx(1, abs=1e-6)
    assert abs(float(found.cosines[0, 1])) < 0.3


def test_rows_are_drawn_by_the_seed(tmp_path: Path) -> None:
    dataset = HiddenStatesDataset(write(tmp_path / "d", planted()))
    one, again, other = (measure_rows(dataset, 2, seed) for seed in (0, 0, 1))
    assert torch.equal(one.norms, again.norms)
    assert one.num_samples == 2
    assert one.norms.shape != other.norms.shape or not torch.equal(one.norms, other.norms)


def test_a_folder_of_files_with_rows_that_are_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = planted()
    samples[3].hidden_states[4, 1, 3] = torch.nan
    samples[3].hidden_states[2, 0, 0] = torch.inf
    for sample in samples:
        tensors = {"hidden_states": sample.hidden_states, "token_ids": sample.token_ids}
        write_hidden_states(str(tmp_path / f"{sample.index}.safetensors"), tensors, {})
    found = measure_rows(HiddenStatesDataset(tmp_path), 100)
    assert found.num_not_finite == 2
    assert torch.isfinite(found.norms).all() and torch.isfinite(found.cosines).all()
    assert found.dead == [[7], [5], [5]]
    assert main(["hidden-states", "inspect", str(tmp_path), "--no-plots"]) == 0
    printed = capsys.readouterr().out
    assert "slot 2" in printed and "2 rows are not finite" in printed


def test_differences_between_datasets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write(tmp_path / "one", planted()), write(tmp_path / "two", planted(change=0.5))
    found = compare_rows(HiddenStatesDataset(one), HiddenStatesDataset(two), 100)
    assert found.num_rows == sum(LENGTHS)
    assert found.largest.tolist() == pytest.approx([0, 0.5, 0], abs=1e-6)
    expected = 0.5 / (sum(LENGTHS) * WIDTH)
    assert found.mean.tolist() == pytest.approx([0, expected, 0], rel=1e-5, abs=1e-12)
    norm = planted(change=0.5)[4].hidden_states[3, 1].norm()
    assert float(found.relative[1]) == pytest.approx(float(0.5 / norm), rel=1e-4)
    assert found.cosine.tolist() == pytest.approx([1, 1, 1], abs=1e-4)
    assert main(["hidden-states", "inspect", str(one), "--against", str(two), "--no-plots"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^3 +0\.5 ", printed, re.MULTILINE), printed
    assert re.search(r"^8 +0 +0 ", printed, re.MULTILINE), printed


def test_components_separate_labels(tmp_path: Path) -> None:
    samples = planted(columns=True)
    dataset = HiddenStatesDataset(write(tmp_path / "d", samples))
    found = measure_rows(dataset, 100)
    assert found.point_layers == [0, 1, 2]
    coordinates, shares = principal_components(found.points[:, 0])
    is_b = torch.tensor([samples[number].columns["label"] == "b" for number in found.point_samples])
    first = coordinates[:, 0]
    assert (first[is_b] > 0).all() != (first[~is_b] > 0).all()
    assert first[is_b].sign().unique().numel() == first[~is_b].sign().unique().numel() == 1
    assert shares[0] > 0.5 > 0.2 > shares[1]
    # against torch's own decomposition
    points = found.points[:, 0].double()
    values = torch.linalg.svdvals(points - points.mean(0))
    expected = float(values[0] ** 2 / values.square().sum())
    assert shares[0] == pytest.approx(expected)


def test_labels_become_short_printable_texts() -> None:
    assert label_text("a\0b\n") == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"
    assert len(label_text("x" * 100)) == 24
    colors = label_colors([str(number) for number in range(20)] + ["7"])
    assert next(iter(colors)) == "7" and [*colors][-1] == OTHERS and len(colors) == 9


class Page(HTMLParser):
    """The tags and the attributes of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A report about a dataset with hostile tokens, labels and names."""
    pytest.importorskip("matplotlib")

    class Hostile:
        """As many tokenizers, it leaves out the space before the first token."""

        def __init__(self) -> None:
            self.is_fast = True
            self.all_special_ids: list[int] = []
            self.added_tokens_decoder: dict[int, object] = {}

        def encode(self, text: str, **_: object) -> list[int]:
            return [0]

        def decode(self, token_ids: list[int], **_: object) -> str:
            return " ".join(f"{HOSTILE}{token}" for token in token_ids)

    monkeypatch.setattr(
        "vllm.transformers_utils.tokenizer.get_tokenizer", lambda *_, **__: Hostile()
    )
    one = write(tmp_path / "one", planted(columns=True))
    two = write(tmp_path / "two", planted(0.5, columns=True))
    path = tmp_path / "report.html"
    options = ["--html", str(path), "--against", str(two), "--label", "label"]
    assert main(["hidden-states", "inspect", str(one), *options]) == 0
    assert not list(tmp_path.glob("*-plots")), "plots only as asked for"
    return path


@pytest.mark.parametrize(("options", "expected"), [([], "a" * 40), (["--tokenizer", "x"], None)])
def test_tokens_are_those_of_the_datasets_revision(
    options: list[str], expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their texts in the report were those of the branch ``main``."""
    pytest.importorskip("matplotlib")
    seen = []

    def get_tokenizer(name: str, **options: object) -> object:
        seen.append((name, options["revision"]))
        raise KeyError(name)

    monkeypatch.setattr("vllm.transformers_utils.tokenizer.get_tokenizer", get_tokenizer)
    samples = planted()
    settings = dataclasses.replace(make_settings(samples, dtype="float32"), revision="a" * 40)
    write_missing(tmp_path / "one", samples, settings)
    with suppress(SystemExit):  # a tokenizer that was named has to be there
        path = str(tmp_path / "report.html")
        main(["hidden-states", "inspect", str(tmp_path / "one"), "--html", path, *options])
    assert seen == [("x" if options else "tiny", expected)]


def test_report_is_one_escaped_file(report: Path) -> None:
    text = report.read_text()
    page = Page(text)
    assert "script" not in page.tags and "onerror" not in dict(page.attributes)
    assert page.tags.count("img") == 6
    links = [value for name, value in page.attributes if name in ("src", "href")]
    assert all(str(link).startswith("data:image/png;base64,") for link in links)
    assert not re.search(r"https?://", re.sub(r"base64,[\w+/=]+", "", text))
    assert text.count(html.escape("<script>alert(1)</script>")) > 50, "tokens and the model's name"
    assert text.count("> " + html.escape(HOSTILE)) > 50, "the space between words"
    for expected in ("11 (", "1: 7", "largest difference", "0.5"):
        assert expected in page.text


def test_report_fits_a_phone(report: Path, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    # a frame as wide as a phone says how wide its page is, and what a script in it could do
    outer = tmp_path / "outer.html"
    outer.write_text(
        f"<iframe src={report.name} width=390 height=800 style=border:0></iframe>"
        "<script>onload = () => { const page = document.querySelector('iframe').contentDocument;"
        "const {scrollWidth, clientWidth} = page.documentElement;"
        "document.title = (scrollWidth > clientWidth ? 'wider' : 'fits') + ' ' + "
        "[...page.images].filter(i => i.naturalWidth > 600 && i.width > 300).length }</script>"
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
        f"--user-data-dir={tmp_path / 'user'}", "--virtual-time-budget=5000",
        "--dump-dom"]  # fmt: skip
    command = [browser, *flags, outer.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    (title,) = re.findall(r"<title>(\w+ \d+)</title>", done.stdout) or [done.stdout[:500]]
    assert title == "fits 6"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--label", "topic"], "--label topic:"),
        (["--against", "OTHER"], "--against"),
        (["--against", "/no/such"], "/no/such: there is no such folder"),
        (["--no-plots", "--html", "x.html"], "--no-plots: not together with"),
        (["--tokenizer", "/no/such", "--html", "x.html"], "--tokenizer /no/such:"),
    ],
)
def test_bad_options(
    tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "d", planted())
    other = write(tmp_path / "e", planted()[:3])
    options = [str(other) if option == "OTHER" else option for option in options]
    with pytest.raises(SystemExit) as ended:
        main(["hidden-states", "inspect", str(path), "--png", str(tmp_path / "p"), *options]
             if "--no-plots" not in options
             else ["hidden-states", "inspect", str(path), *options])  # fmt: skip
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_other_layers_without_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One layer would be compared with each of three."""
    for name, slots in (("one", 1), ("three", 3)):
        (tmp_path / name).mkdir()
        tensors = {"hidden_states": torch.ones(4, slots, 8), "token_ids": torch.arange(4)}
        write_hidden_states(str(tmp_path / name / "a.safetensors"), tensors, {})
    for path, other, message in (("one", "three", "3 layers, not 1"), ("three", "one", "1 layers")):
        options = [str(tmp_path / path), "--against", str(tmp_path / other), "--no-plots"]
        with pytest.raises(SystemExit) as ended:
            main(["hidden-states", "inspect", *options])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
