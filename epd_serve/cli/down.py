"""``epd-serve down``: stop a deployment."""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

import typer

from epd_serve.cli.admin import Deployment
from epd_serve.cli.flags import On, ray_address
from epd_serve.config import load_config


def down(deployment: Deployment = None, on: On = None) -> None:
    """Stop a deployment on this machine, or with --on on a cluster, after its requests are finished."""
    if on is None:
        _end_here(deployment)
        return
    if deployment is None:
        raise ValueError("--deployment is missing, as in epd-serve down --deployment FILE --on ray")
    address = ray_address(on)
    from epd_serve.launch.remote.ray import down as end

    file = Path(deployment)
    end(load_config(file), file.stem, address)


def _end_here(wanted: str | None) -> None:
    """Let a deployment's launcher stop it, and wait for the end."""
    from epd_serve.launch.processes.runs import find_run

    run = find_run(wanted)
    began_s = time.monotonic()
    launcher = os.pidfd_open(run.pid)
    typer.echo(f"Stopping the deployment at {run}: it finishes its requests first. Ctrl-C stops waiting.")
    signal.pidfd_send_signal(launcher, signal.SIGTERM)
    select.select([launcher], [], [])
    typer.echo(f"Stopped after {time.monotonic() - began_s:.1f} s. Its logs: {run.logs}")
