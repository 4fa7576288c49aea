"""The Lua scripts: one file an operation, its header is its type.

A header names its KEYS (as in `keys.NAMES`), its scalar ARGV and, after `|`, the fields of
each item. A script whose header names an unknown key fails when this module is imported;
a call with other arguments than the header names raises TypeError before Redis sees it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

from producer.contract.keys import NAMES, QueueKeys

#: items that one call may carry; a longer list is sent in several calls
MAX_ITEMS = 256

Argument = str | bytes | int


@dataclass(frozen=True, slots=True)
class Script:
    """One operation on a queue."""

    name: str
    source: str
    sha: str
    keys: tuple[str, ...]
    scalars: tuple[str, ...]
    item: tuple[str, ...]

    def arguments(
        self,
        keys: QueueKeys,
        scalars: dict[str, Argument],
        items: Iterable[Sequence[Argument]] = (),
    ) -> list[Argument]:
        """`numkeys key... arg...` of EVALSHA for one call."""
        if scalars.keys() != set(self.scalars):
            raise TypeError(f"{self.name} takes {self.scalars}, not {tuple(scalars)}")
        arguments: list[Argument] = [len(self.keys), *(keys[k] for k in self.keys)]
        arguments += [scalars[name] for name in self.scalars]
        for item in items:
            if len(item) != len(self.item):
                raise TypeError(f"an item of {self.name} is {self.item}")
            arguments += item
        return arguments


_HEADER = re.compile(
    r"-- (?P<name>\w+): .+?\n-- KEYS: (?P<keys>[\w ]+)\n-- ARGV:(?P<scalars>[\w ]*)"
    r"(?:\|(?P<item>[\w ]*))?\n",
    re.DOTALL,
)


def _read(name: str, text: str, library: str) -> Script:
    header = _HEADER.match(text)
    if header is None or header["name"] != name:
        raise ValueError(f"{name}.lua has no header with its name, KEYS and ARGV")
    keys = tuple(header["keys"].split())
    unknown = [k for k in keys if k not in NAMES]
    if unknown:
        raise ValueError(f"{name}.lua names unknown keys {unknown}")
    scalars = tuple((header["scalars"] or "").split())
    item = tuple((header["item"] or "").split())
    names = ", ".join(f"{k} = KEYS[{i}]" for i, k in enumerate(keys, 1))
    values = ", ".join(f"{a} = ARGV[{i}]" for i, a in enumerate(scalars, 1))
    base, stride = len(scalars), len(item)
    prelude = f"""local K = {{{names}}}
local A = {{{values}}}
local ITEMS = {f"(#ARGV - {base}) / {stride}" if stride else "0"}
if ITEMS ~= math.floor(ITEMS) or ITEMS > {MAX_ITEMS} then
  error('ROLLQ {name} takes up to {MAX_ITEMS} items of {stride} fields', 0)
end
local function item(i)
  return unpack(ARGV, {base} + (i - 1) * {stride} + 1, {base} + i * {stride})
end
"""
    source = f"""{prelude}{library}
local function operation()
{text}end
local reply = operation()
settle()
return reply
"""
    return Script(
        name=name,
        source=source,
        sha=hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest(),
        keys=keys,
        scalars=scalars,
        item=item,
    )


def _load() -> dict[str, Script]:
    folder = resources.files(__package__) / "lua"
    texts = {f.name[:-4]: f.read_text() for f in folder.iterdir() if f.name.endswith(".lua")}
    library = texts.pop("lib")
    return {name: _read(name, text, library) for name, text in sorted(texts.items())}


SCRIPTS = _load()
