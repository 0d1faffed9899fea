"""Runs a study into a folder, resumes it there, and analyses what the folder holds.

    out/manifest.json      what is run; "finished" tells whether all of it was
    out/parts/<part>.jsonl.gz, <part>.partial.jsonl.gz, <part>.checkpoint      while it is not
    out/runs.jsonl.gz, curves.csv.gz, headline.csv, frontier.csv, *.png      what came of it

The analysis reads records back from their file, so that it sees the same numbers in every run.
"""

import dataclasses
import functools
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from rich.console import Console

from kondo.run_files import LOCK, DamagedFileError, WriteError, locked, set_aside
from kondo_lab.evidence import part_files, plotting, progress, records, statistics
from kondo_lab.evidence.part_files import OLDER_RECORDS, PARTS, RECORDS, path_of
from kondo_lab.evidence.result_folder import CLAIMS, CURVES, FRONTIER, HEADLINE, MANIFEST, MEND
from kondo_lab.evidence.run_manifest import FinishedError as FinishedError
from kondo_lab.evidence.run_manifest import FolderError as FolderError
from kondo_lab.evidence.run_manifest import (
    Manifest,
    differences,
    found,
    new_manifest,
    plain,
    settings_of,
)
from kondo_lab.evidence.run_manifest import Order as Order
from kondo_lab.evidence.run_manifest import read_manifest as read_manifest
from kondo_lab.evidence.study import Analysis, Claim, FrontierPoint, Headline, Study
from kondo_lab.training import provenance
from kondo_lab.training.part import Context, DamagedCheckpointError, Part, Stopped
from kondo_lab.training.record import Run
from kondo_lab.training.worker_pool import stop_on_interrupt

_WRITTEN = (MANIFEST, RECORDS, CURVES, HEADLINE, CLAIMS, FRONTIER)
"""What every run writes, or may write; names of figures are its own."""


class Outcome(NamedTuple):
    """What a run left behind."""

    analysis: Analysis | None
    """None if no part was finished, or those that were could not be analysed alone."""
    stopped: bool
    """Whether it ended before its last part: the user stopped it, or its minutes were over."""
    written: list[Path]


def run(order: Order, console: Console) -> Outcome:
    """Run what the folder does not hold yet, then analyse.

    Raises:
        FinishedError: the folder holds this run, finished.
        FolderError: the folder holds another run, finished or not.
        FolderInUseError: another run uses it.
        DamagedFileError: the manifest or the records of a finished part cannot be read.
        WriteError: a file of it cannot be written.
    """
    settings = order.settings()
    parts = order.study.parts(settings)
    _check_names(parts)
    files = part_files.all_files(order.out, parts)
    with _claimed(order, settings, files) as manifest:
        stopped = _run_parts(order, parts, manifest, console)
        manifest |= {"finished": not stopped, "interrupted": stopped}
        if not part_files.gather(order.out, files):
            _save(order.out, manifest)
            return Outcome(None, stopped, [])
        try:
            analysis, written = _analyse(order.study, settings, order.out, manifest)
        except Exception as error:
            if not stopped:
                raise
            # The records are kept, and half a study need not make sense to its analysis.
            _save(order.out, manifest)
            reason = f"{type(error).__name__}: {error}"
            console.print(f"The finished parts cannot be analysed alone: {reason}", markup=False)
            return Outcome(None, stopped, [order.out / RECORDS])
        if not stopped:
            shutil.rmtree(order.out / PARTS)
        return Outcome(analysis, stopped, [order.out / RECORDS, *written])


def numbered(order: Order) -> Order:
    """Return the order with the first free folder of `out`, `out-2`, `out-3`, ...

    A folder with an unfinished run of the same settings is free: that run is resumed.
    """
    wanted = order.out if order.out.name not in ("", "..") else Path(os.path.abspath(order.out))
    fresh = new_manifest(order, order.settings())
    number = 1
    while True:
        out = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        candidate = dataclasses.replace(order, out=out)
        try:
            found(candidate, fresh)
        except (FolderError, DamagedFileError):
            number += 1
        else:
            return candidate


def reanalyse(study: Study, folder: Path) -> tuple[Analysis, list[Path]]:
    """Analyse a folder's records again and return what comes of it and the files written.

    Of a run that is not finished, or was killed, these are the records of the parts it has made.

    Raises:
        FolderError: the folder holds no records of this study as it is now.
        DamagedFileError: its records cannot be read.
        FolderInUseError: a run is writing to it.
        WriteError: a file of it cannot be written.
    """
    unfinished = (folder / PARTS).exists()
    with locked(folder / PARTS / LOCK, folder) if unfinished else nullcontext():
        return _reanalyse(study, folder)


