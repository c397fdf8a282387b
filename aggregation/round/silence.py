"""How long a round waits for a client that sends nothing. Pure; decision 0020 has the reasons.

Only a client that has held a request for its assignment's status open in this attempt can be silent. For any other
client the round waits until the window is over.
"""

from umbel.aggregation.phrases import some
from umbel.aggregation.types import ClientId

_CUT_S_MIN, _CUT_S_MAX, _CUT_SHARE = 5.0, 30.0, 1 / 60
_QUIET_S_MIN, _QUIET_S_MAX, _QUIET_SHARE = 30.0, 120.0, 0.1
_GAPS = 3.0  # a client may be quiet for this many times its own longest gap
_WORDS = "fell silent"


def cut_s(window_s: float) -> float:
    """Seconds from a client's disconnection until it counts as silent: window / 60, but 5 to 30.

    A killed process closes its connection at once. A client whose link broke notices that, and returns sooner.
    """
    return min(max(_CUT_SHARE * window_s, _CUT_S_MIN), _CUT_S_MAX)


def quiet_s(window_s: float, longest_gap_s: float = 0.0) -> float:
    """Seconds from a client's answered request until it counts as silent: window / 10, but 30 to 120.

    Its code may compute without a pause in which the SDK's thread could ask again. `longest_gap_s`: the longest time
    between two requests of this client so far, in seconds. The client may be quiet for three times as long.
    """
    return max(min(max(_QUIET_SHARE * window_s, _QUIET_S_MIN), _QUIET_S_MAX), _GAPS * longest_gap_s)


def silent_words(clients: list[ClientId]) -> str:
    """These clients fell silent, as the end of a round's reason."""
    return f"{some(clients)} {_WORDS}"


def is_silence(reason: str) -> bool:
    """Whether a client is missing because a round did not wait longer for silent clients."""
    return reason.endswith(_WORDS)
