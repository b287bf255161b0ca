"""Compares Attendant's attention with that of other libraries on this machine.

attend_bench and its peers take turns, in rounds, on the same problems with the same number of
threads; of each the best repetition counts. First the peers' answers are compared with the
definition in float64. The table and the picture go into docs/performance.md, between its markers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

import report
from peers import OnnxRuntime, OpenVino, Peer, Problem, Torch, Unsupported, reference

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CASES = "t128_d64,b8_t128_d64,t512_d64,t2048_*,t8192_d64,f64_*,decode*"

# Repetitions of a few milliseconds, as attend_bench has them, and at least as many.
PIECE_SECONDS = 3e-3
LEAST_PIECES = 3

# Small problems of every kind that is compared: plain, causal, float64, one query, grouped heads.
CHECKS = [
    Problem("float32", 2, 4, 4, 96, 96, 64, False),
    Problem("float32", 2, 4, 4, 96, 96, 64, True),
    Problem("float64", 2, 4, 4, 96, 96, 64, False),
    Problem("float32", 2, 4, 4, 1, 96, 64, False),
    Problem("float32", 2, 4, 2, 1, 96, 64, False),
    Problem("float32", 1, 4, 2, 8, 96, 64, False),
]
TOLERANCE = {"float32": 2e-6, "float64": 2e-14}


def problem_of(case: dict[str, Any]) -> Problem:
    return Problem(**{f.name: case[f.name] for f in fields(Problem)})


def attend_bench(arguments: argparse.Namespace, cases: str, extra: list[str]) -> str:
    command = [arguments.attend_bench, f"--cases={cases}", f"--threads={arguments.threads}", *extra]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def measure_ours(arguments: argparse.Namespace, case: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        attend_bench(arguments, case, [f"--seconds={arguments.seconds}", f"--json={file.name}"])
        (result,) = json.load(file)
    return dict(result)


def keep_best(best: dict[str, Any], other: dict[str, Any]) -> None:
    for rate in ("gflops", "peak_gflops", "gigabytes_per_second", "read_bandwidth"):
        if rate in best:
            best[rate]["best"] = max(best[rate]["best"], other[rate]["best"])


def seconds_of(run: Callable[[int], object], copies: int, seconds: float) -> float:
    """The best repetition of a call, each on the next copy of keys and values."""
    turn = 0

    def piece(calls: int) -> float:
        nonlocal turn
        begin = time.perf_counter()
        for _ in range(calls):
            run(turn)
            turn = (turn + 1) % copies
        return (time.perf_counter() - begin) / calls

    first = piece(1)  # allocates; says enough about a call that takes long
    calls = math.ceil(PIECE_SECONDS / (piece(1) if first < 10 * PIECE_SECONDS else first))
    end = time.perf_counter() + seconds
    pieces: list[float] = []
    while len(pieces) < LEAST_PIECES or time.perf_counter() < end:
        pieces.append(piece(calls))
    return min(pieces)


def check(peers: list[Peer]) -> str:
    """Compares the peers' answers with the definition and says how far they are from it. Exits
    where one is wrong."""
    worst: dict[str, float] = {}
    for problem in CHECKS:
        inputs = problem.inputs(copies=1)
        for peer in peers:
            try:
                call = peer.prepare(problem, inputs)
            except Unsupported:
                continue
            call.run(0)
            difference = float(
                np.abs(call.output() - reference(problem, inputs, call.causal)).max()
            )
            if not difference <= TOLERANCE[problem.dtype]:
                sys.exit(f"compare: {peer.name} is off by {difference:.2g} on {problem}")
            worst[problem.dtype] = max(worst.get(problem.dtype, 0.0), difference)
    return ", ".join(f"{worst[dtype]:.1e} in {dtype}" for dtype in worst)


def compare(arguments: argparse.Namespace, peers: list[Peer], case: str) -> report.Comparison:
    result = report.Comparison(measure_ours(arguments, case))
    problem, copies = problem_of(result.ours), int(result.ours["key_value_copies"])
    inputs = problem.inputs(copies)
    for round_number in range(arguments.rounds):
        if round_number > 0:
            keep_best(result.ours, measure_ours(arguments, case))
        for peer in peers:
            # Set up anew in each round: one peer's threads and memory at a time.
            try:
                call = peer.prepare(problem, inputs)
            except Unsupported as reason:
                result.unsupported[peer.name] = str(reason)
                continue
            best = seconds_of(call.run, copies, arguments.seconds)
            result.seconds[peer.name] = min(best, result.seconds.get(peer.name, math.inf))
            del call
    return result


def available_peers(arguments: argparse.Namespace) -> list[Peer]:
    threads = arguments.threads
    makers: list[tuple[str, Callable[[], Peer]]] = [
        ("onnxruntime", lambda: OnnxRuntime("MultiHeadAttention", threads)),
        ("onnxruntime", lambda: OnnxRuntime("Attention", threads)),
        ("onnxruntime", lambda: OnnxRuntime("GroupQueryAttention", threads)),
        ("openvino", lambda: OpenVino(threads)),
    ]
    if arguments.torch:
        makers.append(("torch", lambda: Torch(threads)))
    peers: list[Peer] = []
    for package, make in makers:
        try:
            peers.append(make())
        except ImportError as error:
            print(f"compare: without {package}, which does not import: {error}", file=sys.stderr)
    return peers


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side (%(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn (%(default)s)")
    parser.add_argument("--cases", default=DEFAULT_CASES, help="of attend_bench (%(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--torch", action="store_true", help="compare with PyTorch as well")
    parser.add_argument("--attend_bench", default=ROOT / "build/release/bin/attend_bench")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/performance.md")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or not arguments.seconds > 0 or arguments.threads < 1:
        parser.error("--rounds and --threads are 1 or more, --seconds more than 0")
    return arguments


def main() -> None:
    arguments = parse()
    try:
        os.nice(-10)  # as attend_bench does for itself
    except PermissionError:
        pass
    names = attend_bench(arguments, arguments.cases, ["--list"]).split()
    peers = available_peers(arguments)
    differences = check(peers)
    print(f"the peers agree with the definition: largest difference {differences}", flush=True)
    comparisons: list[report.Comparison] = []
    for name in names:
        comparisons.append(compare(arguments, peers, name))
        print(report.line(comparisons[-1]), flush=True)
        if max(comparisons[-1].share, comparisons[-1].best_peer or 0) > 1:
            print("compare: more than the roof: something else was running", file=sys.stderr)
    report.write(arguments.output, comparisons, peers, differences, arguments.rounds)


if __name__ == "__main__":
    main()
