"""The topology notation: ``E-P-D``, ``(E-P)-D``, ``4E-8P-20D``, ``E-P-D@tp2``.

::

    topology = unit { "-" unit }                 "-"  separates devices
    unit     = [ count ] ( member | group )
    group    = "(" member { "-" member } ")"     "()" puts isolated instances on one device
    member   = [ count ] stages [ "@tp" width ]  adjacent letters are one instance
    stages   = one or more different letters of E, P, D

Spaces are allowed around symbols. Printing is canonical: stages in data-path order, no count or width of 1, no
group around a single instance; ``parse_topology(str(t)) == t``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NoReturn

from epd_serve.types import Role, Stage

#: Limit of counts, widths and instances, so that a typing error cannot exhaust memory.
MAX_COUNT = 4096


class TopologyError(ValueError):
    """An invalid topology line.

    Attributes:
        text: the line as given.
        position: 0-based offset of the fault, ``len(text)`` at the end.
        problem: the fault and its correction.
    """

    def __init__(self, text: str, position: int, problem: str) -> None:
        super().__init__(
            f"topology {text!r}, position {position + 1}: {problem}\n    {text}\n    {' ' * position}^"
        )
        self.text = text
        self.position = position
        self.problem = problem


@dataclass(frozen=True, kw_only=True)
class Member:
    """``count`` equal instances, each ``tensor_parallel`` devices wide: ``4E``, ``D@tp2``."""

    role: Role
    count: int = 1
    tensor_parallel: int = 1

    def __str__(self) -> str:
        count = str(self.count) if self.count > 1 else ""
        width = f"@tp{self.tensor_parallel}" if self.tensor_parallel > 1 else ""
        return f"{count}{self.role}{width}"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Isolated instances that share one device or set of devices, ``count`` times: ``2(E-P)``."""

    members: tuple[Member, ...]
    count: int = 1

    def __str__(self) -> str:
        count = str(self.count) if self.count > 1 else ""
        return f"{count}({'-'.join(map(str, self.members))})"


Unit = Member | Group


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A topology with P and D, as :func:`parse_topology` returns it."""

    units: tuple[Unit, ...]

    def __str__(self) -> str:
        return "-".join(map(str, self.units))

    @property
    def members(self) -> tuple[Member, ...]:
        """All members in the order written, including those of groups, regardless of the groups' counts."""
        return tuple(member for unit in self.units for member in members_of(unit))

    @property
    def stages(self) -> frozenset[Stage]:
        return frozenset(stage for member in self.members for stage in member.role.stages)

    @property
    def num_instances(self) -> int:
        return sum(
            (unit.count if isinstance(unit, Group) else 1) * member.count
            for unit in self.units
            for member in members_of(unit)
        )

    @property
    def num_devices(self) -> int:
        """Devices that the topology needs."""
        return sum(unit.count * width_of(unit) for unit in self.units)


def members_of(unit: Unit) -> tuple[Member, ...]:
    return unit.members if isinstance(unit, Group) else (unit,)


def width_of(unit: Unit) -> int:
    """Return the devices of one replica: the largest tensor-parallel width of its members."""
    return max(member.tensor_parallel for member in members_of(unit))


def parse_topology(text: str) -> Topology:
    """Parse a topology line. Raises TopologyError if it breaks the grammar or lacks P or D."""
    return _Parser(text).parse()


#: A number, letters, ``@tp`` or another character.
_TOKEN = re.compile(r"\s*(@tp|[0-9]+|[^\W\d_]+|\S)")


