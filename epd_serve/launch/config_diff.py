"""The difference between the instances that run and those of another deployment file, as steps."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from epd_serve.config import DeploymentConfig, ShapeConfig, model_path
from epd_serve.config.applied import changes
from epd_serve.config.vllm import connectors
from epd_serve.launch.deployment_record import DeploymentRecord, Prepared
from epd_serve.launch.processes.ports import next_port
from epd_serve.protocol.addresses import is_loopback
from epd_serve.topology.change import Part, Step, StepKind, plan_change


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The steps in order, the instances that they start, and notes on what stays other than in the file.

    Attributes:
        options: a line for each option that changes.
    """

    steps: tuple[Step, ...]
    to_start: Mapping[str, Prepared]
    notes: tuple[str, ...]
    options: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Notes and options, for people."""
        return [*(f"note: {note}" for note in self.notes), *(f"option {line}" for line in self.options)]


#: Options whose values are shown to nobody.
_SECRETS = frozenset({"api_key", "cluster_key", "join_key", "key"})


def changed_options(old: DeploymentConfig, new: DeploymentConfig) -> tuple[str, ...]:
    """Return a line for each option that differs, as in ``gateway.max_queue: 4096 -> 10``."""
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    return tuple(f"{path}: {_shown(before, path)} -> {_shown(after, path)}" for path, _ in changes(old, new))


def _shown(config: dict[str, Any], path: str) -> str:
    value: Any = config
    for name in path.split("."):
        value = value[name]
    if path == "gateway.api_keys":
        return ", ".join(key["name"] for key in value) or "none"
    if path.rpartition(".")[2] in _SECRETS:
        return "none" if value is None else "a secret"
    return json.dumps(value)


def check_open_api(old: DeploymentConfig, new: DeploymentConfig) -> tuple[str, ...]:
    """Return a warning where the new deployment asks for no API key any more.

    Raises ValueError where the gateway listens beyond the loopback interface.
    """
    if not old.gateway.needs_key or new.gateway.needs_key:
        return ()
    where = f"{old.gateway.host} port {old.gateway.port}"
    if not is_loopback(old.gateway.host):
        raise ValueError(
            f"the file has no gateway.api_keys, and the API at {where} would be open to everybody who reaches it: "
            "add the keys to the file; to open the API, stop the deployment and start it from the file"
        )
    return (f"THE API BECOMES OPEN: the file has no gateway.api_keys; all users of this machine reach {where}",)


def check_same_deployment(old: DeploymentConfig, new: DeploymentConfig) -> None:
    """Raise ValueError for another model, or for a change of options that all processes share."""
    if old.engine == new.engine == "vllm":
        before, after = (connectors(one.placement(), one.vllm) for one in (old, new))
        if before != after:
            raise ValueError(
                f"the instances hand on features by {before[0]} and KV by {before[1]}; the file's would do it by "
                f"{after[0]} and {after[1]}: stop the deployment and start it from the new file"
            )
    if _source(old) != _source(new) or old.model_name != new.model_name:
        raise ValueError(
            f"the deployment serves {old.model_name!r} ({old.model}) and the file is for {new.model_name!r} "
            f"({new.model}); start a deployment of its own for another model"
        )
    other = [path for path, how in changes(old, new) if how.how == "anew"]
    if other:
        raise ValueError(
            f"a change of {', '.join(other)} needs another start: stop the deployment and start it from the "
            "new file"
        )


def _source(config: DeploymentConfig) -> Path | ShapeConfig:
    """The model itself, however its file names it."""
    return model_path(config.model) if isinstance(config.model, str) else config.model


def difference(record: DeploymentRecord, config: DeploymentConfig) -> Difference:
    """Find the steps to the new deployment.

    Raises ValueError, as :func:`plan_change` does, where they are not possible while the deployment serves.
    """
    record.look()
    live = record.live
    prepared = record.prepare(config)
    boards = _boards(live, prepared, record.directory)
    names = _names(set(live), prepared)
    running = [
        replace(
            _part(name, one, _board(one)),
            is_current=one.is_current(config.settings_for(str(one.options.role))),
        )
        for name, one in live.items()
    ]
    wanted = [_part(name, one, boards.get(_board(one))) for name, one in zip(names, prepared, strict=True)]
    steps = plan_change(running, wanted)
    started = {step.name for step in steps if step.kind is StepKind.START}
    named = {name: one for name, one in zip(names, prepared, strict=True) if name in started}
    return Difference(
        steps=tuple(steps),
        to_start=_placed(record, config, named, boards),
        notes=tuple(_notes(record, config, prepared, steps)),
    )


def _part(name: str, one: Prepared, board: str | None) -> Part:
    return Part(
        name=name,
        role=one.options.role,
        kind=one.kind(board),
        devices=one.placement.devices,
        roles=one.roles,
    )


def _board(one: Prepared) -> str | None:
    """The file that the instances in its parentheses share; None outside parentheses, and for vLLM's."""
    return None if one.slot is None else one.slot.rpartition(":")[0]


