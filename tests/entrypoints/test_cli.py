"""The command line of `vllm serve`: flags, JSON, dotted entries, config files, help, typos."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.main import COMMANDS, main
from vllm.entrypoints.cli.parsers import command_parsers
from vllm.entrypoints.cli.serve_arguments import (
    ServeArguments,
    make_serve_parser,
    parse_serve_arguments,
)
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.options import options_of

DEEP = '{"a":' * 100_000
TRANSFER = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}


def parse(*arguments: str) -> ServeArguments:
    return parse_serve_arguments(arguments)


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        parse_serve_arguments(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_defaults() -> None:
    arguments = parse("m")
    assert arguments.engine == EngineArgs(model="m") or vars(arguments.engine) == vars(
        EngineArgs(model="m")
    )
    assert arguments.server == ServerSettings()


def test_the_launcher_of_existing_clients() -> None:
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1}
    arguments = parse(
        *("m", "--speculative_config", json.dumps(speculative)),
        *("--kv_transfer_config", json.dumps(TRANSFER), "--api-server-count", "4"),
        *("--renderer-num-workers", "2", "--enable-scale-out", "--no-enable-prefix-caching"),
        *("--max-model-len", "2k", "--served-model-name", "a", "b", "--port=0"),
    )
    assert arguments.engine.speculative_config == speculative
    assert arguments.engine.kv_transfer_config == TRANSFER
    assert arguments.engine.served_model_name == ["a", "b"]
    assert arguments.engine.max_model_len == 2000
    assert not arguments.engine.enable_prefix_caching
    assert (arguments.server.api_server_count, arguments.server.renderer_num_workers) == (4, 2)
    assert arguments.server.enable_scale_out


def test_every_option_has_a_flag_in_both_spellings_and_a_help_text() -> None:
    parser = make_serve_parser()
    grouped = [option.name for option in options_of(ServerSettings)]
    assert sorted(grouped) == sorted(f.name for f in fields(ServerSettings))
    for option in (*fields(EngineArgs), *fields(ServerSettings)):
        action = parser.option(f"--{option.name.replace('_', '-')}")
        assert action is not None and action.dest == option.name
        assert action.help, option.name
    assert parse("m", "--max_queued_requests", "7").server.max_queued_requests == 7
    assert parse("m", "--max-queued-requests=7").server.max_queued_requests == 7
    assert parse("m", "--uvicorn_log_level=error").server.uvicorn_log_level == "error"


def test_dotted_entries() -> None:
    arguments = parse(
        "m",
        "--speculative-config.method=extract_hidden_states",
        "--speculative_config.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids",
        "[2, 0]",
        "--kv-transfer-config",
        json.dumps({**TRANSFER, "kv_connector_extra_config": {"num_writer_threads": 2}}),
        "--kv-transfer-config.kv_connector_extra_config.shared_storage_path=/a_b.c/d=e",
        "--kv-transfer-config.kv-role=kv_both",
    )
    layers = {"eagle_aux_hidden_state_layer_ids": [2, 0]}
    assert arguments.engine.speculative_config == {
        "method": "extract_hidden_states",
        "draft_model_config": {"hf_config": layers},
    }
    assert arguments.engine.kv_transfer_config == {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "num_writer_threads": 2,
            "shared_storage_path": "/a_b.c/d=e",
        },
    }


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--api-key", "a", "b", "--api_key=c"], "('a b and then c'); name all values once"),
        (["--served-model-name", "a", "--served-model-name", "a", "b"], "('a and then a b'); name"),
        (["--port", "1", "--port=2", "--no-enable-lora"], None),
        (["--enable-lora", "--port", "2", "--no-enable-lora"], None),
    ],
)
def test_flags_that_are_given_twice(flags: list[str], problem: str | None, capsys: Any) -> None:
    """argparse would forget values that the user named; a wrapper's one value may be replaced."""
    if problem is not None:
        with pytest.raises(SystemExit):
            parse("m", *flags)
        assert problem in capsys.readouterr().err
        return
    parsed = parse("m", *flags)
    assert parsed.server.port == 2 and not parsed.engine.enable_lora
    assert "is given more than once ('" in (said := capsys.readouterr().err)
    assert said.endswith("): the last one counts\n") and said.count("\n") == 1
    same = parse("m", "--port", "1", "--port=1", "--api-key", "a")
    assert same.server.port == 1 and same.server.api_key == ["a"]
    assert not capsys.readouterr().err


