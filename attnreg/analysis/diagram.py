"""Decision diagrams over finite variables: exact answers about all points of a product, without visiting them.

A node tests one variable and has one child for each class of it. Equal nodes are one node: a function of many variables
stays small where its parts are independent, equal functions have the same node, and counting takes one pass.
Source: R. E. Bryant, Graph-Based Algorithms for Boolean Function Manipulation, IEEE Trans. Computers C-35(8), 1986,
with many-valued variables (A. Srinivasan et al., Algorithms for Discrete Function Manipulation, ICCAD 1990).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import repeat
from math import prod
from typing import Any

from attnreg.errors import RequestError

# vLLM 0.20.0 beside 0.33.0 on SM 9.0 needs 1,856,769 nodes; 6,700,000 take 5.2 GB. Recursion is as deep as the number
# of variables
MAX_NODES = 2_500_000
MAX_VARIABLES = 300
_CURE = "decide them in parts: fewer words and choices in one registry"
Node = int
Box = dict[int, frozenset[int]]


class EntangledError(RequestError):
    """Raised if a space has too many parts to distinguish."""


class Diagrams:
    """A store of nodes over variables; ``sizes`` are their numbers of classes. A terminal holds any hashable value.

    ``false`` and ``true`` are the boolean terminals; `conjoin`, `unite` and `negate` take and return boolean functions.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        if len(self.sizes) > MAX_VARIABLES:
            message = f"the registry tells configurations apart by {len(self.sizes)} words and facets"
            raise EntangledError(f"{message}; all of them are decided for at most {MAX_VARIABLES}", _CURE)
        self._level: list[int] = []
        self._kids: list[tuple[Node, ...]] = []
        self._values: list[Any] = []
        self._unique: dict[tuple[Any, ...], Node] = {}
        self._memo: dict[tuple[Any, ...], Node] = {}
        self._bits: dict[Node, int] = {}
        self._masks: dict[Node, int] = {}
        self._accepted: dict[int, dict[Node, Node]] = {}
        self._end = len(self.sizes)
        self.false = self.terminal(False)
        self.true = self.terminal(True)
        # level -> the number of points of the variables from there on
        self._points = [prod(self.sizes[level:]) for level in range(self._end + 1)]
        self._counts: dict[Node, int] = {self.false: 0, self.true: 1}
        self._booleans = self._taken(self.false) | self._taken(self.true)

    def __len__(self) -> int:
        return len(self._level)

    def terminal(self, value: Hashable) -> Node:
        """The constant function."""
        # the key has the type: True == 1 in Python, but they are different values
        return self._intern(("value", type(value), value), self._end, (), value)

    def node(self, level: int, kids: Sequence[Node]) -> Node:
        """The function that continues with ``kids[c]`` where variable ``level`` is in its class c."""
        first = kids[0]
        if kids.count(first) == len(kids):
            return first
        key = (level, *kids)
        return self._unique.get(key) or self._intern(key, level, tuple(kids), None)

    def _intern(self, key: tuple[Any, ...], level: int, kids: tuple[Node, ...], value: Any) -> Node:
        node = self._unique.get(key)
        if node is None:
            node = self._unique[key] = len(self._level)
            if node >= MAX_NODES:
                message = f"the conditions are too entangled: over {MAX_NODES:,} parts of the space of configurations"
                raise EntangledError(message, _CURE)
            self._level.append(level)
            self._kids.append(kids)
            self._values.append(value)
        return node

    def among(self, level: int, classes: Iterable[int]) -> Node:
        """The boolean function that holds where variable ``level`` is in one of these classes."""
        wanted = set(classes)
        return self.node(level, [self.true if c in wanted else self.false for c in range(self.sizes[level])])

    def value(self, node: Node) -> Any:
        """The value of a terminal."""
        return self._values[node]

    def evaluate(self, node: Node, point: Sequence[int]) -> Any:
        """The function's value at a point (a class for each variable)."""
        while self._level[node] != self._end:
            node = self._kids[node][point[self._level[node]]]
        return self._values[node]

    def ite(self, test: Node, then: Node, other: Node) -> Node:
        """The function that is ``then`` where ``test`` holds and ``other`` elsewhere."""
        true, false = self.true, self.false
        if test == true or then == other:
            return then
        if test == false:
            return other
        # the test is true inside its own region, and false outside
        then = true if then == test else then
        other = false if other == test else other
        if then == true and other == false:
            return test
        # conjunction and union do not depend on the order
        if other == false and then < test and self._is_boolean(then):
            test, then = then, test
        elif then == true and other < test and self._is_boolean(other):
            test, other = other, test
        key = (test, then, other)
        node = self._memo.get(key)
        if node is None:
            levels, memo = self._level, self._memo
            level = min(levels[test], levels[then], levels[other])
            rows = zip(
                self._kids[test] if levels[test] == level else repeat(test),
                self._kids[then] if levels[then] == level else repeat(then),
                self._kids[other] if levels[other] == level else repeat(other),
                strict=False,  # one of them ends
            )
            kids: list[Node] = []
            for row in rows:
                a, b, c = row
                # most results are terminals or cached: without this shortcut the loop would take twice as long
                if a == true or b == c:
                    kids.append(b)
                elif a == false:
                    kids.append(c)
                else:
                    kid = memo.get(row)
                    kids.append(self.ite(a, b, c) if kid is None else kid)
            node = memo[key] = self.node(level, kids)
        return node

    def _is_boolean(self, node: Node) -> bool:
        """Whether the function is true or false everywhere."""
        return not self._taken(node) & ~self._booleans

    def negate(self, a: Node) -> Node:
        return self.ite(a, self.false, self.true)

    def conjoin(self, nodes: Iterable[Node]) -> Node:
        """The boolean function that holds where all of ``nodes`` hold."""
        out = self.true
        # deeper functions first, so that the partial results stay small
        for node in sorted(set(nodes), key=lambda n: self._level[n], reverse=True):
            out = self.ite(node, out, self.false)
        return out

    def unite(self, nodes: Iterable[Node]) -> Node:
        """The boolean function that holds where any of ``nodes`` holds."""
        out = self.false
        for node in nodes:
            out = self.ite(node, self.true, out)
        return out

    def apply(self, function: Callable[..., Hashable], *nodes: Node) -> Node:
        """The diagram of ``function``, applied at every point to the values of ``nodes``."""
        if len(nodes) == 1:
            return self._mapped(function, nodes[0], {})
        memo: dict[tuple[Node, ...], Node] = {}

        def go(args: tuple[Node, ...]) -> Node:
            node = memo.get(args)
            if node is None:
                level = min(self._level[n] for n in args)
                if level == self._end:
                    node = self.terminal(function(*(self._values[n] for n in args)))
                else:
                    columns = (self._kids[n] if self._level[n] == level else repeat(n) for n in args)
                    rows = list(zip(*columns, strict=False))  # one of them ends
                    for row in dict.fromkeys(rows):
                        if row not in memo:
                            go(row)
                    node = self.node(level, [*map(memo.__getitem__, rows)])
                memo[args] = node
            return node

        return go(nodes)

    def _mapped(self, function: Callable[[Any], Hashable], node: Node, memo: dict[Node, Node]) -> Node:
        """The diagram of a function of one node's values."""
        found = memo.get(node)
        if found is None:
            level = self._level[node]
            if level == self._end:
                found = self.terminal(function(self._values[node]))
            else:
                kids = self._kids[node]
                for kid in set(kids):
                    if kid not in memo:
                        self._mapped(function, kid, memo)
                found = self.node(level, [*map(memo.__getitem__, kids)])
            memo[node] = found
        return found

    def accepted(self, node: Node, test: Callable[[Any], bool]) -> Node:
        """The boolean function that holds where a test accepts the value of ``node``; cached by the accepted values."""
        taken = self._taken(node)
        wanted = 0
        for terminal, bit in self._bits.items():
            if taken & bit and test(self._values[terminal]):
                wanted |= bit
        memo = self._accepted.setdefault(wanted, {})

        def go(n: Node) -> Node:
            found = memo.get(n)
            if found is None:
                values = self._masks[n]
                # no need to descend if the test accepts all values of a part, or none
                if not values & wanted:
                    found = self.false
                elif not values & ~wanted:
                    found = self.true
                else:
                    kids = self._kids[n]
                    found_kids = {kid: go(kid) for kid in set(kids)}
                    found = self.node(self._level[n], [*map(found_kids.__getitem__, kids)])
                memo[n] = found
            return found

        return go(node)

    def _taken(self, node: Node) -> int:
        """The values of the function, as a set of bits: `_bits` has the bit of each terminal."""
        mask = self._masks.get(node)
        if mask is None:
            if self._level[node] == self._end:
                mask = self._bits.setdefault(node, 1 << len(self._bits))
            else:
                mask = 0
                for kid in set(self._kids[node]):
                    mask |= self._taken(kid)
            self._masks[node] = mask
        return mask

    def equals(self, node: Node, value: Hashable) -> Node:
        """The boolean function that holds where ``node`` has a value."""
        return self.accepted(node, lambda found: found == value)

    def where(self, region: Node, test: Callable[[Any], bool], node: Node) -> Node:
        """The boolean function that holds in ``region`` where ``test`` accepts the value of ``node``."""
        memo: dict[tuple[Node, Node], Node] = {}

        def go(a: Node, b: Node) -> Node:
            # most regions are small: skip everything outside
            if a == self.false:
                return a
            found = memo.get((a, b))
            if found is None:
                level = min(self._level[a], self._level[b])
                if level == self._end:
                    found = self.true if test(self._values[b]) else self.false
                else:
                    x = self._kids[a] if self._level[a] == level else repeat(a)
                    y = self._kids[b] if self._level[b] == level else repeat(b)
                    rows = list(zip(x, y, strict=False))  # one of them ends
                    kids = {row: go(*row) for row in dict.fromkeys(rows)}
                    found = self.node(level, [*map(kids.__getitem__, rows)])
                memo[a, b] = found
            return found

        return go(region, node)

    def terminals(self, node: Node) -> list[Any]:
        """Every value but None that the function takes, in the order in which the store first met them."""
        taken = self._taken(node)
        values = (self._values[terminal] for terminal, bit in self._bits.items() if taken & bit)
        return [value for value in values if value is not None]

    def count(self, node: Node) -> int:
        """The number of points at which a boolean function holds."""
        memo, points = self._counts, self._points

        def go(n: Node) -> int:
            count = memo.get(n)
            if count is None:
                below = points[self._level[n] + 1]
                count = memo[n] = sum(
                    times * go(k) * (below // points[self._level[k]]) for k, times in Counter(self._kids[n]).items()
                )
            return count

        return go(node) * (points[0] // points[self._level[node]])

    def cheapest(
        self, node: Node, cost: Callable[[int, int], int], free: Sequence[int], memo: dict[Node, tuple[float, int]]
    ) -> list[int] | None:
        """A point of least cost where a boolean function holds; ``free`` has the class of each variable that may be
        any.

        memo: the results of earlier calls with this cost, empty at first.
        """
        memo |= {self.true: (0, 0), self.false: (float("inf"), 0)}

        def go(n: Node) -> float:
            if n not in memo:
                level = self._level[n]
                memo[n] = min((go(k) + cost(level, c), c) for c, k in enumerate(self._kids[n]))
            return memo[n][0]

        if go(node) == float("inf"):
            return None
        point = list(free)
        while self._level[node] != self._end:
            chosen = memo[node][1]
            point[self._level[node]] = chosen
            node = self._kids[node][chosen]
        return point

    def bounds(self, node: Node) -> Box:
        """The smallest box around a boolean function: variable -> the classes that occur."""
        occurring: list[set[int]] = [set() for _ in self.sizes]
        seen, stack = {self.false}, [] if node == self.false else [node]
        spans = {(0, self._level[node] if stack else 0)}

        while stack:
            n = stack.pop()
            if n not in seen:
                seen.add(n)
                for c, kid in enumerate(self._kids[n]):
                    if kid != self.false:
                        occurring[self._level[n]].add(c)
                        spans.add((self._level[n] + 1, self._level[kid]))
                        stack.append(kid)
        # a variable that a path does not test takes every class
        for level in {level for start, stop in spans for level in range(start, stop)}:
            occurring[level] = set(range(self.sizes[level]))
        return {level: frozenset(classes) for level, classes in enumerate(occurring)}

    def tested(self, node: Node) -> set[int]:
        """The variables that a function depends on."""
        seen, stack = {node}, [node]
        while stack:
            new = set(self._kids[stack.pop()]) - seen
            seen |= new
            stack += new
        return {self._level[n] for n in seen} - {self._end}

    def allowed(self, node: Node, box: Box, level: int) -> frozenset[int]:
        """The classes to which a variable can be widened, so that a boolean function still holds in the whole box.

        The function must hold in the box as it is; only nodes that test the variable are tried again.
        """
        memo: dict[Node, bool] = {self.true: True, self.false: False}

        def below(n: Node) -> set[Node]:
            kids, classes = self._kids[n], box.get(self._level[n])
            return set(kids) if classes is None else {kids[c] for c in classes}

        def holds(n: Node) -> bool:
            found = memo.get(n)
            if found is None:
                found = memo[n] = all(map(holds, below(n)))
            return found

        kept, found = box.get(level, frozenset()), set(range(self.sizes[level]))
        seen, stack = {node}, [node]
        while stack and len(found) > len(kept):
            n = stack.pop()
            if self._level[n] == level:
                found -= {c for c in found - kept if not holds(self._kids[n][c])}
            else:
                new = below(n) - seen
                seen |= new
                stack += [kid for kid in new if self._level[kid] <= level]
        return frozenset(found)

    def box(self, box: Box) -> Node:
        """The boolean function that holds in a box."""
        return self.conjoin(self.among(level, classes) for level, classes in box.items())
