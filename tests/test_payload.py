"""Payloads and results: what is stored is what was given and can be read again; all else is refused."""

import json
import math
import traceback
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Annotated, Any, Literal, NamedTuple, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    EmailStr,
    Field,
    RootModel,
    SecretStr,
    computed_field,
)
from typing_extensions import TypedDict

from aioqueue.context import JobContext
from aioqueue.definition import define
from aioqueue.errors import InvalidPayload, InvalidResult, TaskDefinitionError
from aioqueue.payload import PayloadCodec, check_json
from aioqueue.result_codec import ResultCodec
from aioqueue.signature import read_signature
from aioqueue.unstorable import find_unstorable

LIMIT = 1_000_000
NAIVE = datetime(2026, 1, 1)


def codec(fn: Callable[..., Any], task: str = "t") -> PayloadCodec:
    return PayloadCodec(read_signature(fn, task=task)[0], task=task)


def result(annotation: object) -> ResultCodec:
    return ResultCodec(annotation, task="t")


class Colour(Enum):
    RED = "red"


class Order(BaseModel):
    id: int
    note: str = ""
    at: datetime | None = None


@dataclass
class Point:
    x: float
    y: float = 0.0


class Pair(NamedTuple):
    left: float
    right: Any


class Tagged(TypedDict):
    tags: list[str]
    score: float


# ---- round trips


async def many(
    number: int,
    text: str,
    colour: Colour,
    when: datetime,
    day: date,
    clock: time,
    span: timedelta,
    money: Decimal,
    key: uuid.UUID,
    point: Point,
    order: Order | None,
    tagged: Tagged,
    anything: Any,
    *,
    flags: dict[str, bool],
    choice: Literal["a", "b"] = "a",
    sizes: tuple[int, ...] = (),
) -> None: ...


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
AWARE = st.datetimes(timezones=st.just(UTC))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)
ARGUMENTS = st.fixed_dictionaries(
    {
        "number": st.integers(),
        "text": TEXT,
        "colour": st.sampled_from(Colour),
        "when": AWARE,
        "day": st.dates(),
        "clock": st.times(),
        "span": st.timedeltas(timedelta(days=-9000), timedelta(days=9000)),
        "money": st.decimals(allow_nan=False, allow_infinity=False, places=4),
        "key": st.uuids(),
        "point": st.builds(Point, FINITE, FINITE),
        "order": st.none() | st.builds(Order, id=st.integers(), note=TEXT, at=st.none() | AWARE),
        "tagged": st.fixed_dictionaries({"tags": st.lists(TEXT, max_size=3), "score": FINITE}),
        "anything": JSON,
        "flags": st.dictionaries(TEXT, st.booleans(), max_size=3),
    },
    optional={"choice": st.sampled_from(["a", "b"]), "sizes": st.lists(st.integers(), max_size=3).map(tuple)},
)
MANY = codec(many)


@given(ARGUMENTS)
def test_arguments_come_back_as_they_were(arguments: dict[str, Any]) -> None:
    raw = MANY.dump((), arguments, limit=LIMIT)
    assert MANY.load(raw) == ((), arguments)
    assert MANY.load(raw.encode()) == ((), arguments)


@given(st.builds(Order, id=st.integers(), note=TEXT, at=st.none() | AWARE))
def test_single_model_is_the_payload_itself(order: Order) -> None:
    async def bill(order: Order) -> None: ...

    bills = codec(bill)
    raw = bills.dump((order,), {}, limit=LIMIT)
    assert json.loads(raw)["id"] == order.id
    assert raw == bills.dump((), {"order": order}, limit=LIMIT) == bills.dump_value(order, limit=LIMIT)
    assert bills.load(raw) == ((), {"order": order})


@given(JSON)
def test_json_values_pass_everywhere(value: Any) -> None:
    assert find_unstorable(value) is None
    assert json.loads(check_json(value, task="t", limit=LIMIT)) == value
    assert result(Any).load(result(Any).dump(value, limit=LIMIT)) == value


# ---- arguments


async def send(to: str, subject: str = "none", *, urgent: bool = False) -> None: ...


SEND = codec(send)


def test_defaults_are_not_stored() -> None:
    assert SEND.dump(("a",), {}, limit=LIMIT) == '{"to":"a"}'
    assert SEND.load('{"to":"a"}') == ((), {"to": "a"})


def test_positions_and_names() -> None:
    raw = SEND.dump(("a", "b"), {"urgent": True}, limit=LIMIT)
    assert raw == SEND.dump_value({"to": "a", "subject": "b", "urgent": True}, limit=LIMIT)


