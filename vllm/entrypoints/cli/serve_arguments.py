"""The command line of ``vllm serve``, and flags from the YAML file of ``--config``."""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
from collections.abc import Sequence
from typing import Any, NamedTuple

import yaml

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.help import HelpAction
from vllm.entrypoints.openai.cli_args import ServerSettings
from vllm.utils.argparse_utils import FlexibleArgumentParser, json_object
from vllm.utils.options import add_flags, given_options, options_of
from vllm.utils.text import did_you_mean

_MOST_USED = {
    "--config FILE": "YAML file with flags; the command line wins",
    "--host ADDRESS": "address to listen on; default: all addresses of this machine",
    "--port N": "port to listen on (8000)",
    "--api-key KEY ...": "keys of which requests must carry one",
    "--served-model-name NAME ...": "names of the model in requests",
    "--dtype TYPE": "auto (the checkpoint's), float32, bfloat16 or float16",
    "--max-model-len N": "most tokens of a request, prompt and answer",
    "--kv-cache-memory-bytes SIZE": "memory for keys, values and states, such as 4GiB",
    "--speculative-config JSON": "the layers to extract",
    "--kv-transfer-config JSON": "the connector, which writes hidden states to files",
    "--enable-hidden-states-download": "serve these files to clients on other machines",
    "--hidden-states-quota-gib N": "most GiB that the files may take",
}
_EXAMPLE = """\
vllm serve Qwen/Qwen3.5-0.8B --port 8000 \\
  --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
    "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 12, 21, 24]}}}' \\
  --kv-transfer-config '{"kv_connector": "ExampleHiddenStatesConnector",
    "kv_role": "kv_producer", "kv_connector_extra_config": {"shared_storage_path": "out"}}'"""


class ServeArguments(NamedTuple):
    """The checked options of a command line."""

    engine: AsyncEngineArgs
    server: ServerSettings


def make_serve_parser() -> FlexibleArgumentParser:
    """Make the parser with every flag of the engine and of the server."""
    parser = command_parser(
        "vllm serve MODEL [flags]",
        "Serve a model over HTTP with OpenAI's API.",
        " Flags may be spelled with dashes or underscores; a flag that takes JSON also takes its "
        "entries one by one: --kv-transfer-config.kv_role=kv_producer.",
    )
    parser.most_used, parser.example = _MOST_USED, _EXAMPLE
    add_flags(parser, options_of(ServerSettings))
    AsyncEngineArgs.add_cli_args(parser)
    return parser


def command_parser(usage: str, description: str, more: str = "") -> FlexibleArgumentParser:
    """Make the parser of a command that runs a model, with the flags that all of these share."""
    parser = FlexibleArgumentParser(
        prog=" ".join(usage.split()[:2]),
        usage=usage,
        description=description,
        epilog=f"--help=NAME explains one flag or one group, --help=all explains all.{more}",
        add_help=False,
        allow_abbrev=False,
    )
    general = parser.add_argument_group("General", "The model, help, and a file with flags.")
    general.add_argument("model_tag", nargs="?", metavar="MODEL", help="Same as --model.")
    general.add_argument("-h", "--help", action=HelpAction, metavar="NAME", help="Explain flags.")
    general.add_argument(
        "--config", metavar="FILE", help="YAML file with flags; the command line wins."
    )
    return parser


def parse_serve_arguments(argv: Sequence[str]) -> ServeArguments:
    """Parse and check the arguments; a mistake ends the program with a message and status 2."""
    parser = make_serve_parser()
    try:
        args = parse_flags(parser, argv)
        server = ServerSettings(**given_options(ServerSettings, args))
        return ServeArguments(AsyncEngineArgs.from_cli_args(args), server)
    except ValueError as error:
        parser.error(str(error))