def test_keys_that_no_header_can_carry(monkeypatch: Any, capsys: Any) -> None:
    """Requests could never name them, so the server would refuse all."""
    for key in (" a", "a\n", "a\r\nb", "\t"):
        with pytest.raises(SystemExit):
            parse("m", "--api-key", "good", key)
        assert "use keys that a header can carry" in capsys.readouterr().err
        monkeypatch.setenv("VLLM_API_KEY", key)
        with pytest.raises(SystemExit):
            parse("m")
        assert "environment variable VLLM_API_KEY=" in capsys.readouterr().err
        monkeypatch.delenv("VLLM_API_KEY")
    assert parse("m", "--api-key", "schlüssel", "a b").server.api_key == ["schlüssel", "a b"]
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        monkeypatch.setenv(name, "yes")
        with pytest.raises(SystemExit):  # before the model is loaded
            parse("m")
        assert f"environment variable {name}='yes'" in capsys.readouterr().err
        monkeypatch.delenv(name)


def test_config_file_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: from-file\n"
        "port: 1234\n"
        "max_model_len: 64\n"
        "enable-prefix-caching: false\n"
        "enforce_eager: true\n"
        "served-model-name: [x, y]\n"
        "dtype: null\n"
        "kv_transfer_config: {kv_connector: C, kv_role: kv_both}\n"
        'api-key: ["1", 2]\n'
    )
    arguments = parse("--config", str(file))
    assert arguments.engine.model == "from-file"
    assert arguments.engine.dtype == "auto"
    assert arguments.engine.served_model_name == ["x", "y"]
    assert not arguments.engine.enable_prefix_caching
    assert arguments.engine.enforce_eager
    assert arguments.server.port == 1234
    assert arguments.server.api_key == ["1", "2"]

    arguments = parse(
        *("mine", "--port", "5", f"--config={file}", "--served-model-name", "z"),
        *("--enable-prefix-caching", "--kv-transfer-config.kv_role=kv_producer"),
    )
    assert arguments.engine.model == "mine"
    assert arguments.engine.max_model_len == 64
    assert arguments.engine.enable_prefix_caching
    assert arguments.engine.served_model_name == ["z"]
    assert arguments.server.port == 5
    expected = {"kv_connector": "C", "kv_role": "kv_producer"}
    assert arguments.engine.kv_transfer_config == expected


def test_values_of_a_config_file_are_taken_as_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """YAML makes 83, 80, a date and true of these."""
    file = tmp_path / "serve.yaml"
    file.write_text(
        "api-key: [0123, 1:20, 4_5]\nserved-model-name: 2024-01-01\nrevision: on\n"
        "port: 1\nport: [2]\nhf-overrides: {rope_theta: 1.5, a: [1, null], "
        "b: 0123, c: 1:20, d: 2024-01-01, e: -1_0, f: -0.5}\n"
    )
    arguments = parse("m", "--config", str(file))
    assert arguments.server.api_key == ["0123", "1:20", "4_5"]
    assert arguments.engine.served_model_name == ["2024-01-01"]
    assert arguments.engine.revision == "on"
    numbers, texts = {"rope_theta": 1.5, "e": -10, "f": -0.5}, {"b": "0123", "c": "1:20"}
    texts["d"] = "2024-01-01"
    assert arguments.engine.hf_overrides == {"a": [1, None], **numbers, **texts}
    assert arguments.server.port == 2
    assert "--port is given more than once" in capsys.readouterr().err


