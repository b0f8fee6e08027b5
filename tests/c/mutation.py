# SPDX-License-Identifier: MIT
"""Where a mutant's fault goes: a function, a few tokens in it, and an operator.

White space, line breaks and comments do not matter, nor what the rest of the function says or which file of the folder
has it. `where` is FOLDER/FUNCTION below libvmem/src, or FOLDER/FILE.c:FUNCTION where several files have one of that
name.
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "libvmem" / "src"
_TOKEN = re.compile(
    r"(?P<gap>\s+|//[^\n]*|/\*.*?\*/|(?m:^[ \t]*\#(?:\\\n|[^\n])*))|"
    r"[A-Za-z_]\w*|\d[\w.]*|\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|"
    r"->|\+\+|--|<<=|>>=|<<|>>|[<>=!+\-*/%&|^]=|&&|\|\||\.\.\.|.",
    re.S,
)


def tokens(text):
    """(token, start, end) of everything but white space, comments and directives."""
    return [(m[0], m.start(), m.end()) for m in _TOKEN.finditer(text) if m["gap"] is None]


def _closing(found, at):
    """The place of the bracket that closes the one at `at`."""
    depth = 0
    for i in range(at, len(found)):
        depth += (found[i][0] in ("(", "{", "[")) - (found[i][0] in (")", "}", "]"))
        if not depth:
            return i
    raise ValueError("a bracket is not closed")


@functools.cache
def functions(path):
    """{name: tokens from its parameters to its last brace} of a file."""
    found, bodies, i = tokens(path.read_text()), {}, 0
    while i < len(found):
        if found[i][0] == "(" and i and re.match(r"[A-Za-z_]", found[i - 1][0]):
            end = _closing(found, i)
            if end + 1 < len(found) and found[end + 1][0] == "{":
                last = _closing(found, end + 1)
                bodies[found[i - 1][0]] = found[i : last + 1]
                i = last
            else:
                i = end
        elif found[i][0] == "{":  # of a structure, or an initializer
            i = _closing(found, i)
        i += 1
    return bodies


@dataclass(frozen=True)
class Fault:
    """Change of the n-th place in the function that has the tokens `old`; of the only one if n is 0.

    replace: `new` stands there. drop: the statement is gone. always, never: the condition around it is 1 or 0.
    """

    operator: str
    old: str
    new: str = ""
    n: int = 0

    def span(self, body):
        """The source between these offsets goes, and this takes its place."""
        said, words = [t[0] for t in tokens(self.old)], [t[0] for t in body]
        places = [i for i in range(len(words)) if words[i : i + len(said)] == said]
        if not places or (self.n or 1) > len(places) or (not self.n and len(places) > 1):
            raise LookupError(f"`{self.old}` is there {len(places)} times; wanted: {self.n or 'once'}")
        first = places[self.n - 1 if self.n else 0]
        last, new = first + len(said) - 1, self.new
        if self.operator in ("always", "never"):
            first, last = _condition(body, first)
            new = str(int(self.operator == "always"))
        elif self.operator == "drop":
            first, last = _statement(body, first)
            new = ";"
        return body[first][1], body[last][2], new


def _condition(body, at):
    """The condition of the innermost if or while around a token."""
    for i in range(at - 1, 0, -1):
        if body[i][0] == "(" and body[i - 1][0] in ("if", "while") and _closing(body, i) > at:
            return i + 1, _closing(body, i) - 1
    raise LookupError("that is in no condition")


def _statement(body, at):
    """The statement around a token, without the if or for before it."""
    first = depth = 0
    for i in range(at, 0, -1):
        depth += (body[i][0] in (")", "]")) - (body[i][0] in ("(", "["))
        if body[i][0] == ")" and depth == 1 and i < at and _is_control(body, i):
            first = i + 1
            break
        if depth <= 0 and body[i][0] in (";", "{", "}", "else") and i < at:
            first = i + 1
            break
    last = first
    while body[last][0] != ";":
        last = _closing(body, last) + 1 if body[last][0] in ("(", "{", "[") else last + 1
    return first, last


def _is_control(body, close):
    """True if the parenthesis closes those of an if, a for or a while."""
    depth = 0
    for i in range(close, 0, -1):
        depth += (body[i][0] == ")") - (body[i][0] == "(")
        if not depth:
            return body[i - 1][0] in ("if", "for", "while")
    return False


def subject(where, root=SRC):
    """(path, tokens of the function) of FOLDER/FUNCTION or FOLDER/FILE.c:FUNCTION below `root`."""
    place, _, name = where.rpartition(":" if ":" in where else "/")
    files = [root / place] if ":" in where else sorted((root / place).glob("*.c"))
    having = [path for path in files if path.is_file() and name in functions(path)]
    if len(having) != 1:
        raise LookupError(f"{len(having)} files have the function {name}")
    return having[0], functions(having[0])[name]


@dataclass(frozen=True)
class Mutant:
    """A fault, and the programs of tests/c of which one must notice it."""

    name: str
    where: str
    fault: Fault
    programs: str

    def apply(self):
        """(path, its text with the fault). LookupError: the fault has no subject any more, or no one place."""
        try:
            path, body = subject(self.where)
            start, end, new = self.fault.span(body)
        except LookupError as error:
            raise LookupError(f"mutant {self.name}: {self.where}: {error}") from None
        text = path.read_text()
        return path, f"{text[:start]}{new}{text[end:]}"


def replace(old, new, n=0):
    return Fault("replace", old, new, n)


def drop(old, n=0):
    return Fault("drop", old, n=n)


def always(old, n=0):
    return Fault("always", old, n=n)


def never(old, n=0):
    return Fault("never", old, n=n)