class _Parser:
    """Recursive descent over the tokens of a line; the last one is "", at its end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [(found[1], found.start(1)) for found in _TOKEN.finditer(text)]
        self._tokens.append(("", len(text)))
        self._index = 0

    @property
    def _token(self) -> str:
        return self._tokens[self._index][0]

    @property
    def _position(self) -> int:
        return self._tokens[self._index][1]

    def parse(self) -> Topology:
        if not self._token:
            self._fail("the line is empty; write one such as 'E-P-D'")
        units = [self._unit()]
        while self._token:
            self._separator()
            units.append(self._unit())
        topology = Topology(units=tuple(units))
        if topology.num_instances > MAX_COUNT:
            self._fail(f"{topology.num_instances} instances exceed the limit of {MAX_COUNT}", at=0)
        for stage, verb in ((Stage.PREFILL, "prefills"), (Stage.DECODE, "decodes")):
            if stage not in topology.stages:
                self._fail(f"no instance {verb}; every topology needs {stage}, as in 'E-P-D' or 'EPD'")
        return topology

    def _unit(self) -> Unit:
        count, opened_at = self._number("count") or 1, self._position
        if self._token != "(":
            return self._member(count)
        self._index += 1
        members = [self._group_member()]
        while self._token != ")":
            self._separator(opened_at)
            members.append(self._group_member())
        self._index += 1
        if self._token.startswith("@"):
            self._fail("'@tp' belongs to a stage set, not to a group; write it inside, as in '(E-P@tp2)'")
        if len(members) == 1 and members[0].count == 1:
            return replace(members[0], count=count)
        return Group(members=tuple(members), count=count)

    def _group_member(self) -> Member:
        count = self._number("count") or 1
        if self._token == "(":
            self._fail("groups do not nest; close the first one before this, as in '(E-P)-(P-D)'")
        return self._member(count)

    def _member(self, count: int) -> Member:
        letters, begin = self._token, self._position
        if not letters:
            self._fail("an instance is missing at the end; write letters of E, P and D")
        if not letters[0].isalpha():
            self._fail(f"expected letters of E, P and D here, not {letters[0]!r}")
        for offset, letter in enumerate(letters):
            if letter not in ("E", "P", "D"):
                stages_are = "use E (encode), P (prefill) and D (decode)"
                advice = f"write {letter.upper()}" if letter in "epd" else stages_are
                self._fail(f"{letter!r} is not a stage; {advice}", at=begin + offset)
            if letter in letters[:offset]:
                problem = f"stage {letter} appears twice in one instance; for two instances write '2{letter}'"
                self._fail(problem, at=begin + offset)
        self._index += 1
        width: int | None = 1
        if self._token == "@tp":
            self._index += 1
            width = self._number("tensor-parallel width")
        elif self._token == "@":
            self._fail("only '@tp' and a number can follow '@', as in 'D@tp2'")
        if width is None:
            self._fail("'@tp' needs a number, as in 'D@tp2'")
        return Member(role=Role.of(map(Stage, letters)), count=count, tensor_parallel=width)

    def _number(self, quantity: str) -> int | None:
        """Read a number, if there is one."""
        if not (self._token.isascii() and self._token.isdecimal()):
            return None
        digits = self._token.lstrip("0")
        if not digits:
            self._fail(f"a {quantity} of 0 is invalid; write 1 or more, or leave the instance out")
        if len(digits) > len(str(MAX_COUNT)) or int(digits) > MAX_COUNT:
            self._fail(f"the {quantity} is above {MAX_COUNT}")
        self._index += 1
        return int(digits)

    def _separator(self, opened_at: int | None = None) -> None:
        """Read a '-'; ``opened_at``: position of the open parenthesis."""
        found = self._token
        if not found and opened_at is not None:
            self._fail("this parenthesis is not closed; add ')'", at=opened_at)
        if found == ")":
            self._fail("this parenthesis closes nothing; remove it, or add '(' before the group")
        if found.isascii() and found.isdecimal():
            self._fail("a count goes before its stages; write '2E', not 'E2'")
        if found != "-":
            self._fail(f"expected '-' here, not {found[:1]!r}")
        self._index += 1

    def _fail(self, problem: str, *, at: int | None = None) -> NoReturn:
        raise TopologyError(self._text, self._position if at is None else at, problem)


def sends_features(source: Role, target: Role) -> bool:
    """Return whether features travel from ``source`` to ``target``."""
    return source.encodes and target.prefills and not (source.prefills and target.encodes)


def sends_kv(source: Role, target: Role) -> bool:
    """Return whether KV travels from ``source`` to ``target``."""
    return source.prefills and target.decodes and not (source.decodes and target.prefills)