def test_texts_and_numbers_of_a_config_file_that_others_take_otherwise(tmp_path: Path) -> None:
    """argparse takes a text that begins with a dash for a flag, and PyYAML ``1e6`` for a text."""
    file = tmp_path / "serve.yaml"
    for names in ("[--, a]", "[a, ---]", "[a, --port]", "--", "[-1, '-x']"):
        file.write_text(
            f"served-model-name: {names}\nhf-overrides: {{a: 1e6, b: -1.5E-3, c: e6}}\n"
        )
        arguments = parse("m", "--config", str(file), "--port", "5")
        assert arguments.engine.served_model_name == names.strip("[]").replace("'", "").split(", ")
        assert arguments.engine.hf_overrides == {"a": 1e6, "b": -0.0015, "c": "e6"}
        arguments = parse("m", "--config", str(file), "--served-model-name", "z")
        assert arguments.engine.served_model_name == ["z"]


def test_bad_config_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    assert "cannot be read" in failure(capsys, "m", "--config", str(file))
    assert "has more than 1,048,576 characters" in failure(capsys, "m", "--config", "/dev/zero")
    for content, message in (
        ("prot: 5", "there is no flag 'prot' (did you mean '--port'?)"),
        ("- port", "not a mapping"),
        ("a: [", "cannot be read"),
        ("enforce-eager: 3", "enforce-eager=3 in the config is not true or false"),
        ("port: many", "'many' is not a whole number"),
        ("port: [1, 2]", "port=[1, 2] in the config: write one value, such as 1,2"),
        ("config: x", "there is no flag 'config'"),
        ("hf-overrides: {a: !!binary aGk=}", "cannot be read"),
        ("revision: [a, b]", "revision=['a', 'b'] in the config: write one value, such as 1,2"),
        ("dtype: []", "dtype=[] in the config: write one value"),
        ("[" * 20_000, "is nested too deeply"),
    ):
        file.write_text(content)
        assert message in failure(capsys, "m", "--config", str(file))