def test_no_parameters() -> None:
    async def nothing() -> None: ...

    assert codec(nothing).dump((), {}, limit=LIMIT) == "{}"
    assert codec(nothing).load("{}") == ((), {})
    with pytest.raises(InvalidPayload, match="takes 0 positional"):
        codec(nothing).dump((1,), {}, limit=LIMIT)


def test_context_is_left_out() -> None:
    async def job(ctx: JobContext, n: int) -> None: ...

    assert define(job).payload.dump((1,), {}, limit=LIMIT) == '{"n":1}'


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ((), {}, "argument 'to' is missing"),
        (("a",), {"urgnt": True}, "no argument is named 'urgnt'; did you mean 'urgent'?"),
        (("a", "b", True), {}, "takes 2 positional arguments, 3 were given"),
        (("a",), {"to": "b"}, "argument 'to' is given twice"),
        ((1,), {}, "to: Input should be a valid string"),
        (("a",), {"urgent": "perhaps"}, "urgent: Input should be a valid boolean"),
    ],
)
def test_arguments_refused(args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidPayload) as caught:
        SEND.dump(args, kwargs, limit=LIMIT)
    assert reason in caught.value.reason
    assert caught.value.task == "t"


class TestSingleModel:
    @staticmethod
    async def bill(order: Order = Order(id=7)) -> None: ...  # noqa: B008 - a default that is a model

    def test_default(self) -> None:
        assert json.loads(codec(self.bill).dump((), {}, limit=LIMIT))["id"] == 7

    def test_mapping_is_the_model(self) -> None:
        assert codec(self.bill).load(codec(self.bill).dump_value({"id": 3}, limit=LIMIT)) == (
            (),
            {"order": Order(id=3)},
        )

    @pytest.mark.parametrize(
        ("args", "kwargs", "reason"),
        [
            (("x",), {}, "Input should be a valid dictionary or instance of Order"),
            ((), {"ordr": Order(id=1)}, "did you mean 'order'"),
            ((Order(id=1), 2), {}, "takes 1 positional"),
            ((SecretStr("x"),), {}, "Input should be a valid dictionary or instance of Order"),
        ],
    )
    def test_refused(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> None:
        with pytest.raises(InvalidPayload, match=reason):
            codec(self.bill).dump(args, kwargs, limit=LIMIT)

    def test_missing(self) -> None:
        async def bill(order: Order) -> None: ...

        with pytest.raises(InvalidPayload, match="argument 'order' is missing"):
            codec(bill).dump((), {}, limit=LIMIT)

    def test_model_that_was_broken_after_it_was_made(self) -> None:
        order = Order(id=1)
        order.note = None  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(InvalidPayload, match="note: Input should be a valid string"):
            codec(self.bill).dump((order,), {}, limit=LIMIT)

    @pytest.mark.parametrize("bad", [Order.model_construct(id="x"), Order.model_construct()])
    def test_model_that_was_never_validated(self, bad: Order) -> None:
        with pytest.raises(InvalidPayload, match=r"id: |expected int, got str"):
            codec(self.bill).dump((bad,), {}, limit=LIMIT)

    def test_root_model(self) -> None:
        class Ids(RootModel[list[int]]): ...

        async def job(ids: Ids) -> None: ...

        assert codec(job).dump((Ids([1, 2]),), {}, limit=LIMIT) == "[1,2]"


def test_aliases_and_computed_fields_come_back() -> None:
    class Odd(BaseModel):
        model_config = ConfigDict(extra="forbid")
        first: int = Field(alias="theFirst")
        second: int = Field(validation_alias=AliasChoices("two", "zwei"))
        third: int = Field(serialization_alias="drei")

        @computed_field
        def total(self) -> int:
            return self.first + self.second

    async def job(odd: Odd) -> None: ...

    async def two(odd: Odd, n: Annotated[int, Field(alias="number")]) -> None: ...

    odd = Odd.model_validate({"theFirst": 1, "zwei": 2, "third": 3})
    assert codec(job).load(codec(job).dump((odd,), {}, limit=LIMIT)) == ((), {"odd": odd})
    assert codec(two).load(codec(two).dump((odd, 4), {}, limit=LIMIT)) == ((), {"odd": odd, "n": 4})


def test_bare_validator_errors_are_payload_errors() -> None:
    class Picky(BaseModel):
        n: int

        def model_post_init(self, context: object) -> None:
            raise KeyError("not a validation error")

    async def job(picky: Picky) -> None: ...

    with pytest.raises(InvalidPayload, match="KeyError"):
        codec(job).dump_value({"n": 1}, limit=LIMIT)
    with pytest.raises(InvalidPayload, match="KeyError"):
        codec(job).load('{"n": 1}')


@pytest.mark.parametrize("raw", ["", "[", "[]", "null", '"x"', '{"to": 1}', '{"to": "a", "new": 1}', b'{"to": "\xff"}'])
def test_stored_payload_that_does_not_fit(raw: str | bytes) -> None:
    with pytest.raises(InvalidPayload) as caught:
        SEND.load(raw)
    assert "\n" not in caught.value.reason


def test_many_errors_are_kept_short() -> None:
    async def job(numbers: list[int]) -> None: ...

    with pytest.raises(InvalidPayload) as caught:
        codec(job).dump((["x"] * 1000,), {}, limit=LIMIT)
    assert "numbers.0: Input should be" in caught.value.reason
    assert caught.value.reason.endswith("and 995 more")


# ---- what cannot be stored

NAN, INF = math.nan, math.inf
UNSTORABLE = [NAN, INF, -INF, Decimal("NaN"), Decimal("Infinity"), complex(0, INF), NAIVE]


class NumpyLike:
    """A number that is no float, as numpy's 32-bit floats are."""

    def __float__(self) -> float:
        return NAN

    def __repr__(self) -> str:
        return "NumpyLike(nan)"


WRAPPERS: list[Callable[[Any], Any]] = [
    lambda value: value,
    lambda value: [1, value],
    lambda value: (value,),
    lambda value: {"a": {"b": value}},
    lambda value: {value: 1},
    lambda value: {value},
    lambda value: frozenset([value]),
    lambda value: deque([value]),
    lambda value: Point(x=value),
    lambda value: Pair(1.0, value),
    lambda value: [[[{"a": [(value,)]}]]],
    lambda value: Order.model_construct(id=1, at=value),
    RootModel[Any],
]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("value", [*UNSTORABLE, NumpyLike()], ids=repr)
def test_unstorable_is_found_however_nested(value: Any, wrap: Callable[[Any], Any]) -> None:
    assert find_unstorable(wrap(value)) is not None


@pytest.mark.parametrize("value", [1.5, Decimal("1.5"), Fraction(1, 3), complex(1, 2), NAIVE.replace(tzinfo=UTC), 10**400])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_good_values_are_not(value: Any, wrap: Callable[[Any], Any]) -> None:
    assert find_unstorable(wrap(value)) is None


def test_dates_times_and_texts_are_not() -> None:
    assert find_unstorable([date(2026, 1, 1), time(1, 2), timedelta(1), "nan", b"nan", Colour.RED, None, True]) is None


def test_the_place_is_told() -> None:
    assert str(find_unstorable({"a": [1, {"b": NAN}]})).startswith("a.1.b: nan")


def test_cycle_ends() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    assert "contains itself" in str(find_unstorable(cycle))


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("value", UNSTORABLE, ids=repr)
def test_unstorable_arguments_are_refused(value: Any, wrap: Callable[[Any], Any]) -> None:
    async def job(value: Any) -> None: ...

    with pytest.raises(InvalidPayload):
        codec(job).dump((wrap(value),), {}, limit=LIMIT)
    with pytest.raises(InvalidPayload):
        check_json(wrap(value), task="t", limit=LIMIT)


class Extra(BaseModel):
    model_config = ConfigDict(extra="allow")


class Constants(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")
    x: float


class Recursive(BaseModel):
    x: float
    children: "list[Recursive]" = []


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (float, NAN),
        (float | None, INF),
        (Annotated[float, Field(ge=0)], INF),
        (list[float], [1.0, NAN]),
        (dict[str, list[float]], {"a": [NAN]}),
        (dict[float, int], {NAN: 1}),
        (set[float], {INF}),
        (Point, Point(NAN)),
        (Pair, Pair(NAN, 1)),
        (Tagged, {"tags": [], "score": NAN}),
        (Extra, Extra.model_validate({"x": NAN})),
        (Constants, Constants(x=NAN)),
        (Recursive, Recursive(x=1, children=[Recursive(x=NAN)])),
        (Order, Order(id=1, at=NAIVE)),
        (datetime, NAIVE),
        (datetime, "2026-01-01T00:00:00"),
        (list[datetime | str], [NAIVE]),
        (object, NAN),
        (str, "a\x00b"),
        (dict[str, int], {"a\x00b": 1}),
        (dict[str, int], {"a\ud800b": 1}),
        (str, "a\ud800b"),
        (list[str], ["\udfff"]),
        (dict[str, Any], {"a": {"\ud800": 1}}),
        (EmailStr | str, "\x00"),
        (bytes, b"\xff"),
        (bytes, b"\x00"),
        (SecretStr, SecretStr("hidden")),
        (Any, SecretStr("hidden")),
        (Any, object()),
        pytest.param(Any, 10**4500, id="long-any"),
        pytest.param(int, 10**4500, id="long-int"),
    ],
)
def test_typed_arguments_are_refused(annotation: Any, value: Any) -> None:
    async def job(value: Any, other: int = 1) -> None: ...

    job.__annotations__["value"] = annotation
    with pytest.raises(InvalidPayload):
        codec(job).dump((value,), {}, limit=LIMIT)


