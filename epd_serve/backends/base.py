"""The interface to an instance, independent of its engine."""

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
    """A stage's answer after its status line, to be forwarded unparsed.

    It is OpenAI's JSON, or events in items (:mod:`epd_serve.rpc.items`).
    """

    @property
    def knows_tokens(self) -> bool:
        """True if the items contain the tokens of their events."""

    @property
    def decode_follows(self) -> bool:
        """True if D's bytes follow these (``x-epd-next: decode``)."""

    @property
    def prompt_note(self) -> str:
        """P's note on the prompt (:mod:`epd_serve.protocol.wire`); "" for none."""

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, in non-empty pieces. Raises InstanceLost if it breaks off."""

    async def forward(self, write: Callable[[bytes], bool]) -> bool:
        """Pass the body to ``write`` as it arrives, until ``write`` returns False; return whether it is complete.

        ``write`` runs in callbacks of the event loop; its exceptions are raised here. Raises InstanceLost if the
        body breaks off.
        """


class StageCall(Protocol):
    """A call in progress, which must be closed."""

    @property
    def opened(self) -> asyncio.Future[Answer]:
        """The answer, once its head has arrived, or the call's exception."""

    def close(self) -> None:
        """End the call; cancels the work unless the answer has been read to the end. Idempotent."""


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

    async def info(self) -> InstanceInfo: ...

    async def probe(self, timeout_s: float) -> None:
        """Return if the instance's process answers; raise StageTimeout if it does not in time.

        A long computation does not delay the answer. A hanging engine ends its process or raises a ServeError.
        """

    async def switch(self, order: RoleOrder) -> RoleChanged:
        """Switch the instance to another role; return when it serves it.

        Raises InvalidRequest for an impossible role, StageTimeout if the instance was not empty in time.
        """

    async def leave(self, order: LeaveOrder) -> Left:
        """Return when no request is left. Raises StageTimeout if the instance was not empty in time."""

    def reports(self) -> AsyncGenerator[Report, None]:
        """Yield the instance's reports until it ends them. Raises InvalidRequest (404) if it sends none."""

    async def encode(self, request: EncodeRequest, *, trace_id: str) -> EncodeReply:
        """Return once the feature is stored and announced."""

    async def tokenize(self, request: TokenizeRequest, *, trace_id: str) -> TokenizeReply:
        """Return the tokens of a chat or prompt. Like :meth:`detokenize`, for instances that prefill."""

    async def detokenize(self, request: DetokenizeRequest, *, trace_id: str) -> DetokenizeReply:
        """Return the text of tokens."""

    def prefill(self, request: PrefillRequest, *, trace_id: str, media: Sequence[bytes] = ()) -> StageCall:
        """Begin a prefill; the call opens with the first token.

        ``media`` are the items' bytes, for an engine that makes prompts from them.
        """

    def decode(self, request: DecodeRequest, *, trace_id: str) -> StageCall:
        """Begin a decode; the call opens with the second token, or with the whole answer if not streamed."""