def test_config_from_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As bash's ``<(...)`` gives it; a pipe without a writer is not waited for."""
    reading, writing = os.pipe()
    os.write(writing, b"port: 5")
    os.close(writing)
    assert parse("m", "--config", f"/dev/fd/{reading}").server.port == 5
    os.close(reading)
    os.mkfifo(tmp_path / "pipe")
    assert "a pipe to which nothing writes" in failure(capsys, "m", f"--config={tmp_path}/pipe")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["m", "--max-modle-len", "5"], "did you mean '--max-model-len'?"),
        (["m", "--hiden_states_ttl=5"], "did you mean '--hidden-states-ttl'?"),
        (["m", "--port.x=5"], "unrecognized arguments: --port.x=5"),
        (["m", "--api-key=--"], "argument --api-key: -- cannot be a value on the command line"),
        (["m", "--kv-transfer-config.a..b=5"], "expected --option.key[.key...]=value"),
        (["m", "--kv-transfer-config.a"], "expected --option.key[.key...]=value"),
        (["m", "--kv-transfer-config", "{"], "'{' is not valid JSON"),
        ([], "--model is missing"),
        (["m", "--model", "n"], "model='n' is not 'm'; give the model once"),
        (["m", "--port", "65536"], "port=65536 is not valid; use at most 65535"),
        (["m", "--max-body-bytes", "0"], "max_body_bytes=0 is not valid; use at least 1"),
        (["m", "--request-timeout", "0"], "request_timeout=0.0 is not valid; use a number above"),
        (["m", "--enable-auto-tool-choice"], "enable_auto_tool_choice needs tool_call_parser"),
        (["m", "--ssl-certfile", "/none"], "ssl_certfile='/none' is not valid; there is no such"),
        (["m", "--allowed-origins", "[1]"], "give a list of strings"),
        (["m", "--tool-call-parser", "x"], "invalid choice: 'x'"),
        (["m", "--uds", ""], "uds='' is not valid; name a path"),
        (["m", "--shutdown-timeout", "inf"], "shutdown_timeout=inf is not valid; use a finite"),
        (["m", "--hidden-states-quota-gib", "inf"], "gib=inf is not valid; use a finite number"),
        (["m", "--config"], "vllm serve: error: argument --config: expected one argument"),
        (["m", "--ssl-keyfile", "a" * 5000], "is not valid; there is no such file"),
        (["m", "--hf-overrides", DEEP], "is not valid JSON: it is nested too deeply"),
        (["m", "--seed", "1.5"], "'1.5' is not a whole number"),
        (["m", "--api-key", "\udcff"], "api_key is not valid text"),
        (["m", "--allowed-methods", "GÉT"], "use ASCII, as HTTP headers do"),
    ],
)
def test_mistakes(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in failure(capsys, *flags)


def test_cors_lists_as_json_or_words() -> None:
    settings = parse("m", "--allowed-origins", '["http://a", "http://b"]').server
    assert settings.allowed_origins == ["http://a", "http://b"]
    assert parse("m", "--allowed-methods", "GET", "PUT").server.allowed_methods == ["GET", "PUT"]
    assert parse("m", "--max-body-bytes", "2MiB").server.max_body_bytes == 2 << 20


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    overview = shown(capsys, "serve", "--help")
    for title in ("Server", "Limits", "Downloads", "ModelConfig", "CacheConfig", "Engine"):
        assert f"\n{title}: " in overview
    assert "--max-model-len" in overview and "Most tokens of a request" not in overview

    one = shown(capsys, "serve", "--help=max_model_len")
    assert "Most tokens of a request" in one and "--dtype" not in one
    group = shown(capsys, "serve", "--help=limits")
    assert "--max-body-bytes N" in group and "default: 33554432" in group
    assert "--port" not in group
    found = shown(capsys, "serve", "--help=ssl")
    assert "--ssl-keyfile" in found and "--api-key" not in found
    everything = shown(capsys, "serve", "--help=all")
    assert "Most tokens of a request" in everything and "--ssl-keyfile" in everything
    assert "HTTP processes that share the address" in shown(
        capsys, "serve", "--help=api-server-count"
    )

    with pytest.raises(SystemExit):
        main(["serve", "--help=hidden-state-ttl"])
    assert "did you mean '--hidden-states-ttl'?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["sevre"])
    assert "did you mean 'serve'?" in capsys.readouterr().err


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_help_looks_in_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "--help=layers")
    assert "vllm extract:\n" in found and "vllm bench extraction:\n" in found
    assert "negative numbers from the end" in found and "vllm serve" not in found
    shared = printed(capsys, "--help=max_model_len")
    assert shared.startswith("vllm serve, vllm extract, vllm models:\n")
    assert shared.count("Most tokens of a request") == 1
    assert "vllm hidden-states convert:\n" in printed(capsys, "--help=shard-size")
    assert "vllm serve:\nLimits:" in printed(capsys, "--help=limits")
    assert "--mask-column" in printed(capsys, "--help=mask-col"), "a part of a name"
    below = shown(capsys, "hidden-states", "--help=shard-size")
    assert below.startswith("vllm hidden-states convert:\n")
    assert "--rounds N" in shown(capsys, "bench", "extraction", "--help=rounds")
    for command in (["bench", "extraction"], ["hidden-states", "inspect"]):
        with pytest.raises(SystemExit):
            main([*command, "--help=nothing"])
        assert f"vllm {' '.join(command)}: error:" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["hidden-states", "--help=shard-sise"])
    assert "'shard-sise' (did you mean '--shard-size'?)" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--help=mask-colunm"])
    assert ended.value.code == 2
    assert "'mask-colunm' (did you mean '--mask-column'?)" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "extract", "models"])