def test_text_that_only_looks_like_it_is_stored() -> None:
    async def job(text: str, names: dict[str, int]) -> None: ...

    arguments = {"text": "\\u0000 \ufffd NaN **********", "names": {"\ufffd": 1, "**********": 2}}
    assert codec(job).load(codec(job).dump((), arguments, limit=LIMIT)) == ((), arguments)


@pytest.mark.parametrize("depth", [190, 230, 600])
def test_depth_that_cannot_be_read_again_is_refused(depth: int) -> None:
    async def job(value: Any) -> None: ...

    value: Any = 1
    for _ in range(depth):
        value = [value]
    if depth < 200:
        assert codec(job).load(codec(job).dump((value,), {}, limit=LIMIT)) == ((), {"value": value})
    else:
        with pytest.raises(InvalidPayload):
            codec(job).dump((value,), {}, limit=LIMIT)


def test_limit_is_in_bytes_of_utf8() -> None:
    async def job(text: str) -> None: ...

    assert len(codec(job).dump(("ä" * 4,), {}, limit=19)) == 15
    with pytest.raises(InvalidPayload, match="19 bytes of JSON, at most 18 are allowed"):
        codec(job).dump(("ä" * 4,), {}, limit=18)
    with pytest.raises(InvalidPayload, match="at most 18"):
        check_json("ä" * 9, task="t", limit=18)


