"""What transformers' own classes compute, layer by layer, found by running them: the oracle for `registry/models`.

`observe(config)` builds the model that a config.json describes, without weights, runs it with a probe in the place of
the attention function, and evaluates the mask that every call received. A row per attention or mixer layer comes back:

- `module`, `layer_idx`: the module's name in the model that `AutoModel` builds, and the layer's index.
- `kind`: full, sliding, chunked, cross, encoder (bidirectional self-attention of text or audio), vision, linear, mamba,
  conv. The last three are mixers without softmax attention; every field about attention is null or false there.
- `attention`: mha, mla, mla_sparse; null for a mixer.
- `num_heads`, `num_kv_heads`, `head_size`, `head_size_v`: of the call; for MLA the expanded one.
- `sliding_window`: the keys that a causal query sees, itself included; one-sided distance where `causal` is false.
  `window_left`, `window_right`: keys before and after the query, null for all of them. `chunk`: blocks of this size.
- `sinks`, `softcap`, `alibi`, and `bias`, which is added to the scores.
- `causal`: true, false, or "prefix", where an image or a prefix sees itself both ways.
- `scaling`: as the model passes it; absent where no call shows it.
- `mla`: dimensions; `absorbed` is the latent form, `indexer` the one that selects keys (`own` false: reuses another's).
- Where they apply: `kv_shared_from` (the layer whose keys and values it reuses), `sparse_blocks` (block-sparse
  selection), `segments` (lengths that one image is cut into).

Floats are on the meta device; indices and masks keep their values, so that a rule is evaluated and not guessed. A class
that computes attention by hand is handed scores of ones, and its mask, scale and bias are read off what reaches the
softmax. Some facts show in no call: MLA dimensions, KV heads that are broadcast before the product, and modules that no
run reached. They are read from the module's attributes; `watch` tells whether that happened ("observed+read").

`--config config.json` prints the rows. `--check FILE.jsonl.gz` observes again and prints what differs; `--every 10`
takes a tenth of its lines. `--record OUT.jsonl.gz` observes every family of variants.py.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import multiprocessing
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import transformers

from transformers_truth.building import NotObservedError, build, model_class, read_config
from transformers_truth.probe import probing
from transformers_truth.rows import EXTRAS, Row, read_calls, role_of, rows_of
from transformers_truth.running import run

_SECONDS = 60


def watch(config: dict[str, Any]) -> tuple[list[Row], str, list[str]]:
    """The rows of a config.json's content, whether any was read ("observed" or "observed+read"), and the errors met."""
    built = read_config(config)
    model_class(built)
    with probing() as probe:
        model = build(built)
        probe.watch(model)
        errors, unseen = run(model, probe)
        probe.calls.extend(read_calls(unseen))
        rows, read = rows_of(model, probe)
    lonely = [c for c in probe.calls if c.run == probe.alone and role_of(model, c.path) == "text"]
    if lonely:
        errors.append(f"never reached by its model: {lonely[0].path} ({type(lonely[0].module).__name__})")
    if unseen:
        errors.append("never reached: " + ", ".join(f"{n} ({type(m).__name__})" for n, m in list(unseen.items())[:6]))
    if not rows:
        raise NotObservedError("; ".join(errors) or "no attention and no mixer")
    return rows, "observed+read" if read else "observed", errors


def observe(config: dict[str, Any]) -> list[Row]:
    """A row per attention or mixer layer of the model that the config.json's content describes."""
    return watch(config)[0]


# ---- the command ---------------------------------------------------------------------------------------------------
def read_lines(path: Path) -> list[Row]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_lines(path: Path, lines: Iterable[Row]) -> None:
    """The same bytes for the same lines: no time and no name in the header."""
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=0, compresslevel=9) as packed:
        for line in lines:
            packed.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
    path.write_bytes(buffer.getvalue())


