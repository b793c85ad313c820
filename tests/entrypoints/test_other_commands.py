"""``vllm collect-env`` and ``vllm completion``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from vllm.entrypoints.cli import collect_env
from vllm.entrypoints.cli.main import main
from vllm.ops.native import isas_of_this_cpu
from vllm.ops.sources import kernels_of
from vllm.utils.build_info import version_line
from vllm.utils.mem_utils import format_bytes, total_memory_bytes
from vllm.version import PRODUCT


def facts(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["collect-env"]) == 0
    pairs = (line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    return dict(pairs)


def test_the_facts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_THREADS", "1")
    monkeypatch.setenv("VLLM_OF_ANOTHER_VERSION", "x=1")
    found = facts(capsys)
    assert found["engine"] == version_line()
    assert found["engine"].startswith(f"{PRODUCT} ")
    assert found["Python"].startswith(sys.version.split()[0])
    assert found["torch"] == torch.__version__
    assert found["transformers"] == transformers.__version__
    assert found["CPU"].endswith(f"instruction sets: {', '.join(isas_of_this_cpu())}")
    assert found["kernels"] == kernels_of("cpu")
    assert found["threads"].startswith("1 for computing; ")
    assert f"of {format_bytes(total_memory_bytes())} that the limits allow" in found["memory"]
    assert torch.cuda.is_available() or "none that torch can use" in found["GPU"]
    assert found["VLLM_CPU_THREADS"] == "1" and found["VLLM_OF_ANOTHER_VERSION"] == "x=1"


def test_no_secrets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY", "VLLM_S3_PASSWORD")
    for name in secrets:
        monkeypatch.setenv(name, "hf_do_not_show")
    found = facts(capsys)
    assert "do_not_show" not in str(found)
    assert "HF_TOKEN" not in found
    assert found["VLLM_API_KEY"] == found["VLLM_S3_PASSWORD"] == "set, not shown"


def test_a_broken_part_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> str:
        raise RuntimeError("no library")

    monkeypatch.setattr(collect_env, "_kernels", broken)
    found = facts(capsys)
    assert found["kernels"] == "RuntimeError: no library"
    assert "memory" in found


def test_completion_without_its_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as ended:
        main(["completion", "bash"])
    assert ended.value.code == 1
    assert capsys.readouterr().err.strip().endswith("pip install shtab")


COMPLETE = """
complete_line() {
  COMP_WORDS=("$@"); COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 )); COMPREPLY=()
  _shtab_vllm; echo "${COMPREPLY[*]}"
}
"""


def test_bash_completes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    lines = {
        "vllm extr": "extract",
        "vllm help mod": "models",
        "vllm extract --lay": "--layers",
        "vllm serve --max-model": "--max-model-len",
        "vllm serve --tool-call-parser her": "hermes",
        "vllm hidden-states conv": "convert",
        "vllm bench extraction --peer t": "transformers",
        "vllm extract --input dat": "data.jsonl",
        "vllm completion z": "zsh",
    }
    (tmp_path / "data.jsonl").touch()
    calls = "\n".join(f"complete_line {line}" for line in lines)
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{COMPLETE}\n{calls}"],
        capture_output=True, text=True, cwd=tmp_path, check=True,
    )  # fmt: skip
    assert dict(zip(lines, done.stdout.splitlines(), strict=True)) == lines


@pytest.mark.parametrize(
    ("shell", "flag"), [("zsh", "--hidden-states-quota-gib"), ("tcsh", "--uvicorn-log-level=")]
)
def test_other_shells(shell: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert flag in script and "collect-env" in script
