"""`isojax`: finds the command, runs it, and turns every refusal into a few readable lines and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from types import ModuleType

from contracts.errors import DifferenceFound, IsojaxError, Refusal
from isojax.cli.exit_codes import INTERRUPTED

COMMANDS = {
    "train": "train a policy as a TOML file says",
    "export": "write a checkpoint or weights as a policy folder that vLLM serves",
    "contract": "show, compare or check execution contracts",
    "verify": "run the gates that prove equal bits, here",
    "drift": "how far two stacks' log-probabilities are apart",
    "bisect": "the first region, layer and row where two executions part",
    "doctor": "what is installed here and what will work",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 for fine, 1 if a check found a difference, 2 for a refusal, 130 after Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="isojax",
        description="One policy, trained in JAX, rolled out by vLLM, with equal bits.",
        epilog="Exit codes: 0 fine, 1 a check found a difference, 2 refused.",
    )
    parser.add_argument("--version", action="version", version=f"isojax {version('isojax')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in given if word in COMMANDS), None)
    modules: dict[str, ModuleType] = {}
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == chosen:
            # The other commands' libraries are not imported.
            modules[name] = import_module(f"isojax.cli.{name}")
            modules[name].add_arguments(command)
    parsed = parser.parse_args(given)
    try:
        return modules[parsed.command].run(parsed)
    except IsojaxError as error:
        print(explain(error), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("isojax: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; nothing more may be written to the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        refused = Refusal(
            field=error.filename or "file",
            found=error.strerror or str(error),
            allowed="a path that this command can read or write",
            reason="The operating system refused it.",
        )
        print(explain(refused), file=sys.stderr)
        return refused.exit_code


def explain(error: IsojaxError) -> str:
    """A refusal as a person reads it: what kind, which field, what was found, what is allowed, and why."""
    verdict = "difference found" if isinstance(error, DifferenceFound) else "refused"
    if not isinstance(error, DifferenceFound | Refusal):
        return f"isojax: {verdict}: {error}"
    lines = (("field", error.field), ("found", error.found), ("allowed", error.allowed), ("reason", error.reason))
    return "\n".join([f"isojax: {verdict} ({type(error).__name__})", *(f"  {name:8} {value}" for name, value in lines)])


if __name__ == "__main__":
    sys.exit(main())
