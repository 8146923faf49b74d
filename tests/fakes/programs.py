"""Random blocks, for the toy pipeline of `fakes.pipeline` and for a tiny model on an engine."""

from __future__ import annotations

import random
from typing import Any

from fakes.pipeline import NUM_LAYERS


class Toy:
    """How a program names what the toy pipeline has. Outputs of odd layers are tuples."""

    num_layers = NUM_LAYERS
    width = 3
    dtype = "torch.float64"
    steps = "steps"
    result = "result()"
    has_ghost = True

    def whole(self, layer: int) -> str:
        """The location of a layer that is written: its output."""
        return f"L[{layer}].output"

    def input(self, layer: int) -> str:
        return f"L[{layer}].input"

    def output(self, layer: int, item: int) -> str:
        """A tensor of the output."""
        return f"{self.whole(layer)}[{item}]" if layer % 2 else self.whole(layer)

    def call(self, layer: int, given: str) -> str:
        return f"L[{layer}]({given})"

    def constant(self, layer: int) -> str:
        return f"L[{layer}].weight"

    def bounded(self, value: str) -> str:
        return f"torch.remainder({value}, 97.0)"

    def bound_in_place(self, name: str) -> str:
        return f"{name}.remainder_(89.0)"

    def test(self, row: str) -> str:
        """A condition that holds about half of the time."""
        return f"float({row}.sum()) % 2 < 1"


