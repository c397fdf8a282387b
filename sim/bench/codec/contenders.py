"""The codecs that are trained with, side by side, and the two federations that they are trained in.

A hundred devices, ten in a round: nobody comes back soon, so that error feedback, whose state is dropped when a version
of the model was missed, has nothing to work with. Ten silos, all in every round: there it does what it is for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from umbel.aggregation.codec.section import CodecSection
from umbel.sim.bench.codec.federation import Setting

# The split and the cohorts of McMahan et al. 0.2 is half of the rate at which float32 diverges.
DEVICES = Setting("100 devices", 100, 2, 10, n_rounds=100, learning_rate=0.2)
# Ten times as much data of two digits or so each, and the same steps a round.
SILOS = Setting("10 silos", 10, 2, 10, n_rounds=60, learning_rate=0.2)


@dataclass(frozen=True, slots=True)
class Contender:
    """A codec as the run file has it, and what it is called beside others."""

    title: str
    codec: CodecSection


def _integer(step: float) -> Contender:
    return Contender(f"integer, step {step:g}", CodecSection(name="integer", step=step))


def _eden(bits: int) -> Contender:
    return Contender(f"EDEN, {bits} bit{'s' * (bits > 1)}", CodecSection(name="eden", bits=bits))


FLOAT32 = Contender("float32", CodecSection())
PROMISED = _integer(4.0)
_SIGN = Contender("sign", CodecSection(name="sign"))
_MASK = Contender("random mask, 1 in 10, structured", CodecSection(name="mask", every=10, mode="structured"))
_LOW_RANK = Contender("low rank, 20 of 200, structured", CodecSection(name="lowrank", rank=20))
_TOP_100TH = Contender("top 1 %", CodecSection(name="topk", share=0.01))

CONTENDERS: Mapping[Setting, Sequence[Contender]] = {
    DEVICES: (
        FLOAT32,
        Contender("float32 in planes", CodecSection(name="planes")),
        Contender("bfloat16 in planes", CodecSection(name="planes", precision="bfloat16")),
        *map(_eden, (4, 2, 1)),
        Contender("QSGD, 16 levels", CodecSection(name="qsgd", levels=16)),
        Contender("TernGrad, clipped", CodecSection(name="ternary", clip_sigmas=2.5)),
        _SIGN,
        Contender("random mask, 1 in 10, sketched", CodecSection(name="mask", every=10, mode="sketched")),
        _MASK,
        _LOW_RANK,
        Contender("top 10 %", CodecSection(name="topk", share=0.1)),
        _TOP_100TH,
        *map(_integer, (0.5, 1.0, 2.0)),
        PROMISED,
        *map(_integer, (8.0, 16.0)),
    ),
    SILOS: (
        FLOAT32,
        _eden(1),
        _SIGN,
        Contender("sign, fed back", CodecSection(name="sign", error_feedback=True)),
        _MASK,
        _LOW_RANK,
        _TOP_100TH,
        Contender("top 1 %, fed back", CodecSection(name="topk", share=0.01, error_feedback=True)),
        Contender("top 0.1 %, fed back", CodecSection(name="topk", share=0.001, error_feedback=True)),
        Contender(
            "top 0.1 %, deep gradient compression",
            CodecSection(name="topk", share=0.001, error_feedback=True, momentum=0.5, warm_up_rounds=4),
        ),
        PROMISED,
        _integer(16.0),
    ),
}
