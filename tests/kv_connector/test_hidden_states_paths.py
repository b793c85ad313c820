"""Options of the connector, and where a request's file may go."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.kv_connector.connector_harness import MakeHarness
from tests.kv_connector.loading import beside_extraction
from vllm.config import SchedulerConfig
from vllm.distributed.kv_transfer.kv_connector.v1.hidden_states_options import (
    HiddenStatesOptions,
)
from vllm.distributed.kv_transfer.kv_connector.v1.storage_folder import (
    extract_only_when_asked,
    storage_options,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.text import safe_name


def test_a_storage_folder_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No shell sees a path in JSON, or in ``--option=~/folder``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("~/rows", Path("~/rows")):
        assert HiddenStatesOptions(shared_storage_path=path).shared_storage_path == str(
            tmp_path / "rows"
        )


def test_ordinary_ids_are_kept() -> None:
    for request_id in ("0-1a2b3c4d", "cmpl-0123456789abcdef-0-89abcdef", "A.b_c", "-"):
        assert safe_name(request_id) == request_id


ODD_IDS = [
    "", ".", "..", "../x", "x/../../y", "/etc/passwd", ".hidden", "a b", "a_b", "a\0b", "é",
    "a\nb", "x" * 500, "x" * 501, "con/", "..\\..", "\ud800", safe_name("a b"), "_hidden",
]  # fmt: skip


def test_odd_ids_get_names_of_their_own_inside_the_folder() -> None:
    names = [safe_name(request_id) for request_id in ODD_IDS]
    assert len(set(names)) == len(ODD_IDS)
    for name in names:
        assert os.path.basename(name) == name
        assert not name.startswith(".")
        assert name.isascii()
        assert 0 < len(name) < 200


def test_a_traversing_id_stays_inside(make_harness: MakeHarness, storage: Path) -> None:
    harness = make_harness()
    harness.add("x/../../../y", 3)
    harness.step({"x/../../../y": 3})
    params = harness.finish("x/../../../y")
    harness.idle_until_done("x/../../../y")
    assert params is not None
    path = Path(params["hidden_states_path"])
    assert path.parent == storage
    assert path.exists()


def test_a_custom_path_is_ignored_unless_allowed(make_harness: MakeHarness, storage: Path) -> None:
    harness = make_harness()
    harness.add("r", 3, {"hidden_states_path": "/anywhere/else"})
    harness.step({"r": 3})
    assert harness.finish("r") == {"hidden_states_path": str(storage / "r.safetensors")}


@pytest.mark.parametrize("absolute", [True, False])
def test_a_custom_path_inside_the_storage(
    make_harness: MakeHarness, storage: Path, absolute: bool
) -> None:
    harness = make_harness(options={"allow_custom_save_path": True})
    wanted = storage / "new" / "deep" / "hs_7.safetensors"
    harness.add(
        "r", 3, {"hidden_states_path": str(wanted if absolute else "new/deep/hs_7.safetensors")}
    )
    harness.step({"r": 3})
    assert harness.finish("r") == {"hidden_states_path": str(wanted)}
    harness.idle_until_done("r")
    assert torch.equal(load_file(wanted)["hidden_states"], harness.rows("r", 3))
    assert sorted(os.listdir(wanted.parent)) == ["hs_7.safetensors", "hs_7.safetensors.lock"]


@pytest.mark.parametrize(
    "path",
    [
        "../x",
        "/etc/x",
        "a/../../x",
        "link/x",
        "",
        ".",
        "a/",
        "x.lock",
        "\ud800",
        5,
        "a/" * 2048 + "x",
    ],
)
def test_a_custom_path_that_is_refused(
    make_harness: MakeHarness, storage: Path, tmp_path: Path, path: Any
) -> None:
    harness = make_harness(options={"allow_custom_save_path": "inside"})
    (storage / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="hidden_states_path="):
        harness.add("r", 3, {"hidden_states_path": path})


@pytest.mark.parametrize("content", [b"root:x:0:0", b"\x0a" + bytes(7) + b'{"a": {}}  ', bytes(99)])
def test_only_files_of_rows_are_replaced(content: bytes, tmp_path: Path) -> None:
    options = HiddenStatesOptions(shared_storage_path=str(tmp_path), allow_custom_save_path=True)
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(ValueError, match="is a file without hidden states"):
        options.check_save_path(str(tmp_path / "other"))
    save_file({"hidden_states": torch.ones(2, 3)}, tmp_path / "rows")
    (tmp_path / "empty").touch()
    for name in ("rows", "empty", "none"):
        options.check_save_path(str(tmp_path / name))


@pytest.mark.parametrize("name", ["pipe", "link", "dangling"])
def test_what_is_not_a_regular_file_is_not_replaced(
    make_harness: MakeHarness, tmp_path: Path, name: str
) -> None:
    """It may be a device, also where requests may name any path."""
    harness = make_harness(options={"allow_custom_save_path": True})
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    with pytest.raises(ValueError, match="a link, a device or a pipe"):
        harness.add("r", 3, {"hidden_states_path": str(tmp_path / name)})


def test_a_path_of_many_folders_fails_alone(
    make_harness: MakeHarness, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one, whose name has a line break, is written."""

    def make(path: str, **options: Any) -> None:
        raise RecursionError

    harness = make_harness(options={"allow_custom_save_path": "inside"})
    harness.add("deep", 3, {"hidden_states_path": "deep/" * 3 + "x"})
    harness.add("line", 3, {"hidden_states_path": "a\nb"})
    made = os.makedirs
    monkeypatch.setattr(
        os, "makedirs", lambda path, **more: (make if "deep" in path else made)(path, **more)
    )
    harness.step({"deep": 3, "line": 3})
    for name in ("deep", "line"):
        harness.finish(name)
        harness.idle_until_done(name)
    assert list(harness.failures) == ["deep"] and "fewer of them" in harness.failures["deep"]
    assert torch.equal(load_file(storage / "a\nb")["hidden_states"], harness.rows("line", 3))