def _reanalyse(study: Study, folder: Path) -> tuple[Analysis, list[Path]]:
    manifest = read_manifest(folder) if os.path.lexists(folder / MANIFEST) else None
    if manifest is not None and "study" not in manifest:
        raise FolderError(
            f"{folder} is in the older format of `kondo demo`, which this version cannot read. "
            "Its manifest.json and figure.png can be read as they are; run the demo again for more."
        )
    if not os.path.lexists(folder / RECORDS) and (folder / OLDER_RECORDS).exists():
        raise FolderError(
            f"{folder} holds {OLDER_RECORDS}, which versions before 0.3 wrote and this one cannot "
            "read. Use the commit in its manifest, or run the study again into another folder."
        )
    if manifest is None or not (os.path.lexists(folder / RECORDS) or (folder / PARTS).exists()):
        raise FolderError(f"{folder} holds no records of a run: no {MANIFEST} or no {RECORDS}.")
    try:
        size, num_seeds = manifest["size"], manifest["num_seeds"]
        settings = settings_of(study, size, num_seeds, manifest.get("first_seed", 0))
    except ValueError as error:
        raise DamagedFileError(f"{folder / MANIFEST} is damaged ({error}) {MEND}") from error
    now = {"study": study.name, "version": study.version, "settings": plain(settings)}
    changed = differences(manifest, now, tuple(now))
    if changed:
        raise FolderError(
            f"{folder} was made by another version of this study: {', '.join(changed)} changed. "
            "Run it again, or use the commit in its manifest."
        )
    _check_places(folder, [*_WRITTEN, *manifest["figures"]])
    whole = manifest["finished"] and os.path.lexists(folder / RECORDS)
    if (folder / PARTS).exists() and not whole:  # a run that was killed has not put them together
        files = part_files.all_files(folder, study.parts(settings))
        part_files.check(files)
        part_files.restore(folder, manifest.get("finished_parts", []))
        part_files.gather(folder, files)
    if not os.path.lexists(folder / RECORDS):
        raise FolderError(f"{folder} holds no records of a run: no part of it was finished.")
    try:
        return _analyse(study, settings, folder, manifest)
    except statistics.RecordsError as error:
        if "records_sha256" in manifest:  # they are as the run wrote them: the study is to blame
            raise
        raise DamagedFileError(f"{folder / RECORDS} lacks records ({error}) {MEND}") from error


def _run_parts(order: Order, parts: Sequence[Part], manifest: Manifest, console: Console) -> bool:
    """Run the parts that are not finished; return whether it ended before the last of them."""
    manifest["finished_parts"] = part_files.finished(order.out, parts)
    todo = [part for part in parts if part.name not in manifest["finished_parts"]]
    if len(todo) < len(parts):
        finished = f"{len(parts) - len(todo)} of {len(parts)} parts done"
        console.print(f"Resuming {order.out}: {finished}.", soft_wrap=True, highlight=False)
    work, done = sum(part.work for part in todo), 0.0
    stop = threading.Event()
    late = time.monotonic() + 60 * (math.inf if order.minutes is None else order.minutes)
    with stop_on_interrupt(stop), progress.show(console) as show:
        for part in todo:
            if stop.is_set() or time.monotonic() > late:
                return True

            def report(share: float, note: str, part: Part = part, done: float = done) -> None:
                show((done + share * part.work) / work, part.name, share, note)

            context = Context(
                device=order.device,
                progress=report,
                stopped=stop.is_set,
                checkpoint=order.out / PARTS / f"{part.name}.checkpoint",
                finished=functools.partial(part_files.table, order.out),
            )
            started = time.monotonic()
            partial = path_of(order.out, part.name, partial=True)
            partial.unlink(missing_ok=True)
            try:
                report(0.0, "")
                made = _made(part, context, console)
                records.write(path_of(order.out, part.name), _signed(made, manifest))
                manifest["finished_parts"] = part_files.finished(order.out, parts)
            except Stopped as stopped:
                if stopped.runs:
                    made = records.checked(stopped.runs, part=part.name)
                    records.write(partial, _signed(made, manifest))
                return True
            except Exception as error:
                error.add_note(
                    f"This was part {part.name!r} of study {order.study.name!r}. Finished parts "
                    f"are kept in {order.out}; the same command goes on from there."
                )
                raise
            finally:
                _add_seconds(order.out, manifest, part.name, time.monotonic() - started)
            context.checkpoint.unlink(missing_ok=True)
            report(1.0, "")
            done += part.work
            seconds = manifest["seconds_by_part"][part.name]
            console.print(f"      {part.name}: done in {seconds:.1f} s", highlight=False)
    return False


def _signed(runs: Iterable[Run], manifest: Manifest) -> list[Run]:
    """Return runs that say of which study they are, on which device and by which commit."""
    environment = manifest["environment"]
    about = {
        "study": manifest["study"],
        "device": environment.get("gpu", environment["device"]),
        "commit": environment["commit"],
    }
    return [dataclasses.replace(run, about={**about, **run.about}) for run in runs]


def _made(part: Part, context: Context, console: Console) -> list[Run]:
    """Return the runs of a part; it starts anew if it cannot read its checkpoint."""
    try:
        return records.checked(part.run(context), part=part.name)
    except DamagedCheckpointError as error:
        name = set_aside(context.checkpoint).name
        text = f"{error} It is set aside as {name}; part {part.name} starts anew."
        console.print(text, markup=False, highlight=False, soft_wrap=True)
        return records.checked(part.run(context), part=part.name)


