"""What a compressed training needs beside the model, as a ConfigRecord in the message, and the reply's one array.

```
message   ConfigRecord "umbel.codec": {"terms": the JSON of `Terms`}
reply     ArrayRecord of the app's own name, with the array "umbel.update": the bytes of the update
```

The array's serialization type is `STYPE`, and its data are the update as docs/reference/wire.md has it. So nothing is
parsed before the codec's own reader, and no other reader of arrays takes the bytes for weights.
"""

from dataclasses import dataclass

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import TypeAdapter, ValidationError

from umbel.aggregation.codec.section import require_codec
from umbel.aggregation.codec.update_codec import UpdateCodec, codec_for
from umbel.aggregation.errors import MalformedUpdate
from umbel.aggregation.model.layout import Layout
from umbel.aggregation.plans.codec import CodecPlan, Grid
from umbel.client.errors import first_finding

RECORD = "umbel.codec"
UPDATE = "umbel.update"
STYPE = "umbel.update/1"
_VERSION = 1
_KEY = "terms"
_CHARS_MAX = 4096
_RANK_MAX = (1 << 32) - 1  # an update states it in four bytes


@dataclass(frozen=True, slots=True)
class Terms:
    """How one client writes its update. Raises `ValueError` for terms that no update can be written with."""

    plan: CodecPlan
    max_abs: float  # greatest absolute value of one coordinate of the weight change
    rank: int  # the client's place among those that are asked, from 0
    version: int = _VERSION
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - fail closed

    def __post_init__(self) -> None:
        if self.version != _VERSION:
            raise ValueError(f"this umbel knows version {_VERSION} of the terms, not {self.version}")
        if not 0 <= self.rank <= _RANK_MAX:
            raise ValueError(f"rank must lie between 0 and {_RANK_MAX}, not {self.rank}")
        if self.plan.feedback:
            raise ValueError("error feedback needs a state at the client, which a Flower mod does not keep")
        require_codec(self.plan)
        _ = self.grid

    @property
    def grid(self) -> Grid:
        return Grid.finest(max_abs=self.max_abs, total_weight_max=1)

    def codec(self, layout: Layout) -> UpdateCodec:
        """The codec of a model with this layout. Raises `ValueError` for one that needs the gradients."""
        codec = codec_for(self.plan, self.grid, layout)
        if codec.within():
            raise ValueError(
                f'{self.plan.codec.name.lower()} with mode = "structured" changes the gradients of the training, which '
                'Flower does not show: set mode to "sketched"'
            )
        return codec


_TERMS = TypeAdapter(Terms)


def put_in(content: RecordDict, terms: Terms) -> RecordDict:
    """A copy of a message's content with these terms. Its records are those of `content`."""
    return RecordDict({**content, RECORD: ConfigRecord({_KEY: _TERMS.dump_json(terms).decode()})})


def taken_out(content: RecordDict) -> Terms | None:
    """The terms in a message's content, which loses them; None without. Raises `ValueError` for terms that are none."""
    if RECORD not in content.config_records:
        return None
    text = content.config_records.pop(RECORD).get(_KEY)
    if not isinstance(text, str) or len(text) > _CHARS_MAX:
        raise ValueError(f"the record {RECORD} must have a text {_KEY!r} of at most {_CHARS_MAX} characters")
    try:
        return _TERMS.validate_json(text, strict=True)
    except ValidationError as error:
        raise ValueError(f"the record {RECORD} cannot be used: {first_finding(error, _KEY)}") from error


def written(update: bytes) -> ArrayRecord:
    """The record with which a client replies."""
    return ArrayRecord({UPDATE: Array("uint8", (len(update),), STYPE, update)})


def is_written(record: ArrayRecord) -> bool:
    """Whether any of the record's arrays says that it is an update."""
    return any(array.stype == STYPE for array in record.values())


def update_in(record: ArrayRecord) -> bytes:
    """The inverse of `written`. Raises `MalformedUpdate` for any other record."""
    array = record.get(UPDATE)
    if array is None or len(record) != 1 or array.stype != STYPE:
        raise MalformedUpdate(f"a compressed reply has one array, {UPDATE!r}, of the type {STYPE!r}, and no other")
    if array.dtype != "uint8" or tuple(array.shape) != (len(array.data),):
        raise MalformedUpdate(
            f"the array {UPDATE!r} states {array.dtype!r:.40} and the shape {list(array.shape)!r:.80}; it must state "
            f"uint8 and its length, {len(array.data)}"
        )
    return array.data
