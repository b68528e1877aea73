"""Times forms of the tiled attention that must give equal bits: python benchmarks/attention_variants.py OUT [NAMES].

Each form is sealed for two token counts, compared bit for bit with the first one, on random numbers and on hazards, and
timed over packed causal sequences beside vLLM's FlashAttention 3. A process that says nothing for too long is ended and
its form noted as hanging; the others go on in a new one.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import dataclasses
import multiprocessing
import os
import queue
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from pallas_kernels.attention.hopper import attention_program
from pallas_kernels.attention.hopper_tiles import Overlap
from pallas_kernels.seal import SealedProgram, seal_program

H, K, D, SPLIT = 32, 8, 128, 512
SHAPES = ((1, 8192), (16, 1024), (4, 2048))
TOKENS = tuple(sorted({count * length for count, length in SHAPES}))
#: Lengths whose starts are multiples of 8 but not of a tile, which cross splits, and of one token.
RAGGED = (1, 7, 520, 1031, 64, 2049, 128, 1536, 333, 1)
#: Seconds without a word from the timing process after which it is taken to hang.
PATIENCE = 40
_LEAN = {"held": 0, "replicated": True, "heavy_first": True, "skip_empty": True, "early_exit": True, "bundle": 2}
VARIANTS = {
    "default": Overlap(),
    "scores under softmax, 2 parts": Overlap(ahead="softmax", parts=2, **_LEAN),
    "scores beside values, turns, 2 parts": Overlap(ahead="values", turns=True, parts=2, **_LEAN),
    "scores under softmax": Overlap(ahead="softmax", **_LEAN),
    "scores beside values, turns": Overlap(ahead="values", turns=True, **_LEAN),
    "turns, half held": Overlap(turns=True, **{**_LEAN, "held": 64}),
    "scores beside values, 2 parts": Overlap(ahead="values", parts=2, **_LEAN),
    "turns": Overlap(turns=True, **_LEAN),
    "scores under softmax, 2 parts, half held": Overlap(ahead="softmax", parts=2, **{**_LEAN, "held": 64}),
    "lean": Overlap(**_LEAN),
    "lean, half held": Overlap(**{**_LEAN, "held": 64}),
    "heavy first": Overlap(heavy_first=True),
    "scores under softmax, 2 parts, bundle 1": Overlap(ahead="softmax", parts=2, **{**_LEAN, "bundle": 1}),
    "scores under softmax, 2 parts, bundle 4": Overlap(ahead="softmax", parts=2, **{**_LEAN, "bundle": 4}),
}


def seal(name: str, tokens: int) -> SealedProgram:
    """One form's program for ``tokens`` rows."""
    program = attention_program(tokens, H, K, D, scale=D**-0.5, split=SPLIT, overlap=VARIANTS[name])
    return seal_program("attention", "1", {}, program)


def seal_all(names: list[str]) -> dict[str, dict[int, SealedProgram] | str]:
    """Every form's programs by token count, or why one could not be lowered. Lowers in processes: it holds the GIL."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, Any] = {name: {} for name in names}
    with concurrent.futures.ProcessPoolExecutor(min(8, os.cpu_count() or 1), context) as pool:
        jobs = {(name, tokens): pool.submit(seal, name, tokens) for name in names for tokens in TOKENS}
        for (name, tokens), job in jobs.items():
            try:
                sealed = job.result()
            except Exception as error:
                found[name] = f"not lowered: {error}"
                continue
            if isinstance(found[name], dict):
                found[name][tokens] = sealed
    return found


def segments(lengths: tuple[int, ...], tokens: int) -> tuple[Any, Any]:
    """Positions and segment ids [tokens], int32, of sequences that each start at a multiple of 8."""
    import torch

    positions, owners = torch.zeros(tokens, dtype=torch.int32), torch.full((tokens,), -1, dtype=torch.int32)
    first = 0
    for number, length in enumerate(lengths):
        positions[first : first + length] = torch.arange(length)
        owners[first : first + length] = number
        first += -(-length // 8) * 8
    return positions.cuda(), owners.cuda()


def inputs(tokens: int, seed: int) -> list[Any]:
    """Normal q [T, H, D], k and v [T, K, D], bfloat16."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(tokens, heads, D, device="cuda", generator=generator).bfloat16() for heads in (H, K, K)]


def hazards(tokens: int, owners: Any) -> list[Any]:
    """Scores up to the thousands in some rows, signed zeros, subnormals, infinities, and NaN in padding rows."""
    import torch

    q, k, v = inputs(tokens, 7)
    q[::3] *= 300
    k[::5] *= 0.0
    v[::7] *= -0.0
    v[1::7] *= 2.0**-130
    v[2::11] *= 2.0**120
    # Not a number from there on.
    late = int((owners >= 0).sum()) - 200
    v[late] = torch.inf
    k[late + 100] = -torch.inf
    for tensor in (q, k, v):
        tensor[owners < 0] = torch.nan
    return [q, k, v]


def captured(action: Callable[[], object]) -> str:
    """What native code prints while ``action`` runs."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            action()
        finally:
            flush(None)
            for number, original in enumerate(saved, 1):
                os.dup2(original, number)
                os.close(original)
        file.seek(0)
        return file.read().decode(errors="replace")


def compiler_words(text: str) -> dict[str, Any]:
    """Registers, spilled bytes and complaints in ptxas's report."""

    def numbers(pattern: str) -> list[int]:
        return [int(found) for found in re.findall(pattern, text)]

    return {
        "registers": max(numbers(r"Used (\d+) registers"), default=None),
        "spill_bytes": max(numbers(r"(\d+) bytes spill"), default=None),
        "complaints": sorted({line.strip()[:200] for line in text.splitlines() if "erialized" in line}),
        "other_words": text[-400:] if "registers" not in text else "",
    }


