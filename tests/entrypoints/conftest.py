from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.engine.harness import extraction_config
from tests.entrypoints.live_server import LiveServer, live_server
from tests.models.checkpoints import make_checkpoint
from vllm import LLM


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="session")
def server(tiny_llama: Path, storage: Path) -> Iterator[LiveServer]:
    """One extracting server for all tests that change nothing about it."""
    with live_server(tiny_llama, storage) as running:
        yield running


@pytest.fixture
def http(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with server.openai() as openai_client:
        yield openai_client


@pytest.fixture(scope="session")
def reference(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """The same model in this process, extracting as the server does."""
    folder = tmp_path_factory.mktemp("reference")
    options = {"max_model_len": 512, "kv_cache_memory_bytes": 2**24}
    with LLM(str(tiny_llama), **options, **extraction_config([0, 2, 4], folder)) as llm:
        yield llm
