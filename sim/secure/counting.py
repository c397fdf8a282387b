"""A coordinator of simulated secure rounds that counts messages and does not check them: its clients send blanks."""

from collections import Counter

from umbel.aggregation.secagg.context import Context
from umbel.aggregation.secagg.coordinator import SecureCoordinator
from umbel.aggregation.secagg.crypto.derive import SHARE_COMMITMENT_BYTES
from umbel.aggregation.secagg.crypto.sealed import SEALED_BYTES
from umbel.aggregation.secagg.messages import AdvertiseKeys, Dealt, ShareKeys, encode_indices

_COMMITMENT = bytes(SHARE_COMMITMENT_BYTES)
_BLANK_DEALT = Dealt(_COMMITMENT, _COMMITMENT, bytes(SEALED_BYTES)).encode()


class CountingCoordinator(SecureCoordinator):
    """The coordinator of `BlankVoice`s. Only the keys are real, because the graph depends on them."""

    def __init__(self, context: Context, opening: bytes) -> None:
        super().__init__(context, opening)
        self._n_revealed = Counter[int]()

    def check_keys(self, index: int, message: bytes) -> AdvertiseKeys:
        return AdvertiseKeys.decode(message)

    def check_shares(self, index: int, message: bytes) -> ShareKeys:
        return ShareKeys(index, b"", {}, b"")

    def inbox(self, index: int) -> bytes:
        shared = self.shared or ()
        n_dealers = len(set(self.session.neighbours(index)).intersection(shared))
        return encode_indices(shared) + _BLANK_DEALT * n_dealers

    def check_agreement(self, index: int, signature: bytes) -> None:
        """It is blank."""

    def take_shares(self, index: int, message: bytes) -> bool:
        self._n_revealed.update(self.session.holders(index))
        return True

    @property
    def is_enough(self) -> bool:
        return all(self._n_revealed[dealer] >= self.session.threshold for dealer in self.shared or ())