@pytest.mark.parametrize("name", ["a" * 250, "\u6f22" * 83, "\u6f22" * 84])
def test_names_as_long_as_a_file_system_takes(
    make_harness: MakeHarness, storage: Path, name: str
) -> None:
    harness = make_harness(options={"allow_custom_save_path": "inside"})
    harness.add("r", 3, {"hidden_states_path": name})
    harness.step({"r": 3})
    harness.finish("r")
    harness.idle_until_done("r")
    if len(os.fsencode(name + ".lock")) <= 255:
        assert harness.failures == {} and sorted(os.listdir(storage)) == [name, name + ".lock"]
    else:
        assert "at most 255 bytes" in harness.failures["r"] and os.listdir(storage) == []


def test_a_lock_that_is_a_link_is_not_opened(
    make_harness: MakeHarness, storage: Path, tmp_path: Path
) -> None:
    harness = make_harness(options={"allow_custom_save_path": "inside"})
    (storage / "a.lock").symlink_to(tmp_path / "made")
    harness.add("r", 3, {"hidden_states_path": "a"})
    harness.step({"r": 3})
    harness.finish("r")
    harness.idle_until_done("r")
    assert "r" in harness.failures
    assert not (tmp_path / "made").exists() and os.listdir(storage) == ["a.lock"]


def test_any_path_when_the_server_says_so(make_harness: MakeHarness, tmp_path: Path) -> None:
    harness = make_harness(options={"allow_custom_save_path": True})
    wanted = tmp_path / "elsewhere" / "a.safetensors"
    harness.add("r", 3, {"hidden_states_path": str(wanted)})
    harness.step({"r": 3})
    harness.finish("r")
    harness.idle_until_done("r")
    assert torch.equal(load_file(wanted)["hidden_states"], harness.rows("r", 3))


def test_a_consumer_writes_no_files(make_harness: MakeHarness, storage: Path) -> None:
    harness = make_harness(role="kv_consumer")
    harness.add("r", 12, {"include_output_tokens": True})
    harness.step({"r": 12})
    harness.step({"r": 1})
    assert harness.finish("r") is None
    harness.step()
    assert harness.done == set()
    assert os.listdir(storage) == []


