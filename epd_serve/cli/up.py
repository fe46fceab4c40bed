"""``epd-serve up``: a deployment on this machine or on a Ray cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from epd_serve.cli import ended_by_ctrl_c
from epd_serve.cli.flags import Host, On, Port, model_of, ray_address
from epd_serve.config import DeploymentConfig, change_config, load_config
from epd_serve.config.keys import hash_key
from epd_serve.config.sections import VLLM_FLAGS
from epd_serve.imports import uncollected


def up(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL|FILE",
            help="A model, or a deployment file (.yaml); default: the demo model as E-P-D on the CPU.",
        ),
    ] = None,
    host: Host = None,
    port: Port = None,
    topology: Annotated[str | None, typer.Option(help="Override the file's, as in '(E-P)-D'.")] = None,
    base_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of the first instance; the others follow. 0: free ones."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Override the file's: 'demo', a model's directory, or its name on the hub.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option(help="Override the file's: auto, or as in cuda:0,cuda:1 or 'cuda x 8'.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Override the file's: auto, float32, bfloat16 or float16.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Override the file's instances.max_model_len.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Override the file's.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Replaces the file's gateway.api_keys; visible to local users in the process list."),
    ] = None,
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Print every command line and its environment; start nothing.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once it is ready; 'epd-serve down' stops it.")
    ] = False,
    on: On = None,
    spread: Annotated[
        Literal["pack", "host"],
        typer.Option(help="With --on: device groups on few hosts, or spread over all hosts."),
    ] = "pack",
) -> None:
    """Run a deployment on this machine until Ctrl-C; with --on, start it on a cluster."""
    _check_words([target or "", *context.args])
    file = None if target is None else Path(target)
    if file is not None and file.suffix == ".gguf":
        raise ValueError(f"{target}: GGUF is not supported; give a directory in the format of transformers")
    if file is not None and file.suffix not in (".yaml", ".yml") and not file.is_file():
        if model is not None:
            raise ValueError(f"{target} and --model {model} are two models; give one of them")
        file, model = None, target
    if api_key is not None and not api_key.strip():
        raise ValueError("--api-key is empty: give a key, or omit the option")
    keys = None if api_key is None else [{"name": "default", "hash": hash_key(api_key.strip())}]
    config = change_config(
        load_config(file) if file else DeploymentConfig(),
        _given(
            gateway=_given(host=host, port=port, api_keys=keys),
            instances=_given(base_port=base_port, max_model_len=max_model_len),
            topology=topology,
            model=None if model is None else model_of(model),
            devices="auto" if devices == "auto" else devices and devices.split(","),
            dtype=dtype,
            served_model_name=served_model_name,
        ),
    )
    if on is not None:
        if dry or detach:
            raise ValueError("--dry-run and --detach are for this machine; remove them with --on")
        with ended_by_ctrl_c():
            from epd_serve.launch.remote import ray

        typer.echo(ray.up(config, file.stem if file else "epd-serve", ray_address(on), spread))
        return
    if dry:
        with ended_by_ctrl_c(), uncollected():
            from epd_serve.launch.dry_run import dry_run

            for line in [*dry_run(config, file, os.environ)]:
                typer.echo(line)
        return
    writer = _fork_launcher() if detach else None
    if isinstance(config.model, str):
        from epd_serve.launch.download import download

        download(config.model)
    with ended_by_ctrl_c(), uncollected():
        from epd_serve.launch.choices import resolve
        from epd_serve.launch.processes.forking import preload

        config, reasons = resolve(config)
        preload(config)  # it imports for seconds, while this process prepares the deployment
        from epd_serve.launch.up import run_up
    raise typer.Exit(asyncio.run(run_up(config, reasons, file, writer)))


def _given(**values: Any) -> dict[str, Any]:
    """Return the given values."""
    return {key: value for key, value in values.items() if value not in (None, {})}


def _check_words(words: Sequence[str]) -> None:
    """Raise ValueError for unknown options, with the equivalent of an option of vLLM."""
    unknown = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    if unknown is not None:
        name = unknown.lstrip("-").replace("-", "_")
        if name in DeploymentConfig.model_fields:
            raise ValueError(f"{unknown}: {name} is a key of a deployment file (docs/reference/options.md)")
        if here := VLLM_FLAGS.get(name):
            raise ValueError(f"{unknown}: use {here} (docs/guide/coming-from-vllm.md)")
        raise ValueError(
            f"{unknown} is not an option of 'epd-serve up' (see 'epd-serve up -h'); others of 'vllm serve' go "
            "into instances.engine_args of a deployment file with engine: vllm"
        )
    if len(words) > 1:
        raise ValueError(f"{words[1]}: 'epd-serve up' takes one model or deployment file")


def _fork_launcher() -> int:
    """Return in a child process, with a descriptor to write to once it has left the terminal.

    The parent ends when the child has left the terminal, or with the child's exit code. Ctrl-C ends both.
    """
    reader, writer = os.pipe()
    if pid := os.fork():
        os.close(writer)
        try:
            is_ready = os.read(reader, 1)
        except KeyboardInterrupt:
            os.kill(pid, signal.SIGTERM)
            is_ready = b""
        raise SystemExit(0 if is_ready else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    os.close(reader)
    os.setsid()
    # not inheritable: a shell waits until all writers of its pipe have ended
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    return writer
