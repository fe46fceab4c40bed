"""The encode of one item of a try: who has it, and who gets it after a failure."""

from __future__ import annotations

from dataclasses import dataclass, field

from epd_serve.errors import PREPARATION_FULL, InstanceFailed, InvalidRequest, ServeError
from epd_serve.flow.failures import is_planned
from epd_serve.protocol.wire import MediaRef
from epd_serve.routing.choice import Router
from epd_serve.routing.table import InstanceRecord, InstanceTable
from epd_serve.types import Stage

#: Encoders that may leave one item without an answer before P encodes it itself.
_MAX_STALLED = 2


@dataclass(slots=True, eq=False)
class ItemEncode:
    """P waits for the feature for twice the first ``patience_s``. An E that gives no answer may take half of that,
    the next half of the rest; what is left then is for P, however many more encoders there are, and P itself says
    when it is over.
    """

    ref: MediaRef
    param: str | None
    encoder: InstanceRecord
    patience_s: float
    num_stalled: int = 0
    tried: set[str] = field(default_factory=set)

    def stalled(self) -> None:
        """The encoder gave no answer in its time."""
        self.num_stalled += 1
        self.patience_s /= 2

    def next_encoder(
        self, router: Router, table: InstanceTable, prefill: InstanceRecord, failure: ServeError
    ) -> None:
        """Another one after a failure, at last P itself, which loads the tower for it.

        Raises ServeError where nobody is left; the failure itself where the item is wrong, P leaves its role, or
        encoders are only too busy, which P does not take over.
        """
        if isinstance(failure, InvalidRequest):
            failure.param = failure.param or self.param
            raise failure
        self.tried.add(self.encoder.name)
        encoder = prefill
        if self.num_stalled < _MAX_STALLED:
            [encoder] = router.encoders.choose_encoders(table, prefill, [self.ref], exclude=self.tried)
        is_tried = encoder.name in self.tried
        if failure.code == PREPARATION_FULL and (is_tried or not encoder.covers(Stage.ENCODE)):
            raise failure
        if is_tried:
            if is_planned(failure):
                raise failure
            raise InstanceFailed(f"the image could not be encoded: {failure.message}", param=self.param)
        self.encoder = encoder