# ---- signatures that are refused


async def iterator(items: Iterable[int]) -> None: ...


async def unknown_class(thing: NumpyLike) -> None: ...


@pytest.mark.parametrize(
    ("fn", "reason"),
    [(iterator, "'items'.*iterator"), (unknown_class, "'thing'.*NumpyLike")],
)
def test_signature_refused(fn: Callable[..., Any], reason: str) -> None:
    with pytest.raises(TaskDefinitionError, match=reason):
        codec(fn)


# ---- results


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (None, None),
        (Any, {"a": [1, 2.5, None, "x"]}),
        (int, 3),
        (float, 1),
        (Order, Order(id=1, at=datetime(2026, 1, 1, tzinfo=UTC))),
        (Order, Order(id=1, at=NAIVE)),
        (list[Order], [Order(id=1)]),
        (Point, Point(1.5)),
        (dict[str, Decimal], {"a": Decimal("1.10")}),
        (set[int], {1, 2}),
        (tuple[int, str], (1, "a")),
        (int | str | None, "x"),
        (Colour, Colour.RED),
    ],
)
def test_result_comes_back(annotation: Any, value: Any) -> None:
    assert result(annotation).load(result(annotation).dump(value, limit=LIMIT)) == value


@pytest.mark.parametrize(
    ("annotation", "value", "reason"),
    [
        (None, 1, "expected none, got int"),
        (int, "3", "expected int, got str"),
        (str, None, "Input should be a valid string"),
        (Order, {"id": 1}, "expected Order, got dict"),
        (Order, Point(1), "id: Field required"),
        (list[int], [1, "2"], "expected int, got str"),
        (list[int], (1, 2), "got tuple"),
        (Literal["a"], "b", "Input should be 'a'"),
        (Annotated[int, Field(gt=0)], -1, "greater than 0"),
        (Any, object(), "Unable to serialize"),
        (Any, ValueError("x"), "Unable to serialize"),
        (Any, NAN, "nan cannot be stored"),
        (float, INF, "inf cannot be stored"),
        (dict[str, float], {"a": NAN}, "a: nan cannot be stored"),
        (Any, {"a": [Decimal("NaN")]}, "a.0: NaN cannot be stored"),
        (Any, {"a": "x\x00y"}, "NUL"),
        (Any, {"x\x00y": 1}, "NUL"),
        (str, "\ud800", "surrogate"),
        (dict[str, int], {"\ud800": 1}, "surrogate"),
        (str, "x" * 100, "102 bytes of JSON, at most 60"),
        (Any, SecretStr("x"), "secret"),
    ],
)
def test_result_refused(annotation: Any, value: Any, reason: str) -> None:
    with pytest.raises(InvalidResult) as caught:
        result(annotation).dump(value, limit=60)
    assert reason in caught.value.reason


