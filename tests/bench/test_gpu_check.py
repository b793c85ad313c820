"""``make gpu-check`` without a card: what it runs, what it says, how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu_check

TESTS = {"tests, kernels", "tests, engine", "tests, memory"}


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Tests that pass in the place of the real ones, and nothing that is missing."""
    for name in ("kernels", "engine", "memory"):
        (tmp_path / f"test_{name}.py").write_text("def test_it():\n    print('ran')\n")
    monkeypatch.setattr(gpu_check, "KERNEL_TESTS", {"kernels": str(tmp_path / "test_kernels.py")})
    monkeypatch.setattr(gpu_check, "ENGINE_TESTS", {"engine": str(tmp_path / "test_engine.py")})
    monkeypatch.setattr(gpu_check, "TESTS_ALONE", {"memory": str(tmp_path / "test_memory.py")})
    monkeypatch.setattr(gpu_check, "report_machine", set)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def table_of(printed: str) -> dict[str, str]:
    lines = [line for line in printed.splitlines() if line[24:28] in ("PASS", "FAIL", "SKIP")]
    return {line[:24].strip(): line[24:] for line in lines}


def test_all_pass(parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["tests"]) == 0
    assert table_of(capsys.readouterr().out) == dict.fromkeys(TESTS, "PASS")


def test_a_failure_is_shown_and_is_the_exit_status(
    parts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (parts / "test_engine.py").write_text(
        "import pytest\n@pytest.mark.parametrize('size', [64, 128, 256])\n"
        "def test_it(size):\n    assert size < 100\n"
    )
    assert gpu_check.main(["tests"]) == 1
    printed = capsys.readouterr().out
    assert "assert 128 < 100" in printed
    verdicts = table_of(printed)
    assert [verdicts.pop(f"tests, {name}") for name in ("kernels", "memory")] == ["PASS"] * 2
    (verdict,) = verdicts.values()
    assert verdict.startswith("FAIL: exit status 1; first ")
    assert verdict.endswith("test_engine.py::test_it[128]")


def test_one_file_has_all_that_was_printed(
    parts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "ROOT", parts)
    (parts / "benchmarks").mkdir()
    (parts / "benchmarks" / "gpu.py").write_text("print('rate 800 TFLOP/s')\n")
    assert gpu_check.main(["--report", "sent.txt"]) == 0
    printed = capsys.readouterr().out
    assert "rate 800 TFLOP/s" in printed and "speed" in table_of(printed)
    written = (parts / "sent.txt").read_text()
    assert printed == f"{written}All of this is in {parts / 'sent.txt'}\n"


def test_what_takes_too_long_is_stopped(
    parts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "TOTAL_SECONDS", 0)
    assert gpu_check.main(["tests"]) == 1
    assert set(table_of(capsys.readouterr().out).values()) == {"FAIL: no time is left"}


def test_vllm_is_measured_where_it_is_named(
    parts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "ROOT", parts)
    (parts / "benchmarks").mkdir()
    (parts / "benchmarks" / "gpu.py").write_text("import sys\nprint(sys.argv[1:])\n")
    assert gpu_check.main(["bench", "--only", "9b", "--peer-python", "env/bin/python"]) == 0
    given = ["--only", "9b", "--peer-python", str(parts / "env" / "bin" / "python")]
    assert str(given) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("missing", "skipped"),
    [
        ({"xxhash"}, {"tests, engine", "tests, memory", "speed"}),
        ({"triton"}, {*TESTS, "speed"}),
    ],
)
def test_what_cannot_run_is_skipped_and_said(
    missing: set[str],
    skipped: set[str],
    parts: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gpu_check, "report_machine", lambda: missing)
    assert gpu_check.main([]) == 1
    printed = capsys.readouterr().out
    assert f"missing: {', '.join(missing)}" in printed
    table = table_of(printed)
    assert {what for what, verdict in table.items() if verdict.startswith("SKIPPED")} == skipped
    assert set(table) == {*TESTS, "speed"}


def test_without_a_card_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device can be used here"):
        gpu_check.main([])
    assert "torch" in capsys.readouterr().out