def parse_flags(parser: FlexibleArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags of ``--config``, then ``argv``; raises ValueError if they conflict."""
    finder = argparse.ArgumentParser(
        prog=parser.prog, usage=parser.usage, add_help=False, allow_abbrev=False
    )
    finder.add_argument("--config")
    path, namespace = finder.parse_known_args(argv)[0].config, argparse.Namespace()
    if path is not None:
        flags, lists = _flags_from_file(path, parser)
        namespace = parser.parse_args(flags)
        vars(namespace).update(lists)
    from_file = vars(namespace).get("model")
    args = parser.parse_args(argv, namespace)
    if args.model_tag is not None:  # the command line wins over the file
        if args.model not in (None, from_file, args.model_tag):
            raise ValueError(f"model={args.model!r} is not {args.model_tag!r}; give the model once")
        args.model = args.model_tag
    return args


_MOST_CHARACTERS = 1 << 20
"""Size of the largest file of flags that is read."""


_NOT_DECIMAL = re.compile(r"[-+]?0\w+$|.*:|\d+-\d+-")


class _Loader(yaml.SafeLoader):
    """Numbers are decimal ones. PyYAML's also make 80 of ``1:20``, 83 of ``0123``, and dates."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        is_text = kind is yaml.ScalarNode and implicit[0] and _NOT_DECIMAL.match(value)
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        return self.DEFAULT_SCALAR_TAG if is_text else tag


# PyYAML alone makes texts of 1e6 and 1.0e6.
_EXPONENTIAL = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_FIRST = list("-+.0123456789")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENTIAL, _FIRST)


class _Entry(NamedTuple):
    """An entry of a file of flags. texts: its value, or the items of a list, as they are written,
    because ``1.10`` as a number is 1.1."""

    key: str
    value: Any
    texts: list[str]


def _flags_from_file(
    path: str, parser: FlexibleArgumentParser
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the entries of a YAML file as command-line arguments, and lists of texts by option
    that could not be these: argparse takes a text such as "---" for a flag.

    Keys are flags without their dashes. A mapping becomes JSON, a list several values, true
    and false become ``--flag`` and ``--no-flag``; null leaves the default. Raises ValueError if
    the file cannot be read, has a key that is not a flag, or several values for one that takes one.
    """
    try:
        entries = _entries(_read_text(path))
    except RecursionError:
        raise ValueError(f"config={path!r} is nested too deeply") from None
    except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"config={path!r} cannot be read: {error}") from None
    arguments: list[str] = []
    lists: dict[str, list[str]] = {}
    for entry in entries:
        flag = f"--{entry.key.replace('_', '-')}"
        option = parser.option(flag)
        if option is None or option.dest in ("config", "help"):
            raise ValueError(
                f"config={path!r}: there is no flag {entry.key!r}{did_you_mean(flag, parser.flags)}"
            )
        if entry.value is None:
            continue
        if option.nargs in ("*", "+") and any(text.startswith("-") for text in entry.texts):
            lists[option.dest] = entry.texts
        else:
            arguments += _arguments(flag, option, entry)
    return arguments, lists


def _entries(text: str) -> list[_Entry]:
    """Return the entries of a YAML mapping."""
    loader = _Loader(text)
    root = loader.get_single_node() or yaml.MappingNode("", [])
    if not isinstance(root, yaml.MappingNode):
        raise ValueError("it is not a mapping of flags to values")
    loader.flatten_mapping(root)

    def value_of(node: yaml.Node) -> Any:
        return loader.construct_object(node, deep=True)

    def texts_of(node: yaml.Node) -> list[str]:
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        scalar = yaml.ScalarNode
        return [
            one.value if isinstance(one, scalar) else json.dumps(value_of(one)) for one in items
        ]

    return [_Entry(str(key.value), value_of(node), texts_of(node)) for key, node in root.value]


def _read_text(path: str) -> str:
    """Read a file, or a pipe such as bash's ``<(...)``. OSError: nothing writes to the pipe."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), encoding="utf-8") as file:
        os.set_blocking(file.fileno(), True)  # the flag was for a pipe without a writer
        text = file.read(_MOST_CHARACTERS + 1)
        if not text and stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
            raise OSError("it is a pipe to which nothing writes")
    if len(text) > _MOST_CHARACTERS:
        raise OSError(f"it has more than {_MOST_CHARACTERS:,} characters")
    return text


def _arguments(flag: str, option: argparse.Action, entry: _Entry) -> list[str]:
    """Return one entry as arguments; argparse checks the values themselves."""
    value = entry.value
    if isinstance(option, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ValueError(f"{flag.strip('-')}={value!r} in the config is not true or false")
        return [flag if value else flag.replace("--", "--no-", 1)]
    if option.type is json_object or isinstance(value, dict):
        return [f"{flag}={value if isinstance(value, str) else json.dumps(value)}"]
    if len(entry.texts) == 1:
        return [f"{flag}={entry.texts[0]}"]
    if option.nargs not in ("*", "+"):  # the parser would take the second for the model
        raise ValueError(f"{entry.key}={value!r} in the config: write one value, such as 1,2")
    return [flag, *entry.texts]