def _analyse(
    study: Study, settings: Any, folder: Path, manifest: Manifest
) -> tuple[Analysis, list[Path]]:
    """Write what is read out of the folder's records; the manifest last.

    What an earlier analysis wrote is deleted where this one does not: first the records are checked
    to be all there.
    """
    path = folder / RECORDS
    try:
        table = records.table(records.read(path))
        if lost := _lost(study, settings, manifest, table):
            raise DamagedFileError(
                f"{path} is damaged (has no records of {', '.join(lost)}, which {MANIFEST} calls "
                "finished)."
            )
        digest = records.digest(path)
        if manifest["finished"] and manifest.get("records_sha256", digest) != digest:
            raise DamagedFileError(f"{path} is damaged (not as {MANIFEST} says the run wrote it).")
    except DamagedFileError as error:
        raise DamagedFileError(f"{error} {MEND}") from error
    with plotting.style():
        analysis = study.analyse(table, settings)
        pictures = {folder / f"{name}.png": figure for name, figure in analysis.figures.items()}
        _check_places(folder, [*manifest["figures"], *(path.name for path in pictures)])
        for path, figure in pictures.items():
            plotting.save(figure, path)
    records.write_table(folder / CURVES, statistics.over_seeds(table))
    records.write_rows(folder / HEADLINE, Headline, analysis.headline)
    records.write_rows(folder / CLAIMS, Claim, analysis.claims)
    written = [folder / CURVES, folder / HEADLINE, folder / CLAIMS, *pictures]
    stale = {folder / name for name in manifest["figures"]} | {folder / FRONTIER}
    if analysis.frontier:
        records.write_rows(folder / FRONTIER, FrontierPoint, analysis.frontier)
        written.append(folder / FRONTIER)
    for path in stale - set(written):
        path.unlink(missing_ok=True)
    if manifest["claim"] != study.claim:  # what a run was made to test is not forgotten
        manifest.setdefault("claim_at_run", manifest["claim"])
    manifest |= {
        "claim": study.claim,
        "seeds": sorted(int(seed) for seed in table["seed"].unique()),
        "records_sha256": digest,
        "findings": analysis.findings,
        "figures": [path.name for path in pictures],
        "captions": analysis.captions,
        "analysis_commit": provenance.commit(),
    }
    _save(folder, manifest)
    return analysis, [*written, folder / MANIFEST]


def _lost(study: Study, settings: Any, manifest: Manifest, table: pd.DataFrame) -> list[str]:
    """Return the parts and seeds that the manifest calls finished and that have no records."""
    parts, seeds = set(manifest.get("finished_parts", [])), set()
    if manifest["finished"]:  # older manifests do not name their parts
        parts |= {part.name for part in study.parts(settings)}
        seeds = set(manifest["seeds"]) - set(table["seed"])
    return [*sorted(parts - set(table["part"])), *(f"seed {seed}" for seed in sorted(seeds))]


@contextmanager
def _claimed(order: Order, settings: Any, files: Sequence[Path]) -> Iterator[Manifest]:
    """Give the manifest of this run, new or resumed; no other run may use the folder meanwhile."""
    fresh = new_manifest(order, settings)
    found(order, fresh)  # a refusal leaves the folder as it was
    _check_places(order.out, _WRITTEN)
    try:
        (order.out / PARTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(f"cannot write to {order.out}: {error.strerror}.") from None
    with locked(order.out / PARTS / LOCK, order.out):
        manifest = found(order, fresh)  # again: another run may have ended since
        _check_places(order.out, [*_WRITTEN, *manifest["figures"]])
        part_files.check(files)
        part_files.restore(order.out, manifest["finished_parts"])
        _save(order.out, manifest)
        yield manifest


def _add_seconds(folder: Path, manifest: Manifest, part: str, seconds: float) -> None:
    by_part = manifest["seconds_by_part"]
    by_part[part] = round(by_part.get(part, 0.0) + seconds, 2)
    manifest["seconds"] = round(sum(by_part.values()), 2)
    _save(folder, manifest)


def _save(folder: Path, manifest: Manifest) -> None:
    provenance.write_manifest(folder / MANIFEST, manifest)


def _check_places(folder: Path, names: Iterable[str]) -> None:
    """Raise if a file cannot be written: now, and not after training or half of the files."""
    for path in (folder / name for name in names):
        if path.is_dir():
            raise WriteError(f"cannot write {path}: it is a folder. Move it away and try again.")


def _check_names(parts: Sequence[Part]) -> None:
    names = [part.name for part in parts]
    bad = [name for name in names if not re.fullmatch(r"[a-z0-9-]+", name)]
    if bad or len(set(names)) < len(names):
        raise ValueError(
            "names of parts must differ and have lower-case letters, digits and hyphens only, "
            f"got {bad or names}."
        )