def differences(recorded: list[Row], observed: list[Row], optional: frozenset[str] = frozenset()) -> list[str]:
    """What differs, a line each; `optional` fields count only where the recorded row has them."""
    names, others = [r["module"] for r in recorded], [r["module"] for r in observed]
    if names != others:
        gone = [n for n in names if n not in others]
        new = [n for n in others if n not in names]
        return [f"modules: {len(names)} recorded, {len(others)} observed; gone {gone[:3]}, new {new[:3]}"]
    return [
        f"{was['module']}.{key}: {was.get(key, 'absent')!r} -> {now.get(key, 'absent')!r}"
        for was, now in zip(recorded, observed, strict=True)
        for key in [*was, *(k for k in now if k not in was and k not in optional)]
        if was.get(key, "absent") != now.get(key, "absent")
    ]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _limited(job: Callable[[Any], Any], argument: Any) -> Any:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {_SECONDS} s of the processor")

    # the process's own time: on a busy machine it passes more slowly than the clock's
    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        return job(argument)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _watch_line(line: Row) -> tuple[Row, list[Row], str, list[str]]:
    """The line, its rows, its source, and the errors; no rows where it failed."""
    try:
        rows, source, errors = _limited(watch, line["config"])
    except Exception as error:
        return line, [], "", [f"{type(error).__name__}: {error}"]
    return line, rows, source, errors


def _quiet() -> None:
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def _all(lines: list[Row], workers: int) -> Iterator[tuple[Row, list[Row], str, list[str]]]:
    if workers <= 1:
        _quiet()
        yield from map(_watch_line, lines)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, initializer=_quiet, maxtasksperchild=100) as pool:
        yield from pool.imap(_watch_line, lines, chunksize=2)


def check(path: Path, workers: int, every: int = 1) -> int:
    """The number of lines of a recorded file that are observed differently now."""
    lines = read_lines(path)
    stated = {k for line in lines for row in line["layers"] for k in row}
    lines = lines[::every]
    optional = frozenset(k for k in EXTRAS if k not in stated)
    wrong = 0
    for line, rows, _, errors in _all(lines, workers):
        found = differences(line["layers"], rows, optional) if rows else errors
        if found:
            wrong += 1
            say(f"{line['family']} ({line['variant']}): {len(found)} differences")
            for text in found[:8]:
                say(f"  {text}")
    say(f"{len(lines) - wrong} of {len(lines)} as recorded")
    return wrong


def record(path: Path, lines: list[Row], workers: int) -> int:
    """Writes the lines with their rows; the number of lines that were not observed."""
    done, failed, dropped = [], 0, 0
    for line, rows, source, errors in _all(lines, workers):
        name = f"{line['family']} ({line['variant']})"
        reached = not any(e.startswith("never reached") for e in errors)
        why = " ".join("; ".join(dict.fromkeys(errors)).split())
        if line["may_fail"] and not (rows and reached):
            # the class refuses this file, or fails on it: it says nothing about layers
            dropped += 1
            continue
        if not rows:
            failed += 1
            say(f"not observed: {name}: {why[:400]}")
            continue
        if not reached:
            say(f"partly: {name}: {why[-300:]}")
        done.append({**line, "source": source, "layers": rows})
    write_lines(path, [{k: d[k] for k in ("family", "variant", "source", "config", "layers")} for d in done])
    layers = sum(len(d["layers"]) for d in done)
    families = len({d["family"] for d in done})
    say(f"{families} families, {len(done)} lines, {layers} layers; {failed} not observed, {dropped} tries dropped")
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check", type=Path, metavar="FILE", help="observe a file again; exit 1 where it differs")
    what.add_argument("--record", type=Path, metavar="FILE", help="observe every variant and write the file")
    what.add_argument("--config", type=Path, metavar="FILE", help="print the rows of a config.json")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="with --check: each Nth line")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--family", action="append", help="only this family; may be repeated")
    options = parser.parse_args(arguments)
    _quiet()
    if options.config:
        for row in observe(json.loads(options.config.read_text())):
            say(json.dumps(row))
        return 0
    if options.check:
        return int(check(options.check, options.workers, options.every) > 0)
    from transformers_truth.variants import variants

    lines = [v for v in variants() if not options.family or v["family"] in options.family]
    record(options.record, lines, options.workers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
