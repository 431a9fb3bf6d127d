"""Reads of demanded experts against a small C program with 8 threads, on the same records; one JSON line last.

usage: python scripts/bench_reader.py MODEL [--records 200] [--threads 12] [--rounds 5] [--busy] [--cold]

MODEL is a GGUF file, a folder of one model's shards, or a pack. The same random experts are read by both, in turns:
by the C program (pread of whole parts, built with ziglang) and by the package's reader, both as a layer's misses are:
ten records at a time, waited for together. ``--busy`` lets the main thread build graphs beside both. Files are in the
page cache after the first round, which is not counted; with ``--cold`` their pages are given up before every reading
(Linux), so that records come from the disk. Nobody sleeps between readings, and both write to all of their memory right
before their clocks start: processors that slept are slow for a while.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_moe.config import ModelConfig
from mlx_moe.formats.gguf import open_gguf
from mlx_moe.formats.gguf_model import expert_index, model_config
from mlx_moe.formats.pack import is_pack, open_pack
from mlx_moe.paging.index import ExpertIndex
from mlx_moe.paging.reader import THREADS, ExpertReader, Fill

AT_ONCE, C_THREADS = 10, 8
REST_S = 0.1
_SOURCE = r"""
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
typedef struct { int file; long offset, length; char* to; } Read;
static Read* reads;
static int count, next_read, stop, fds[64];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void* work(void* unused) {
  (void)unused;
  for (;;) {
    pthread_mutex_lock(&lock);
    int i = next_read < stop ? next_read++ : -1;
    pthread_mutex_unlock(&lock);
    if (i < 0) return 0;
    for (long done = 0; done < reads[i].length;) {
      long n = pread(fds[reads[i].file], reads[i].to + done, reads[i].length - done, reads[i].offset + done);
      if (n <= 0) exit(2);
      done += n;
    }
  }
}
int main(int argc, char** argv) {   /* threads, reads at a time, files...; on standard input "file offset length"s */
  int threads = atoi(argv[1]), at_once = atoi(argv[2]), capacity = 1 << 16;
  for (int i = 3; i < argc; ++i) fds[i - 3] = open(argv[i], O_RDONLY);
  reads = malloc(capacity * sizeof(Read));
  long total = 0;
  while (count < capacity && scanf("%d %ld %ld", &reads[count].file, &reads[count].offset, &reads[count].length) == 3)
    total += reads[count++].length;
  char* memory = malloc(total);
  for (long i = 0; i < total; i += 4096) memory[i] = 1;
  for (int i = 0; i < count; ++i) { reads[i].to = memory; memory += reads[i].length; }
  struct timespec a, b;
  clock_gettime(CLOCK_MONOTONIC, &a);
  pthread_t ids[256];
  while (stop < count) {
    stop = stop + at_once < count ? stop + at_once : count;
    for (int i = 0; i < threads; ++i) pthread_create(&ids[i], 0, work, 0);
    for (int i = 0; i < threads; ++i) pthread_join(ids[i], 0);
  }
  clock_gettime(CLOCK_MONOTONIC, &b);
  printf("%f\n", (b.tv_sec - a.tv_sec) + (b.tv_nsec - a.tv_nsec) * 1e-9);
  return 0;
}
"""


def index_of(path: Path) -> ExpertIndex:
    """Of a pack or a GGUF model."""
    if path.is_dir() and is_pack(path):
        return open_pack(path).experts
    file = open_gguf(path)
    return expert_index(file, ModelConfig.from_dict(model_config(file)))


def build(folder: Path) -> Path:
    """The C program."""
    source, program = folder / "reader.c", folder / "reader"
    source.write_text(_SOURCE)
    command = [sys.executable, "-m", "ziglang", "cc", "-O2", "-o", program, source, "-lpthread"]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    return program


def build_graph() -> None:
    """What a main thread does: some ops, which are dropped again."""
    x = mx.zeros((8,))
    for _ in range(8):
        x = mx.exp(x * 0.5) + 1


def c_seconds(program: Path, index: ExpertIndex, chosen: list[tuple[int, int]], busy: bool) -> float:
    """The C program on these experts; it has the same company as the package's reader."""
    parts = [part for layer, expert in chosen for part in index.reads(layer, expert)]
    lines = "".join(f"{index.files.index(part.file)} {part.offset} {part.length}\n" for part in parts)
    at_once = AT_ONCE * len(parts) // len(chosen)
    command = [str(program), str(C_THREADS), str(at_once), *map(str, index.files)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write(lines)
        process.stdin.close()
        while busy and process.poll() is None:
            build_graph()
        return float(process.stdout.read())


def our_seconds(reader: ExpertReader, fills: list[Fill], busy: bool) -> float:
    """The package's reader, ten misses at a time."""
    for fill in fills:
        fill.target.fill(1)
    started = time.perf_counter()
    for i in range(0, len(fills), AT_ONCE):
        some = fills[i : i + AT_ONCE]
        together = reader.queue.together()
        jobs = [reader.start(fill, beside=len(some), together=together) for fill in some]
        reader.queue.go(together)
        while busy and not all(job.ended for job in jobs):
            build_graph()
        for job in jobs:
            job.wait()
    return time.perf_counter() - started


def forget(index: ExpertIndex) -> None:
    """Have the system drop the files' pages, once it has read what it meant to read ahead in the reading before."""
    end = time.perf_counter() + REST_S
    while time.perf_counter() < end:  # a processor that slept is slow for as long as a reading takes
        pass
    for path in index.files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def compare(
    index: ExpertIndex, records: int, threads: int, rounds: int, busy: bool = False, cold: bool = False
) -> dict[str, float]:
    """Medians over the rounds: GB/s of both, and their ratio."""
    rng = random.Random(0)
    layers = range(len(index.layers))
    chosen = [(layer, rng.randrange(index.layers[layer].experts)) for layer in rng.choices(layers, k=records)]
    sizes = [index.layers[layer].record_bytes for layer, _ in chosen]
    memory = np.ones(sum(sizes), dtype=np.uint8)
    starts = np.cumsum([0, *sizes])
    fills = [Fill(*chosen[i], memory[starts[i] : starts[i + 1]]) for i in range(records)]
    reader = ExpertReader(index, threads)
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder))
        pairs = []
        for _ in range(rounds + 1):
            pair = [0.0, 0.0]
            for ours in rng.sample((False, True), 2):  # neither always comes after the other
                if cold:
                    forget(index)
                pair[ours] = our_seconds(reader, fills, busy) if ours else c_seconds(program, index, chosen, busy)
            pairs.append(pair)
    reader.close()
    theirs, ours = (statistics.median(pair[i] for pair in pairs[1:]) for i in range(2))
    total = sum(sizes) / 1e9
    return {"c_gb_per_s": total / theirs, "our_gb_per_s": total / ours, "ratio": theirs / ours}


def main(argv: list[str] | None = None) -> None:
    """Compare, print a line and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--records", type=int, default=200)
    parser.add_argument("--threads", type=int, default=THREADS, help="of the package")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="build graphs in the main thread meanwhile")
    parser.add_argument("--cold", action="store_true", help="from the disk: give up the page cache before each reading")
    args = parser.parse_args(argv)
    found = compare(index_of(args.model), args.records, args.threads, args.rounds, args.busy, args.cold)
    print("C {c_gb_per_s:.2f} GB/s, the package {our_gb_per_s:.2f} GB/s: {ratio:.0%}".format(**found))
    machine = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": args.threads,
        "busy": args.busy,
        "cold": args.cold,
    }
    print(json.dumps({"bench": "reader", **machine, **{name: round(value, 3) for name, value in found.items()}}))


if __name__ == "__main__":
    main()