def test_help_begins_with_the_most_used_flags(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    parser = command_parsers()[command]
    assert isinstance(parser, FlexibleArgumentParser)
    text = shown(capsys, command, "--help")
    first, _, rest = text.partition("The other flags, by group:")
    names = [flag.split()[0] for flag in parser.most_used]
    assert len(names) == (5 if command == "models" else 12)
    for name in names:
        assert parser.option(name) is not None, name
        assert re.search(rf"^  {name} .*[\w)]$", first, re.MULTILINE)
        assert not re.search(rf"{name}(?![\w-])", rest), f"{name} is shown twice"
    others = {action.option_strings[0] for action in parser._actions if action.option_strings}
    assert set(re.findall(r"(?<=\s)--?[\w-]+", rest)) >= others - set(names)
    arguments = shlex.split(parser.example.replace("\\\n", " "))
    assert arguments[:2] == ["vllm", command] and parser.example.splitlines()[0] in first
    parser.parse_args(arguments[2:])
    assert shown(capsys, "help", command) == text


@pytest.mark.parametrize("name", ["samples", "seed", "shard-size"])
def test_help_tells_a_default_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for entry in printed(capsys, f"--help={name}").split("\n\n"):
        assert entry.count("(default: ") <= 1, entry


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--help")
    assert printed(capsys, "help") == text
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert "--png" in shown(capsys, "help", "hidden-states", "inspect")
    assert set(command_parsers()) == set(COMMANDS) - {"help"}
    with pytest.raises(SystemExit):
        main(["chat"])
    assert "the commands are serve, extract, bench," in capsys.readouterr().err


def test_a_mistake_ends_the_program_with_status_2() -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "m", "--prot", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "(did you mean '--port'?)" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["models", "--json"],
        ["extract", "--help"],
        ["--help=layers"],
        ["hidden-states", "layers", "5"],
    ],
)
def test_a_reader_that_leaves_is_no_error(arguments: list[str]) -> None:
    """``vllm ... | head -0``: no traceback; the status of SIGPIPE, or 0 where argparse prints."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *arguments]
    at_once = {**os.environ, "PYTHONUNBUFFERED": "1"}  # fails where it is printed, not at the end
    with subprocess.Popen(
        command, env=at_once, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(60) in ((0, 141) if arguments[-1] == "--help" else (141,))
        error = process.stderr.read()
        assert b"Traceback" not in error and b"Broken pipe" not in error


@pytest.mark.parametrize("arguments", ["--version", "help", "hidden-states layers 5"])
@pytest.mark.parametrize(
    ("output", "statuses"), [(">&-", [0]), (">&- 2>&- <&-", [0]), (">/dev/full", [1, 2])]
)
def test_output_that_is_closed_or_full(output: str, statuses: list[int], arguments: str) -> None:
    command = f"{sys.executable} -m vllm.entrypoints.cli.main {arguments} {output}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    prints_itself = arguments == "help"  # argparse does not tell a failure
    assert done.returncode in ([0, 1] if prints_itself else statuses), done.stderr
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr or done.returncode == 0


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict"])
def test_names_that_the_output_cannot_encode(encoding: str, tmp_path: Path) -> None:
    """As in a terminal of another encoding, and for names that are not UTF-8."""
    folder = tmp_path / os.fsdecode("d\u00e9".encode("latin-1"))
    folder.mkdir()
    (folder / "\u6771.safetensors").touch()
    done = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "hidden-states", "verify", str(folder)],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert b"/d\\udce9: 1 problem\n" in done.stdout


@pytest.mark.parametrize("variable", ["VLLM_LOGGING_LEVEL", "VLLM_LOG_FORMAT"])
def test_a_variable_that_every_module_reads(variable: str) -> None:
    """It is looked at before other modules are imported, which would end in a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm.entrypoints.cli.main", "models"],
        env={**os.environ, variable: "loud"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"vllm models: environment variable {variable}='loud': use one")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_before_a_command_has_begun(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While its modules are loaded, for instance."""

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm.entrypoints.cli.main.import_module", interrupt)
    assert main(["models"]) == 130
    assert capsys.readouterr().err == "vllm: interrupted\n"


def test_an_interrupt_that_was_caught_does_not_change_the_status(tmp_path: Path) -> None:
    """As by SIGTERM while a module with dataclasses is imported."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "flush = sys.stdout.flush\n"
        "def interrupted():\n"
        "    sys.stdout.flush = flush\n"
        "    try:\n"
        "        exec('raise KeyboardInterrupt')\n"
        "    except KeyboardInterrupt:\n"
        "        print('caught')\n"
        "sys.stdout.flush = interrupted\n"
    )
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "--version"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.stdout.endswith("caught\n") and ended.returncode == 0
