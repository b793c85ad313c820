"""Layout and report of ``make test-upstream``, on a source tree made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import upstream
from tests.integration.upstream_utils import create_new_process_for_each_test, multi_gpu_test


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An extraction test that sorts layers, beside files that are not its own."""
    folder = tmp_path / "tree" / upstream.EXTRACTION
    folder.mkdir(parents=True)
    (folder / "test_extraction.py").write_text("assert sorted(layer_ids)\n")
    (folder / "helper.py").write_text("")
    (folder / "conftest.py").write_text("raise RuntimeError\n")
    (folder / "test_other.py").write_text("raise RuntimeError\n")
    unit = tmp_path / "tree" / upstream.KV / "unit"
    unit.mkdir()
    (unit / "test_config.py").write_text("KVConnectorFactory._registry\n")
    return tmp_path / "tree"


def test_only_what_applies_is_laid_out(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    found = upstream.lay_out(tree, work)
    assert found == [upstream.EXTRACTION / "test_extraction.py"]
    assert (
        "test_config.py: not run, it needs KVConnectorFactory._registry" in capsys.readouterr().out
    )
    names = {path.name for path in (work / found[0]).parent.iterdir()}
    assert names == {"__init__.py", "conftest.py", "helper.py", "test_extraction.py"}
    assert (work / found[0]).read_text() == (tree / found[0]).read_text()
    assert "sorted = list" in (work / found[0]).with_name("conftest.py").read_text()
    assert (work / "tests/__init__.py").is_file()
    assert (work / "tests/utils.py").is_file()


def test_outcomes_tell_failures_from_known_differences(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="a" name="test_x"/>'
        '<testcase classname="a" name="test_y"><skipped/></testcase>'
        '<testcase classname="a" name="test_z[1]"><failure/></testcase>'
        '<testcase classname="b" name="test_kv_connector[lmcache-1]"><error/></testcase>'
        "</testsuite></testsuites>"
    )
    results = [outcome.result for outcome in upstream.read_outcomes(report)]
    assert results == ["passed", "skipped", "failure", "different"]


def test_a_folder_that_is_no_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["upstream", str(tmp_path)])
    with pytest.raises(SystemExit):
        upstream.main()
    assert "name a source tree of upstream vLLM" in capsys.readouterr().err


@create_new_process_for_each_test()
def passes(value: int) -> None:
    assert value == 1


@create_new_process_for_each_test("fork")
def skips() -> None:
    pytest.skip("not today")


def test_each_test_in_a_process_of_its_own() -> None:
    passes(1)
    with pytest.raises(AssertionError, match="passes ended with 1"):
        passes(2)
    with pytest.raises(pytest.skip.Exception):
        skips()
    assert multi_gpu_test(num_gpus=10**6).args == (True,)
