"""Reads msgspec's sentence about a value that does not fit, for those who tell it to people: the field first.

msgspec 0.23 says `Expected ``int`` >= 1 - at ``$.engine.replicas```; it has no structured form of it.
"""

import re
from dataclasses import dataclass

_SENTENCE = re.compile(r"(?s)(.*?)(?: - at (?:`key` in )?`\$\.?(.*)`)?")
_BOUND = re.compile(r"Expected `(?:int|float)` ([<>]=? \S+)")
# The name comes from the client and may hold anything; the path is made of our own names.
_NAMED = re.compile(r"(?s)Object (contains unknown|missing required) field `(.*?)`(?: - at `\$\.?([\w.\[\]]*)`)?")


@dataclass(frozen=True, slots=True)
class Complaint:
    """`field` is the path of the value at fault (`messages[0].role`; empty for the whole), `section` what it stands in.

    `reason` says what is wrong with it; for a field that is `unknown` or `missing` there is nothing more to say.
    """

    section: str
    field: str
    reason: str
    unknown: bool = False
    missing: bool = False


def read(sentence: str) -> Complaint:
    """The parts of msgspec's sentence."""
    if named := _NAMED.fullmatch(sentence):
        kind, name, section = named.groups("")
        unknown = kind == "contains unknown"
        return Complaint(section, join(section, name), "", unknown=unknown, missing=not unknown)
    match = _SENTENCE.fullmatch(sentence)
    reason, path = (match.group(1), match.group(2) or "") if match else (sentence, "")
    path = path.removesuffix("[...]")  # msgspec's word for a key of a dictionary
    return Complaint(path, path, _in_plain_words(reason))


def _in_plain_words(reason: str) -> str:
    if bound := _BOUND.fullmatch(reason):
        return f"must be {bound.group(1)}"
    words = reason.replace("`", "").replace(" | ", " or ")
    return f"{words[:1].lower()}{words[1:]}"


def join(path: str, name: str) -> str:
    """A path one step longer."""
    return f"{path}.{name}" if path else name
