"""The kinds of rounds, and in words what sets each apart. What else is done for a kind asks for these words."""

from enum import StrEnum


class Task(StrEnum):
    """What a round asks of its clients: to train the model, only to measure it on their own held-out data, or to try
    with a share of the work whether they are fit for it."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    CANARY = "canary"

    @property
    def mark(self) -> str:
        """What stands before the attempt in the ids of its assignments: each kind has attempts of its own."""
        return {Task.TRAINING: "", Task.EVALUATION: "e", Task.CANARY: "c"}[self]

    @property
    def sends_updates(self) -> bool:
        """Whether its clients train, upload an update and report it; otherwise they measure, and report that alone."""
        return self is not Task.EVALUATION

    @property
    def makes_model(self) -> bool:
        """Whether its updates are summed, and its end makes the run's next version."""
        return self is Task.TRAINING

    @property
    def tries_clients(self) -> bool:
        """Whether it is the clients that are tried. They are chosen to differ, and measure how fit they are; whoever
        comes is judged, and who does not come is a finding too."""
        return self is Task.CANARY

    @property
    def may_be_left_out(self) -> bool:
        """Whether the run goes on without it where nobody does it: it is not waited for, nor tried again."""
        return self is Task.EVALUATION

    @property
    def follows_its_round(self) -> bool:
        """Whether it comes after the training of its number, to which it belongs."""
        return self is Task.EVALUATION

    @property
    def closing_words(self) -> str:
        """What is done when it has closed."""
        return {
            Task.TRAINING: "making the new model",
            Task.EVALUATION: "adding up what was measured",
            Task.CANARY: "judging what was tried",
        }[self]
