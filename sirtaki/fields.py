"""Types of the fields of records that are read from files and databases, and functions that check the fields.

msgspec validates values by these types: text must be printable, sizes are limited, and NaN and booleans are not
accepted as numbers.
"""

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from sirtaki.errors import RegistryError

T = TypeVar("T")

# Control characters, surrogates, format characters (which can reverse the direction of writing) and all spaces but
# U+0020 are excluded, because they can spoof text on a terminal and some databases reject them.
_PRINTABLE = (
    r"^[^\x00-\x1f\x7f-\xa0\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u1680\u180e\u2000-\u200f\u2028-\u202f"
    r"\u205f-\u206f\u3000\ud800-\udfff\ufeff\ufff0-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]*\Z"
)
MAX_LABEL_CHARS = 2_000

Text = Annotated[str, Meta(max_length=1_000, pattern=_PRINTABLE)]
Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARS, pattern=_PRINTABLE)]
Texts = Annotated[dict[Text, Text], Meta(max_length=100)]
Count = Annotated[int, Meta(ge=0, le=10**9)]
Number = Annotated[float, Meta(ge=0, le=1e18)]
Positive = Annotated[float, Meta(ge=1e-9, le=1e18)]


def checked(kind: type[T], data: Any, *, at: str = "") -> T:  # `data` is Any, because `json.loads` returns Any.
    """Convert lists, dicts and numbers, as parsed from JSON, to the type `kind`.

    Args:
        kind: type of the result.
        data: parsed JSON.
        at: name of `data`. The path of a field in an error message begins with it.

    Raises:
        RegistryError: a field is missing, unknown or invalid. The message begins with the field's path.
    """
    try:
        return msgspec.convert(data, kind)
    except (msgspec.MsgspecError, RecursionError) as err:
        raise RegistryError(_message(err, at)) from err


def parsed(kind: type[T], text: str | bytes, *, at: str = "") -> T:
    """Parse JSON text to a value of the type `kind`.

    Args:
        kind: type of the result.
        text: JSON text.
        at: name of the text. The path of a field in an error message begins with it.

    Raises:
        RegistryError: a field is missing, unknown or invalid, or the text is not JSON.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, TypeError, UnicodeError, RecursionError) as err:
        raise RegistryError(_message(err, at)) from err


def plain(value: object) -> Any:  # The return type is Any, because JSON values have several types.
    """Convert a value to the dicts, lists, strings and numbers of JSON."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_base))


def _base(value: object) -> Any:
    """Convert an instance of a subclass of str, int or float (`torch.__version__`, a NumPy float) to the base class."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a value of type {type(value).__name__} cannot be stored as JSON; use str, int or float")


def _message(err: Exception, at: str) -> str:
    """Convert msgspec's "Expected `int` >= 1 - at `$.knobs.streams`" to `knobs.streams: expected int >= 1`."""
    what, _, place = str(err).replace("`", "").partition(" - at ")
    if r"\x00" in what:
        what = "expected printable text"
    text = f"{place.replace('$', at).removeprefix('.') or at or 'JSON'}: {what[:1].lower()}{what[1:200]}"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
