"""Steering vectors read from files: values by format, and files that cannot be used."""

from __future__ import annotations

import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.engine.harness import engine, random_prompts
from vllm import SteeringVector
from vllm.steering import files

WIDTH = 72
DRAWN = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(3))
BY_LAYER = {f"layers.{layer}": DRAWN[layer] for layer in (3, 1)}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(
    tensors: dict[str, torch.Tensor],
    version: int = 3,
    alignment: int | None = None,
    kind: int | None = None,
) -> bytes:
    """Make a file as repeng does with ggml's writer, with entries of more types than it has."""
    entries = [
        text("general.architecture") + struct.pack("<I", 8) + text("controlvector"),
        text("controlvector.model_hint") + struct.pack("<I", 8) + text("llama"),
        text("controlvector.layer_count") + struct.pack("<II", 4, len(tensors)),
        text("some.flags") + struct.pack("<IIQ3?", 9, 7, 3, True, False, True),
        text("some.texts") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("é"),
        text("some.float") + struct.pack("<Id", 12, 0.5),
    ]
    if alignment is not None:
        entries.append(text("general.alignment") + struct.pack("<II", 4, alignment))
    alignment = alignment or 32
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries)
    data = b""
    for name, tensor in tensors.items():
        data += bytes(-len(data) % alignment)
        kinds = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
        number = kinds[tensor.dtype] if kind is None else kind
        shape = struct.pack(f"<I{tensor.dim()}Q", tensor.dim(), *tensor.shape)
        head += text(name) + shape + struct.pack("<IQ", number, len(data))
        data += tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return head + bytes(-len(head) % alignment) + data


