"""The interface through which a caller talks to an instance, whatever engine runs behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Protocol

from epd_serve.protocol.instance_state import InstanceInfo, LeaveOrder, Left, Report, RoleChanged, RoleOrder
from epd_serve.protocol.wire import (
    DecodeRequest,
    DetokenizeReply,
    DetokenizeRequest,
    EncodeReply,
    EncodeRequest,
    PrefillRequest,
    TokenizeReply,
    TokenizeRequest,
)


class Answer(Protocol):
    """A stage's answer whose status line has arrived: OpenAI's JSON or events, to be forwarded unparsed."""

    @property
    def framed(self) -> bool:
        """Whether the bytes are items (:mod:`epd_serve.rpc.items`), so that its tokens are known."""

    @property
    def decode_follows(self) -> bool:
        """Whether D's bytes come after these (``x-epd-next: decode``)."""

    @property
    def prompt_note(self) -> str:
        """P's note on the prompt (:mod:`epd_serve.protocol.wire`); "" for none."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, never empty pieces. Raises InstanceLost where it breaks off."""

    async def forward(self, write: Callable[[bytes], bool]) -> bool:
        """Hand the body to ``write`` as it arrives, until that returns False; returns whether it is complete.

        ``write`` is called out of the event loop's callbacks; what it raises is raised here. Raises InstanceLost
        where the body breaks off.
        """


class StageCall(Protocol):
    """A call that is under way. It must be closed."""

    @property
    def opened(self) -> asyncio.Future[Answer]:
        """A future that is done when the answer's head is there.

        It raises the exception that came in its place.
        """

    def close(self) -> None:
        """Break the call off, which cancels the work, unless its answer has been read to the end. Idempotent."""


class StageCalls(Protocol):
    """One instance's stage calls.

    Every call raises InstanceLost for a failed connection, and the instance's own error
    (:func:`epd_serve.errors.error_from_response`) for an answer with status 400 or above. Closing a call
    cancels the work; so does cancelling the task that waits in ``encode``.
    """

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...

    async def info(self) -> InstanceInfo:
        """Return the instance's info."""

    async def probe(self, timeout_s: float) -> None:
        """Return where the instance's process answers; raise StageTimeout where it does not in time.

        An instance that computes for long is well; one whose engine hangs ends by itself, or raises a ServeError.
        """

    async def switch(self, order: RoleOrder) -> RoleChanged:
        """Have it serve another role; return when it does.

        Raises InvalidRequest for a role that it cannot have, StageTimeout where it was not empty in time.
        """

    async def leave(self, order: LeaveOrder) -> Left:
        """Return when no request is left. Raises StageTimeout where it was not empty in time."""

    def reports(self) -> AsyncGenerator[Report, None]:
        """Yield the instance's reports until it ends them. Raises InvalidRequest (404) where it makes none."""

    async def encode(self, request: EncodeRequest, *, trace_id: str) -> EncodeReply:
        """Return once the feature is stored and announced."""

    async def tokenize(self, request: TokenizeRequest, *, trace_id: str) -> TokenizeReply:
        """The tokens of a chat or prompt; for instances that prefill, as :meth:`detokenize` is."""

    async def detokenize(self, request: DetokenizeRequest, *, trace_id: str) -> DetokenizeReply:
        """The text of tokens."""

    def prefill(self, request: PrefillRequest, *, trace_id: str, media: Sequence[bytes] = ()) -> StageCall:
        """Begin a prefill; the call is opened once the first token is there.

        ``media`` are the items' bytes, for an engine whose prompts are made from them.
        """

    def decode(self, request: DecodeRequest, *, trace_id: str) -> StageCall:
        """Begin a decode.

        The call is opened once the second token is there, or the whole answer if not streamed.
        """
