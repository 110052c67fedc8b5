"""Owns the command `tokenline`: its flags, what it prints, its exit codes. The work is done elsewhere.

Exit codes: 0 well; 1 the service failed; 2 the configuration or the machine cannot serve; 130 interrupted at the start.
"""

import argparse
import importlib.metadata
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec

from serve_app.errors import ConfigError, TokenlineError
from serve_app.explain import fetch
from serve_app.explain.explain import explain
from serve_app.explain.report import report
from serve_app.gguf import convert
from serve_app.launch import Service, serving
from serve_app.local import detached, preflight, servefile
from serve_app.local.probe import QUESTION, curl_line, sample_chat
from serve_app.local.progress import Reporter
from serve_app.model import EMBEDDED, prepare_embedded

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; every foreseeable problem is one sentence on standard error. Returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.command(arguments))
    except (ConfigError, OSError) as error:
        return _complain(error, 2)
    except TokenlineError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _model(_: argparse.Namespace) -> int:
    def convert_aloud(gguf: Path, folder: Path) -> None:
        _say("preparing the embedded model, once: up to a minute …")
        convert(gguf, folder)

    _say(f"{EMBEDDED} is in {prepare_embedded(convert_aloud)}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    servefile.read(arguments.config)
    _say("ok")
    return 0


def _run(arguments: argparse.Namespace) -> int:
    file = servefile.read(arguments.config, host=arguments.host, port=arguments.port or None)
    running = detached.current() if arguments.run_id is None and arguments.port != 0 else None
    if running is not None and running.url == f"http://{file.host}:{file.port}":
        raise ConfigError(f"the background run serves at {running.url} already; `make stop` ends it")
    if arguments.detach:
        return _run_detached(arguments, file)
    return _run_here(arguments)


def _run_here(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C, SIGTERM or SIGHUP. As the background run (`run_id` given) it also keeps the state file."""
    # SIGINT too: a shell script starts its background commands with that ignored, and it would stay so.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    reporter = Reporter(sys.stdout)
    run_id: str | None = arguments.run_id
    log = detached.log_path() if run_id else None
    ready = False
    try:
        with serving(
            arguments.config, host=arguments.host, port=arguments.port, reporter=reporter, run_id=run_id, log=log
        ) as service:
            _introduce(service, reporter)
            if run_id:
                detached.mark_ready(run_id, service.url)
            ready = True
            reporter.say("Ctrl-C ends it." if run_id is None else "`make stop` ends it.")
            service.wait()
    except KeyboardInterrupt:
        reporter.say("ended")
        return 0 if ready else _INTERRUPTED
    finally:
        if run_id:
            detached.forget(run_id)
    return 0


def _introduce(service: Service, reporter: Reporter) -> None:
    answer = sample_chat(service.url, service.model)
    reporter.say(f"\n{service.model} is served at {service.url}; the log is {service.log}")
    reporter.say(f"Where the time goes: {service.url}/insight or `tokenline explain`; metrics: {service.metrics_url}")
    reporter.say(f"\n{curl_line(service.url, service.model)}\n\n{QUESTION}\n{answer}\n")


def _run_detached(arguments: argparse.Namespace, file: servefile.ServeFile) -> int:
    preflight.check(file)  # here too, so that a refusal comes at once and from this process
    flags = [str(arguments.config.absolute())]
    flags += ["--host", arguments.host] if arguments.host else []
    flags += ["--port", str(arguments.port)] if arguments.port is not None else []
    signal.signal(signal.SIGTERM, _interrupt)
    detached.start(flags, Reporter(sys.stdout))
    return 0


def _stop(_: argparse.Namespace) -> int:
    ended = detached.stop()
    if ended is None:
        _say("nothing runs in the background")
    else:
        _say(f"ended the background run{f' at {ended.url}' if ended.url else ', which was still starting'}")
    return 0


def _explain(arguments: argparse.Namespace) -> int:
    running = detached.current() if arguments.url is None else None
    url = arguments.url or (running and running.url) or fetch.DEFAULT_URL
    key = fetch.admin_key(arguments.key_file)
    if arguments.id is None:
        explanation = explain(fetch.latest(url, key, arguments.last))
    else:
        explanation = explain(fetch.with_id(url, key, arguments.id), one_by_one=True)
    _say(msgspec.json.encode(explanation).decode() if arguments.json else report(explanation))
    return 0


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokenline", description="Serve language models on Ray Serve.")
    parser.add_argument("--version", action="version", version=f"tokenline {importlib.metadata.version('tokenline')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    commands.add_parser("model", help="prepare the embedded model in the cache folder").set_defaults(command=_model)
    run = commands.add_parser("run", help="serve on this machine until Ctrl-C, and answer a first chat")
    run.add_argument("config", nargs="?", type=Path, default=servefile.DEFAULT_CONFIG, metavar="CONFIG")
    run.add_argument("--port", type=int, help="in place of the file's; 0 takes a free one")
    run.add_argument("--host", help="in place of the file's")
    run.add_argument("--detach", action="store_true", help="return once it is ready and serve in the background")
    run.add_argument("--run-id", help=argparse.SUPPRESS)  # how the background run knows that it is one
    run.set_defaults(command=_run)
    commands.add_parser("stop", help="end what `run --detach` started").set_defaults(command=_stop)
    check = commands.add_parser("check", help="say whether a Serve config file is well-formed")
    check.add_argument("config", type=Path, metavar="CONFIG")
    check.set_defaults(command=_check)
    _add_explain(commands.add_parser("explain", help="say where the time of the latest requests, or of one, went"))
    return parser


def _add_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", nargs="?", metavar="ID", help="one request: its x-request-id, or its trace's id")
    parser.add_argument("--last", type=_count, default=200, metavar="N", help="how many of the latest (200)")
    parser.add_argument("--url", help=f"the service; else the background run's, else {fetch.DEFAULT_URL}")
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE", help=f"holds the admin key; else {fetch.KEY_VARIABLE} is it"
    )
    parser.add_argument("--json", action="store_true", help="the whole explanation as JSON")
    parser.set_defaults(command=_explain)


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _complain(error: Exception, status: int) -> int:
    sys.stderr.write(f"tokenline: {error}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