def write(path: Path, content: Any) -> Path:
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif path.suffix == ".safetensors":
        safetensors.torch.save_file(content, path)
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.safetensors", BY_LAYER),
        ("a.pt", BY_LAYER),
        ("a.pth", {3: DRAWN[3], 1: torch.nn.Parameter(DRAWN[1])}),
        ("a.gguf", gguf({"direction.2": DRAWN[3], "other": DRAWN[4], "direction.0": DRAWN[1]})),
        ("b.gguf", gguf({"direction.0": DRAWN[1], "direction.2": DRAWN[3]}, 2, alignment=8)),
    ],
)
def test_tensors_named_by_layer(tmp_path: Path, name: str, content: Any) -> None:
    path = write(tmp_path / name, content)
    whole = SteeringVector.from_file(path, scale=0.5, positions="prompt")
    assert whole.specs() == SteeringVector(DRAWN[[1, 3]], [1, 3], 0.5, "prompt").specs()
    one = SteeringVector.from_file(str(path), 3, norm_match=True)
    assert one.specs() == SteeringVector(DRAWN[3], 3, norm_match=True).specs()
    with pytest.raises(ValueError, match=r"layers=\[1, 2\]: has to be some of those in .*\[1, 3\]"):
        SteeringVector.from_file(path, [1, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_without_layers(tmp_path: Path, dtype: torch.dtype) -> None:
    rows = DRAWN[:2].to(dtype)
    for name, content in (
        ("a.safetensors", {"probe": rows}),
        ("a.pt", rows),
        ("b.pt", {"direction": rows}),
    ):
        path = write(tmp_path / name, content)
        read = SteeringVector.from_file(path, [4, 2])
        assert read.specs() == SteeringVector(rows, [4, 2]).specs()
        with pytest.raises(ValueError, match="layers=None: has to be given, because the tensor"):
            SteeringVector.from_file(path)
    path = write(tmp_path / "c.gguf", gguf({"direction.1": rows[0]}))
    assert SteeringVector.from_file(path).specs() == SteeringVector(rows[0], 2).specs()


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-pickle",)


def _compressed() -> bytes:
    path = Path("compressed.pt")
    torch.save(torch.zeros(1 << 20), "plain.pt")
    with zipfile.ZipFile("plain.pt") as plain, zipfile.ZipFile(path, "w", 8) as archive:
        for entry in plain.infolist():
            archive.writestr(entry.filename, plain.read(entry))
    return path.read_bytes()


GOOD = gguf({"direction.1": DRAWN[0]})


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("a.bin", lambda: b"", r"has to end in \.safetensors, \.pt, \.pth or \.gguf"),
        ("a.safetensors", lambda: b"", "HeaderTooSmall|header"),
        ("a.safetensors", lambda: safetensors.torch.save(BY_LAYER)[:-1], "header|incomp"),
        ("a.safetensors", lambda: {"a": DRAWN[0], "b": DRAWN[1]}, "several tensors have to be nam"),
        ("a.safetensors", lambda: {"layers.1": DRAWN}, r"layer 1 has shape \(5, 72\), not"),
        ("a.safetensors", lambda: {"layers.1": DRAWN[0], "layers.2": DRAWN[0, 1:].clone()},
         r"vectors=\[71, 72\]: has to be of one width"),
        ("a.safetensors", lambda: {"layers.1": DRAWN[0] / 0}, "vectors='...': has to be finite"),
        ("a.safetensors", lambda: {"layers.1": torch.ones(3, dtype=torch.int64).clone()}, "float"),
        ("a.safetensors", lambda: {"layers.1": DRAWN[0], "layers.01": DRAWN[1]}, "the same layer"),
        ("a.pt", lambda: b"", "it is empty"),
        ("a.pt", lambda: pickle.dumps(Bomb()), "not a zip file"),
        ("a.pt", lambda: Bomb(), "mkdir is not part of a dense tensor"),
        ("a.pt", lambda: {1: [DRAWN[0]]}, "1 is of type list, not a t"),
        ("a.pt", dict, "it has no tensor"),
        ("a.pt", lambda: torch.zeros(1).expand(1 << 40), "saved with 1 values"),
        ("a.pt", _compressed, "the archive is compressed"),
        ("a.gguf", lambda: b"GGUF", "the file is truncated"),
        ("a.gguf", lambda: b"GGML" + GOOD[4:], "not a GGUF file"),
        ("a.gguf", lambda: gguf({"direction.1": DRAWN[0]}, version=1), "GGUF version is 1"),
        ("a.gguf", lambda: gguf({"direction.1": DRAWN[0]}, kind=8), "has GGUF type 8"),
        ("a.gguf", lambda: gguf({"direction.1": DRAWN}), r"shape \[5, 72\]"),
        ("a.gguf", lambda: gguf({"direction.x": DRAWN[0]}), r"no tensor direction\.<layer>"),
        ("a.gguf", lambda: GOOD[:8] + b"\xff" * 16 + GOOD[24:], "truncated|not known|decode"),
        ("a.gguf", lambda: b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + text("general.alignment")
         + struct.pack("<II", 4, 0) + text("direction.1") + struct.pack("<IQIQ", 1, 1, 0, 0),
         "its alignment is 0"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    make: Callable[[], Any],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / name, make())
    with pytest.raises(ValueError, match=message) as caught:
        SteeringVector.from_file(path)
    assert str(path) in str(caught.value) or "vectors" in str(caught.value)
    assert not Path("made-by-a-pickle").exists()


def test_every_prefix_of_a_file_is_one_error(tmp_path: Path) -> None:
    for name, content in (("a.gguf", GOOD), ("a.safetensors", safetensors.torch.save(BY_LAYER))):
        for end in range(0, len(content) - 1, 7):
            path = write(tmp_path / name, content[:end])
            with pytest.raises(ValueError, match="steering vectors in"):
                SteeringVector.from_file(path)


def test_what_is_not_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "folder.pt").mkdir()
    for name, message in (
        ("pipe.pt", "not a regular file"),
        ("folder.pt", "not a regular file"),
        ("none.pt", "No such file"),
    ):
        with pytest.raises(ValueError, match=message):
            SteeringVector.from_file(tmp_path / name)
    monkeypatch.setattr(files, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="bytes; at most 100 are read"):
        SteeringVector.from_file(write(tmp_path / "large.pt", DRAWN))


def test_rows_are_steered_by_a_file(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    """``direction.1`` is added to what layer 1 returns; a width that differs is one error."""
    path = write(tmp_path / "a.gguf", gguf({"direction.1": DRAWN[0], "direction.2": DRAWN[1]}))
    prompts = random_prompts(4, [9])
    with engine(checkpoint("llama")) as llm:
        (plain,) = llm.extract(prompts, layers=[1, 2])
        (steered,) = llm.extract(prompts, layers=[1, 2], steering=SteeringVector.from_file(path))
        assert torch.equal(steered.hidden_states[:, 0], plain.hidden_states[:, 0])
        added = steered.hidden_states[:, 1] - plain.hidden_states[:, 1]
        assert torch.allclose(added, DRAWN[0].expand(9, -1), atol=1e-5)
        narrow = write(tmp_path / "b.gguf", gguf({"direction.1": DRAWN[0, 1:]}))
        with pytest.raises(ValueError, match="has to be 72 elements"):
            list(llm.extract(prompts, layers=[1], steering=SteeringVector.from_file(narrow)))


def test_a_short_file_does_not_hold_many_tensors(tmp_path: Path) -> None:
    """Their offsets say that they are all the same bytes."""
    names = b"".join(
        text(f"direction.{i}") + struct.pack("<IQIQ", 1, 10_000, 0, 0) for i in range(100)
    )
    head = b"GGUF" + struct.pack("<IQQ", 3, 100, 0) + names
    file = tmp_path / "many.gguf"
    file.write_bytes(head + bytes(-len(head) % 32 + 40_000))
    with pytest.raises(ValueError, match="its tensors lie over one another"):
        SteeringVector.from_file(file)