def _boards(live: Mapping[str, Prepared], prepared: Sequence[Prepared], directory: Path) -> dict[str | None, str]:
    """The file of each board of the new deployment: one in use where its instances are alike, else a new one."""
    here = _groups(live.values())
    found: dict[str | None, str] = {}
    for board, members in _groups(prepared).items():
        free = [path for path in here if path not in found.values()]
        alike = {path: (here[path] & members).total() for path in free}
        best = max(alike, key=lambda path: alike[path], default=None)
        if best is not None and alike[best]:
            found[board] = best
        else:
            paths = (str(directory / f"device-{number}") for number in count())
            found[board] = next(path for path in paths if path not in found.values() and not Path(path).exists())
    return found


def _groups(instances: Iterable[Prepared]) -> dict[str, Counter[Hashable]]:
    groups: dict[str, Counter[Hashable]] = {}
    for one in instances:
        if (board := _board(one)) is not None:
            groups.setdefault(board, Counter())[one.kind(None)] += 1
    return groups


def _names(taken: set[str], prepared: Sequence[Prepared]) -> list[str]:
    """A name for each instance, were it started, that no other instance has or gets."""
    names = []
    for one in prepared:
        stem = re.sub(r"\d+$", "", one.options.name)
        free = (f"{stem}{number}" for number in count())
        name = next(name for name in free if name not in taken)
        taken.add(name)
        names.append(name)
    return names


def _placed(
    record: DeploymentRecord,
    config: DeploymentConfig,
    named: Mapping[str, Prepared],
    boards: Mapping[str | None, str],
) -> dict[str, Prepared]:
    """The instances to start, with names, ports and board slots of their own."""
    ports = {one.options.port for one in record.live.values()} | {record.ports.gateway}
    if config.gateway.admin.port is not None:
        ports.add(config.gateway.admin.port)
    slots = {one.slot for one in record.live.values()}
    indices = {one.placement.index for one in record.live.values()}
    placed: dict[str, Prepared] = {}
    for name, one in named.items():
        port = next_port(config, ports, name)
        ports.add(port)
        index = next(index for index in count() if index not in indices)
        indices.add(index)
        board, slot = boards.get(_board(one)), None
        if board is not None:
            slot = next(slot for slot in _slots(board) if slot not in slots)
            slots.add(slot)
        placement = replace(one.placement, name=name, shares_device_with=(), index=index)
        placed[name] = one.placed(placement, port, slot)
    return placed


def _slots(board: str) -> Iterator[str]:
    return (f"{board}:{number}" for number in count())


def _notes(
    record: DeploymentRecord, config: DeploymentConfig, prepared: Sequence[Prepared], steps: Sequence[Step]
) -> Iterator[str]:
    gone = {step.name for step in steps if step.kind is StepKind.STOP}
    automatic = {one.options.threads or 1 for one in prepared if one.chose_threads}
    kept = [
        one.options
        for name, one in record.live.items()
        if name not in gone and one.chose_threads and automatic and one.options.threads not in automatic
    ]
    if kept:
        listed = ", ".join(f"{options.name} {options.threads}" for options in kept)
        yield f"CPU threads stay as they were ({listed}); started anew, instances would have {max(automatic)}"
    if config.instances.base_port != record.config.instances.base_port:
        yield "instances.base_port is for instances that are started; the others keep their ports"
