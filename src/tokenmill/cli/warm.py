"""`tokenmill warm`: compile all kernels before the first run, as for a container image."""

from __future__ import annotations

from dataclasses import asdict

from tokenmill.cli import console as ui


def warm(json: ui.AsJson = False) -> None:
    """Compile everything that builds, runs and live text need, for the CPU of this machine, and say where it lies.

    NUMBA_CACHE_DIR chooses the folder. What is there already is not compiled again.
    """
    from tokenmill.run.warm import warm

    report = warm()
    if json:
        ui.print_json(asdict(report))
        return
    if report.compiled:
        rows = [(name, round(seconds, 2)) for name, seconds in report.compiled.items()]
        ui.console.print(ui.table("compiled", ("kernel", "seconds"), rows))
    ready = f"{len(report.compiled)} kernels compiled, {report.loaded} were there, in {report.seconds:.1f} s"
    ui.print_line(f"{ready}: {report.folder or 'kept nowhere, as no folder can be written to'}")