class Writer:
    """Writes one program. Keeps what names hold, so that most lines are right.

    Args:
        choices: Decides, as `random.Random` does.
        mischief: How often a statement is out of order or raises.
        calls: How often a module is called or a weight read.
        draws: How often random numbers are drawn.
        shared: How often it shares something with the programs beside it.
        words: How the program names what the model has.
    """

    def __init__(
        self,
        choices: Any,
        *,
        mischief: float,
        calls: float = 0.0,
        draws: float = 0.0,
        shared: float = 0.0,
        words: Toy | None = None,
    ) -> None:
        self.shared = shared
        self.words = words or Toy()
        # Places of a step in model order: input and output of each layer, then logits, samples.
        self.num_places = 2 * self.words.num_layers + 2
        self.calls = calls
        self.draws = draws
        self.random = choices
        self.mischief = mischief
        self.lines: list[str] = []
        self.num_names = 0
        self.position = -1
        self.step = "0"
        # Names of tensors with at least two dimensions, the last of size 3.
        self.names: list[str] = []
        # The name that was read last, with its place; it may still reach the model.
        self.last: tuple[str, int] | None = None

    def program(self) -> str:
        self.statements(0, self.random.randint(1, 7))
        if self.random.random() < 0.75:
            self.loop()
        if self.chance(0.3):
            self.put(0, f"out.append({self.words.result})")
            if self.chance(0.7):
                self.force(0)
        return "\n".join(self.lines) + "\n"

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def put(self, depth: int, line: str) -> None:
        self.lines.append(" " * (4 * (depth + 1)) + line)

    def loop(self) -> None:
        chosen = self.random.choice(["[:]", "[:2]", "[:3]", "[1:]", "[1:3]", "[[0, 2]]"])
        self.put(0, f"for s in {self.words.steps}{chosen}:")
        if self.chance(0.15) or chosen.startswith("[1"):
            self.position = -1
        self.step = "s"
        self.last = None
        self.statements(1, self.random.randint(2, 10))
        if self.chance(0.15):
            self.force(1)
            self.put(1, f"if len(out) % {self.random.randint(2, 4)} == 0: break")
        self.put(1, "out.append(s)")
        self.last = None
        if self.chance(0.3):
            self.put(0, "out.append('after')")
            self.force(0)

    def statements(self, depth: int, count: int) -> None:
        for _ in range(count):
            self.statement(depth)

    def statement(self, depth: int) -> None:
        kinds = [
            (self.read, 6), (self.keep, 3), (self.force, 3), (self.edit, 4), (self.copy, 2),
            (self.assign, 3), (self.combine, 3), (self.branch, 1.5), (self.write_blind, 1),
            (self.input, 1.5), (self.logits, 1), (self.samples, 1),
        ]  # fmt: skip
        if self.chance(self.mischief):
            kinds = [(self.late, 4), (self.caught, 5), (self.ghostly, 2.5), (self.raising, 1)]
        elif self.calls and self.chance(self.calls):
            kinds = [(self.call, 3), (self.constant, 1)]
        elif self.draws and self.chance(self.draws):
            kinds = [(self.draw, 1)]
        elif self.shared and self.chance(self.shared):
            kinds = [(self.hand_over, 4), (self.take, 4), (self.meet, 0.2)]
        functions, weights = zip(*kinds, strict=True)
        self.random.choices(functions, weights)[0](depth)

    # -- lines that ask --------------------------------------------------------------------------

    def next_place(self, *, kind: int) -> int | None:
        """Return a layer whose input (0) or output (1) still comes in this step."""
        layers = [i for i in range(self.words.num_layers) if 2 * i + kind > self.position]
        if not layers:
            return None
        layer = self.random.choice(layers[:3])
        self.position = 2 * layer + kind
        return layer

    def fresh(self) -> str:
        self.num_names += 1
        return f"v{self.num_names}"

    def read(self, depth: int) -> None:
        layer = self.next_place(kind=1)
        if layer is None:
            return self.force(depth)
        name = self.fresh()
        self.put(depth, f"{name} = {self.words.output(layer, self.random.randint(0, 1))}")
        self.names.append(name)
        self.last = (name, layer)
        return None

    def input(self, depth: int) -> None:
        layer = self.next_place(kind=0)
        if layer is None:
            return self.keep(depth)
        name = self.fresh()
        self.put(depth, f"{name} = {self.words.input(layer)}")
        self.names.append(name)
        self.last = None
        if self.chance(0.4):
            self.put(depth, f"{self.words.input(layer)} = {name} * 2 + {self.row()}")
        elif self.chance(0.4):
            self.put(depth, f"{name}[-1] = 7.0")
        return None

    def logits(self, depth: int) -> None:
        if self.position >= self.num_places - 2:
            return
        self.position = self.num_places - 2
        name = self.fresh()
        self.put(depth, f"{name} = model.logits")
        self.put(depth, f"out.append({name}{self.random.choice(['', '[-1]', '.sum()'])})")
        if self.chance(0.4):
            self.put(depth, f"{name}[:, 0] += {self.number()}")
        elif self.chance(0.3):
            self.put(depth, f"model.logits = {name} + 1")
        self.last = None

    def samples(self, depth: int) -> None:
        if self.position >= self.num_places - 1:
            return
        self.position = self.num_places - 1
        name = self.fresh()
        self.put(depth, f"{name} = model.samples")
        self.put(depth, f"out.append({name}[0])")
        if self.chance(0.3):
            self.put(depth, f"{name}[0, 0] = {self.random.randint(1, 9)}")
        elif self.chance(0.3):
            self.put(depth, f"if int({name}[0, 0]) % 2: out.append('odd')")
        self.last = None

    def assign(self, depth: int) -> None:
        """Read-modify-write, with values of wherever."""
        if self.last is None or self.chance(0.3):
            self.read(depth)
        if self.last is None:
            return
        name, layer = self.last
        whole = self.words.whole(layer)
        changed = self.random.choice([f"{name} * 2", f"{name} + {self.row()}", f"{name} - 1"])
        if layer % 2:
            self.put(depth, f"{whole} = ({changed}, {whole}[1])")
        elif self.chance(0.3):
            self.put(depth, f"{name} = {changed}")
            self.put(depth, f"{whole} = {name}")
            if self.chance(0.5):
                self.put(depth, f"{name} += {self.number()}")
        else:
            self.put(depth, f"{whole} = {changed}")
        if self.chance(0.3):
            again = self.fresh()
            self.put(depth, f"{again} = {self.words.output(layer, 0)}")
            self.put(depth, f"out.append({again}[-1])")

    def write_blind(self, depth: int) -> None:
        layer = self.next_place(kind=1)
        if layer is None:
            return
        count = f"(rows if {self.step} == 0 else 1)"
        words = self.words
        value = f"torch.full(({count}, {words.width}), {self.number()}, dtype={words.dtype})"
        if self.names and self.chance(0.5):
            value += f" + {self.row()}"
        both = f"({value}, {value})" if layer % 2 else value
        self.put(depth, f"{words.whole(layer)} = {both}")
        self.last = None

    def call(self, depth: int) -> None:
        """Call a module of any stage, with values of any stage; the open visit stays open."""
        if not self.names:
            return self.read(depth)
        name, fresh = self.name(), self.fresh()
        layer = self.random.randint(0, self.words.num_layers - 1)
        given = self.random.choice([name, name, f"{name} * 2", f"{name} + {self.row()}"])
        if self.chance(self.mischief / 2):
            given = f"{name}[:, :2]"
        self.put(depth, f"{fresh} = {self.words.call(layer, given)}")
        if self.chance(0.2):
            self.put(depth, f"{name}[-1] = {self.number()}")
        self.names.append(fresh)
        if self.chance(0.3):
            value = self.random.choice([f"{fresh}[-1]", f"float({fresh}.sum())", fresh])
            self.put(depth, f"out.append({value})")
        elif self.last is not None and self.chance(0.3):
            self.put(depth, f"{self.last[0]}[-1] += {fresh}[-1]")
        return None

    def constant(self, depth: int) -> None:
        fresh = self.fresh()
        layer = self.random.randint(0, self.words.num_layers - 1)
        self.put(depth, f"{fresh} = {self.words.constant(layer)}")
        self.names.append(fresh)
        if self.chance(0.3):
            self.put(depth, f"out.append({fresh}{self.random.choice(['', '[-1]', '.sum()'])})")

    def draw(self, depth: int) -> None:
        kind = self.random.choice(["torch", "python", "numpy", "in place", "keep"])
        fresh = self.fresh()
        if kind == "torch":
            self.put(
                depth,
                f"{fresh} = torch.randint(0, 9, (2, {self.words.width})).to({self.words.dtype})",
            )
            self.names.append(fresh)
        elif kind == "python":
            self.put(depth, "out.append(random.randint(0, 99))")
        elif kind == "numpy":
            self.put(depth, f"{fresh} = float(numpy.random.randint(0, 99)) + {self.row()}")
            self.put(depth, f"out.append({fresh})")
        elif self.names and kind == "in place":
            self.put(depth, f"{self.name()}.random_(0, 9)")
        else:
            self.put(depth, "out.append(torch.randint(0, 99, (1,)))")

    # -- lines that share ------------------------------------------------------------------------

    def hand_over(self, depth: int) -> None:
        """Bind a name that others look up, or put a value where they look."""
        name = self.name()
        if name is None:
            self.read(depth)
        elif self.chance(0.5):
            self.put(depth, f"bag.append({self.random.choice([name, f'{name}[-1:]'])})")
        else:
            self.put(depth, f"shared_{self.random.randint(0, 1)} = {name}")

    def take(self, depth: int) -> None:
        """Look at what others have done by now, and use it."""
        kind = self.random.choice(["count", "value", "edit", "name"])
        if kind == "count":
            self.put(depth, "out.append(len(bag))")
        elif kind == "value":
            fresh = self.fresh()
            self.put(depth, f"{fresh} = bag[-1] if bag else torch.zeros(1, 3).double()")
            self.names.append(fresh)
            if self.chance(0.4):
                self.put(depth, f"out.append({fresh}[-1])")
        elif kind == "edit":
            self.put(depth, f"if bag: bag[-1][-1] += {self.number()}")
        else:
            fresh = self.fresh()
            self.put(depth, f"try: {fresh} = shared_{self.random.randint(0, 1)}")
            self.put(depth, f"except NameError: {fresh} = torch.ones(1, 3).double()")
            self.names.append(fresh)

    def meet(self, depth: int) -> None:
        self.put(depth, "barrier()")

    # -- lines that use --------------------------------------------------------------------------

    def number(self) -> str:
        return f"{self.random.randint(1, 9)}.0"

    def name(self) -> str | None:
        return self.random.choice(self.names[-6:]) if self.names else None

    def row(self) -> str:
        """Return an expression for three numbers, whatever the rows of its value."""
        name = self.name()
        if name is None or self.chance(0.15):
            return self.number()
        return self.random.choice(
            [
                f"{name}[-1]",
                f"{name}[0]",
                f"{name}.sum(0)",
                f"{name}.clone()[-1]",
                f"2.0 - {name}[-1]",
            ]
        )

    def keep(self, depth: int) -> None:
        name = self.name()
        if name is not None:
            value = self.random.choice(
                [name, f"{name}[-1]", f"{name}.clone()", f"[{name}, {name}[0]]"]
            )
            self.put(depth, f"out.append({value})")

    def force(self, depth: int) -> None:
        name = self.name()
        if name is None:
            return
        value = self.random.choice(
            [
                f"float({name}.sum())", f"int({name}[-1][0]) % 7", f"{name}[0, 1].item()",
                f"tuple({name}.shape)", f"{name} + 1", f"f'{{{name}[-1][2]:.1f}}'",
                f"torch.stack([{name}[-1], {name}[0]])", f"bool(({name}[-1] > 40).any())",
                f"len({name})", f"[float(x) for x in {name}[-1]]",
                f"isinstance({name}, torch.Tensor)", f"torch.cat(({name}, {name} * 2)).sum()",
                f"1.0 - {name}",
            ]
        )  # fmt: skip
        self.put(depth, f"out.append({value})")

    def edit(self, depth: int) -> None:
        """Edit in place: the value read last (which reaches the model), or any other."""
        name = self.last[0] if self.last is not None and self.chance(0.6) else self.name()
        if name is None:
            return
        self.put(
            depth,
            self.random.choice(
                [
                    f"{name}[-1] += {self.row()}", f"{name}[:] = {self.number()}",
                    f"{name}[-1] = {self.row()}", f"{name} += {self.row()}",
                    f"{name}.add_({self.number()})", f"{name} *= 2.0", f"{name}[-1, 1:] = 3.0",
                    f"{name}[-1].mul_(2.0)", self.words.bound_in_place(name),
                ]
            ),
        )  # fmt: skip

    def copy(self, depth: int) -> None:
        name = self.name()
        if name is not None:
            fresh = self.fresh()
            self.put(depth, f"{fresh} = {name}.clone()")
            self.names.append(fresh)
            if self.chance(0.6):
                self.put(depth, f"{name}[:] = {self.number()}")
                self.put(depth, f"out.append({fresh}[-1])")

    def combine(self, depth: int) -> None:
        name = self.name()
        if name is not None:
            fresh = self.fresh()
            self.put(depth, f"{fresh} = {name} * 3.0 + {self.row()}")
            self.put(depth, f"{fresh} = {self.words.bounded(fresh)}")
            self.names.append(fresh)

    def branch(self, depth: int) -> None:
        name = self.name()
        if name is None or depth > 2:
            return
        before = (self.position, self.last, list(self.names))
        self.put(depth, f"if {self.words.test(f'{name}[-1]')}:")
        self.statements(depth + 1, self.random.randint(1, 2))
        self.put(depth + 1, "out.append('yes')")
        position = self.position
        self.position, self.last, self.names = before
        self.names = list(self.names)
        self.put(depth, "else:")
        self.put(depth + 1, "out.append('no')")
        if self.chance(0.5):
            self.statement(depth + 1)
        self.position = max(position, self.position)
        self.last, self.names = None, before[2]

    # -- mischief --------------------------------------------------------------------------------

    def late(self, depth: int) -> None:
        layer = self.random.randint(0, self.words.num_layers - 1)
        self.put(depth, f"late = {self.words.output(layer, 0)}")
        self.put(depth, "out.append(late)")

    def caught(self, depth: int) -> None:
        layer = self.random.randint(0, self.words.num_layers - 1)
        self.put(depth, "try:")
        self.put(depth + 1, f"late = {self.words.output(layer, 0)}")
        self.put(depth + 1, f"out.append({self.random.choice(['late', 'float(late.sum())'])})")
        if self.chance(0.3):
            self.put(depth + 1, "late[-1] = 1.0")
        self.put(depth, "except OutOfOrderError:")
        self.put(depth + 1, "out.append('caught')")
        if self.chance(0.3) and self.last is not None:
            self.put(depth, f"{self.last[0]}[-1] += 1.0")
        if 2 * layer + 1 > self.position:
            self.position = 2 * layer + 1
            self.last = None

    def ghostly(self, depth: int) -> None:
        if self.position > 2 * 2 + 1 or not self.words.has_ghost:
            return
        if self.chance(0.5):
            self.put(depth, "out.append(ghost.output)")
        else:
            self.put(depth, "try: out.append(float(ghost.output.sum()))")
            self.put(depth, "except OutOfOrderError: out.append('no ghost')")
        self.last = None

    def raising(self, depth: int) -> None:
        self.put(depth, "if len(out) % 2: raise ValueError(len(out))")


def program(
    seed: int,
    *,
    mischief: float = 0.06,
    calls: float = 0.0,
    draws: float = 0.0,
    shared: float = 0.0,
) -> str:
    """Return the source of one random block for the toy pipeline, indented as in a file."""
    writer = Writer(random.Random(seed), mischief=mischief, calls=calls, draws=draws, shared=shared)
    return f"    out = []\n{writer.program()}"