def test_results_that_are_not_values_are_refused_and_closed() -> None:
    async def coroutine() -> None: ...

    async def stream() -> AsyncIterator[int]:
        yield 1

    def numbers() -> Iterator[int]:
        yield 1

    for value in (coroutine(), stream(), numbers(), iter([1]), map(str, [1])):
        with pytest.raises(InvalidResult, match=type(value).__name__):
            result(Any).dump(value, limit=LIMIT)


def test_stored_result_that_does_not_fit_is_a_value_error() -> None:
    for raw in ("", "[", '"x"', b'{"id": "x"}'):
        with pytest.raises(ValueError):
            result(Order).load(raw)


def test_result_annotation_is_read() -> None:
    async def untyped():  # type: ignore[no-untyped-def]
        ...

    async def typed() -> "list[int]": ...  # type: ignore[empty-body]

    assert define(untyped).result.dump({"any": 1}, limit=LIMIT) == '{"any":1}'
    assert define(typed).result.dump([1], limit=LIMIT) == "[1]"
    with pytest.raises(InvalidResult):
        define(typed).result.dump(["x"], limit=LIMIT)


def test_result_annotation_refused() -> None:
    for annotation in (NumpyLike, Iterator[int]):
        with pytest.raises(TaskDefinitionError, match="return annotation"):
            result(annotation)


# -- many in one piece -----------------------------------------------------------------------------------------------------


class Aliased(BaseModel):
    number: int = Field(alias="n")
    when: datetime | None = None


def test_many_are_written_as_each_by_itself() -> None:
    async def one(model: Aliased) -> None: ...
    async def several(a: int, b: list[str] = ["x"], c: float | None = None) -> None: ...  # noqa: B006 - never called

    for fn, values in (
        (one, [Aliased(n=1), {"n": 2}, {"number": "3"}, Aliased(n=4, when=datetime(2030, 1, 1, tzinfo=UTC))]),
        (several, [{"a": 1}, {"a": "2", "b": ["\u2603", '"']}, {"a": 3, "c": 0.5}]),
    ):
        of_fn = codec(cast(Callable[..., Any], fn))
        many: list[Any] = list(values)
        assert of_fn.dump_values(many, limit=1_000) == [of_fn.dump_value(value, limit=1_000) for value in many]


def test_many_of_which_one_may_be_wrong_are_left_to_a_look_at_each() -> None:
    async def one(model: Aliased) -> None: ...
    async def anything(a: Any) -> None: ...

    of_one, free = codec(one), codec(anything)
    changed = Aliased(n=1)
    changed.number = cast(int, "one")
    naive = Aliased(n=1, when=NAIVE)
    for wrong in ({"n": "x"}, changed, naive, "text"):
        assert of_one.dump_values([{"n": 1}, wrong], limit=1_000) is None
    for bad in (math.nan, "\x00", "x" * 1_000, "\ud800"):
        assert free.dump_values([{"a": 1}, {"a": bad}], limit=1_000) is None
    assert free.dump_values([], limit=1_000) == []


class Bag(BaseModel):
    size: int = 0


def test_a_model_under_the_name_of_its_parameter_is_refused_with_the_form_that_is_taken() -> None:
    def pack(bag: Bag) -> None: ...

    packing = codec(pack, "pack")
    hint = "this task takes the model itself: leave out 'bag' around it"
    with pytest.raises(InvalidPayload, match=hint):
        packing.dump_value({"bag": {"size": 1}}, limit=1000)
    with pytest.raises(InvalidPayload, match=hint):
        packing.load('{"bag": {"size": 1}}')
    assert packing.dump_values([{"bag": {}}, {"size": 1}], limit=1000) is None, "each is looked at by itself"
    assert packing.load('{"size": 7}')[1]["bag"].size == 7
    assert packing.load('{"bag": 1}')[1]["bag"].size == 0, "an extra key that is no model is pydantic's affair"


def test_a_model_that_has_such_a_field_takes_it() -> None:
    class Inner(BaseModel):
        bag: dict[str, int]

    def pack(bag: Inner) -> None: ...

    packing = codec(pack, "pack")
    assert packing.load(packing.dump_value({"bag": {"size": 1}}, limit=1000))[1]["bag"].bag == {"size": 1}


def test_a_refusal_shows_no_values_above_it() -> None:
    def pack(size: int) -> None: ...

    value = "s3" + "cret"
    with pytest.raises(InvalidPayload) as caught:
        codec(pack, "pack").dump((value,), {}, limit=1000)
    assert value not in "".join(traceback.format_exception(caught.value))
