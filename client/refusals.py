"""What the coordinator hears when a secure round is not as it should be: what kind of thing, and nothing else.

The site's own log has the whole sentence. Whoever asks may be the one who lies, so it learns no number and no name.
"""

from umbel.aggregation.secagg.errors import BadKey, Disagreement, ForgedMessage, SecAggError, TooFew
from umbel.client.errors import Alarm

_TOLD: tuple[tuple[type[SecAggError], str], ...] = (
    (Disagreement, "the coordinator says different things, or what cannot be"),
    (ForgedMessage, "something in this round is not signed by whom it is said to be from"),
    (BadKey, "a key in this round is one that no honest client has"),
    (TooFew, "there are fewer clients than this one takes part with"),
)
_OTHERWISE = "a message of this round is not as the protocol has it"


def alarm_of(error: SecAggError) -> Alarm:
    """The alarm that an error of the protocol is."""
    told = next((words for kind, words in _TOLD if isinstance(error, kind)), _OTHERWISE)
    return Alarm(f"{told}: {error}. Nothing more is said in this attempt", f"{told}; nothing more is said")
