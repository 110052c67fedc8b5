"""msgspec's sentences, as the installed version really makes them, and the field they are about."""

from typing import Annotated

import msgspec
import pytest

from serve_app.complaint import Complaint, read


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    count: Annotated[int, msgspec.Meta(ge=1)]


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    inner: Inner | None = None
    rows: list[Inner] = []
    by_id: dict[int, int] = {}


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ({"inner": {"count": 0}}, Complaint("inner.count", "inner.count", "must be >= 1")),
        (
            {"rows": [{"count": 1}, {"count": "x"}]},
            Complaint("rows[1].count", "rows[1].count", "expected int, got str"),
        ),
        ({"rows": [{"count": 1, "x": 1}]}, Complaint("rows[0]", "rows[0].x", "", unknown=True)),
        ({"x": 1}, Complaint("", "x", "", unknown=True)),
        ({"inner": {}}, Complaint("inner", "inner.count", "", missing=True)),
        ({"by_id": {"1": "x"}}, Complaint("by_id", "by_id", "expected int, got str")),
        ({"by_id": {"x": 1}}, Complaint("by_id", "by_id", "expected int, got str")),
        ([], Complaint("", "", "expected object, got array")),
    ],
)
def test_the_field_at_fault_is_found_in_each_kind_of_sentence(value: object, complaint: Complaint) -> None:
    with pytest.raises(msgspec.ValidationError) as raised:
        msgspec.json.decode(msgspec.json.encode(value), type=Outer)
    assert read(str(raised.value)) == complaint