@pytest.mark.parametrize(("allowed", "warned"), [(True, True), ("inside", False), (False, False)])
def test_the_log_warns_of_any_path_at_the_start(
    make_harness: MakeHarness,
    allowed: object,
    warned: bool,
    caplog: pytest.LogCaptureFixture,
    storage: Path,
) -> None:
    harness = make_harness(options={"allow_custom_save_path": allowed})
    type(harness.scheduler).check_config(harness.scheduler._vllm_config)
    told = f'can make this process write.*"inside" keeps them to {storage}'
    assert bool(re.search(told, caplog.text)) is warned


def test_two_requests_cannot_share_a_path(make_harness: MakeHarness) -> None:
    harness = make_harness(options={"allow_custom_save_path": True})
    harness.add("a", 3, {"hidden_states_path": "same"})
    harness.step({"a": 2})
    for spelling in ("same", "./other/../same"):
        with pytest.raises(ValueError, match="being written by another request"):
            harness.add("b", 3, {"hidden_states_path": spelling})
    harness.step({"a": 1})
    harness.finish("a")
    harness.idle_until_done("a")
    harness.add("b", 3, {"hidden_states_path": "same"})
    harness.step({"b": 3})
    params = harness.finish("b")
    harness.idle_until_done("b")
    assert params is not None
    rows = load_file(params["hidden_states_path"])["hidden_states"]
    assert torch.equal(rows, harness.rows("b", 3))


@pytest.mark.parametrize("params", [{"include_output_tokens": 1}, {"include_output_tokens": "no"}])
def test_wrong_params_are_refused(make_harness: MakeHarness, params: dict[str, Any]) -> None:
    harness = make_harness()
    with pytest.raises(ValueError, match="include_output_tokens"):
        harness.add("r", 3, params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_storage_pth": "/x"}, r"did you mean 'shared_storage_path'"),
        ({"num_writer_threads": 0}, r"\.num_writer_threads=0 is not valid; use at least 1"),
        ({"num_writer_threads": True}, r"=True is not valid: it should be a valid integer"),
        ({"use_synchronization_lock": 1}, r"lock=1 is not valid: it should be a valid boolean"),
        (
            {"allow_custom_save_path": "all"},
            r"path='all' is not valid; use true, false",
        ),
        ({"shared_storage_path": ""}, r"shared_storage_path='' is not valid; name a folder"),
        ({"max_bytes_in_flight": -5}, r"=-5 is not valid; use at least 1"),
    ],
)
def test_options_are_checked(
    make_harness: MakeHarness, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_harness(options=options)


def test_storage_that_cannot_be_made(make_harness: MakeHarness, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"shared_storage_path=.*file/x.* cannot be written: "):
        make_harness(options={"shared_storage_path": str(tmp_path / "file" / "x")})


def test_defaults() -> None:
    options = HiddenStatesOptions()
    assert options.shared_storage_path == "/tmp"
    assert options.num_writer_threads == 8
    assert not options.allow_custom_save_path
    assert options.use_synchronization_lock


def test_the_servers_flag_reaches_our_connector_among_others(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    options = beside_extraction(tmp_path, {"kv_connector": "OffloadingConnector"})
    config = EngineArgs(str(checkpoint("llama")), **options).create_engine_config()
    assert storage_options(config) == HiddenStatesOptions(shared_storage_path=str(tmp_path))
    extract_only_when_asked(config)
    expected = HiddenStatesOptions(shared_storage_path=str(tmp_path), extract_only_when_asked=True)
    assert storage_options(config) == expected
    assert storage_options(pickle.loads(pickle.dumps(config))) == expected


def test_a_device_has_room_for_the_rows_of_two_steps(make_harness: MakeHarness) -> None:
    """Each step with a last piece that is a whole one, however few rows are in it."""
    small, large = (
        torch.empty(3, 16, n, 1024, dtype=torch.float16, device="meta") for n in (1, 64)
    )

    def room(row_cache: torch.Tensor, **options: Any) -> int:
        worker = make_harness(options=options).worker
        worker._vllm_config.scheduler_config = SchedulerConfig(max_num_batched_tokens=3000)
        chosen: int = worker._saver_options(row_cache).max_bytes_in_flight
        return chosen

    assert room(small) == 64 * 2**20
    assert room(large) == 2 * (3000 * 64 * 1024 * 2 + 8 * 2**20)
    assert room(large, max_bytes_in_flight=7000) == 7000
