"""How messages name the ranks of a group, where a job may have several groups that each count their ranks from 0."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankNames:
    """Of a group: "rank 1"; "rank 1 of client 0" in a job of several clients; "client 1" where each rank is a client's
    first.
    """

    noun: str = "rank"
    suffix: str = ""  # such as " of client 0"

    def of(self, rank: int) -> str:
        """`rank`: its number in the group, from 0."""
        return f"{self.noun} {rank}{self.suffix}"

    def of_several(self, ranks: str) -> str:
        """`ranks`: their numbers, such as "1, 2"."""
        return f"{self.noun}s {ranks}{self.suffix}"

    @property
    def whole(self) -> str:
        """What the ranks are together."""
        return "client" if self.suffix else "silo"

    @property
    def plural(self) -> str:
        return f"{self.noun}s"


RANKS, CLIENTS = RankNames(), RankNames("client")


def ranks_of_client(number: int, n_clients: int) -> RankNames:
    """The names of one client's ranks. In a job of one client they need no more than their numbers."""
    return RANKS if n_clients == 1 else RankNames(suffix=f" of client {number}")
