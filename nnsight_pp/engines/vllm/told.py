"""What code says of the process that it runs in: what it imports, and what it sets there.

It is read off the operations, once for each code. What is put together only when the code runs (a
`getattr` with a text, an import of a name that is computed) is not told.
"""

from __future__ import annotations

import dis
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, final

from nnsight_pp.core import touches
from nnsight_pp.core.meaning import all_codes
from nnsight_pp.wire.block_codec import mentioned_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

ENVIRONMENT = frozenset({"environ", "environb", "getenv", "putenv", "unsetenv"})
# They set something for their whole process, and nothing else is likely to have these names.
SETTERS = frozenset(
    [
        *("set_printoptions", "set_num_threads", "set_num_interop_threads", "set_default_device"),
        *("set_float32_matmul_precision", "use_deterministic_algorithms", "set_flush_denormal"),
        *("set_deterministic_debug_mode", "set_default_tensor_type", "set_warn_always"),
        *("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_math_sdp", "enable_cudnn_sdp"),
        *("preferred_linalg_library", "preferred_blas_library", "set_sharing_strategy"),
        *("register_module_forward_hook", "register_module_forward_pre_hook"),
        *("register_module_full_backward_hook", "register_module_full_backward_pre_hook"),
        *("filterwarnings", "simplefilter", "resetwarnings", "captureWarnings", "basicConfig"),
        *("setLevel", "addHandler", "removeHandler", "chdir", "fchdir", "umask", "setlocale"),
        *("sdpa_kernel", "setrecursionlimit", "setswitchinterval", "settrace", "setprofile"),
    ]
)
# These too, where the filters are put back by `warnings.catch_warnings`.
_PUT_BACK = frozenset({"filterwarnings", "simplefilter", "resetwarnings"})
# Methods that change what a list, a dict, a set or a deque holds.
CHANGING = touches.PUTTING - {"save"} | touches.CHANGING
_BY_TEXT = frozenset({"import_module", "__import__"})
_IMPORTS = dis.opmap["IMPORT_NAME"]
_STORES = frozenset({"STORE_NAME", "STORE_GLOBAL", "STORE_FAST", "STORE_DEREF"})
_LOADS = frozenset({"LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_CLASSDEREF"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
# Of local names and constants.
_VALUES = ("LOAD_FAST", "LOAD_CONST", "LOAD_SMALL_INT")
# They stand between what is looked at, and change nothing of it.
_PASSED_OVER = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PRECALL", "PUSH_NULL", "RESUME"})


class Import(NamedTuple):
    """One import statement: ``from <level dots><name> import <parts>``."""

    name: str
    level: int
    parts: tuple[str, ...]


class Change(NamedTuple):
    """A change of what is found from a name by attributes.

    Attributes:
        path: The name, the attributes behind it, and what is set or called at the end.
        is_call: Whether that is a method which changes what holds it.
        line: Where.
    """

    path: tuple[str, ...]
    is_call: bool
    line: int


class Told(NamedTuple):
    """What one code says, that which is nested in it included.

    Attributes:
        mentions: Names and attributes.
        imports: What it imports.
        texts: Texts that may name a module, where it imports by such or looks for one.
        imports_texts: Whether it imports by such.
        known_as: For a name that an import binds: the module, and what is taken of it, if
            anything is.
        environment: The words by which it looks at environment variables.
        setters: The words by which it sets something for its process.
        changes: What it changes of what it finds by names.
        uses: What it finds by names, and by attributes behind them.
    """

    mentions: frozenset[str]
    imports: tuple[Import, ...]
    texts: tuple[str, ...]
    imports_texts: bool
    known_as: dict[str, tuple[str, str]]
    environment: tuple[str, ...]
    setters: tuple[str, ...]
    changes: tuple[Change, ...]
    uses: frozenset[tuple[str, ...]]


@lru_cache(maxsize=4096)
def told_by(code: CodeType) -> Told:
    """Return what ``code`` says.

    Cost: some 100 microseconds for a page of it, once; a look-up after that.
    """
    codes = list(all_codes(code))
    names = {name for one in codes for name in one.co_names}
    imports: list[Import] = []
    known_as: dict[str, tuple[str, str]] = {}
    for one in codes:
        if _IMPORTS in one.co_code[::2]:
            _read_imports(one, imports, known_as)
    texts = {
        text
        for one in codes
        for text in one.co_consts
        if type(text) is str and text.replace(".", "_").isidentifier()
    }
    uses: set[tuple[str, ...]] = set()
    changes = tuple(change for one in codes for change in _Walk(one, known_as, uses).run())
    setters = names & SETTERS
    if "catch_warnings" in names:
        setters -= _PUT_BACK
    return Told(
        mentioned_in(code),
        tuple(imports),
        tuple(sorted(texts)) if names & {*_BY_TEXT, "modules"} else (),
        bool(names & _BY_TEXT),
        known_as,
        tuple(sorted(names & ENVIRONMENT)),
        tuple(sorted(setters)),
        changes,
        frozenset(uses),
    )


def _read_imports(
    code: CodeType, imports: list[Import], known_as: dict[str, tuple[str, str]]
) -> None:
    """Note the import statements of ``code``, and what they bind."""
    before: list[dis.Instruction] = []
    module, part, is_whole = "", "", True
    for one in dis.get_instructions(code):
        if one.opname == "IMPORT_NAME":
            level, parts = (found.argval for found in before[-2:])
            imports.append(Import(one.argval, level, tuple(parts or ())))
            # `import a.b` binds a, `import a.b as c` takes b of what it has imported.
            module, part = ("" if level else one.argval), ""
            is_whole = not parts
        elif one.opname == "IMPORT_FROM":
            part = one.argval
        elif one.opname in _STORES and module:
            if is_whole:
                known_as[one.argval] = (module if part else module.partition(".")[0], "")
                module = ""
            else:
                known_as[one.argval] = (module, part)
        elif one.opname.startswith("LOAD_"):
            module = ""
        if one.opname not in _PASSED_OVER:
            before = [*before[-1:], one]


@final
class _Walk:
    """A walk over the operations of one code.

    Args:
        code: It.
        known_as: Names that its imports bind.
        uses: Gets what it finds.
    """

    def __init__(
        self, code: CodeType, known_as: dict[str, tuple[str, str]], uses: set[tuple[str, ...]]
    ) -> None:
        self._uses = uses
        self._code = code
        self._known_as = known_as
        self._path: tuple[str, ...] = ()  # what the last operations have found
        self._held: tuple[str, ...] = ()  # kept for `a.b += c`
        self._holder: tuple[str, ...] = ()  # what the last value may be an index of
        self._is_setattr = False
        self._line = 0

    def run(self) -> Iterator[Change]:
        """Yield the changes."""
        for one in dis.get_instructions(self._code):
            self._line = (one.positions.lineno if one.positions else None) or self._line
            if one.opname not in _PASSED_OVER:
                yield from self._step(one.opname, one.argval)

    def _step(self, operation: str, argument: str) -> Iterator[Change]:
        if operation in _LOADS or operation.startswith(_VALUES):
            yield from self._load(operation, argument)
        elif operation in _ATTRIBUTES:
            if self._path:
                self._path = (*self._path, argument)
                self._uses.add(self._path)
                if len(self._path) > 2 and argument in CHANGING:
                    yield self._change(self._path, is_call=True)
            elif argument in SETTERS:
                self._uses.add(("", argument))  # of something that no name leads to
        elif operation == "COPY":
            self._held = self._path
        else:
            target = self._path or self._held
            if operation in ("STORE_ATTR", "DELETE_ATTR") and target:
                yield self._change((*target, argument))
            elif operation in ("STORE_SUBSCR", "DELETE_SUBSCR") and len(self._holder) > 1:
                yield self._change((*self._holder, "..."))
            if operation.startswith("STORE_"):
                self._held = ()
            self._path = self._holder = ()
            self._is_setattr = False

    def _load(self, operation: str, argument: str) -> Iterator[Change]:
        if self._is_setattr and self._path:
            yield self._change((*self._path, "..."))
            self._is_setattr = False
        self._holder, self._path = self._path, ()
        is_known = type(argument) is str and argument in self._known_as
        if operation in _LOADS or (is_known and operation.startswith("LOAD_FAST")):
            if argument in ("setattr", "delattr"):
                self._is_setattr = True
            else:
                self._path = (argument,)
                self._uses.add(self._path)

    def _change(self, path: tuple[str, ...], *, is_call: bool = False) -> Change:
        return Change(path, is_call, self._line)