def measure(programs: dict[str, dict[int, SealedProgram]], wanted: list[str], report: Any) -> None:
    """Runs in a process of its own: compiles, compares and times the forms ``wanted``; the first of all is right."""
    import torch
    from timing import microseconds

    from bridge.launcher import Compiler, Launcher

    compiler = Compiler(torch.device("cuda:0"))
    layer = torch.zeros((), dtype=torch.int32, device="cuda")
    tokens = TOKENS[0]
    cases = {}
    for what, lengths, make in (
        ("one sequence", (tokens,), lambda owners: inputs(tokens, 1)),
        ("ragged", RAGGED, lambda owners: inputs(tokens, 2)),
        ("hazards", RAGGED, lambda owners: hazards(tokens, owners)),
        ("hazards in one sequence", (tokens - 24,), lambda owners: hazards(tokens, owners)),
    ):
        positions, owners = segments(lengths, tokens)
        cases[what] = (*make(owners), positions, owners, layer)
    timed = {}
    for count, length in SHAPES:
        positions, owners = segments((length,) * count, count * length)
        timed[count, length] = (*inputs(count * length, 3), positions, owners, layer)

    def outputs(name: str) -> dict[str, Any]:
        run = Launcher(programs[name][tokens], compiler)
        found = {what: run(*operands)[0].view(torch.int16) for what, operands in cases.items()}
        torch.cuda.synchronize()
        return found

    def compiled(name: str) -> dict[str, Any]:
        start = time.perf_counter()
        said = captured(lambda: compiler.compile(programs[name][tokens].modules[0]))
        return {**compiler_words(said), "compile_s": round(time.perf_counter() - start, 2)}

    first = next(iter(programs))
    first_words = compiled(first)
    expected = outputs(first)
    for name in wanted:
        row: dict[str, Any] = {"variant": name, **dataclasses.asdict(VARIANTS[name])}
        report.put(("starts", name))
        try:
            row |= first_words if name == first else compiled(name)
            report.put(("compiled", name))
            # Twice, since a race need not show at once.
            for _ in range(2):
                for what, found in outputs(name).items():
                    row[f"different: {what}"] = int((found != expected[what]).sum())
            for (count, length), operands in timed.items():
                run = Launcher(programs[name][count * length], compiler)
                us, spread = microseconds([lambda run=run, operands=operands: run(*operands)], repeats=5, rounds=7)
                row[f"{count} x {length} us"], row[f"{count} x {length} spread_us"] = round(us, 1), round(spread, 1)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
            # A failed launch spoils the process for every later one.
            report.put(("row", row))
            report.put(("spoilt", name))
            return
        report.put(("row", row))
    report.put(("library", ""))
    report.put(("row", library_row(timed, microseconds)))
    report.put(("done", ""))


def library_row(timed: dict[tuple[int, int], tuple[Any, ...]], microseconds: Callable[..., Any]) -> dict[str, Any]:
    """FlashAttention 3 over the same inputs."""
    import torch
    from attention import flash_attention

    row: dict[str, Any] = {"variant": "FlashAttention 3"}
    try:
        for (count, length), (q, k, v, *_) in timed.items():
            starts = torch.arange(count + 1, device="cuda", dtype=torch.int32) * length

            def call(q: Any = q, k: Any = k, v: Any = v, starts: Any = starts, length: int = length) -> Any:
                return flash_attention(q, k, v, starts, length, length, cu_seqlens_k=starts)

            us, spread = microseconds([call], repeats=5, rounds=7)
            row[f"{count} x {length} us"], row[f"{count} x {length} spread_us"] = round(us, 1), round(spread, 1)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"
    return row


def supervise(programs: dict[str, dict[int, SealedProgram]], keep: Callable[[dict[str, Any]], None]) -> None:
    """Has every form measured; ends a process that hangs and goes on behind the form that it hung in."""
    context = multiprocessing.get_context("spawn")
    waiting = list(programs)
    while waiting:
        report = context.Queue()
        process = context.Process(target=measure, args=(programs, waiting, report), daemon=True)
        process.start()
        current, what = waiting[0], "set up"
        quiet = time.monotonic()
        while True:
            try:
                what, word = report.get(timeout=1)
                quiet = time.monotonic()
            except queue.Empty:
                if process.is_alive() and time.monotonic() - quiet < PATIENCE:
                    continue
                reason = (
                    f"no word for {PATIENCE} s" if process.is_alive() else f"ended with exit code {process.exitcode}"
                )
                keep({"variant": current, "failed": f"{reason}, after: {what}"})
                # What fails before the first form fails for all of them.
                finished = what == "set up" or current not in waiting
                waiting = [] if finished else waiting[waiting.index(current) + 1 :]
                break
            if what == "row":
                keep(word)
            elif what in ("starts", "library"):
                current = word
            elif what == "spoilt":
                waiting = waiting[waiting.index(word) + 1 :]
                break
            elif what == "done":
                waiting = []
                break
        process.kill()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("names", nargs="*", help="forms to run, after the default; all of them if none is named")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(VARIANTS):
        parser.error(f"no such forms: {sorted(unknown)}; there are {list(VARIANTS)}")
    names = ["default", *(name for name in arguments.names or VARIANTS if name != "default")]
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    from timing import write_results

    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(row, flush=True)
        write_results(arguments.out, rows)

    start = time.perf_counter()
    sealed = seal_all(names)
    print(f"sealed in {time.perf_counter() - start:.1f} s", flush=True)
    for name, found in sealed.items():
        if isinstance(found, str):
            keep({"variant": name, "failed": found})
    supervise({name: found for name, found in sealed.items() if isinstance(found, dict)}, keep)


if __name__ == "__main__":
    main()
